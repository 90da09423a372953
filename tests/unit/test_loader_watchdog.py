"""A reader that is stuck becomes an error, and its process can still end; one that is slow is left alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, DatasetManifest, load
from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.loader import Loader
from components.common.data.loader_damage import Watchdog

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = transform_for(32, resize_ratio=1.0)
LIMIT_S = 1.0


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_does_not_answer(digits_dataset: Artifact[DatasetManifest], tmp_path: Path, split: str) -> None:
    copy = Path(shutil.copytree(digits_dataset.path, tmp_path / "dataset"))
    dataset = load(copy, DatasetManifest)
    shard = copy / dataset.manifest.splits[split].shards[-1]  # type: ignore[index]
    shard.unlink()
    os.mkfifo(shard)  # who opens it waits for a writer, for ever
    augmentation = Augmentation() if split == "train" else None
    started = time.monotonic()
    with pytest.raises(EngineryError) as caught:
        Loader(dataset, split, SPEC, batch_size=8, augmentation=augmentation, stuck_after_s=LIMIT_S)
    assert time.monotonic() - started >= LIMIT_S
    assert f"reading the {split} split of {copy} is stuck: nothing came in 1 seconds" in str(caught.value)
    assert f"cat {copy}/{split}-*.tar" in str(caught.value)
    with shard.open("wb"):  # lets go of the thread
        pass


class Stuck:
    """In place of DALI's iterator: gives one batch of it, and then waits for content that never comes."""

    def __init__(self, iterator: object, pipe: int) -> None:
        self.iterator, self.pipe, self.calls = iterator, pipe, 0

    def __next__(self) -> object:
        self.calls += 1
        if self.calls > 1:
            os.read(self.pipe, 1)
        return next(self.iterator)  # type: ignore[call-overload]


def test_storage_that_stops_answering_in_the_middle(digits_dataset: Artifact[DatasetManifest]) -> None:
    reading, writing = os.pipe()
    loader = Loader(digits_dataset, "val", SPEC, batch_size=60, stuck_after_s=LIMIT_S)
    stuck = Stuck(loader._iterators[0], reading)
    loader._iterators = [stuck]  # type: ignore[list-item]
    batches = iter(loader)
    assert len(next(batches).images) == 60
    with pytest.raises(EngineryError, match=r"reading the val split of .* is stuck"):
        next(batches)
    with pytest.raises(EngineryError, match=r"reading the val split of .* is stuck"):
        next(iter(loader))  # at once, and without another call into DALI
    assert stuck.calls == 2
    os.close(writing)


def test_a_consumer_may_be_slow(digits_dataset: Artifact[DatasetManifest]) -> None:
    loader = Loader(digits_dataset, "val", SPEC, batch_size=60, stuck_after_s=LIMIT_S)
    num_images = 0
    for batch in loader:
        num_images += len(batch.images)
        time.sleep(1.5 * LIMIT_S)
    assert num_images == 120


def test_a_process_whose_thread_is_stuck_can_end() -> None:
    script = """
import os
from components.common.data.loader_damage import Watchdog

reading, writing = os.pipe()
try:
    Watchdog("test", 0.2).call(lambda: os.read(reading, 1))
except TimeoutError:
    print("told")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


def test_a_call_returns_and_raises_as_it_would_here() -> None:
    watchdog = Watchdog("test", 60)
    assert watchdog.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        watchdog.call(lambda: 1 // 0)

    def slow() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        watchdog.call(slow)
    assert watchdog.call(lambda: 4) == 4
