"""The directory of a generated data set: begun by one set of arguments, continued only by the same.

While a data set is being written its directory holds `dataset.partial.json`, and `dataset.json` once it is
complete; both hold the arguments. Images appear under their final name only when whole, so a killed run
continues where it stopped.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from components.common.contracts.errors import UserError

COMPLETE = "dataset.json"
PARTIAL = "dataset.partial.json"

Arguments = Mapping[str, str | int]


def begin(directory: Path, arguments: Arguments) -> bool:
    """Claim a directory for a data set.

    Returns:
        True when the directory already holds exactly this data set, complete: nothing is left to do.

    Raises:
        UserError: the directory holds something else, or the same data set of other arguments.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file, and a directory is needed. Name another path.")
    for name, state in ((COMPLETE, "a complete"), (PARTIAL, "an unfinished")):
        path = directory / name
        if not path.exists():
            continue
        found = _read(path)
        if found == dict(arguments):
            return name == COMPLETE
        raise UserError(
            f"{directory} holds {state} data set of other arguments: {_differences(found, arguments)}. "
            f"Give another directory, the arguments it was begun with, or delete it (rm -r {directory})."
        )
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty, and its files were not written by `enginery data` "
            f"(there is no {COMPLETE}). Give an empty or a new directory."
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / PARTIAL, json.dumps(dict(arguments), indent=2).encode() + b"\n", sync=True)
    return False


def finish(directory: Path) -> None:
    """Mark the data set as complete. Call it once every image is written."""
    os.replace(directory / PARTIAL, directory / COMPLETE)


def is_written(path: Path) -> bool:
    """Whether an earlier run wrote this image. Zero bytes are what a power cut leaves of a file."""
    return path.exists() and path.stat().st_size > 0


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file that exists under its name only when whole.

    `sync` also carries it to the disk first; too slow for each of 50,000 images, which can be made again.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: Path) -> dict[str, str | int]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Delete {path.parent} and write it again.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no arguments. Delete {path.parent} and write it again.")
    return found


def _differences(found: Arguments, wanted: Arguments) -> str:
    """`seed is 1, not 0` for each argument that differs."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return ", ".join(f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'given')}" for name in names)
