"""A killed run is resumed by the next one, which keeps what it had done; the workers of a step end with it."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from components.common.contracts.manifests import MANIFEST, PARTIAL_OUTPUT, DatasetManifest, load
from components.common.process.partial_output import EARLIER_VARIABLE
from tests.conftest import preprocess
from tests.processes import start_python
from tests.unit.refusals import refuses
from tests.waiting import wait_until

from .builders import SHARD_BYTES, write_tree


def start(data: Path, output: Path, num_workers: int = 1) -> subprocess.Popen[str]:
    words = ("--data", data, "--output", output, "--num-workers", num_workers, "--shard-bytes", SHARD_BYTES)
    return start_python("-m", "components.preprocess", *words, start_new_session=True)


def kill_after(num_done: int, data: Path, output: Path) -> set[str]:
    """SIGKILL once so many shards are done. Returns the names of those that are."""
    process = start(data, output)
    wait_until(lambda: len(list(output.glob(f"{PARTIAL_OUTPUT}/train-*.json"))) >= num_done, process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (output / MANIFEST).exists()
    return {path.stem for path in output.glob(f"{PARTIAL_OUTPUT}/*-*.json")}


def times(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_mtime_ns for path in folder.glob("*.tar")}


def test_a_killed_run_is_resumed_in_its_output(all_digits: Path, tmp_path: Path, whole) -> None:
    output = tmp_path / "out"
    done = kill_after(3, all_digits, output)
    before = times(output)
    damaged, *kept = sorted(done)
    with (output / f"{damaged}.tar").open("ab") as shard:
        shard.write(b"more")
    assert f"train-{len(done):06d}" not in done
    (output / f"train-{len(done):06d}.tar").write_bytes(b"half a shard")
    (output / ".data_card.html.1.tmp").write_text("half a card")
    again = start(all_digits, output)
    _, said = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert "resuming where an earlier run stopped" in said
    assert {name: times(output)[name] for name in kept} == {name: before[name] for name in kept}
    assert not (output / PARTIAL_OUTPUT).exists()
    assert load(output, DatasetManifest).digest == whole.digest


def test_a_run_with_another_output_takes_the_finished_shards(all_digits: Path, tmp_path, whole, monkeypatch) -> None:
    """But none of what another process holds, or was planned otherwise."""
    first, second, held, other = (tmp_path / name for name in ("first", "second", "held", "other"))
    finished = kill_after(2, all_digits, first)
    one, *more = sorted(finished)
    for output, gone in ((second, [one]), (held, more), (other, more), (first, more)):  # as of several killed runs
        if output != first:
            shutil.copytree(first, output)
        for name in gone:
            (output / f"{name}.tar").unlink()
            (output / PARTIAL_OUTPUT / f"{name}.json").unlink()
    (other / PARTIAL_OUTPUT / "plan.json").write_text("sha256:other ")
    before = {one: times(first)[one], **{name: times(second)[name] for name in more}}
    left_alone = [sorted(output.rglob("*")) for output in (held, other)]
    earlier = [first, second, held, other, tmp_path / "gone"]
    monkeypatch.setenv(EARLIER_VARIABLE, json.dumps([str(path) for path in earlier]))
    with (held / PARTIAL_OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        preprocess(all_digits, tmp_path / "out", shard_bytes=SHARD_BYTES)
    after = times(tmp_path / "out")
    assert {name for name in after if after[name] == before.get(name)} == finished
    assert load(tmp_path / "out", DatasetManifest).digest == whole.digest
    assert [list(output.glob("*")) for output in (first, second)] == [[], []]  # partial shards go, too
    assert [sorted(output.rglob("*")) for output in (held, other)] == left_alone


def test_an_output_of_other_settings_or_of_another_process_is_left_alone(few_digits: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / PARTIAL_OUTPUT).mkdir(parents=True)
    (output / PARTIAL_OUTPUT / "plan.json").write_text("sha256:other ")
    (output / "train-000000.tar").write_bytes(b"theirs")
    with refuses("other-unfinished-output"):
        preprocess(few_digits, output)
    (output / ".half.1.tmp").write_text("what the other one writes")
    with (output / PARTIAL_OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refuses("output-in-use"):
            preprocess(few_digits, output)
    assert (output / ".half.1.tmp").exists()
    assert (output / "train-000000.tar").read_bytes() == b"theirs"


def test_files_that_could_not_be_read_are_read_again_after_a_refusal(tmp_path: Path) -> None:
    images = write_tree(tmp_path / "images", {"train/a": 3, "train/b": 3, "val/a": 1})
    write_tree(images, {"val/b": 1}, height=40)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name},{path.parents[1].name}" for path in images.rglob("*.png")]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    os.rename(images, tmp_path / "away")
    images.mkdir()
    os.rename(tmp_path / "away" / "val", images / "val")  # as a share that is not mounted
    output = tmp_path / "out"
    with refuses("unusable-files", "preprocess.max_bad_fraction", says="6 of 8 files"):
        preprocess(table, output)
    val = times(output)["val-000000"]
    os.rename(tmp_path / "away" / "train", images / "train")
    os.utime(table)
    with refuses("other-unfinished-output"):  # sizes are known by now
        preprocess(table, output)
    (output / PARTIAL_OUTPUT / "plan.json").unlink()  # as of a web server, which tells no sizes
    assert preprocess(table, output).manifest.num_rejected == 0
    assert times(output)["val-000000"] == val


@pytest.fixture(scope="module")
def large_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seconds of work for each worker."""
    root = write_tree(tmp_path_factory.mktemp("large"), {"a": 2, "b": 2}, height=1500, width=1500)
    for folder in ("a", "b"):
        for number in range(60):
            os.link(root / folder / "000.png", root / folder / f"more{number}.png")
    return root


@contextmanager
def packing(data: Path, output: Path) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """preprocess as a person starts it, with its processes, once its workers write."""
    step, processes = start(data, output, num_workers=2), []
    try:
        wait_until(lambda: len(list(output.glob("*.tar"))) >= 2, process=step)
        processes += psutil.Process(step.pid).children(recursive=True)
        yield step, processes
    finally:
        step.kill()
        for process in processes:  # which keep its output open
            with suppress(psutil.NoSuchProcess):
                process.kill()
        step.communicate()


def still_running(processes: list[psutil.Process]) -> list[str]:
    """Those that keep working for seconds."""
    deadline = time.monotonic() + 5
    while (left := [one for one in processes if is_running(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [str(one) for one in left]


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)  # which nobody may collect in a container
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGHUP, 130)])
def test_workers_end_with_their_step(tmp_path: Path, large_images: Path, number: signal.Signals, code: int) -> None:
    with packing(large_images, tmp_path / "out") as (step, workers):
        assert len(workers) >= 2
        step.send_signal(number)  # SIGHUP comes when a terminal closes
        assert step.wait(timeout=10) == code  # the shards that are being written take longer
        assert still_running(workers) == []
        if number == signal.SIGHUP:
            assert step.stderr.read().endswith("preprocess: interrupted\n")


def test_a_worker_that_is_killed_ends_the_step_with_the_fix(tmp_path: Path, large_images: Path) -> None:
    with packing(large_images, tmp_path / "out") as (step, processes):
        workers = [process for process in processes if "spawn_main" in " ".join(process.cmdline())]
        workers[0].send_signal(signal.SIGKILL)  # as the kernel does where memory runs out
        _, text = step.communicate(timeout=600)
        assert step.returncode == 1
        assert "preprocess: a process that packs images was killed, most often because memory ran out" in text
        assert "--set preprocess.num_workers=1 (python -m components.preprocess: --num-workers 1)" in text
