"""Files of a dataset's shards: tar archives with a DALI index, and the records that parts and killed runs leave."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError, model_validator

from components.common.contracts.digests import digest_bytes
from components.common.contracts.manifests import PARTIAL_OUTPUT, prepare_directory
from components.common.contracts.records import FileEntry, FileName, Record
from components.common.data.image_files import read_samples
from components.common.process.partial_output import open_partial

REJECTED = "rejected.jsonl"
_JOINING = "joining"  # there while merge is at work: its shards are links, and writing into them would change the parts
PLAN = "plan.json"  # in the folder of records: digest of what is packed
_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = tarfile.BLOCKSIZE
REJECTED_ANNOTATIONS = "rejected_annotations.jsonl"
THUMBNAIL_SIDE = 48  # px, of the gray thumbnails that images are compared by
RECORDS = "records"  # folder of a part with its shards' records


class TarWriter(AbstractContextManager["TarWriter"]):
    """The bytes are those of `tarfile` in USTAR format; the index is that of DALI's wds2idx."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._sha = hashlib.sha256()
        self._samples: list[str] = []  # lines of the index
        self.size_bytes = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if error is None:  # two empty blocks end an archive, which is then filled up to whole records
                self._write(bytes(2 * _BLOCK_BYTES))
                self._write(bytes(-self.size_bytes % tarfile.RECORDSIZE))

    def add(self, key: str, members: dict[str, bytes]) -> None:
        """Append the members of a sample, by extension."""
        places = []
        for extension, data in members.items():
            name = f"{key}.{extension}"
            header = tarfile.TarInfo(name)  # owner, mode and time stay at fixed values: the same input, the same bytes
            header.size = len(data)
            self._write(header.tobuf(tarfile.USTAR_FORMAT))
            places.append(f"{extension} {self.size_bytes} {len(data)} {name}")
            self._write(data)
            self._write(bytes(-len(data) % _BLOCK_BYTES))
        self._samples.append(" ".join(places))

    def digest(self) -> str:
        """Return the digest of the archive; complete once it is closed."""
        return f"sha256:{self._sha.hexdigest()}"

    def index(self) -> bytes:
        """Return the index of the members for DALI."""
        return "".join(f"{line}\n" for line in (f"v1.2 {len(self._samples)}", *self._samples)).encode()

    def _write(self, data: bytes) -> None:
        self._sha.update(data)
        self._file.write(data)
        self.size_bytes += len(data)


class ShardRecord(Record):
    """Record of a shard: its files, its numbers of packed and rejected images, and sums over its pixels."""

    name: FileName
    num_images: int
    num_rejected: int
    num_rejected_annotations: int = 0  # of the packed images
    pixel_sum: tuple[float, float, float]  # per RGB channel, of values in 0..1
    pixel_square_sum: tuple[float, float, float]
    num_pixels: int
    files: dict[str, FileEntry]  # the tar and its index; none where every image was rejected

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if not self.files.keys() <= {f"{self.name}.tar", f"{self.name}.idx"}:
            raise ValueError("files are NAME.tar and NAME.idx")
        return self


def read_record(records: Path, name: str) -> ShardRecord | None:
    """The record of a shard that is done, None of any other."""
    try:
        return ShardRecord.model_validate_json((records / f"{name}.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def listing_file(records: Path, name: str) -> Path:
    """Path of a shard's part of the listing: a JSON line per packed image."""
    return records / f"{name}.jsonl"


def rejected_file(records: Path, name: str) -> Path:
    """Path of the listing of a shard's rejected files: a JSON line each, with path and reason."""
    return records / f"{name}.rejected.jsonl"


def annotations_file(records: Path, name: str) -> Path:
    """Path of a shard's annotations that something is wrong with: a JSON line each."""
    return records / f"{name}.annotations.jsonl"


def thumbnails_file(records: Path, name: str) -> Path:
    """Path of a shard's thumbnails: 48x48 bytes for each packed image, in order; empty if nobody looks at them."""
    return records / f"{name}.thumbnails"


def has_thumbnails(records: Path, record: ShardRecord) -> bool:
    """True if there is a thumbnail of each image of a shard."""
    file = thumbnails_file(records, record.name)
    return file.is_file() and file.stat().st_size == record.num_images * THUMBNAIL_SIDE**2


def record_files(records: Path, name: str) -> tuple[Path, ...]:
    """All that is recorded of a shard."""
    kinds = (listing_file, rejected_file, annotations_file, thumbnails_file)
    return records / f"{name}.json", *(file(records, name) for file in kinds)


def write_index(archive: TarWriter, tar: Path) -> dict[str, FileEntry]:
    """Write the index of a tar that is closed. Returns the entries of both."""
    index, listed = tar.with_suffix(".idx"), archive.index()
    index.write_bytes(listed)
    return {
        tar.name: FileEntry(size_bytes=archive.size_bytes, digest=archive.digest()),
        index.name: FileEntry(size_bytes=len(listed), digest=digest_bytes(listed)),
    }


def leave_out(folder: Path, record: ShardRecord, keys: Container[str]) -> ShardRecord:
    """Write a shard again without some images. Returns its record.

    Args:
        folder: of the tar and its index, either of which may be a link.
        record: of the shard as it is.
        keys: of the images.
    """
    tar, index = folder / f"{record.name}.tar", folder / f"{record.name}.idx"
    written = folder / PARTIAL_OUTPUT / tar.name
    num_images, files = 0, dict[str, FileEntry]()
    with TarWriter(written) as archive:
        for key, members in read_samples(tar, lambda key: key not in keys):
            archive.add(key, members)
            num_images += 1
    # A run that is killed from here on packs the shard again.
    (folder / PARTIAL_OUTPUT / f"{record.name}.json").unlink(missing_ok=True)
    tar.unlink()
    index.unlink()
    if num_images:
        written.replace(tar)
        files = write_index(archive, tar)
    return record.model_copy(update={"num_images": num_images, "files": files})


def entries_of(listing: Path) -> Iterator[Mapping[str, Any]]:
    """The entries of a listing, one at a time."""
    with listing.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def json_lines(entries: Iterable[Mapping[str, object]]) -> bytes:
    """One JSON object a line, in UTF-8."""
    # File names that are not UTF-8 hold lone surrogates; written as \udcXX they are JSON and come back the same.
    return "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries).encode(errors="backslashreplace")


@contextmanager
def open_output(output: Path, *, joining: bool = False) -> Iterator[Path]:
    """The folder for records in the output directory: new, or left by a killed run.

    It goes again where nothing was planned, so that a data folder that can't be used leaves nothing behind.

    Args:
        output: the step's output directory.
        joining: for merge, which starts again where a run of its own was killed or refused.

    Raises:
        UserError: the directory holds something else, or another process is at work in it.
    """
    folder = output / PARTIAL_OUTPUT
    if folder.is_dir() and (folder / _JOINING).exists() != joining:
        prepare_directory(output)  # which refuses it: the other step's work is in it
    with open_partial(output, known=None) as records:
        if joining:
            (records / _JOINING).touch()
        try:
            yield records
        except BaseException:
            if not joining and not (records / PLAN).exists():
                shutil.rmtree(records)
            raise
