"""A data set that trains in a second, and the settings for it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact, DatasetManifest

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
def tiny_dataset(
    all_digits: Path, run_preprocess: Callable[..., Artifact[DatasetManifest]], tmp_path_factory: pytest.TempPathFactory
) -> Artifact[DatasetManifest]:
    """12 digits of each class: 96 to train, 24 to validate."""
    root = tmp_path_factory.mktemp("tiny")
    for folder in sorted(path for path in all_digits.iterdir() if path.is_dir()):
        (root / "data" / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:12]:
            shutil.copy(file, root / "data" / folder.name)
    return run_preprocess(root / "data", root / "dataset")
