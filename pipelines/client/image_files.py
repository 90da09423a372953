"""The image files of a folder."""

from pathlib import Path

from components.common.errors import UserError

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


def images_in(folder: Path) -> list[Path]:
    """Deeply, in the order of their names.

    Raises:
        UserError: there is none.
    """
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"there is no image in the folder {folder}; images end in {', '.join(sorted(_SUFFIXES))}")
    return found
