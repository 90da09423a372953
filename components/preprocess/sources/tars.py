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
from typing import Any, BinaryIO

from components.common.errors import EngineryError, UserError
from components.preprocess.sources.places import Place, keep_room
from components.preprocess.sources.samples import Sample
from components.preprocess.sources.trees import File, is_image_name, is_visible, safe_path

OUTSIDE = "a path out of the archive"
_MAX_TEXT_BYTES = 1000  # of a label
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
        with tarfile.open(fileobj=stream, mode="r:", errors="surrogateescape") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep a kilobyte of each
                _add(listing, member, stream)
            end = archive.offset
    except tarfile.TarError as error:
        stream.seek(0)
        start = stream.read(8)
        if suffix := next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), ""):
            raise UserError(f"{name} is no tar but a {suffix} file; give it a name that ends so") from None
        raise UserError(f"{name} is no tar that can be read ({error}); make it anew, or fetch it again") from None
    stream.seek(end)
    if stream.read(512).strip(b"\0"):  # tarfile takes a damaged header for the end
        raise UserError(f"{name} is damaged at byte {end}; make it anew, or fetch it again")
    return listing


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
    try:
        with _opener(name)(source) as compressed, target.open("wb") as plain:
            while chunk := compressed.read(_CHUNK_BYTES):
                keep_room(target.parent, name)
                plain.write(chunk)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{name} is damaged ({error}); make it anew, or fetch it again") from None
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise EngineryError(f"can't unpack {name}: {error}; unpack it elsewhere and name the folder") from None
        raise UserError(f"{name} is damaged ({error}); make it anew, or fetch it again") from None


def _opener(name: str) -> Callable[[Path], Any]:
    openers: dict[str, Callable[[Path], Any]] = {".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
    return next((opener for suffix, opener in openers.items() if name.lower().endswith(suffix)), gzip.open)


def _open_zst(path: Path) -> Any:
    for module in ("compression.zstd", "zstandard"):  # Python 3.14, or a package
        try:
            return importlib.import_module(module).open(path, "rb")
        except ImportError:
            continue
    raise UserError(f"this Python can't read {path.name}; unpack it to a .tar (zstd -d), or pip install zstandard")
