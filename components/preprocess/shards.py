"""Pack images into WebDataset tar shards with a DALI index, decoding each one on the way."""

import hashlib
import json
import tarfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType

from PIL import Image
from pydantic import ValidationError

from components.common.contracts.digests import digest_bytes
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import FileEntry, Record
from components.preprocess.decoding import PixelSums, Rejected, as_png, decode, shrink
from components.preprocess.sources import Sample, Storage, Unreadable, read_sample

_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = tarfile.BLOCKSIZE


class TarWriter:
    """The bytes are those of `tarfile` in USTAR format; the index is that of DALI's wds2idx."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._sha = hashlib.sha256()
        self._samples: list[str] = []  # lines of the index
        self.size_bytes = 0

    def __enter__(self) -> "TarWriter":
        return self

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
        """Of the archive; complete once it is closed."""
        return f"sha256:{self._sha.hexdigest()}"

    def index(self) -> bytes:
        """What DALI needs to know of the members."""
        return "".join(f"{line}\n" for line in (f"v1.2 {len(self._samples)}", *self._samples)).encode()

    def _write(self, data: bytes) -> None:
        self._sha.update(data)
        self._file.write(data)
        self.size_bytes += len(data)


_MEMBER_OVERHEAD_BYTES = 2048  # tar headers and padding of an image and its label
_USUAL_BYTES = 110_000  # of an image whose size nobody tells: the mean of ImageNet
_USUAL_BYTES_PER_SQUARE = 0.4  # of a 4:3 image over its squared shorter side, as JPEG of quality 90
UNREADABLE = "unreadable: "  # begins the reason of a file that the system or a server did not give
LABEL_WIDTH = 6  # digits of a .cls member; DALI needs labels of one length to batch them


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """What one worker packs."""

    storage: Storage
    folder: Path
    """Where the tar and its index go."""
    records: Path
    """Where the shard's record and listing go."""
    name: str
    """Of the files, such as train-000012."""
    first_index: int
    samples: Sequence[Sample]
    max_pixels: int
    max_short_side: int
    jpeg_quality: int


class ShardRecord(Record):
    """What went into a shard, what did not, and sums over its pixels."""

    name: str
    num_images: int
    num_rejected: int
    pixel_sum: tuple[float, float, float]  # per RGB channel, of values in 0..1
    pixel_square_sum: tuple[float, float, float]
    num_pixels: int
    files: dict[str, FileEntry]  # the tar and its index; none where every image was rejected


def planned_bytes(sample: Sample, max_short_side: int) -> int:
    """What an image counts in the plan: its size, or the usual one where that is not known or it is scaled down."""
    size_bytes = sample.size_bytes or _USUAL_BYTES
    return min(size_bytes, int(_USUAL_BYTES_PER_SQUARE * max_short_side**2)) if max_short_side else size_bytes


def plan_shards(samples: Sequence[Sample], shard_bytes: int, max_short_side: int = 0) -> list[Sequence[Sample]]:
    """Cut the listing into shards of equal size, as near to `shard_bytes` as that allows.

    Depends on the listing and these settings alone, not on what is rejected later.
    """
    ends = list(accumulate(planned_bytes(sample, max_short_side) + _MEMBER_OVERHEAD_BYTES for sample in samples))
    if not ends:
        return []
    num_shards = max(1, round(ends[-1] / shard_bytes))
    cuts = [bisect_left(ends, ends[-1] * number / num_shards) + 1 for number in range(1, num_shards)]
    edges = [0, *cuts, len(samples)]
    return [samples[start:end] for start, end in pairwise(edges) if start < end]


def read_record(records: Path, name: str) -> ShardRecord | None:
    """The record of a shard that is done, None of any other."""
    try:
        return ShardRecord.model_validate_json((records / f"{name}.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def listing_file(records: Path, name: str) -> Path:
    """Where a shard's part of the listing lies: a JSON line per packed image."""
    return records / f"{name}.jsonl"


def rejected_file(records: Path, name: str) -> Path:
    """Where a shard's rejected files are listed: a JSON line each, with path and reason."""
    return records / f"{name}.rejected.jsonl"


def record_files(records: Path, name: str) -> tuple[Path, ...]:
    """All that is recorded of a shard."""
    return records / f"{name}.json", listing_file(records, name), rejected_file(records, name)


def write_shard(task: ShardTask) -> ShardRecord:
    """Write one tar, its index, its part of the listing, and last its record."""
    tar = task.folder / f"{task.name}.tar"
    index = tar.with_suffix(".idx")
    tar.unlink(missing_ok=True)  # a worker of a run that was killed just now may have it open still
    with TarWriter(tar) as archive:
        content = _fill(archive, task)
    files = {}
    if content.entries:
        listed = archive.index()
        index.write_bytes(listed)
        files[tar.name] = FileEntry(size_bytes=archive.size_bytes, digest=archive.digest())
        files[index.name] = FileEntry(size_bytes=len(listed), digest=digest_bytes(listed))
    else:
        tar.unlink()  # every image was rejected; an empty shard would stop DALI
    record = ShardRecord(
        name=task.name,
        num_images=len(content.entries),
        num_rejected=len(content.rejected),
        pixel_sum=content.sums.values(),
        pixel_square_sum=content.sums.squares(),
        num_pixels=content.sums.num_pixels,
        files=files,
    )
    write_atomically(listing_file(task.records, task.name), json_lines(content.entries))
    write_atomically(rejected_file(task.records, task.name), json_lines(content.rejected))
    write_atomically(task.records / f"{task.name}.json", record.model_dump_json().encode())
    return record


def _fill(archive: TarWriter, task: ShardTask) -> "_Content":
    content = _Content()
    for number, sample in enumerate(task.samples, task.first_index):
        try:
            data, extension, image = _image(task, sample)
        except (Rejected, Unreadable) as reason:
            content.rejected.append({"path": sample.path, "reason": str(reason)})
            continue
        except OSError as error:
            content.rejected.append({"path": sample.path, "reason": f"{UNREADABLE}{error.strerror or error}"})
            continue
        key = f"{number:09d}"
        archive.add(key, {extension: data, "cls": f"{sample.label:0{LABEL_WIDTH}d}".encode()})
        content.sums.add(image)
        content.entries.append(
            {
                "key": key,
                "path": sample.path,
                "label": sample.label,
                "height": image.height,
                "width": image.width,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    return content


def json_lines(entries: Sequence[Mapping[str, object]]) -> bytes:
    """One JSON object a line, in UTF-8."""
    # File names that are not UTF-8 hold lone surrogates; written as \udcXX they are JSON and come back the same.
    return "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries).encode(errors="backslashreplace")


def _image(task: ShardTask, sample: Sample) -> tuple[bytes, str, Image.Image]:
    """The bytes to pack, their extension, and the image that the loader will see.

    Raises:
        Rejected: it can't be used.
        Unreadable: it must not or can't be read.
        OSError: the same, from the system.
    """
    Image.MAX_IMAGE_PIXELS = None  # decode checks, with a message of its own
    data = read_sample(task.storage, sample)
    extension, image = decode(data, task.max_pixels)
    if 0 < task.max_short_side < min(image.size):
        data, image = shrink(image, task.max_short_side, task.jpeg_quality)
        extension = "jpg"
    elif extension == "":
        data, extension = as_png(image), "png"
    return data, extension, image


@dataclass(kw_only=True)
class _Content:
    entries: list[Mapping[str, object]] = field(default_factory=list)
    rejected: list[Mapping[str, object]] = field(default_factory=list)
    sums: PixelSums = field(default_factory=PixelSums)
