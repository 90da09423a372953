"""Folders that are written whole or not at all: beside their final place first."""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from components.common.contracts.errors import EngineryError, UserError
from components.common.process.disk import explain


def check_new(output: Path, what: str, setting: str = "") -> None:
    """Say before any work that nothing can be written there.

    Args:
        output: the folder that is to be written.
        what: it is, such as "a release".
        setting: the option that names it, if one does.

    Raises:
        UserError: it exists, or the folder that it is to be in does not, or can't be written.
    """
    if output.exists() or output.is_symlink():
        message = f"{output} exists already, and {what} is never overwritten; name a new folder"
        raise UserError(message + f" with {setting}" * bool(setting), code="output-exists", setting=setting)
    if not output.absolute().parent.is_dir():
        raise UserError(f"there is no folder {output.absolute().parent}; make it first", code="no-parent-folder")
    if not os.access(output.absolute().parent, os.W_OK):
        message = (
            f"can't write into {output.absolute().parent}; name a new folder elsewhere, or make it writable for you"
        )
        raise UserError(message, code="output-unwritable")


_SPARED_BYTES = 1 << 30


def check_room(source: str, needed: int, folder: Path) -> None:
    """Refuse what a disk has no room for, before any of it is brought.

    Args:
        source: where it comes from.
        needed: its bytes.
        folder: in a temporary folder beside the output.

    Raises:
        EngineryError: there is too little.
    """
    where = folder.absolute().parents[1]
    if needed + _SPARED_BYTES > (free := shutil.disk_usage(where).free):
        raise EngineryError(
            f"{source} has {needed:,} bytes, beside which {_SPARED_BYTES:,} must stay free, and {where} has {free:,}; "
            "make room there",
            code="no-space",
        )


@contextmanager
def new_folder(output: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which gets the name `output` at the end: complete and on disk, or not at all.

    Raises:
        UserError: see `check_new`; or something else came there meanwhile.
    """
    check_new(output, what)
    with temporary_folder(output) as temporary:
        yield temporary
        finish(temporary, output)


@contextmanager
def temporary_folder(output: Path) -> Iterator[Path]:
    """A locked folder beside `output`, removed at the end unless it was renamed; those of killed processes go first."""
    _remove_left(output)
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        with _locked(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish(folder: Path, output: Path) -> None:
    """Give a folder its name, once all of it is on disk.

    Raises:
        UserError: something that is not an empty folder has come there meanwhile.
    """
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    try:
        folder.rename(output)
    except OSError as error:
        raise UserError(
            f"can't write {output}: {error.strerror}; name a new folder", code="output-unwritable"
        ) from None
    _sync(output.absolute().parent)


_SUFFIX = re.compile(r"\.[0-9a-f]{8}\.tmp")
_MIN_AGE_S = 60.0  # younger folders stay: their process may not have locked them yet


def _remove_left(output: Path) -> None:
    with suppress(OSError):  # such as of a file system without locks, where they stay
        for left in output.absolute().parent.iterdir():
            is_own = left.name.startswith(f".{output.name}.") and _SUFFIX.fullmatch(left.name, len(output.name) + 1)
            if is_own and time.time() - left.stat().st_mtime > _MIN_AGE_S:
                with suppress(BlockingIOError), _locked(left, must=True):
                    shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, must: bool = False) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with nullcontext() if must else suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def translate_errors(output: Path) -> Iterator[None]:
    """Turn errors of the file system, where a command writes `output`, into those for the user."""
    try:
        yield
    except OSError as error:
        known = explain(error, output.absolute().parent)
        raise known or UserError(f"can't write {output}: {error}", code="output-unwritable") from None
