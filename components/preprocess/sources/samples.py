"""What a source of labelled images consists of: samples, the storage that reads them, classes and splits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class ZipEntry(NamedTuple):
    """What the directory of a zip says of a file. Beside its place all that is needed to read it."""

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


class Unreadable(Exception):
    """A file must not or can't be used; the message is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AddressRefused(PermissionError):
    """A web server leads to an address of an inner network; strerror says which, and what to do."""


MAX_FILE_BYTES = 1 << 29  # of an image file; more is not read into memory


class Storage(Protocol):
    """Reads samples. Goes to spawned processes by pickle and opens what it needs there."""

    def read(self, sample: Sample) -> bytes:
        """The file's bytes.

        Raises:
            OSError: it is gone, may not be read, or its server can't be reached.
            Unreadable: it must not or can't be used.
        """


def read_sample(storage: Storage, sample: Sample) -> bytes:
    """The file's bytes, as Storage.read, unless there are more than an image has.

    Raises:
        OSError: as Storage.read.
        Unreadable: as Storage.read, or it is too large.
    """
    if sample.size_bytes > MAX_FILE_BYTES:
        raise Unreadable(f"has {sample.size_bytes:,} bytes, more than an image may have")
    return storage.read(sample)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the data holds."""

    classes: tuple[str, ...]
    splits: dict[str, list[Sample]]
    storage: Storage


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
    """`source` and more samples, which can't be read but are listed as rejected, each with its reason."""
    if not reasons:
        return source
    refused = [Sample(path=path, label=0, size_bytes=0) for path in sorted(reasons)]
    splits = {**source.splits, "train": source.splits["train"] + refused}
    return Source(classes=source.classes, splits=splits, storage=Refusing(source.storage, dict(reasons)))


def counts_by_label(labels: Sequence[int], num_classes: int) -> tuple[int, ...]:
    """Images per class."""
    counts = Counter(labels)
    return tuple(counts[label] for label in range(num_classes))
