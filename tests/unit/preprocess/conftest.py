"""The digits in several shards."""

from pathlib import Path

import pytest

from components.common.contracts.manifests import DatasetManifest, load
from tests.conftest import Dataset, Shared, preprocess

from .builders import SHARD_BYTES


@pytest.fixture(scope="session")
def whole(all_digits: Path, shared: Shared) -> Dataset:
    folder = shared("digits_in_shards", lambda folder: preprocess(all_digits, folder / "x", shard_bytes=SHARD_BYTES))
    return load(folder / "x", DatasetManifest)
