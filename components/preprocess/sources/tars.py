"""Tar archives: listed once, then read in place by the offset of each file. Nothing is ever extracted."""

import bz2
import gzip
import importlib
import lzma
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from components.common.errors import EngineryError, UserError
from components.preprocess.sources.places import Place, keep_room
from components.preprocess.sources.samples import Sample
from components.preprocess.sources.trees import File, is_image_name, is_visible, safe_path

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
