"""A disk that is full or can't be written, a limit of files, or a database in use, as one line with its fix."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from components.common.contracts.errors import EngineryError, UserError

_FULL_BYTES = 256 << 10  # less is free only where something has just failed to write
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
# What libraries make of ENOSPC when they don't raise OSError: SQLite, Rust (safetensors), C++ (OpenVINO, protobuf).
_NO_SPACE_WORDS = re.compile(r"no space left|disk is full|os error 28\b|disk quota exceeded", re.IGNORECASE)
_READ_ONLY_WORDS = re.compile("readonly database|unable to open database file")  # SQLite's
_NOT_ALLOWED_WORDS = re.compile(r"\[Errno (?:1|13|30)\] ([\w -]+): ['\"](.+?)['\"]")  # in the list of shutil.copytree
# Code of an error -> words that tell of it, whoever raised it, and what to say then.
_BY_WORDS = {
    "database-locked": (
        re.compile("database is locked"),  # SQLite's
        "another process keeps MLflow's database locked; wait until it is done, or end it",
    ),
    "file-too-large": (
        re.compile(r"file too large|os error 27\b", re.IGNORECASE),
        "a file would be larger than this shell or the disk allows; raise the limit (ulimit -f unlimited), or write to "
        "another disk",
    ),
}
_AGAIN = "then run the same command again (finished steps are kept)"


def explain(error: BaseException, place: Path) -> EngineryError | None:
    """Return the error for a person where a disk is behind an error, whoever raised it; None where none is.

    Args:
        error: what was caught.
        place: where the process writes, for errors that don't name a file.
    """
    return out_of_space(error, place) or _refused(error, place) or _by_words(error) or full(place)


def out_of_space(error: BaseException, place: Path) -> EngineryError | None:
    """Return the error of a full disk, if that is what an error says; see `explain`."""
    for cause in _causes(error):
        if (isinstance(cause, OSError) and cause.errno in _NO_SPACE) or _NO_SPACE_WORDS.search(str(cause)):
            places = [place, Path(tempfile.gettempdir())]
            if isinstance(cause, OSError) and isinstance(cause.filename, str | bytes):
                named = (cause.filename, cause.filename2)  # of a copy, what was read and what was written
                places = [Path(os.fsdecode(name)) for name in named if isinstance(name, str | bytes)]
            return no_space(min(places, key=_free_bytes))
    return None


def _refused(error: BaseException, place: Path) -> EngineryError | None:
    """Return the error of a file that this user may not use."""
    for cause in _causes(error):
        refused, reason = "", ""
        if isinstance(cause, OSError) and cause.errno in _NOT_ALLOWED and isinstance(cause.filename, str | bytes):
            refused, reason = os.fsdecode(cause.filename), cause.strerror or ""
        elif isinstance(cause, shutil.Error) and (found := _NOT_ALLOWED_WORDS.search(str(cause))):
            refused, reason = found[2], found[1]
        elif _READ_ONLY_WORDS.search(str(cause)):
            refused, reason = str(place), "it can't be opened or written"
        if refused:
            return UserError(
                f"can't use {refused}: {reason}; give this user access to it, or set ENGINERY_HOME to a directory that "
                "can be written",
                code="permission-denied",
            )
    return None


def _by_words(error: BaseException) -> EngineryError | None:
    """Return the error of an SQLite file that another process holds, or of a file larger than this one may write."""
    for code, (words, text) in _BY_WORDS.items():
        if any(words.search(str(cause)) for cause in _causes(error)):
            return EngineryError(f"{text}, {_AGAIN}", code=code)
    return None


def full(place: Path) -> EngineryError | None:
    """Return the error of a disk without room, for failures that don't tell: of `place`, or of temporary files."""
    tight = [path for path in (place, Path(tempfile.gettempdir())) if _free_bytes(path) < _FULL_BYTES]
    return no_space(tight[0]) if tight else None


def no_space(place: Path) -> EngineryError:
    """Return the error of a full disk."""
    return EngineryError(
        f"no space left on {_mount_point(place)}: {_free_bytes(place) / 1e6:.1f} MB free; free space or "
        f"write to a larger disk (runs: set ENGINERY_HOME), {_AGAIN}",
        code="no-space",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from or in place of."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            left += [cause.__context__, cause.__cause__]


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(_existing(path)).free
    except OSError:
        return 1 << 62  # unknown, so not what is full


def _mount_point(path: Path) -> Path:
    path = _existing(path).resolve()
    return next(parent for parent in (path, *path.parents) if os.path.ismount(parent))
