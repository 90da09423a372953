"""Refusals of preprocess, as a person meets them: one message with the fix, an exit code, and failure.json."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from components.preprocess.config import PreprocessConfig
from components.preprocess.packing import ShardTask, write_shard
from tests.conftest import preprocess
from tests.processes import ROOT, on_small_disk
from tests.unit.refusals import refuses

from .builders import find, write_tree

DATA, NAMES = "data", "preprocess.class_names_file"


def start(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and message of `python -m components.preprocess`, which must be one line."""
    command = [*prefix, sys.executable, "-m", "components.preprocess", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd="/")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = (line for line in done.stderr.splitlines() if ": packing " not in line)
    assert line.startswith("preprocess: ")
    return done.returncode, line.removeprefix("preprocess: ")


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ({}, "no-class-folders"),
        ({"": 3}, "no-class-folders"),  # images straight in the folder
        ({"only": 4}, "too-few-classes"),
        ({"many": 4, "single": 1}, "too-few-images"),
        ({"many": 4, "none": 0}, "too-few-images"),
        ({"train/a": 2, "train/b": 2}, "missing-split"),
        ({"train": 2, "val/a": 2}, "no-class-folders"),
        ({"train/a": 2, "train/b": 2, "val/a": 2, "val/new": 2}, "unknown-classes"),
        ({"train/a": 2, "train/b": 2, "val/a": 0}, "empty-split"),
        ({"one": 4, "two\nlines": 4}, "invalid-class-name"),
    ],
    ids=str,
)
def test_folders_that_cannot_be_used(tmp_path: Path, counts: dict[str, int], code: str) -> None:
    root, output = tmp_path / "images", tmp_path / "out"
    if "" not in counts:
        root.mkdir()
    with refuses(code):
        preprocess(write_tree(root, counts), output)
    assert not output.exists() or not list(output.iterdir())


@pytest.mark.parametrize(
    ("text", "code", "setting"),
    [
        ("cat\n", "unknown-classes", NAMES),
        ("cat\ndog\ncat\n", "duplicate-class-names", ""),
        ("n01440764 tench\n" * 2, "duplicate-class-names", ""),
        ("\n \n", "no-class-names", ""),
        (None, "unreadable-class-names", NAMES),
    ],
)
def test_class_names_files_that_do_not_fit(tmp_path: Path, text: str | None, code: str, setting: str) -> None:
    if text is not None:
        (tmp_path / "names.txt").write_text(text)
    with refuses(code, setting):
        find(write_tree(tmp_path / "images", {"cat": 2, "dog": 2}), class_names_file=str(tmp_path / "names.txt"))


def test_a_refusal_is_one_line_and_failure_json(tmp_path: Path) -> None:
    data, output = write_tree(tmp_path / "images", {"only": 4}), tmp_path / "out"
    code, text = start("--data", str(data), "--output", str(output))
    assert code == 2
    assert "images has only the class 'only'" in text
    failure = json.loads((output / "failure.json").read_text())
    assert failure == {**failure, "step": "preprocess", "exit_code": 2}
    assert f"{failure['message']} [{failure['code']}]" == text
    assert [path.name for path in output.iterdir()] == ["failure.json"]


def test_an_output_within_the_data(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    split = write_tree(tmp_path / "split", {"train/a": 1, "train/b": 1, "val/a": 1})
    write_tree(split, {"val/b": 1}, height=40)
    for data, out in ((root, root / "out"), (root, root / "a" / "out"), (root, root), (split, split / "train" / "x")):
        with refuses("output-in-data", "output"):
            preprocess(f"file://{data}", out)
        assert out == root or not out.exists()
    for data, output in ((root, root / ".hidden" / "out"), (split, split / "out")):  # neither is seen
        preprocess(data, output, on_leak="warn")


def test_a_full_disk_ends_the_step(tmp_path: Path) -> None:
    small = write_tree(tmp_path / "small", {"a": 40, "b": 40})  # the archive's own overhead does not fit
    large = write_tree(tmp_path / "large", {"a": 2, "b": 2})
    for number in range(4):
        (large / "a" / f"large{number}.png").write_bytes(b"\0" * 500_000)
    for data, size, message in (
        (large, "1m", "the disk of /mnt/out is too small for the shards: they take 2.0 MB, and 1.0 MB are free. Free"),
        (small, "256k", "no space left"),
    ):
        code, text = start("--data", str(data), "--output", "/mnt/out", prefix=on_small_disk(size))
        assert code == 1
        assert message.lower() in text.lower()


def test_a_full_disk_is_no_rejected_image(tmp_path: Path) -> None:
    source = find(write_tree(tmp_path / "images", {"a": 4, "b": 4}))
    task = ShardTask(
        storage=source.storage,
        folder=tmp_path,
        name="full",
        first_index=0,
        samples=source.splits["train"],
        config=PreprocessConfig(data="images"),
    )
    task.records.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # the kernel refuses to write more, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(task)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(task.records.glob("*.json*"))
