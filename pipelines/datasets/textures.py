"""The data set of any size: procedural textures that a ResNet-50 learns, but not to perfection.

Written by processes in parallel, and the same bytes for the same arguments whatever their number: each
image has a generator of its own, seeded by (seed, split, class, index). What an image shows: synthesis.py.
Another seed gives other images of the same classes. Other versions of NumPy or Pillow (its JPEG encoder) may
differ in single bits, so a data set's identity is the digest that `preprocess` takes of it.
"""

import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.errors import UserError
from pipelines.datasets import DatasetSummary
from pipelines.datasets.directory import begin, finish, is_written, write_whole
from pipelines.datasets.synthesis import SYNTHESIS_VERSION, texture_image

JPEG_QUALITY = 90
MIN_IMAGE_SIZE = 16  # px; below about 64 the fine textures are gone
SPLITS = ("train", "val")
IMAGES_PER_TASK = 64  # about half a second of work: a fine progress bar, and Ctrl-C answers quickly


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Some images of one class and split, for one worker."""

    folder: Path
    """Where they go: DIR/<split>/<class>."""
    seed: int
    split: int
    """Index into SPLITS."""
    class_index: int
    indices: range
    """Numbers of the images within their class and split."""
    image_size: int
    """px"""


def write_textures(
    directory: Path,
    *,
    num_classes: int = 50,
    num_train: int = 40000,
    num_val: int = 10000,
    seed: int = 0,
    image_size: int = 224,
    num_workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> DatasetSummary:
    """Write DIRECTORY/{train,val}/<class>/<index>.jpg and, last, DIRECTORY/dataset.json.

    Classes are balanced; a remainder goes to the first classes, one image each. An unfinished run of the
    same arguments is continued, a finished one left alone.

    Args:
        directory: New, empty, or of an earlier run with the same arguments.
        num_classes: 1 or more. More classes lie closer together: 50 is what the difficulty was set for.
        num_train: Images of the training split, all classes together; at least one per class.
        num_val: The same for the validation split.
        seed: 0 or more. Another seed gives other images of the same classes.
        image_size: Width and height, px.
        num_workers: Processes; 0 = one per core that this process may use.
        on_progress: Called with the number of images that have just become ready.

    Raises:
        UserError: an argument is out of range, or the directory holds something else.
    """
    started = time.perf_counter()
    _check(num_classes, num_train, num_val, seed, image_size, num_workers)
    arguments: dict[str, str | int] = {
        "dataset": "textures",
        "num_classes": num_classes,
        "num_train": num_train,
        "num_val": num_val,
        "seed": seed,
        "image_size": image_size,
        "jpeg_quality": JPEG_QUALITY,
        "synthesis_version": SYNTHESIS_VERSION,
    }
    already_complete = begin(directory, arguments)
    if not already_complete:
        tasks = list(_tasks(directory, num_classes, (num_train, num_val), seed, image_size))
        for folder in {task.folder for task in tasks}:
            folder.mkdir(parents=True, exist_ok=True)
        _run(tasks, num_workers or num_usable_cores(), on_progress or (lambda num_images: None))
        finish(directory)
    return DatasetSummary(
        directory=directory,
        num_images=num_train + num_val,
        num_classes=num_classes,
        seconds=time.perf_counter() - started,
        already_complete=already_complete,
    )


def num_usable_cores() -> int:
    """Cores that this process may run on (a container's or taskset's share, not the machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(num_classes: int, num_train: int, num_val: int, seed: int, image_size: int, num_workers: int) -> None:
    for name, value, least in (
        ("num_classes", num_classes, 1),
        ("num_train", num_train, num_classes),
        ("num_val", num_val, num_classes),
        ("seed", seed, 0),
        ("image_size", image_size, MIN_IMAGE_SIZE),
        ("num_workers", num_workers, 0),
    ):
        if value < least:
            reason = " (one image per class)" if name in ("num_train", "num_val") else ""
            option = "--" + name.replace("_", "-")
            raise UserError(f"{name} is {value}, and must be at least {least}{reason}. Change {option}.")


def _tasks(
    directory: Path, num_classes: int, num_images: tuple[int, int], seed: int, image_size: int
) -> Iterator[_Task]:
    digits = max(3, len(str(num_classes - 1)))
    for split, split_name in enumerate(SPLITS):
        least, extra = divmod(num_images[split], num_classes)
        for class_index in range(num_classes):
            count = least + (class_index < extra)
            for first in range(0, count, IMAGES_PER_TASK):
                yield _Task(
                    folder=directory / split_name / f"{class_index:0{digits}d}",
                    seed=seed,
                    split=split,
                    class_index=class_index,
                    indices=range(first, min(first + IMAGES_PER_TASK, count)),
                    image_size=image_size,
                )


def _run(tasks: list[_Task], num_workers: int, on_progress: Callable[[int], None]) -> None:
    if num_workers == 1:
        for task in tasks:
            on_progress(_write_task(task))
        return
    # spawn: forking a process that has threads (a progress bar's) can deadlock the child
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(num_workers, len(tasks)), mp_context=context, initializer=_start_worker)
    try:
        pending: set[Future[int]] = {pool.submit(_write_task, task) for task in tasks}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                on_progress(future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # true of every process that multiprocessing starts

    def die_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()


def _write_task(task: _Task) -> int:
    """Write the images that an earlier run has not. Returns how many of them are ready now: all."""
    for index in task.indices:
        path = task.folder / f"{index:05d}.jpg"
        if not is_written(path):
            write_whole(path, texture_jpeg(task.seed, task.split, task.class_index, index, task.image_size))
    return len(task.indices)


def texture_jpeg(seed: int, split: int, class_index: int, index: int, image_size: int) -> bytes:
    """JPEG bytes of one image, a function of these numbers alone."""
    rng = np.random.default_rng((seed, split, class_index, index))
    buffer = io.BytesIO()
    texture_image(rng, class_index, image_size).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()
