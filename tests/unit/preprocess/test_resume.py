"""A killed run is continued by the next one in the same directory, and what it had done is kept."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.artifacts import MANIFEST, UNFINISHED, Artifact, DatasetManifest, load
from components.common.errors import UserError

Preprocess = Callable[..., Artifact[DatasetManifest]]
SHARD_BYTES = 1_000_000
REPOSITORY = Path(__file__).resolve().parents[3]


def start(data: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "components.preprocess", "--data", str(data), "--output", str(output)]
    command += ["--num-workers", "1", "--shard-bytes", str(SHARD_BYTES)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("num_done", [1, 2])
def test_a_killed_run_is_continued(all_digits: Path, tmp_path: Path, run_preprocess: Preprocess, num_done: int) -> None:
    output = tmp_path / "out"
    process = start(all_digits, output)
    deadline = time.monotonic() + 60
    while len(list(output.glob(f"{UNFINISHED}/train-*.json"))) < num_done:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (output / MANIFEST).exists()
    done = {path.with_suffix(".tar").name for path in output.glob(f"{UNFINISHED}/train-*.json")}
    before = {name: (output / name).stat().st_mtime_ns for name in done}
    assert f"train-{len(done):06d}.tar" not in done
    (output / f"train-{len(done):06d}.tar").write_bytes(b"half a shard")
    again = start(all_digits, output)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert "going on where an earlier run stopped" in said
    assert {name: (output / name).stat().st_mtime_ns for name in done} == before
    assert not (output / UNFINISHED).exists()
    whole = run_preprocess(all_digits, tmp_path / "whole", shard_bytes=SHARD_BYTES)
    assert load(output, DatasetManifest).digest == whole.digest


def test_a_killed_run_of_other_settings_is_left_alone(
    few_digits: Path, tmp_path: Path, run_preprocess: Preprocess
) -> None:
    output = tmp_path / "out"
    (output / UNFINISHED).mkdir(parents=True)
    (output / UNFINISHED / "plan.json").write_text("sha256:other ")
    (output / "train-000000.tar").write_bytes(b"theirs")
    with pytest.raises(UserError, match="holds an unfinished data set of other images or settings; empty it or"):
        run_preprocess(few_digits, output)
    assert (output / "train-000000.tar").read_bytes() == b"theirs"


def test_a_shard_that_was_damaged_meanwhile_is_written_again(
    few_digits: Path, tmp_path: Path, run_preprocess: Preprocess
) -> None:
    whole = run_preprocess(few_digits, tmp_path / "whole")
    output = tmp_path / "out"
    process = start(few_digits, output)
    while not (output / UNFINISHED / "train-000000.json").exists():
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with (output / "train-000000.tar").open("ab") as shard:
        shard.write(b"more")
    assert run_preprocess(few_digits, output, shard_bytes=SHARD_BYTES).manifest.splits == whole.manifest.splits


def test_files_that_could_not_be_read_are_read_again_after_a_refusal(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Path]
) -> None:
    images = write_tree(tmp_path / "images", {"train/a": 3, "train/b": 3, "val/a": 1})
    write_tree(images, {"val/b": 1}, height=40)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name},{path.parents[1].name}" for path in images.rglob("*.png")]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    os.rename(images, tmp_path / "away")
    images.mkdir()
    os.rename(tmp_path / "away" / "val", images / "val")  # as a share that is not mounted
    output = tmp_path / "out"
    with pytest.raises(UserError, match=r"6 of 8 files are no usable image.*unreadable: No such file"):
        run_preprocess(table, output)
    val = (output / "val-000000.tar").stat().st_mtime_ns
    os.rename(tmp_path / "away" / "train", images / "train")
    os.utime(table)
    with pytest.raises(UserError, match="unfinished data set of other images"):  # sizes are known by now
        run_preprocess(table, output)
    plan = output / UNFINISHED / "plan.json"
    plan.unlink()  # as of a web server, which tells no sizes
    assert run_preprocess(table, output).manifest.num_rejected == 0
    assert (output / "val-000000.tar").stat().st_mtime_ns == val


def test_two_at_once(few_digits: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    records = tmp_path / "out" / UNFINISHED
    records.mkdir(parents=True)
    with (records / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process writes .* at this moment; wait for it"):
            run_preprocess(few_digits, tmp_path / "out")
