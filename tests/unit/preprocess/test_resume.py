"""A killed run is continued by the next one in the same directory, and what it had done is kept."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import MANIFEST, UNFINISHED, Artifact, DatasetManifest, load
from components.common.process.partial_output import EARLIER_VARIABLE

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


def kill_after(num_done: int, data: Path, output: Path) -> None:
    """SIGKILL once so many shards are done."""
    process = start(data, output)
    deadline = time.monotonic() + 600
    while len(list(output.glob(f"{UNFINISHED}/train-*.json"))) < num_done:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_run_is_continued(all_digits: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    output = tmp_path / "out"
    kill_after(2, all_digits, output)
    assert not (output / MANIFEST).exists()
    done = {path.with_suffix(".tar").name for path in output.glob(f"{UNFINISHED}/train-*.json")}
    before = {name: (output / name).stat().st_mtime_ns for name in done}
    assert f"train-{len(done):06d}.tar" not in done
    (output / f"train-{len(done):06d}.tar").write_bytes(b"half a shard")
    (output / ".data_card.html.1.tmp").write_text("half a card")
    again = start(all_digits, output)
    _, said = again.communicate(timeout=600)
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
    (tmp_path / "out" / ".half.1.tmp").write_text("what the other one writes")
    with (records / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process writes .* at this moment; wait for it"):
            run_preprocess(few_digits, tmp_path / "out")
    assert (tmp_path / "out" / ".half.1.tmp").exists()


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}


def test_a_run_with_an_output_of_its_own_takes_over_finished_shards(
    all_digits: Path, tmp_path: Path, run_preprocess: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = [tmp_path / "first", tmp_path / "second", tmp_path / "gone"]
    for output, num_done in zip(earlier, (1, 2), strict=False):
        kill_after(num_done, all_digits, output)
    finished = [{path.stem for path in output.glob(f"{UNFINISHED}/*-*.json")} for output in earlier]
    done = finished[0] | finished[1]
    before: dict[str, int] = {}
    for output, names in zip(earlier, finished, strict=True):  # the first that has finished a shard gives it
        before = {**{name: time for name, time in times(output).items() if Path(name).stem in names}, **before}
    whole = run_preprocess(all_digits, tmp_path / "whole", shard_bytes=SHARD_BYTES)
    monkeypatch.setenv(EARLIER_VARIABLE, json.dumps([str(path) for path in earlier]))
    again = start(all_digits, tmp_path / "out")
    _, said = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert f"going on where an earlier run stopped, with {len(done)} finished shards" in said
    after = times(tmp_path / "out")
    assert {name for name in after if after[name] == before.get(name)} == {f"{name}.tar" for name in done}
    assert load(tmp_path / "out", DatasetManifest).digest == whole.digest
    assert [list(output.glob("*")) for output in earlier] == [[], [], []]  # what is half done goes, too


def test_what_another_process_packs_or_was_planned_otherwise_is_not_taken_over(
    all_digits: Path, tmp_path: Path, run_preprocess: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, other = tmp_path / "held", tmp_path / "other"
    kill_after(1, all_digits, held)
    kill_after(1, all_digits, other)
    (other / UNFINISHED / "plan.json").write_text("sha256:other ")
    before = [sorted(output.rglob("*")) for output in (held, other)]
    monkeypatch.setenv(EARLIER_VARIABLE, json.dumps([str(held), str(other)]))
    with (held / UNFINISHED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_preprocess(all_digits, tmp_path / "out", shard_bytes=SHARD_BYTES)
    assert [sorted(output.rglob("*")) for output in (held, other)] == before
