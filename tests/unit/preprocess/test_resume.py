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


def test_two_at_once(few_digits: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    records = tmp_path / "out" / UNFINISHED
    records.mkdir(parents=True)
    with (records / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process writes .* at this moment; wait for it"):
            run_preprocess(few_digits, tmp_path / "out")
