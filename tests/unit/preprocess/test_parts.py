"""Parts of a data set, packed on their own and joined: the same data set, to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import ALL_FILES, Artifact, DatasetManifest, DatasetPartManifest, load
from components.common.errors import EngineryError, UserError
from components.common.settings import resolve
from components.common.steplog import StepLog
from components.merge.config import MergeConfig
from components.merge.run import run as merge
from components.preprocess.config import PreprocessConfig
from components.preprocess.run import run as preprocess

Preprocess = Callable[..., Artifact[DatasetManifest]]
SETTINGS: dict[str, Any] = {"shard_bytes": 1_000_000, "num_workers": 1}


def pack(data: Path, output: Path, part: str, **settings: Any) -> Artifact[DatasetPartManifest]:
    config = resolve(PreprocessConfig, "preprocess", {"data": str(data), "part": part, **SETTINGS, **settings})
    preprocess(config, StepLog("preprocess"), output=output)
    return load(output, DatasetPartManifest, verify=ALL_FILES)


def join(parts: list[Path], output: Path) -> Artifact[DatasetManifest]:
    config = MergeConfig(parts=tuple(str(part) for part in parts))
    merge(config, StepLog("merge"), output=output)
    return load(output, DatasetManifest, verify=ALL_FILES)


@pytest.fixture(scope="module")
def messy_digits(all_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits with files among them that are no images."""
    root = tmp_path_factory.mktemp("messy")
    for folder in sorted(path for path in all_digits.iterdir() if path.is_dir()):
        (root / folder.name).mkdir()
        for number, file in enumerate(sorted(folder.iterdir())):
            content = b"no image" if number % 40 == 7 else file.read_bytes()
            (root / folder.name / file.name).write_bytes(content)
    return root


@pytest.fixture(scope="module")
def whole(messy_digits: Path, tmp_path_factory: pytest.TempPathFactory, run_preprocess: Preprocess) -> Any:
    return run_preprocess(messy_digits, tmp_path_factory.mktemp("whole") / "dataset", **SETTINGS)


@pytest.mark.parametrize("num_parts", [1, 3, 12])
def test_joined_parts_are_the_whole_data_set(
    messy_digits: Path, whole: Artifact[DatasetManifest], tmp_path: Path, num_parts: int
) -> None:
    folders = []
    for number in reversed(range(1, num_parts + 1)):
        part = pack(messy_digits, tmp_path / f"part{number}", f"{number}/{num_parts}")
        folders.append(part.path)
    joined = join(folders, tmp_path / "joined")
    num_shards = sum(len(split.shards) for split in whole.manifest.splits.values())
    assert num_shards > 4
    assert joined.manifest.num_rejected == whole.manifest.num_rejected > 30
    assert joined.manifest == whole.manifest
    assert joined.digest == whole.digest


def test_parts_that_do_not_belong_together(messy_digits: Path, tmp_path: Path) -> None:
    first = pack(messy_digits, tmp_path / "first", "1/2").path
    second = pack(messy_digits, tmp_path / "second", "2/2").path
    other = pack(messy_digits, tmp_path / "other", "2/2", seed=1).path
    third = pack(messy_digits, tmp_path / "third", "3/3").path
    refusals = {
        (first,): "of 2 parts 2/2 is missing; pack it with --part 2/2",
        (first, first): "the part 1/2 is given twice",
        (first, other): "are parts of different data sets: other images, seed or settings",
        (first, second, third): "3/3 is no part of 2 parts",
    }
    for parts, message in refusals.items():
        with pytest.raises(UserError, match=message):
            join(list(parts), tmp_path / "joined")
        assert not (tmp_path / "joined").exists()
    next(second.glob("records/*.jsonl")).write_text("{}")
    with pytest.raises(EngineryError, match="is damaged"):
        join([first, second], tmp_path / "joined")


@pytest.mark.parametrize("part", ["0/2", "3/2"])
def test_there_is_no_such_part(few_digits: Path, tmp_path: Path, part: str) -> None:
    with pytest.raises(UserError, match=f"there is no part {part}: of 2 parts the first is 1/2"):
        pack(few_digits, tmp_path / "out", part)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_part_fails_early_when_nothing_may_be_rejected(messy_digits: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and on_bad is fail"):
        pack(messy_digits, tmp_path / "out", "1/2", on_bad="fail")
    assert (tmp_path / "out" / "rejected.jsonl").read_text().count("not an image") > 10
