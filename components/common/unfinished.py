"""The output directory of a step that can be continued: locked, and with a folder for what is half done."""

import fcntl
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from components.common.artifacts import FAILURE, MANIFEST, UNFINISHED, prepare_directory
from components.common.errors import UserError

_LOCK = "lock"
_PATIENCE_S = 5.0  # the processes of a run that was killed may still be ending
_LOOK_S = 0.1


@contextmanager
def open_unfinished(output: Path, known: Collection[str] = ()) -> Iterator[Path]:
    """The folder for what is half done in an output directory: new, or left by a killed run.

    It goes again where the step ends without having put anything into it.

    Args:
        output: the step's output directory.
        known: files that this step itself may have left there.

    Raises:
        UserError: the directory holds something else, or another process is at work in it.
    """
    folder = output / UNFINISHED
    if folder.is_dir() and not (output / MANIFEST).exists():
        (output / FAILURE).unlink(missing_ok=True)
        for temporary in output.glob(".*"):
            if temporary.is_file():  # of a process that was killed while it wrote
                temporary.unlink()
        foreign = [entry.name for entry in output.iterdir() if entry.name not in (UNFINISHED, *known)]
        if foreign:
            raise UserError(
                f"the output directory {output} holds {sorted(foreign)[0]}, which this step did not write; name another"
            )
    else:
        prepare_directory(output)
        folder.mkdir()
    with (folder / _LOCK).open("w") as lock:
        _take(lock.fileno(), output)
        try:
            yield folder
        finally:
            if folder.is_dir() and all(entry.name == _LOCK for entry in folder.iterdir()):
                shutil.rmtree(folder)


def _take(handle: int, output: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process writes {output} at this moment; wait for it, or name another"
                ) from None
        time.sleep(_LOOK_S)
