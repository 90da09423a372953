"""A data set that trains in a second, and the settings for it."""

from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact, DatasetManifest, load
from tests.conftest import Preprocess, Shared, copy_digits

SETTINGS: dict[str, Any] = {
    "architecture": "resnet18",
    "image_size": 32,
    "resize_ratio": 1.0,
    "epochs": 3,
    "global_batch_size": 16,
    "learning_rate": 0.4,
    "deterministic": True,
    "augmentation": {"min_area": 0.8, "max_aspect_ratio": 1.1, "flip_probability": 0.0},
}


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """Of a training with 6 steps in each of 3 epochs."""
    return SETTINGS


@pytest.fixture(scope="session")
def tiny_dataset(all_digits: Path, run_preprocess: Preprocess, shared: Shared) -> Artifact[DatasetManifest]:
    """12 digits of each class: 96 to train, 24 to validate."""

    def build(folder: Path) -> None:
        copy_digits(all_digits, folder / "data", 12)
        run_preprocess(folder / "data", folder / "dataset")

    return load(shared("tiny_dataset", build) / "dataset", DatasetManifest)
