"""Tar and zip archives, listed once and read in place. Nothing is ever extracted."""

import bz2
import gzip
import importlib
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from components.common.contracts.errors import EngineryError, UserError
from components.preprocess.sources.folders import File, is_image_name, is_visible, safe_path
from components.preprocess.sources.locations import Place, keep_room
from components.preprocess.sources.samples import MAX_FILE_BYTES, Sample, Unreadable, ZipEntry

OUTSIDE = "a path out of the archive"
_MAX_TEXT_BYTES = 1000  # of a label
_MAX_MEMBERS = 10_000_000
_MAX_HEADER_BYTES = 1 << 16  # of a long name or PAX header of one member; Linux' longest path has 4,096
_MAX_GLOBAL_BYTES = 1 << 20  # of the PAX headers that go for all members
_MIN_BOMB_BYTES = 1 << 30  # what a compressed archive may unpack to at any ratio
_MAX_RATIO = 200  # beyond that
_MAX_XZ_BYTES = 1 << 28  # of memory for its dictionary; `xz -9` takes 64 MiB
_CHUNK_BYTES = 1 << 24
_MAGIC = {b"\x1f\x8b": ".tar.gz", b"BZh": ".tar.bz2", b"\xfd7zXZ": ".tar.xz", b"(\xb5/\xfd": ".tar.zst", b"PK": ".zip"}


@dataclass(kw_only=True)
class Listing:
    """What is in an archive."""

    files: dict[str, File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)  # why an image must not be read, by path
    texts: dict[str, bytes] = field(default_factory=dict)  # content of a tar's .cls files


def list_tar(stream: BinaryIO, name: str) -> Listing:
    """Go through the headers. Of members with the same name the last one counts, as when they are extracted.

    Raises:
        UserError: it is no tar, or is damaged.
    """
    listing = Listing()
    try:
        with tarfile.open(fileobj=stream, mode="r:", errors="surrogateescape", tarinfo=_Member) as archive:
            last = -1
            for _ in range(_MAX_MEMBERS):
                if (member := archive.next()) is None:
                    break
                if archive.offset <= last:
                    raise tarfile.ReadError("a member ends before it begins")
                last = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep a kilobyte of each
                _add(listing, member, stream)
            else:
                raise UserError(f"{name} has more than {_MAX_MEMBERS:,} members; pack it as several tars")
            end = archive.offset
    except (tarfile.TarError, RecursionError, ValueError, OverflowError) as error:
        stream.seek(0)
        start = stream.read(8)
        if suffix := next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), ""):
            raise UserError(f"{name} is no tar but a {suffix} file; give it a name that ends so") from None
        raise UserError(f"{name} is no tar that can be read ({error}); make it anew, or fetch it again") from None
    stream.seek(end)
    if stream.read(512).strip(b"\0"):  # tarfile takes a damaged header for the end
        raise UserError(f"{name} is damaged at byte {end}; make it anew, or fetch it again")
    return listing


class _Member(tarfile.TarInfo):
    """A header whose parts are bounded before they are read: a tar of a few kilobytes may claim any size."""

    def _proc_member(self, archive: Any) -> Any:
        if self.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX_TYPES):
            most = _MAX_HEADER_BYTES
            if self.type == tarfile.XGLTYPE:
                most = _MAX_GLOBAL_BYTES - sum(len(key) + len(value) for key, value in archive.pax_headers.items())
            if not 0 <= self.size <= most:
                raise tarfile.ReadError(f"a header claims {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_sparse(self, archive: Any) -> Any:
        if self._sparse_structs[1]:  # type: ignore[attr-defined]
            raise tarfile.ReadError("a sparse file in more than one piece")
        return super()._proc_sparse(archive)  # type: ignore[misc]

    def _mark_sparse(self, member: tarfile.TarInfo, *_: Any) -> None:
        """No map is read: sparse members are refused."""
        member.sparse = b""

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _mark_sparse


_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _add(listing: Listing, member: tarfile.TarInfo, stream: BinaryIO) -> None:
    path = safe_path(member.name)
    if not is_visible(member.name):
        return
    shown = path or member.name
    if path and member.isdir():
        listing.folders.add(path)
        return
    listing.files.pop(shown, None)
    listing.refused.pop(shown, None)
    listing.texts.pop(shown, None)
    if path is None:
        if not member.isdir():
            listing.refused[shown] = OUTSIDE
        return
    if not member.isreg() or member.issparse():
        if is_image_name(shown):
            listing.refused[shown] = "no regular file of the archive"
        return
    listing.files[path] = File(path, member.size, member.offset_data)
    if path.lower().endswith(".cls") and member.size <= _MAX_TEXT_BYTES:
        stream.seek(member.offset_data)
        listing.texts[path] = stream.read(member.size)


@dataclass(frozen=True)
class TarStorage:
    """Samples within one tar."""

    place: Place
    file: str

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        return self.place.read_range(self.file, sample.offset, sample.size_bytes)


@dataclass(frozen=True)
class ShardStorage:
    """Samples within several tars; their paths begin with the tar's."""

    place: Place
    tars: frozenset[str]

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        end = sample.path.index("/")
        while sample.path[:end] not in self.tars:
            end = sample.path.index("/", end + 1)
        return self.place.read_range(sample.path[:end], sample.offset, sample.size_bytes)


def decompress(source: Path, target: Path, name: str) -> None:
    """Write the tar that is in a compressed one.

    Raises:
        UserError: it is damaged, or this Python lacks the decompressor.
        EngineryError: the disk is too small for it.
    """
    most = max(_MIN_BOMB_BYTES, _MAX_RATIO * source.stat().st_size)
    try:
        with _opener(name)(source) as compressed, target.open("wb") as plain:
            while chunk := compressed.read(_CHUNK_BYTES):
                keep_room(target.parent, name)
                if plain.tell() + len(chunk) > most:
                    raise UserError(
                        f"{name} unpacks to more than {most:,} bytes, {_MAX_RATIO} times its size, as no archive of "
                        "images does; if that is right, unpack it yourself and name the folder"
                    )
                plain.write(chunk)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{name} is damaged ({error}); make it anew, or fetch it again") from None
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise EngineryError(f"can't unpack {name}: {error}; unpack it elsewhere and name the folder") from None
        raise UserError(f"{name} is damaged ({error}); make it anew, or fetch it again") from None


def _opener(name: str) -> Callable[[Path], Any]:
    openers: dict[str, Callable[[Path], Any]] = {".bz2": bz2.open, ".xz": _Xz, ".zst": _open_zst}
    return next((opener for suffix, opener in openers.items() if name.lower().endswith(suffix)), gzip.open)


class _Xz:
    """As lzma.open for reading, with bounded memory: a file says itself how large the dictionary is."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._part = lzma.LZMADecompressor(memlimit=_MAX_XZ_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, num_bytes: int) -> bytes:
        """Up to so many bytes; none at the end.

        Raises:
            lzma.LZMAError: it is damaged, or wants more memory.
            EOFError: it is cut off.
        """
        data = b""
        while not data:
            fed = b""
            if self._part.eof:  # another stream may follow, after zeros
                fed = self._part.unused_data
                while not (fed := fed.lstrip(b"\0")):
                    if not (fed := self._file.read(1 << 16)):
                        return b""
                self._part = lzma.LZMADecompressor(memlimit=_MAX_XZ_BYTES)
            elif self._part.needs_input and not (fed := self._file.read(1 << 16)):
                raise EOFError("it is cut off")
            data = self._part.decompress(fed, num_bytes)
        return data


def _open_zst(path: Path) -> Any:
    for module in ("compression.zstd", "zstandard"):  # Python 3.14, or a package
        try:
            return importlib.import_module(module).open(path, "rb")
        except ImportError:
            continue
    raise UserError(f"this Python can't read {path.name}; unpack it to a .tar (zstd -d), or pip install zstandard")


_MAX_DIRECTORY_BYTES = 1 << 28  # about 2.5 million members, whose entries take ten times as much in memory
_ENCRYPTED = 0x1
_SIGNATURE = b"PK\x03\x04"
_HEADER = struct.Struct("<26xHH")  # of a member: lengths of its name and of extra fields, which follow
_DECOMPRESSORS: dict[int, Callable[[], Any]] = {
    zipfile.ZIP_DEFLATED: lambda: zlib.decompressobj(-zlib.MAX_WBITS),
    zipfile.ZIP_BZIP2: bz2.BZ2Decompressor,
}
_METHODS = {9: "Deflate64", 14: "LZMA", 93: "Zstandard", 95: "xz", 97: "WavPack", 98: "PPMd", 99: "AES encryption"}


def list_zip(file: str, name: str) -> Listing:
    """Read the directory. Of members with the same name the last one counts, as when they are extracted.

    Raises:
        UserError: it is no zip, or is damaged.
    """
    listing = Listing()
    try:
        _check_directory(file, name)
        with zipfile.ZipFile(file) as archive:
            for path, member in _members(archive):
                if path and member.is_dir():
                    listing.folders.add(path)
                    continue
                shown = path or member.filename
                listing.files.pop(shown, None)
                listing.refused.pop(shown, None)
                if path and not _is_special(member):
                    entry = ZipEntry(
                        member.compress_size, member.CRC, member.compress_type, bool(member.flag_bits & _ENCRYPTED)
                    )
                    listing.files[path] = File(path, member.file_size, member.header_offset, entry)
                elif path is None and not member.is_dir():
                    listing.refused[shown] = OUTSIDE
                elif path and is_image_name(shown):
                    listing.refused[shown] = "no regular file of the archive"
    except (zipfile.BadZipFile, NotImplementedError, IndexError, ValueError, struct.error) as error:
        raise UserError(f"{name} is no zip that can be read ({error}); make it anew, or fetch it again") from None
    return listing


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
    """Refuse a directory that is too large to read, by the record at the end of the archive."""
    with open(file, "rb") as stream:
        end = zipfile._EndRecData(stream)  # type: ignore[attr-defined]
    if end and end[zipfile._ECD_SIZE] > _MAX_DIRECTORY_BYTES:  # type: ignore[attr-defined]
        raise UserError(f"{name} has a directory of more than {_MAX_DIRECTORY_BYTES:,} bytes; pack it as a tar")


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


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str | None, zipfile.ZipInfo]]:
    for member in archive.infolist():
        if is_visible(member.filename):
            yield safe_path(member.filename), member


def _is_special(member: zipfile.ZipInfo) -> bool:
    """A link or device, by the mode that Unix tools write; others write none."""
    mode = member.external_attr >> 16
    return stat.S_IFMT(mode) not in (0, stat.S_IFREG)
