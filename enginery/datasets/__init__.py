"""The built-in datasets of `enginery data`: real handwritten digits, and procedural textures of any number.

Their directory is begun by one set of arguments, and continued only by the same. While a dataset is being written it
holds `dataset.partial.json`, and `dataset.json` once it is complete; both hold the arguments. Images appear under their
final name only when whole, so a killed run continues where it stopped.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import write_atomically
from components.common.process.lifetime import end_with_creator

COMPLETE = "dataset.json"
PARTIAL = "dataset.partial.json"

SPLITS = ("train", "val")
MAX_IMAGE_SIZE = 4096  # px; a worker takes up to 100 bytes of memory for each pixel
Arguments = Mapping[str, str | int]
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """The content of a dataset's directory."""

    directory: Path
    num_images: int
    """All splits together; pairs of sentences of a dataset without images."""
    num_classes: int
    seconds: float
    """Wall time of this call."""
    already_complete: bool = False
    """True: an earlier call with the same arguments had finished, and this one wrote nothing."""


def write_dataset(
    directory: Path, arguments: Arguments, write: Callable[[], None], *, num_images: int, num_classes: int
) -> DatasetSummary:
    """Write a dataset, or continue it, by calling `write`; a complete one is left alone.

    Raises:
        UserError: the directory holds something else, or the same dataset of other arguments.
    """
    started = time.perf_counter()
    already_complete = _begin(directory, arguments)
    if not already_complete:
        write()
        (directory / PARTIAL).replace(directory / COMPLETE)
    return DatasetSummary(
        directory=directory,
        num_images=num_images,
        num_classes=num_classes,
        seconds=time.perf_counter() - started,
        already_complete=already_complete,
    )


def _begin(directory: Path, arguments: Arguments) -> bool:
    """Claim a directory for a dataset.

    Returns:
        True when the directory already holds exactly this dataset, complete: nothing is left to do.

    Raises:
        UserError: the directory holds something else, or the same dataset of other arguments.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file, and a directory is needed. Name another path.", code="no-directory")
    for name, state in ((COMPLETE, "a complete"), (PARTIAL, "an unfinished")):
        path = directory / name
        if not path.exists():
            continue
        found = _read(path)
        if found == dict(arguments):
            return name == COMPLETE
        raise UserError(
            f"{directory} holds {state} dataset of other arguments: {_differences(found, arguments)}. "
            f"Give another directory, the arguments it was begun with, or delete it (rm -r {directory}).",
            code="other-dataset",
        )
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty, and its files were not written by `enginery data` "
            f"(there is no {COMPLETE}). Give an empty or a new directory.",
            code="directory-not-empty",
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / PARTIAL, json.dumps(dict(arguments), indent=2).encode() + b"\n")
    return False


def is_written(path: Path) -> bool:
    """True if an earlier run wrote this image. Zero bytes are what a power cut leaves of a file."""
    return path.exists() and path.stat().st_size > 0


def write_whole(path: Path, content: bytes) -> None:
    """Write an image that exists under its name only when whole. Not synced, since it can be made again."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def check_range(why: str = "", /, **arguments: tuple[int, int] | tuple[int, int, int]) -> None:
    """See that arguments of a command are in range: by name the value, the least and the most, and `why` for people.

    Raises:
        UserError: one has not.
    """
    for name, (value, least, *most) in arguments.items():
        if value < least or any(value > each for each in most):
            option, reason = f"--{name.replace('_', '-')}", f" ({why})" if why else ""
            allowed = "".join((f"at least {least}", *(f" and at most {each}" for each in most)))
            message = f"{option} is {value}, and must be {allowed}{reason}. Change {option}."
            raise UserError(message, code="invalid-setting", setting=option)


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """Some images of one folder, for one worker."""

    folder: Path
    """DIR/<split>, or DIR/<split>/<class>."""
    seed: int
    split: int
    """Index into SPLITS."""
    class_index: int = 0
    """Index of the class, where each class has a folder."""
    indices: range
    """Numbers of the images within their folder."""
    image_size: int
    """px"""

    def parts(self, most: int) -> "list[ImageTask]":
        """The same images in tasks of at most so many."""
        return [replace(self, indices=self.indices[first : first + most]) for first in self.indices[::most]]


def run_tasks(
    function: Callable[[ImageTask], _Result],
    tasks: Sequence[ImageTask],
    num_workers: int,
    on_progress: Callable[[int], None] | None,
) -> list[_Result]:
    """Run a module's function on each task in so many processes, 0 for one per core. Returns the results in order."""
    num_workers = min(num_workers or num_cores(), len(tasks))
    if num_workers == 1:
        return list(_counted(map(function, tasks), tasks, on_progress))
    # spawn: forking a process that has threads (a progress bar's) can deadlock the child
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=end_with_creator)
    try:
        return list(_counted(pool.map(function, tasks), tasks, on_progress))
    finally:
        pool.shutdown(cancel_futures=True)


def _counted(
    results: Iterable[_Result], tasks: Sequence[ImageTask], on_progress: Callable[[int], None] | None
) -> Iterator[_Result]:
    for result, task in zip(results, tasks, strict=True):
        if on_progress:
            on_progress(len(task.indices))
        yield result


def _read(path: Path) -> dict[str, str | int]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} holds no arguments ({error}). Delete {path.parent} and write it again.", code="damaged-arguments"
        ) from error


def _differences(found: Arguments, wanted: Arguments) -> str:
    """`seed is 1, not 0` for each argument that differs."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return ", ".join(f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'given')}" for name in names)
