"""Zip archives, read in place. Nothing is ever extracted."""

import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from components.common.errors import UserError
from components.preprocess.sources.samples import Sample, Unreadable
from components.preprocess.sources.tars import OUTSIDE, Listing
from components.preprocess.sources.trees import File, is_image_name, is_visible, safe_path

_MAX_BYTES = 10**9  # of one image, unpacked
_ENCRYPTED = 0x1


def list_zip(file: str, name: str) -> Listing:
    """Read the directory. Of members with the same name the last one counts, as when they are extracted.

    Raises:
        UserError: it is no zip, or is damaged.
    """
    listing = Listing()
    try:
        with zipfile.ZipFile(file) as archive:
            for path, member in _members(archive):
                if path and member.is_dir():
                    listing.folders.add(path)
                    continue
                shown = path or member.filename
                listing.files.pop(shown, None)
                listing.refused.pop(shown, None)
                if path and not _is_special(member):
                    listing.files[path] = File(path, member.file_size)
                elif is_image_name(shown):
                    listing.refused[shown] = "no regular file of the archive" if path else OUTSIDE
    except zipfile.BadZipFile as error:
        raise UserError(f"{name} is no zip that can be read ({error}); make it anew, or fetch it again") from None
    return listing


@dataclass(frozen=True)
class ZipStorage:
    """Samples within a zip."""

    file: str
    base: str = ""  # folder of the archive that samples' paths begin in, with a closing slash

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        archive, members = _opened(self.file)
        member = members.get(self.base + sample.path)
        if member is None:
            raise FileNotFoundError(2, "not in the archive", sample.path)
        if member.flag_bits & _ENCRYPTED:
            raise Unreadable("encrypted; unpack the archive with its password and name the folder")
        if member.file_size > _MAX_BYTES:
            raise Unreadable(f"unpacks to {member.file_size:,} bytes, more than an image may have")
        try:
            return archive.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise Unreadable(f"damaged in the archive: {error}") from None
        except NotImplementedError as error:
            raise Unreadable(f"packed in a way that is not read: {error}") from None


@lru_cache(maxsize=2)
def _opened(file: str) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    """Once per process, since reading the directory takes long where there are many members."""
    archive = zipfile.ZipFile(file)
    return archive, {path: member for path, member in _members(archive) if path and not member.is_dir()}


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str | None, zipfile.ZipInfo]]:
    for member in archive.infolist():
        if is_visible(member.filename):
            yield safe_path(member.filename), member


def _is_special(member: zipfile.ZipInfo) -> bool:
    """A link or device, by the mode that Unix tools write; others write none."""
    mode = member.external_attr >> 16
    return stat.S_IFMT(mode) not in (0, stat.S_IFREG)
