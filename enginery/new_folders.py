"""Folders that are written whole or not at all: beside their final place first."""

import os
from pathlib import Path

from components.common.contracts.errors import UserError


def check_new(output: Path, what: str) -> None:
    """Say before any work that nothing can be written there.

    Args:
        output: the folder that is to be written.
        what: it is, such as "a release".

    Raises:
        UserError: it exists, or the folder that it is to be in does not.
    """
    if output.exists() or output.is_symlink():
        raise UserError(
            f"{output} exists already, and {what} is never overwritten; name a new folder", code="output-exists"
        )
    if not output.absolute().parent.is_dir():
        raise UserError(f"there is no folder {output.absolute().parent}; make it first", code="no-parent-folder")


def to_disk(folder: Path) -> None:
    """So that a power cut leaves a whole release or none."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def give_name(temporary: Path, output: Path) -> None:
    """Rename a folder that is complete.

    Raises:
        UserError: something else came there meanwhile.
    """
    try:
        temporary.rename(output)  # fails where something that is not an empty folder has come there meanwhile
    except OSError as error:
        raise UserError(
            f"can't write {output}: {error.strerror}; name a new folder", code="output-unwritable"
        ) from None
    descriptor = os.open(output.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
