"""Samples of a source, their classes and splits, and the storage that reads them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import UserError
from components.common.data.places import Place, Unreadable, check_size, is_uri

SYNSET_MAPS = ("LOC_synset_mapping.txt", "synset_words.txt")
# How files begin that are not UTF-8: with a mark, or with Latin letters of two bytes each.
_WIDE = {
    re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff"): "UTF-32",
    re.compile(rb"\xff\xfe|\xfe\xff"): "UTF-16",
    re.compile(rb"[^\0]\0[^\0]\0"): "UTF-16LE",
    re.compile(rb"\0[^\0]\0[^\0]"): "UTF-16BE",
}
_SYNSET_LINE = re.compile(r"(n\d{8})\s+(\S.*)")


@dataclass(frozen=True)
class ClassNames:
    """Classes in the order of their labels."""

    names: tuple[str, ...]
    labels: Mapping[str, int]  # by what the data calls a class: its name, or the wnid of a synset map
    wnids: tuple[str, ...] = ()  # of a synset map, in the order of `names`

    def only(self, wnids: Iterable[str]) -> "ClassNames":
        """The classes of a synset map that the data has, in the map's order."""
        wanted = set(wnids)
        kept = [(wnid, name) for wnid, name in zip(self.wnids, self.names, strict=True) if wnid in wanted]
        return _of_synsets([wnid for wnid, _ in kept], [name for _, name in kept])


NOT_SHOWN = "(not shown, since it was fetched)"  # in place of text from a file that may be none of ours


def refuse_utf16(start: bytes, where: str) -> None:
    """Refuse a file that begins as text of two or four bytes a character, of which no line could be used."""
    for pattern, name in _WIDE.items():
        if pattern.match(start):
            message = f"{where} is {name}, and UTF-8 is needed; convert it: iconv -f {name} -t UTF-8 FILE > OTHER"
            raise UserError(message, code="not-utf8", setting="data")


def plain_names(names: Iterable[str]) -> ClassNames:
    """Classes that the data calls by their names."""
    listed = tuple(names)
    return ClassNames(listed, {name: label for label, name in enumerate(listed)})


def check_names_differ(names: Iterable[str], where: str) -> None:
    """Refuse names of classes that are one to people, unless they are letters, such as "A" and "a".

    Raises:
        UserError: two differ only in case, in spaces at their ends, or in how Unicode composes their letters.
    """
    known: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).strip()
        twin = known.setdefault(key.casefold() if len(key) > 1 else key, name)
        if twin != name:
            which = NOT_SHOWN if is_uri(where) else f"{twin!r} and {name!r}"
            raise UserError(
                f"{where} has classes that differ only in case, spaces or the encoding of letters: {which}. Give both "
                "one name, or list both in preprocess.class_names_file",
                code="similar-class-names",
                setting="preprocess.class_names_file",
            )


def read_class_names(path: Path) -> ClassNames:
    """Read class_names_file: one class per line, or a synset map.

    Raises:
        UserError: it can't be read, is empty, or names a class twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        message = f"can't read class_names_file {path}: {error}; name a text file in UTF-8 with one class per line"
        raise UserError(message, code="unreadable-class-names", setting="preprocess.class_names_file") from None
    return parse_class_names(text, str(path))


def parse_class_names(text: str, where: str, *, is_fetched: bool = False) -> ClassNames:
    """As read_class_names, of the text of a file called `where`, of which no message shows any if it was fetched."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{where} names no class; write one class per line", code="no-class-names")
    synsets = [_SYNSET_LINE.fullmatch(line) for line in lines]
    keys = [match[1] for match in synsets if match] if all(synsets) else lines
    if twice := sorted(name for name, times in Counter(keys).items() if times > 1):
        which = NOT_SHOWN if is_fetched else ", ".join(twice[:5])
        message = f"{where} names a class twice: {which}. Each line must name another class"
        raise UserError(message, code="duplicate-class-names")
    if not all(synsets):
        return plain_names(lines)
    shown = [match[2].partition(",")[0].strip() for match in synsets if match]
    times = Counter(shown)
    return _of_synsets(
        keys, [f"{name} ({key})" if times[name] > 1 else name for key, name in zip(keys, shown, strict=True)]
    )


def _of_synsets(wnids: list[str], names: list[str]) -> ClassNames:
    labels = {name: label for label, name in enumerate(names)} | {wnid: label for label, wnid in enumerate(wnids)}
    return ClassNames(tuple(names), labels, tuple(wnids))


def check_two_classes(names: tuple[str, ...], where: str, fix: str, *, is_fetched: bool = False) -> None:
    """A classifier needs two classes.

    Args:
        names: of the classes.
        where: what messages call the data.
        fix: what to do about it, as a sentence.
        is_fetched: the names are from a file that was fetched, so that no message shows them.

    Raises:
        UserError: there are fewer.
    """
    if len(names) < 2:
        has = f"only the class {NOT_SHOWN if is_fetched else repr(names[0])}" if names else "no class"
        raise UserError(f"{where} has {has}; a classifier needs at least two. {fix}", code="too-few-classes")


class ZipEntry(NamedTuple):
    """A file's entry in the directory of a zip. Beside its place all that is needed to read it."""

    packed_bytes: int
    crc: int
    method: int  # of compression, as zip numbers them
    is_encrypted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One image file before it was opened."""

    path: str  # within the source, forward slashes; unique
    label: int
    size_bytes: int  # 0 where it is not known
    offset: int = -1  # of the file's bytes within an uncompressed tar, or of its header within a zip; -1 elsewhere
    zipped: ZipEntry | None = None  # None for what is not in a zip
    annotation: bytes | None = None  # what the data says of the image but for one class, as its task's packer reads it
    mask: "Sample | None" = None  # the file with a class for each pixel; None of other tasks


class Storage(Protocol):
    """Reads samples. Goes to spawned processes by pickle and opens what it needs there."""

    def read(self, sample: Sample) -> bytes:
        """The file's bytes.

        Raises:
            OSError: it is gone, may not be read, or its server can't be reached.
            Unreadable: it must not or can't be used.
        """


@dataclass(frozen=True)
class FileStorage:
    """Samples that are files of their own."""

    place: Place

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        return self.place.read(sample.path, sample.size_bytes)


def read_sample(storage: Storage, sample: Sample) -> bytes:
    """The file's bytes, as Storage.read, unless there are more than an image has.

    Raises:
        OSError: as Storage.read.
        Unreadable: as Storage.read, or it is too large.
    """
    check_size(sample.size_bytes)
    return storage.read(sample)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples of the data by split, their classes, and the storage that reads them."""

    classes: tuple[str, ...]
    splits: dict[str, list[Sample]]
    storage: Storage
    num_refused: int = 0  # of the samples of train, which are no images: see with_refused
    unused: tuple[str, ...] = ()  # images of neither split, such as those of a test split, or without annotations


@dataclass(frozen=True)
class Refusing:
    """A storage in front of which some samples are refused, each for a reason."""

    storage: Storage
    reasons: Mapping[str, str] = field(default_factory=dict)  # by Sample.path

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        if reason := self.reasons.get(sample.path):
            raise Unreadable(reason)
        return self.storage.read(sample)


def with_refused(source: Source, reasons: Mapping[str, str]) -> Source:
    """`source` and more samples, which can't be read but are listed as rejected.

    Each has its reason; an empty one is left to the storage, which fails to read the sample.
    """
    if not reasons:
        return source
    refused = [Sample(path=path, label=0, size_bytes=0) for path in sorted(reasons)]
    splits = {**source.splits, "train": source.splits["train"] + refused}
    storage = Refusing(source.storage, dict(reasons))
    return replace(source, splits=splits, storage=storage, num_refused=source.num_refused + len(refused))


TRAIN_NAMES = ("train", "training")  # what the splits are called, in folders, tars and tables
VAL_NAMES = ("val", "validation", "valid")
TEST_NAMES = ("test", "testing", "eval", "evaluation", "holdout")


def split_of(path: str, val_names: Sequence[str] = VAL_NAMES) -> str | None:
    """The split that a path names; "" for none, None for a test split, which is neither."""
    words = re.split("[^a-z]+", path.lower())
    if any(name in words for name in TRAIN_NAMES):
        return "train"
    if any(name in words for name in val_names):
        return "val"
    return None if any(name in words for name in TEST_NAMES) else ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every kind of source."""

    names: ClassNames | None  # of class_names_file
    val_fraction: float
    seed: int
    of_tree: "Callable[[Any, Storage, Options], Source]"
    """Lists the samples of a tree of files, by task."""


def hold_out(
    samples: Iterable[Sample],
    classes: Sequence[str],
    options: Options,
    labels: Iterable[int] = (),
    *,
    is_fetched: bool = False,
) -> dict[str, list[Sample]]:
    """Split each class, in the order of the labels.

    Args:
        samples: of all classes.
        classes: names by label.
        options: share and seed.
        labels: classes that must have samples; others may have none.
        is_fetched: as check_two_classes.

    Raises:
        UserError: a class has too few files.
    """
    of_class: dict[int, list[Sample]] = {label: [] for label in labels}
    for sample in samples:
        of_class.setdefault(sample.label, []).append(sample)
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for label, own in sorted(of_class.items()):
        train, val = hold_out_share(own, f"class {NOT_SHOWN if is_fetched else repr(classes[label])}", options)
        splits["train"] += train
        splits["val"] += val
    return splits


def hold_out_share(samples: list[Sample], whole: str, options: Options) -> tuple[list[Sample], list[Sample]]:
    """Training and validation of what `whole` names. The choice of a file depends on its name and the seed alone.

    Raises:
        UserError: these are too few files.
    """
    if len(samples) < 2:
        raise UserError(
            f"{whole} has {'1 file' if samples else 'no files'}; at least 2 are needed to split it into train and val. "
            f"Add images{' or remove the class' if whole.startswith('class') else ''}",
            code="too-few-images",
        )
    drawn = sorted(
        samples, key=lambda sample: digest_bytes(f"{options.seed}:{sample.path}".encode(errors="surrogateescape"))
    )
    num_val = min(max(1, round(len(samples) * options.val_fraction)), len(samples) - 1)
    held_out = {sample.path for sample in drawn[:num_val]}
    return (
        [sample for sample in samples if sample.path not in held_out],
        [sample for sample in samples if sample.path in held_out],
    )
