"""What preprocess refuses, as a person meets it: one message with the fix, an exit code, failure.json, nothing else."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.preprocess.config import PreprocessConfig
from components.preprocess.run import run
from components.preprocess.shards import ShardTask, write_shard
from components.preprocess.sources import find_samples

REPOSITORY = Path(__file__).resolve().parents[3]
WriteTree = Callable[..., Path]
Preprocess = Callable[..., Artifact[DatasetManifest]]


def start(*arguments: str, prefix: tuple[str, ...] = (), **variables: str) -> tuple[int, str]:
    """Exit code and message of `python -m components.preprocess`, which must be one line."""
    command = [*prefix, sys.executable, "-m", "components.preprocess", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd="/")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if ": packing " not in line and " INFO mlflow." not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("preprocess: ")
    return done.returncode, lines[0].removeprefix("preprocess: ")


def refused(output: Path, **settings: object) -> str:
    """The same message, in this process."""
    with pytest.raises(UserError) as caught:
        run(resolve(PreprocessConfig, "preprocess", settings), StepLog("preprocess"), output=output)
    assert caught.value.exit_code == 2
    return str(caught.value)


FOLDERS: dict[str, tuple[Mapping[str, int] | None, str]] = {
    "empty": ({}, "images has no sub-folders, so no classes; arrange the images as DIR/<class>/image.jpg"),
    "one class": (
        {"only": 4},
        "images has only the class 'only'; a classifier needs at least two. Add a folder of images of another class",
    ),
    "one image": (
        {"many": 4, "single": 1},
        "class 'single' has 1 file; at least 2 are needed to split it into train and val. Add images or remove",
    ),
    "no image": ({"many": 4, "none": 0}, "class 'none' has no files; at least 2 are needed"),
    "no val": ({"train/a": 2, "train/b": 2}, "images has train/ but no val/; it needs both train/ and val/. Add "),
    "train without classes": ({"train": 2, "val/a": 2}, "images/train has no sub-folders, so no classes; arrange"),
    "class only in val": (
        {"train/a": 2, "train/b": 2, "val/a": 2, "val/new": 2},
        "images/val has classes that train/ has not: new. Add them to train/ or remove them",
    ),
    "val without files": ({"train/a": 2, "train/b": 2, "val/a": 0}, "images/val holds no files; put images into"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_cannot_be_used(tmp_path: Path, write_tree: WriteTree, name: str) -> None:
    counts, message = FOLDERS[name]
    (tmp_path / "images").mkdir()
    write_tree(tmp_path / "images", counts)
    output = tmp_path / "out"
    assert message in refused(output, data=str(tmp_path / "images"))
    assert not output.exists() or not list(output.iterdir())


def test_a_refusal_is_one_line_and_failure_json(tmp_path: Path, write_tree: WriteTree) -> None:
    output = tmp_path / "out"
    code, text = start("--data", str(write_tree(tmp_path / "images", {"only": 4})), "--output", str(output))
    assert code == 2
    assert "images has only the class 'only'" in text
    failure = json.loads((output / "failure.json").read_text())
    assert failure == {**failure, "step": "preprocess", "message": text, "exit_code": 2}
    assert [path.name for path in output.iterdir()] == ["failure.json"]


def test_data_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"PK")
    (tmp_path / "images.py").write_text("")
    for data, message in (
        (str(tmp_path / "absent"), "the data folder {} does not exist; name a folder with one sub-folder of images"),
        (str(tmp_path / "images.zip"), "{} is no zip that can be read"),
        (str(tmp_path / "images.py"), "the data {} is a file, not a folder, and of no kind that is read; name a"),
        ("s3://bucket/images", "reading s3:// needs a package that is not installed: pip install s3fs"),
    ):
        assert refused(tmp_path / "out", data=data).startswith(message.format(data))


def test_images_straight_in_the_folder(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path, {"images": 3})
    text = refused(tmp_path / "out", data=str(tmp_path / "images"))
    assert "images has no sub-folders, so no classes" in text


def test_settings_that_are_out_of_range_or_unknown(tmp_path: Path, write_tree: WriteTree) -> None:
    data = str(write_tree(tmp_path / "images", {"a": 2, "b": 2}))
    for settings, message in (
        ({"num_workers": "-1"}, "preprocess.num_workers: got '-1', needs an integer of at least 0 (default 0)"),
        ({"val_fraction": "1"}, "preprocess.val_fraction: got '1', needs a number above 0 and below 1 (default 0.2)"),
        ({"on_bad": "ask"}, "preprocess.on_bad: got 'ask', needs one of skip, fail (default skip)"),
        ({"shard_byte": 1000000}, "unknown setting preprocess.shard_byte; did you mean preprocess.shard_bytes?"),
    ):
        assert refused(tmp_path / "out", data=data, **settings).startswith(message)
    code, text = start("--data", data, "--output", str(tmp_path / "out"), "--config", str(tmp_path / "no.yaml"))
    assert (code, text[:23]) == (2, "can't read the config f")
    assert start("--output", str(tmp_path / "out")) == (
        2,
        "preprocess.data is required: " + (PreprocessConfig.model_fields["data"].description or ""),
    )


def test_an_output_that_holds_something_is_left_alone(tmp_path: Path, write_tree: WriteTree) -> None:
    data = str(write_tree(tmp_path / "images", {"cat": 3, "dog": 3}))
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    code, text = start("--data", data, "--output", str(output))
    assert code == 2
    assert text == f"the output directory {output} is not empty (it holds mine.txt); name another or empty it"
    assert [path.name for path in output.iterdir()] == ["mine.txt"]


def test_an_output_within_the_data(tmp_path: Path, write_tree: WriteTree, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    for output in (root / "out", root / "a" / "out", root):
        text = refused(output, data=f"file://{root}")
        assert text.startswith(f"the output {output} lies in the data folder {root}, where it would be taken for a cl")
        assert output == root or not output.exists()
    split = write_tree(tmp_path / "split", {"train/a": 1, "train/b": 1, "val/a": 1})
    write_tree(split, {"val/b": 1}, height=40)
    assert start("--data", str(split), "--output", str(split / "train" / "out"))[0] == 2
    shutil.rmtree(split / "train" / "out")
    for data, output in ((root, root / ".hidden" / "out"), (split, split / "out")):  # neither is seen
        run_preprocess(data, output, on_leak="warn")


def _small_disk(size: str) -> tuple[str, ...]:
    """Prefix of a command that sees a disk of that size at /mnt, or a skip where the system has no namespaces."""
    script = f'mount -t tmpfs -o size={size} none /mnt && exec "$@"'
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    return prefix


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path, write_tree: WriteTree) -> None:
    data = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    for number in range(4):
        (data / "a" / f"large{number}.png").write_bytes(b"\0" * 500_000)
    code, text = start("--data", str(data), "--output", "/mnt/out", prefix=_small_disk("1m"))
    assert code == 1
    assert text.startswith(
        "the disk of /mnt/out is too small for the shards: they take 2.0 MB, and 1.0 MB are free. Free"
    )


def test_a_disk_that_fills_up_while_packing(tmp_path: Path, write_tree: WriteTree) -> None:
    data = write_tree(tmp_path / "images", {"a": 40, "b": 40})  # small images: the archive's own overhead does not fit
    code, text = start("--data", str(data), "--output", "/mnt/out", prefix=_small_disk("64k"))
    assert code == 1
    assert "no space left" in text.lower()


def test_a_full_disk_is_no_rejected_image(tmp_path: Path, write_tree: WriteTree) -> None:
    data = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    source = find_samples(str(data), val_fraction=0.5, seed=0, class_names_file="", scratch=tmp_path)
    task = ShardTask(
        storage=source.storage,
        folder=tmp_path,
        records=tmp_path,
        name="full",
        first_index=0,
        samples=source.splits["train"],
        max_pixels=10**6,
        max_short_side=0,
        jpeg_quality=90,
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # the kernel refuses to write more, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(task)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("full*.json*")) == []


def test_a_failure_is_in_mlflow(tmp_path: Path, write_tree: WriteTree, empty_store: Path) -> None:
    data = write_tree(tmp_path / "images", {"only": 2})
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"
    code, text = start("--data", str(data), "--output", str(tmp_path / "out"), MLFLOW_TRACKING_URI=uri)
    assert code == 2
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([entry.experiment_id for entry in client.search_experiments()])
    assert (run.info.status, run.data.tags["enginery.message"]) == ("FAILED", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat\n", "has folders that class_names_file does not name: dog. Add their names to the file"),
        ("cat\ndog\ncat\n", "names a class twice: cat. Each line must name another class"),
        (None, "can't read class_names_file .*; name a text file in UTF-8 with one class per line"),
    ],
)
def test_class_names_files_that_do_not_fit(
    tmp_path: Path,
    run_preprocess: Preprocess,
    write_tree: Callable[..., Any],
    text: str | None,
    message: str,
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 3, "dog": 3})
    if text is not None:
        (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        run_preprocess(root, tmp_path / "out", class_names_file=str(tmp_path / "names.txt"))
