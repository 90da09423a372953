"""A few of the fuzz targets' cases; `make test-all` runs 26,000."""

from pathlib import Path

import pytest

from tests.fuzz import images, parsers, releases, shards
from tests.fuzz.running import MAX_GROWTH_BYTES, grow, run_cases


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_images_are_rejected_or_decode_alike(seed: int) -> None:
    assert dict(run_cases(100, seed, images.check_batch, images.BATCH)) == {}
    files = images.originals()
    rejected = [images.is_rejected(images.damaged(number, seed, files)) for number in range(100)]
    assert 0.3 < sum(rejected) / 100 < 0.95  # the cases are damaged, and not all beyond use
    assert not any(images.is_rejected(data) for data in files)


def test_damaged_shards_end_with_a_word() -> None:
    assert dict(run_cases(16, 0, shards.check_batch, shards.BATCH)) == {}


def test_what_is_not_damaged_is_read(tmp_path: Path) -> None:
    for name, (data, read) in (parsers.originals() | releases.originals()).items():
        file = tmp_path / Path(name).name
        file.write_bytes(data)
        found = read(file)
        assert not (isinstance(found, list) and found), name  # problems of a release


def test_damaged_tables_archives_models_and_manifests() -> None:
    assert dict(run_cases(100, 0, parsers.check_batch, parsers.BATCH)) == {}


def test_damaged_releases_signatures_and_registry_manifests() -> None:
    assert dict(run_cases(50, 0, releases.check_batch, releases.BATCH)) == {}


def test_a_process_that_grows_case_by_case_is_named() -> None:
    growths: list[int] = []
    assert [number for number, _ in run_cases(3, 0, grow, 3, growths)] == [2]
    assert growths[0] > MAX_GROWTH_BYTES


@pytest.mark.slow
def test_many_damaged_files() -> None:
    assert dict(run_cases(8000, 2, images.check_batch, images.BATCH)) == {}
    assert dict(run_cases(8000, 2, parsers.check_batch, parsers.BATCH)) == {}
    assert dict(run_cases(8000, 2, releases.check_batch, releases.BATCH)) == {}
    assert dict(run_cases(2000, 2, shards.check_batch, shards.BATCH)) == {}
