"""Zip archives as a source: listed once and read in place. Nothing is ever extracted."""

import bz2
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.contracts.errors import UserError
from components.common.contracts.foreign import MAX_FILE_BYTES
from components.common.data.places import Unreadable, fetched, translate_errors
from components.preprocess.sources.folders import File, Listing, archive_source, damaged
from components.preprocess.sources.samples import Options, Sample, Source, ZipEntry

_MAX_DIRECTORY_BYTES = 1 << 28
_MAX_MEMBERS = 1_500_000  # of the directory; Python keeps 600 bytes of each
_ENCRYPTED = 0x1
_UTF8 = 0x800
_FAT = 0  # the system of archives made on Windows
_SIGNATURE = b"PK\x03\x04"
_HEADER = struct.Struct("<26xHH")  # of a member: lengths of its name and of extra fields, which follow
_DECOMPRESSORS: dict[int, Callable[[], Any]] = {
    zipfile.ZIP_DEFLATED: lambda: zlib.decompressobj(-zlib.MAX_WBITS),
    zipfile.ZIP_BZIP2: bz2.BZ2Decompressor,
}
_METHODS = {9: "Deflate64", 14: "LZMA", 93: "Zstandard", 95: "xz", 97: "WavPack", 98: "PPMd", 99: "AES encryption"}


def zip_source(data: str, scratch: Path, options: Options) -> Source:
    """List the images of a zip, where it is, or of a URI in `scratch`.

    Raises:
        UserError: it can't be read, or what it holds is no labelled images.
    """
    with translate_errors(data):
        file = str(fetched(data, scratch))
        return archive_source(data, _list_zip(file, data), ZipStorage(file), options)


def _list_zip(path: str, name: str) -> Listing:
    """Read the directory.

    Raises:
        UserError: it is no zip, or is damaged.
    """
    listing = Listing(name=name)
    try:
        _check_directory(path, name)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            has_backslashes = not any("/" in member.filename for member in members)
            for member in members:
                entry = ZipEntry(
                    member.compress_size, member.CRC, member.compress_type, bool(member.flag_bits & _ENCRYPTED)
                )
                # A link or device tells by the mode that Unix tools write; others write none.
                is_regular = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
                inner = _name(member, has_backslashes=has_backslashes)
                file = File(inner, member.file_size, member.header_offset, entry)
                listing.add(file, is_folder=inner.endswith("/"), is_regular=is_regular)
    except (zipfile.BadZipFile, NotImplementedError, IndexError, ValueError, struct.error) as error:
        raise damaged(name, f"is no zip that can be read ({error})") from None
    return listing


def _name(member: zipfile.ZipInfo, *, has_backslashes: bool) -> str:
    """The path: of macOS in UTF-8 without the flag that says so, of some tools on Windows with backslashes.

    Where others have slashes, a backslash is half of a letter, as in Shift-JIS, GBK and Big5.
    """
    path = member.filename
    if not member.flag_bits & _UTF8:
        with suppress(UnicodeError):
            path = path.encode("cp437").decode()
    return path.replace("\\", "/") if has_backslashes and member.create_system == _FAT else path


@dataclass(frozen=True)
class ZipStorage:
    """Samples within a zip. Each knows its place, so that no process that reads them holds the directory."""

    file: str

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        entry = sample.zipped
        if entry is None:
            raise FileNotFoundError(2, "not in the archive", sample.path)
        if entry.is_encrypted:
            raise Unreadable("encrypted; unpack the archive with its password and name the folder")
        if max(sample.size_bytes, entry.packed_bytes) > MAX_FILE_BYTES:
            raise Unreadable(f"unpacks to {sample.size_bytes:,} bytes, more than an image may have")
        with open(self.file, "rb") as archive:
            archive.seek(sample.offset)
            header = archive.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_SIGNATURE):
                raise Unreadable("damaged in the archive: its header is not where the directory says")
            archive.seek(sum(_HEADER.unpack(header)), os.SEEK_CUR)  # its name, and what else is said of it
            packed = archive.read(entry.packed_bytes)
        data = _unpacked(packed, entry.method, sample.size_bytes)
        if len(packed) != entry.packed_bytes or len(data) != sample.size_bytes:
            raise Unreadable("damaged in the archive: it is not as long as the directory says")
        if zlib.crc32(data) != entry.crc:
            raise Unreadable("damaged in the archive: its checksum is wrong")
        return data


def _check_directory(file: str, name: str) -> None:
    """Refuse a directory that is too large to read: by the record at the end of the archive, then by its entries."""
    with open(file, "rb") as stream:
        end = zipfile._EndRecData(stream)  # type: ignore[attr-defined]
        size, location = (end[zipfile._ECD_SIZE], end[zipfile._ECD_LOCATION]) if end else (0, 0)  # type: ignore[attr-defined]
        num_members = 0
        if size <= _MAX_DIRECTORY_BYTES:
            stream.seek(max(0, location - size))
            num_members = stream.read(size).count(zipfile.stringCentralDir)  # type: ignore[attr-defined]
    if size > _MAX_DIRECTORY_BYTES or num_members > _MAX_MEMBERS:
        raise UserError(
            f"{name} has a directory of {size:,} bytes; {_MAX_MEMBERS:,} members in {_MAX_DIRECTORY_BYTES:,} bytes are "
            "read at most; pack it as a tar",
            code="too-many-members",
        )


def _unpacked(packed: bytes, method: int, size_bytes: int) -> bytes:
    """The file's bytes, or one more than `size_bytes` where there are more: a small file may unpack to anything."""
    if method == zipfile.ZIP_STORED:
        return packed
    if method not in _DECOMPRESSORS:
        name = _METHODS.get(method, f"method {method}")
        raise Unreadable(f"packed in a way that is not read ({name}); unpack the archive and name the folder")
    try:
        return _DECOMPRESSORS[method]().decompress(packed, size_bytes + 1)
    except (zlib.error, OSError, EOFError) as error:
        raise Unreadable(f"damaged in the archive: {error}") from None
