"""The output directory of a step that can resume: locked, and with a folder for the partial output."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import FAILURE, MANIFEST, PARTIAL_OUTPUT, make_directory, prepare_directory

# What a local run sets: a JSON list of what killed runs left of the same steps, data, code and settings.
EARLIER_VARIABLE = "ENGINERY_UNFINISHED_OUTPUTS"
LOCK = "lock"  # in the folder of the partial output, held by the process at work there
_PATIENCE_S = 5.0  # the processes of a run that was killed may still be ending
_POLL_S = 0.1


def lock_output(output: Path) -> None:
    """Make an output directory, and keep other steps out of it for as long as this process lives.

    Raises:
        UserError: it can't be written, or another process is at work in it.
    """
    make_directory(output)
    with suppress(OSError):  # not every file system has locks
        _acquire(os.open(output, os.O_RDONLY | os.O_DIRECTORY), output)


def _acquire(handle: int, output: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"another process writes {output} at this moment; wait for it, or name another"
                raise UserError(text, code="output-in-use", setting="output") from None
        time.sleep(_POLL_S)


@contextmanager
def open_partial(output: Path, known: Collection[str] | None) -> Iterator[Path]:
    """The folder for the partial output of a step: new, or left by a killed run.

    It goes again where the step ends without having put anything into it.

    Args:
        output: the step's output directory.
        known: files that this step itself may have left there; None for any.

    Raises:
        UserError: the directory holds something else, or another process is at work in it.
    """
    folder = output / PARTIAL_OUTPUT
    if folder.is_dir() and not (output / MANIFEST).exists():
        (output / FAILURE).unlink(missing_ok=True)
        own = {PARTIAL_OUTPUT, *(known or ()), *(temporary.name for temporary in _temporaries(output))}
        foreign = [entry.name for entry in output.iterdir() if entry.name not in own]
        if foreign and known is not None:
            message = f"the output directory {output} holds {min(foreign)}, which this step did not write; name another"
            raise UserError(message, code="output-occupied", setting="output")
    else:
        prepare_directory(output)
        folder.mkdir()
    with (folder / LOCK).open("w") as lock:
        _acquire(lock.fileno(), output)
        for temporary in _temporaries(output):  # of a process that was killed while it wrote a file
            temporary.unlink()
        try:
            yield folder
        finally:
            if folder.is_dir() and all(entry.name == LOCK for entry in folder.iterdir()):
                shutil.rmtree(folder)


def _temporaries(output: Path) -> list[Path]:
    return [entry for entry in output.glob(".*") if entry.is_file()]


def earlier_outputs() -> list[Path]:
    """Return outputs of killed runs that may hold something to reuse, of this step or of another."""
    return [Path(output) for output in json.loads(os.environ.get(EARLIER_VARIABLE) or "[]")]


@contextmanager
def hold(output: Path) -> Iterator[Path]:
    """The folder of the partial output in another output directory, locked while something is taken from it.

    Raises:
        OSError: another process is at work there, or it is finished or gone.
    """
    folder = output / PARTIAL_OUTPUT
    with (folder / LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (output / MANIFEST).exists():
            raise FileExistsError(f"{output} is finished")
        yield folder
