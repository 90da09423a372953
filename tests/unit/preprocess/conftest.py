"""Small folders of images, and views of what preprocess makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.transforms import TransformSpec


def _gradient(height: int = 48, width: int = 64, shift: int = 0) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 4 + shift, y * 5, (x + y) * 2], axis=-1).astype(np.uint8))


def _write_tree(root: Path, counts: dict[str, int], **options: int) -> Path:
    """PNG images, as many as said, in folders of these names."""
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True)
        for index in range(count):
            _gradient(shift=number * 20 + index, **options).save(root / folder / f"{index:03d}.png")
    return root


def _listing(dataset: Artifact[DatasetManifest], split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dataset.file(f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def _rejected(dataset: Path) -> dict[str, str]:
    """Reason by path."""
    lines = [json.loads(line) for line in (dataset / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    return {entry["path"]: entry["reason"] for entry in lines}


def _plain(size: int) -> TransformSpec:
    """Normalization that leaves pixel values in 0..255."""
    return TransformSpec(resize_size=size, crop_size=size, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))


@pytest.fixture(scope="session")
def gradient() -> Callable[..., Any]:
    return _gradient


@pytest.fixture(scope="session")
def write_tree() -> Callable[..., Any]:
    return _write_tree


@pytest.fixture(scope="session")
def listing() -> Callable[..., Any]:
    return _listing


@pytest.fixture(scope="session")
def rejected() -> Callable[..., Any]:
    return _rejected


@pytest.fixture(scope="session")
def plain() -> Callable[..., Any]:
    return _plain
