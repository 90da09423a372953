"""Parts of a dataset, packed on their own and joined: the same dataset, to the byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.manifests import ALL_FILES, DatasetManifest, DatasetPartManifest, load
from components.common.contracts.settings import resolve
from components.merge.config import MergeConfig
from tests.conftest import Dataset, preprocess, run_step
from tests.steps import step
from tests.unit.refusals import refuses
from tests.unit.registered import replace_file, reseal

SETTINGS: dict[str, Any] = {"shard_bytes": 1_000_000}


def pack(data: Path, output: Path, part: str, **settings: Any) -> Path:
    run_step(data, output, part=part, **SETTINGS, **settings)
    return load(output, DatasetPartManifest, verify=ALL_FILES).path


def join(parts: list[Path], output: Path, **settings: Any) -> Dataset:
    step("merge", output, {"parts": [*map(str, parts)], **settings})
    return load(output, DatasetManifest, verify=ALL_FILES)


@pytest.fixture(scope="module")
def messy_digits(all_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits with files among them that are no images."""
    root = tmp_path_factory.mktemp("messy")
    for folder in sorted(path for path in all_digits.iterdir() if path.is_dir()):
        (root / folder.name).mkdir()
        for number, file in enumerate(sorted(folder.iterdir())):
            (root / folder.name / file.name).write_bytes(b"no image" if number % 40 == 7 else file.read_bytes())
    return root


def test_joined_parts_are_the_whole_dataset(messy_digits: Path, tmp_path: Path) -> None:
    whole = preprocess(messy_digits, tmp_path / "whole", **SETTINGS)
    num_shards = sum(len(split.shards) for split in whole.manifest.splits.values())
    assert num_shards > 4
    for num_parts in (3, num_shards + 2):  # of more parts than shards, some are empty
        names = [f"{number}/{num_parts}" for number in reversed(range(1, num_parts + 1))]
        parts = [pack(messy_digits, tmp_path / name.replace("/", "of"), name) for name in names]
        joined = join(parts, tmp_path / f"joined{num_parts}")
        assert joined.manifest.num_rejected > 30
        assert joined.manifest == whole.manifest
        assert joined.digest == whole.digest


def test_parts_that_do_not_belong_together(few_digits: Path, tmp_path: Path) -> None:
    first, second, third = (pack(few_digits, tmp_path / part[0], part) for part in ("1/2", "2/2", "3/3"))
    other = pack(few_digits, tmp_path / "other", "2/2", seed=1)
    for parts, code in (
        ([first], "missing-part"),
        ([first, first], "part-twice"),
        ([first, other], "foreign-part"),
        ([first, second, third], "foreign-part"),
    ):
        with refuses(code, "merge.parts"):
            join(parts, tmp_path / "joined")
        assert not (tmp_path / "joined").exists()
    next(second.glob("records/*.jsonl")).write_text("{}")
    with refuses("damaged-artifact"):
        join([first, second], tmp_path / "joined")


def test_foreign_parts_write_nothing_but_their_shards(few_digits: Path, tmp_path: Path) -> None:
    first, second = (pack(few_digits, tmp_path / "parts" / name, f"{name}/2") for name in ("1", "2"))
    again = Path(shutil.copytree(first, tmp_path / "parts" / "again"))
    reseal(again, lambda record: record.update(part="2/2"))
    with refuses("shard-twice"):
        join([first, again], tmp_path / "joined")
    (tmp_path / "parts" / "bashrc").write_text("foreign")
    (tmp_path / "bashrc").write_text("own")
    name = next(first.glob("*.tar")).stem
    record = json.loads((first / "records" / f"{name}.json").read_bytes())
    record["files"]["../bashrc"] = record["files"][f"{name}.tar"]
    replace_file(first, f"records/{name}.json", json.dumps(record).encode())
    with refuses("no-shard-record"):
        join([first, second], tmp_path / "joined")
    assert (tmp_path / "bashrc").read_text() == "own"


def test_a_join_that_was_refused_or_killed_can_be_given_again(few_digits: Path, tmp_path: Path) -> None:
    data = tmp_path / "leaking"
    for split, numbers in (("train", range(4)), ("val", range(3, 5))):
        for label in ("0", "1"):
            (data / split / label).mkdir(parents=True)
            for file in (sorted((few_digits / label).iterdir())[number] for number in numbers):
                (data / split / label / file.name).write_bytes(file.read_bytes())
    parts = [pack(data, tmp_path / name, f"{name}/2") for name in ("1", "2")]
    output = tmp_path / "joined"
    with refuses("leak", "preprocess.on_leak"):
        join(parts, output)
    with refuses("output-not-empty"):  # it would write into the parts
        preprocess(data, output, on_leak="warn", **SETTINGS)
    (output / "train-000001.tar").unlink(missing_ok=True)
    joined = join(parts, output, on_leak="warn")
    assert joined.digest == preprocess(data, tmp_path / "whole", on_leak="warn", **SETTINGS).digest
    assert [load(part, DatasetPartManifest, verify=ALL_FILES).path for part in parts] == parts
    with refuses("output-not-empty"):
        join(parts, output, on_leak="warn")


def test_settings_of_parts(messy_digits: Path, tmp_path: Path) -> None:
    for part, code in (("3/2", "no-such-part"), *((part, "invalid-setting") for part in ("0/2", "1/0", "01/2", "1-2"))):
        with refuses(code, "preprocess.part"):
            run_step(messy_digits, tmp_path / "out", part=part)
        assert not list((tmp_path / "out").glob("*"))
    with refuses("invalid-setting", "merge.parts"):
        resolve(MergeConfig, "merge", {"parts": "PART"})
    with refuses("unusable-files", "preprocess.on_bad"):  # a part fails early when nothing may be rejected
        pack(messy_digits, tmp_path / "out", "1/2", on_bad="fail")
    assert (tmp_path / "out" / "rejected.jsonl").read_text().count("not an image") > 10
