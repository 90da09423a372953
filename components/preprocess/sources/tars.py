"""Tars as a source: of class folders, or WebDataset's. Listed once and read in place; nothing is ever extracted.

A WebDataset tar holds KEY.jpg beside KEY.cls, which holds an integer or a class name.
"""

import bz2
import gzip
import importlib
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import MANIFEST, MAX_MANIFEST_BYTES, claims_of
from components.common.data.places import (
    Place,
    RemotePlace,
    fetched,
    is_uri,
    keep_room,
    local_file,
    locate_file,
    translate_errors,
)
from components.preprocess.sources.folders import (
    File,
    Listing,
    Tree,
    archive_source,
    damaged,
    is_image_name,
    joined,
    refuse_splits,
    sample_of,
    shown,
)
from components.preprocess.sources.samples import (
    TEST_NAMES,
    TRAIN_NAMES,
    VAL_NAMES,
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    check_names_differ,
    check_two_classes,
    hold_out,
    parse_class_names,
    plain_names,
    with_refused,
)

_MAX_TEXT_BYTES = 1000  # of a label
_MAX_MEMBERS = 10_000_000
_MAX_PACKED_MEMBERS = 1_500_000  # of a compressed tar; as a zip
_FEW_MEMBERS, _MIN_PACKED_BYTES = 20_000, 128  # beyond so many a compressed tar has more bytes than that for each
_MAX_HEADER_BYTES = 1 << 14  # of a long name or PAX header of one member; Linux' longest path has 4,096
_MAX_HEADERS = 5  # of one member: PAX for all, PAX, two long names, its own
_MAX_GLOBAL_BYTES = 1 << 20  # of the PAX headers that go for all members
_MIN_BOMB_BYTES = 1 << 28  # what a compressed archive may unpack to at any ratio
_MAX_RATIO = 200  # beyond that
_MAX_XZ_BYTES = 1 << 28  # of memory for its dictionary; `xz -9` takes 64 MiB
_CHUNK_BYTES = 1 << 24
_MAGIC = {b"\x1f\x8b": ".tar.gz", b"BZh": ".tar.bz2", b"\xfd7zXZ": ".tar.xz", b"(\xb5/\xfd": ".tar.zst", b"PK": ".zip"}
_NAMES_FILE = "classes.txt"
_SPLIT_FOLDERS = {*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES}
_MAX_LABEL = 999_999
_NUM_READERS = 8


def tar_source(data: str, scratch: Path, options: Options) -> Source:
    """List the images of a tar, where it is: only of a web server that sends no parts of files it is fetched.

    Raises:
        UserError: it can't be read, or what it holds is no labelled images.
    """
    with translate_errors(data):
        place, file = locate_file(data)
        if not (isinstance(place, RemotePlace) and place.has_ranges(file)):
            place, file = local_file(fetched(data, scratch))
        return _source_of(data, place, file, options, _MAX_MEMBERS)


def compressed_tar_source(data: str, scratch: Path, options: Options) -> Source:
    """List the images of a compressed tar, which is decompressed into `scratch`.

    Raises:
        UserError: as tar_source.
        EngineryError: the disk is too small for it.
    """
    with translate_errors(data):
        path, unpacked = fetched(data, scratch), scratch / "unpacked.tar"
        max_members = min(_MAX_PACKED_MEMBERS, max(_FEW_MEMBERS, path.stat().st_size // _MIN_PACKED_BYTES))
        _decompress(path, unpacked, data)
        if path.parent == scratch:
            path.unlink()
        return _source_of(data, *local_file(unpacked), options, max_members)


def _source_of(data: str, place: Place, file: str, options: Options, max_members: int) -> Source:
    with place.open(file) as stream:
        listing = list_tar(stream, data, max_members)
    storage = TarStorage(place, file)
    if not _is_webdataset(listing):
        return archive_source(data, listing, storage, options)
    beside = locate_file(data)[0]
    return with_refused(_webdataset(beside, storage, _images(listing, "", "train"), data, options), listing.refused)


def list_tar(stream: BinaryIO, name: str, max_members: int) -> Listing:
    """Go through the headers.

    Raises:
        UserError: it is no tar, is damaged, or has too many members.
    """
    listing = Listing(name=name)
    try:
        with _Tar(fileobj=stream, errors="surrogateescape") as archive:
            last = -1
            for _ in range(max_members):
                archive.num_headers = 0
                if (member := archive.next()) is None:
                    break
                if archive.offset <= last:
                    raise tarfile.ReadError("a member ends before it begins")
                last = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep a kilobyte of each
                _add(listing, member, stream)
            else:
                raise UserError(
                    f"{name} has more than {max_members:,} members; pack it as several tars, or unpack it and name the "
                    "folder",
                    code="too-many-members",
                )
            end = archive.offset
    except (tarfile.TarError, RecursionError, ValueError, OverflowError) as error:
        stream.seek(0)
        start = stream.read(8)
        if suffix := next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), ""):
            raise UserError(
                f"{name} is no tar but a {suffix} file; give it a name that ends so", code="other-archive-kind"
            ) from None
        raise damaged(name, f"is no tar that can be read ({error})") from None
    stream.seek(end)
    if stream.read(512).strip(b"\0"):  # tarfile takes a damaged header for the end
        raise damaged(name, f"is damaged at byte {end}")
    return listing


class _Member(tarfile.TarInfo):
    """A header whose parts are bounded before they are read: a tar of a few kilobytes may claim any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> Self:
        """Read a header as tarfile does, and of a plain file neither owner nor mode nor time, which take long."""
        if len(buf) == 512 and buf[156:157] == tarfile.REGTYPE and not buf[345]:
            check = buf[148:156]
            if tarfile.nti(check) == sum(buf) - sum(check) + 256:  # type: ignore[attr-defined]
                member = cls(tarfile.nts(buf[:100], encoding, errors))  # type: ignore[attr-defined]
                member.size = tarfile.nti(buf[124:136])  # type: ignore[attr-defined]
                return member
        return super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]

    def _proc_member(self, archive: Any) -> Any:
        archive.num_headers += 1
        if archive.num_headers > _MAX_HEADERS:
            raise tarfile.ReadError("a member with many headers")
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


class _Tar(tarfile.TarFile):
    tarinfo = _Member
    num_headers = 0  # of the member that is being read


_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _add(listing: Listing, member: tarfile.TarInfo, stream: BinaryIO) -> None:
    file = File(member.name, member.size, member.offset_data)
    path = listing.add(file, is_folder=member.isdir(), is_regular=member.isreg() and not member.issparse())
    if path.lower().endswith(".cls") and member.size <= _MAX_TEXT_BYTES:
        listing.keep(member.size)
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


def _decompress(source: Path, target: Path, name: str) -> None:
    """Write the tar that is in a compressed one.

    Raises:
        UserError: it is damaged, or this Python lacks the decompressor.
        EngineryError: the disk is too small for it.
    """
    most = max(_MIN_BOMB_BYTES, _MAX_RATIO * source.stat().st_size)
    try:
        openers: dict[str, Callable[[Path], Any]] = {".bz2": bz2.open, ".xz": _Xz, ".zst": _open_zst}
        opener = next((opener for suffix, opener in openers.items() if name.lower().endswith(suffix)), gzip.open)
        with opener(source) as compressed, target.open("wb") as plain:
            while chunk := compressed.read(_CHUNK_BYTES):
                keep_room(target.parent, name)
                if plain.tell() + len(chunk) > most:
                    raise UserError(
                        f"{name} unpacks to more than {most:,} bytes, {_MAX_RATIO} times its size, as no archive of "
                        "images does; if that is right, unpack it yourself and name the folder",
                        code="archive-too-large",
                    )
                plain.write(chunk)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise damaged(name, f"is damaged ({error})") from None
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise EngineryError(
                f"can't unpack {name}: {error}; unpack it elsewhere and name the folder", code="disk-full"
            ) from None
        raise damaged(name, f"is damaged ({error})") from None


class _Xz(AbstractContextManager["_Xz"]):
    """As lzma.open for reading, with bounded memory: a file says itself how large the dictionary is."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._part = lzma.LZMADecompressor(memlimit=_MAX_XZ_BYTES)

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
    message = f"this Python can't read {path.name}; unpack it to a .tar (zstd -d), or pip install zstandard"
    raise UserError(message, code="missing-package")


@dataclass(frozen=True)
class _Image:
    file: File
    text: str | None  # of its .cls; None where there is none
    split: str


def tar_files(tree: Tree) -> list[str]:
    """The tars of a folder that has nothing but tars, in itself or in folders of splits; none of any other folder."""
    folders = set(tree.folders(""))
    if {folder.lower() for folder in folders} - _SPLIT_FOLDERS or any(tree.folders(folder) for folder in folders):
        return []
    return [joined(home, name) for home in ("", *sorted(folders)) for name in tree.names(home) if name.endswith(".tar")]


def _is_webdataset(listing: Listing) -> bool:
    """True if an image of the tar has a .cls beside it."""
    return any(path in listing.files for path in (f"{_key(file)}.cls" for file in listing.files if _is_image(file)))


def shard_source(place: Place, tars: Sequence[str], options: Options) -> Source:
    """List the images of several tars.

    Raises:
        UserError: a tar can't be read or holds no labels, or there are too few images of a class to split.
    """
    splits = _splits_of(tars, place.name)
    first = _list(place, tars[0])
    if not _is_webdataset(first):
        raise UserError(
            f"{shown(place.name, tars[0])} has no labels (KEY.cls beside KEY.jpg), so it is no WebDataset tar; name a "
            "single archive of class folders, or unpack the tars into class folders",
            code="no-labels",
        )
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        rest = list(readers.map(lambda tar: _list(place, tar), tars[1:]))
    images, refused = [], {}
    for tar, split, listing in zip(tars, splits, (first, *rest), strict=True):
        images += _images(listing, f"{tar}/", split)
        refused.update({f"{tar}/{path}": reason for path, reason in listing.refused.items()})
    return with_refused(_webdataset(place, ShardStorage(place, frozenset(tars)), images, place.name, options), refused)


def _list(place: Place, tar: str) -> Listing:
    name = shown(place.name, tar)
    with translate_errors(name), place.open(tar) as stream:
        return list_tar(stream, name, _MAX_MEMBERS)


def _images(listing: Listing, prefix: str, split: str) -> list[_Image]:
    found = []
    folders = {path.rpartition("/")[0] for path in listing.files if _is_image(path)}
    refuse_splits(listing.name, sorted(folders - {""}))  # a tar has one split
    for path, file in sorted(listing.files.items()):
        if _is_image(path):
            label = f"{_key(path)}.cls"
            text = listing.texts.get(label, b"").decode(errors="replace").strip() if label in listing.files else None
            found.append(_Image(file._replace(path=prefix + path), text, split))
    return found


def _webdataset(beside: Place, storage: Storage, images: Sequence[_Image], name: str, options: Options) -> Source:
    """The source of images with their labels; classes.txt may lie in `beside`."""
    names = options.names or _names_beside(beside)
    texts = Counter(image.text for image in images if image.text)
    by_number = 2 * sum(count for text, count in texts.items() if _is_number(text)) >= texts.total()
    if names is None:
        names = _names_of(set(texts), by_number)
        check_names_differ(names.names, name)
    is_fetched = is_uri(name) and options.names is None
    check_two_classes(names.names, name, "Add images of another class, with their .cls files", is_fetched=is_fetched)
    samples: dict[str, list[Sample]] = {"train": [], "val": []}
    reasons: dict[str, str] = {}
    for image in images:
        label = _label(image.text, names, by_number)
        if isinstance(label, int):
            samples[image.split].append(sample_of(image.file, label))
        else:
            reasons[image.file.path] = label
    if samples["val"] and not samples["train"]:
        message = f"{name} has validation tars but no images for training; add tars whose names begin with train"
        raise UserError(message, code="missing-split")
    splits = samples if samples["val"] else hold_out(samples["train"], names.names, options, is_fetched=is_fetched)
    return with_refused(Source(classes=names.names, splits=splits, storage=storage), reasons)


def _label(text: str | None, names: ClassNames, by_number: bool) -> int | str:
    """The label that a .cls gives, or why it gives none."""
    if not text:
        return "no .cls file with its label" if text is None else "its .cls file is empty or too long"
    if by_number:
        if not _is_number(text):
            return f"its label {text[:40]!r} is no integer from 0"
        return int(text) if int(text) < len(names.names) else f"its label {text[:40]} is not below {len(names.names)}"
    known = names.labels.get(text)
    return f"its label {text[:40]!r} is no class name" if known is None else known


def _names_beside(place: Place) -> ClassNames | None:
    data = _read_beside(place, _NAMES_FILE)
    if data is None:
        return _names_of_manifest(_read_beside(place, MANIFEST) or b"")
    name = shown(place.name, _NAMES_FILE)
    try:
        return parse_class_names(data.decode("utf-8-sig"), name, is_fetched=is_uri(name))
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error}); write it again in that encoding", code="not-utf8") from None


def _read_beside(place: Place, name: str) -> bytes | None:
    with translate_errors(shown(place.name, name)):
        try:
            return place.read(name, most_bytes=MAX_MANIFEST_BYTES)
        except (FileNotFoundError, PermissionError):  # stores that may not be listed say "forbidden" of what is absent
            return None


def _names_of_manifest(data: bytes) -> ClassNames | None:
    """The classes of a dataset of our own, or a part of one; None of any other file, which may have this name too."""
    manifest = claims_of(data)
    names = manifest.get("classes") if manifest.get("kind") in ("dataset", "dataset_part") else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return plain_names(names)


def _names_of(texts: set[str], by_number: bool) -> ClassNames:
    if not by_number:
        return plain_names(sorted(texts))
    numbers = [int(text) for text in texts if _is_number(text) and int(text) <= _MAX_LABEL]
    return plain_names(str(number) for number in range(max(numbers, default=-1) + 1))


def _splits_of(tars: Sequence[str], where: str) -> list[str]:
    """Return the split of each tar: train, or val where its folder or a word of its name says so.

    Raises:
        UserError: some are of a third split, which must go into neither of the two.
    """
    splits = [_split_of(tar) for tar in tars]
    if "test" in splits and {"train", "val"} & set(splits):
        raise UserError(
            f"{where} has tars for testing beside others, such as {tars[splits.index('test')]}; take them away, or "
            "give them a name that begins with train or val",
            code="test-tars",
        )
    return ["train" if split == "test" else split for split in splits]


def _split_of(tar: str) -> str:
    folder, _, name = tar.lower().rpartition("/")
    words = set(re.split("[^a-z]+", name))
    if folder in VAL_NAMES or name.startswith("val"):
        return "val"
    if folder in TRAIN_NAMES or words & set(TRAIN_NAMES):
        return "train"
    return "val" if words & set(VAL_NAMES) else "test" if {folder, *words} & {*TEST_NAMES, "dev"} else "train"


def _key(path: str) -> str:
    """Up to the first dot of the file's name: the members of a WebDataset sample share it."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _is_image(path: str) -> bool:
    return is_image_name(path) and path.rpartition("/")[2].count(".") == 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
