"""Parts of a data set, packed on their own and joined: the same data set, to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import ALL_FILES, Artifact, DatasetManifest, DatasetPartManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
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


def join(parts: list[Path], output: Path, **settings: Any) -> Artifact[DatasetManifest]:
    config = MergeConfig(parts=tuple(str(part) for part in parts), **settings)
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


@pytest.mark.parametrize("num_parts", [3, 12])
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


def test_parts_that_do_not_belong_together(few_digits: Path, tmp_path: Path) -> None:
    first = pack(few_digits, tmp_path / "first", "1/2").path
    second = pack(few_digits, tmp_path / "second", "2/2").path
    other = pack(few_digits, tmp_path / "other", "2/2", seed=1).path
    third = pack(few_digits, tmp_path / "third", "3/3").path
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


def test_there_is_no_such_part(few_digits: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no part 3/2: of 2 parts the first is 1/2"):
        pack(few_digits, tmp_path / "out", "3/2")
    assert list((tmp_path / "out").iterdir()) == []
    for part in ("0/2", "1/0", "01/2", "1-2"):
        with pytest.raises(UserError, match=f"preprocess.part: got '{part}', needs text such as 3/8"):
            pack(few_digits, tmp_path / "out", part)


def test_a_join_that_was_refused_or_killed_can_be_given_again(
    few_digits: Path, tmp_path: Path, run_preprocess: Preprocess
) -> None:
    data = tmp_path / "leaking"
    for split, numbers in (("train", range(4)), ("val", range(3, 5))):
        for label in ("0", "1"):
            (data / split / label).mkdir(parents=True)
            for number in numbers:
                file = sorted((few_digits / label).iterdir())[number]
                (data / split / label / file.name).write_bytes(file.read_bytes())
    parts = [pack(data, tmp_path / name, f"{name}/2").path for name in ("1", "2")]
    output = tmp_path / "joined"
    with pytest.raises(UserError, match="2 of 4 validation images are training images too"):
        join(parts, output)
    with pytest.raises(UserError, match="is not empty"):  # it would write into the parts
        run_preprocess(data, output, on_leak="warn", **SETTINGS)
    (output / "train-000001.tar").unlink(missing_ok=True)
    joined = join(parts, output, on_leak="warn")
    assert joined.digest == run_preprocess(data, tmp_path / "whole", on_leak="warn", **SETTINGS).digest
    assert [load(part, DatasetPartManifest, verify=ALL_FILES).path for part in parts] == parts
    with pytest.raises(UserError, match="is not empty"):
        join(parts, output, on_leak="warn")


def test_what_parts_may_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"merge\.parts: got 'PART', needs a list of texts, such as \[PART1, PART2\]"):
        resolve(MergeConfig, "merge", {"parts": "PART"})


def test_a_part_fails_early_when_nothing_may_be_rejected(messy_digits: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and on_bad is fail"):
        pack(messy_digits, tmp_path / "out", "1/2", on_bad="fail")
    assert (tmp_path / "out" / "rejected.jsonl").read_text().count("not an image") > 10
