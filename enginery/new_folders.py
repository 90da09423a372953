"""Folders that are written whole or not at all: beside their final place first."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.common.contracts.errors import UserError
from components.common.process.disk import explain


def check_new(output: Path, what: str) -> None:
    """Say before any work that nothing can be written there.

    Args:
        output: the folder that is to be written.
        what: it is, such as "a release".

    Raises:
        UserError: it exists, or the folder that it is to be in does not, or can't be written.
    """
    if output.exists() or output.is_symlink():
        raise UserError(
            f"{output} exists already, and {what} is never overwritten; name a new folder", code="output-exists"
        )
    if not output.absolute().parent.is_dir():
        raise UserError(f"there is no folder {output.absolute().parent}; make it first", code="no-parent-folder")
    if not os.access(output.absolute().parent, os.W_OK):
        message = (
            f"can't write into {output.absolute().parent}; name a new folder elsewhere, or make it writable for you"
        )
        raise UserError(message, code="output-unwritable")


@contextmanager
def new_folder(output: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which gets the name `output` at the end: complete and on disk, or not at all.

    Raises:
        UserError: see `check_new`; or something else came there meanwhile.
    """
    check_new(output, what)
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        try:
            temporary.rename(output)  # fails where something that is not an empty folder has come there meanwhile
        except OSError as error:
            raise UserError(
                f"can't write {output}: {error.strerror}; name a new folder", code="output-unwritable"
            ) from None
        _sync(output.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there only if something failed


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
