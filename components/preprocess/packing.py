"""Pack images into WebDataset tar shards with a DALI index, in several processes that decode each on the way.

A run that was killed is resumed: what it finished stays, and a run with another output takes it from there.
"""

import hashlib
import random
import shutil
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from components.common.contracts.digests import canonical_json
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import PARTIAL_OUTPUT, write_atomically
from components.common.contracts.settings import how_to_set
from components.common.data.read_alike import Rejected, as_png, decode
from components.common.dataset.shards import (
    PLAN,
    REJECTED,
    THUMBNAIL_SIDE,
    ShardRecord,
    TarWriter,
    annotations_file,
    entries_of,
    has_thumbnails,
    json_lines,
    listing_file,
    read_record,
    record_files,
    rejected_file,
    thumbnails_file,
    write_index,
)
from components.common.process.lifetime import end_with_creator
from components.common.process.partial_output import earlier_outputs, hold
from components.common.process.steplog import StepLog
from components.common.tasks import TASKS
from components.preprocess.config import PreprocessConfig
from components.preprocess.decoding import PixelSums, gray_thumbnail, shrink
from components.preprocess.sources import Sample, Source, Storage, Unreadable, read_sample
from components.preprocess.tasks import labels_of

# What decides which bytes are packed where; the rest of the config says what is done about what is found.
_PACKING = ("task", "shard_bytes", "max_pixels", "max_short_side", "jpeg_quality")
UNREADABLE = "unreadable: "  # begins the reason of a file that the system or a server did not give
_MEMBER_OVERHEAD_BYTES = 2048  # tar headers and padding of an image and its label
_USUAL_BYTES = 110_000  # of an image whose size nobody tells: the mean of ImageNet
_USUAL_BYTES_PER_SQUARE = 0.4  # of a 4:3 image over its squared shorter side, as JPEG of quality 90


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A shard that one worker packs."""

    storage: Storage
    folder: Path
    """Folder of the tar and its index."""
    name: str
    """Name of the files without extension, such as train-000012."""
    first_index: int
    samples: Sequence[Sample]
    config: PreprocessConfig

    @property
    def records(self) -> Path:
        """Folder of the shard's record and listing."""
        return self.folder / PARTIAL_OUTPUT


def _planned_bytes(sample: Sample, max_short_side: int) -> int:
    """Return the size that the plan counts: the usual one where it is not known or the image is scaled down."""
    size_bytes = sample.size_bytes or _USUAL_BYTES
    if max_short_side:
        size_bytes = min(size_bytes, int(_USUAL_BYTES_PER_SQUARE * max_short_side**2))
    return size_bytes + _mask_bytes(sample)


def _mask_bytes(sample: Sample) -> int:
    return sample.mask.size_bytes if sample.mask else 0


def plan_shards(samples: Sequence[Sample], shard_bytes: int, max_short_side: int = 0) -> list[Sequence[Sample]]:
    """Cut the listing into shards of equal size, as near to `shard_bytes` as that allows.

    Depends on the listing and these settings alone, not on what is rejected later.
    """
    ends = list(accumulate(_planned_bytes(sample, max_short_side) + _MEMBER_OVERHEAD_BYTES for sample in samples))
    if not ends:
        return []
    num_shards = max(1, round(ends[-1] / shard_bytes))
    cuts = [bisect_left(ends, ends[-1] * number / num_shards) + 1 for number in range(1, num_shards)]
    edges = [0, *cuts, len(samples)]
    return [samples[start:end] for start, end in pairwise(edges) if start < end]


def write_shard(task: ShardTask) -> ShardRecord:
    """Write one tar, its index, its part of the listing, and last its record."""
    tar = task.folder / f"{task.name}.tar"
    tar.unlink(missing_ok=True)  # a worker of a run that was killed just now may have it open still
    with TarWriter(tar) as archive, thumbnails_file(task.records, task.name).open("wb") as thumbnails:
        content = _fill(archive, thumbnails, task)
    files = {}
    if content.entries:
        files = write_index(archive, tar)
    else:
        tar.unlink()  # every image was rejected; an empty shard would stop DALI
    record = ShardRecord(
        name=task.name,
        num_images=len(content.entries),
        num_rejected=len(content.rejected),
        num_rejected_annotations=sum(not entry["kept"] for entry in content.annotations),
        pixel_sum=content.sums.values(),
        pixel_square_sum=content.sums.squares(),
        num_pixels=content.sums.num_pixels,
        files=files,
    )
    write_atomically(listing_file(task.records, task.name), json_lines(content.entries))
    write_atomically(rejected_file(task.records, task.name), json_lines(content.rejected))
    write_atomically(annotations_file(task.records, task.name), json_lines(content.annotations))
    write_atomically(task.records / f"{task.name}.json", record.model_dump_json().encode())
    return record


def _fill(archive: TarWriter, thumbnails: BinaryIO, task: ShardTask) -> "_Content":
    content, name = _Content(), task.config.task
    pack_label = labels_of(name).pack
    for number, sample in enumerate(task.samples, task.first_index):
        try:
            data, extension, image, size = _image(task, sample)
            label = pack_label(sample, size, image.size, task.storage)
        except (Rejected, Unreadable) as reason:
            content.rejected.append({"path": sample.path, "reason": str(reason)})
            continue
        except OSError as error:
            content.rejected.append({"path": sample.path, "reason": f"{UNREADABLE}{error.strerror or error}"})
            continue
        key = f"{number:09d}"
        archive.add(key, {extension: data, TASKS[name].label_member: label.data})
        content.annotations += [
            {"path": sample.path, "annotation": which, "reason": reason, "kept": kept}
            for which, reason, kept in label.refused
        ]
        content.sums.add(image)
        if task.config.near_duplicates != "keep":
            thumbnails.write(gray_thumbnail(image))
        content.entries.append(
            {
                "key": key,
                "path": sample.path,
                **label.entry,
                "height": image.height,
                "width": image.width,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    return content


def _image(task: ShardTask, sample: Sample) -> tuple[bytes, str, Image.Image, tuple[int, int]]:
    """The bytes to pack, their extension, the image that the loader will see, and its width and height before.

    Raises:
        Rejected: it can't be used.
        Unreadable: it must not or can't be read.
        OSError: the same, from the system.
    """
    Image.MAX_IMAGE_PIXELS = None  # decode checks, with a message of its own
    data = read_sample(task.storage, sample)
    config = task.config
    extension, image = decode(data, config.max_pixels)
    size = image.size
    if 0 < config.max_short_side < min(size):
        data, image = shrink(image, config.max_short_side, config.jpeg_quality)
        extension = "jpg"
    elif extension == "":
        data, extension = as_png(image), "png"
    return data, extension, image, size


@dataclass(kw_only=True)
class _Content:
    entries: list[Mapping[str, object]] = field(default_factory=list)
    rejected: list[Mapping[str, object]] = field(default_factory=list)
    annotations: list[Mapping[str, object]] = field(default_factory=list)
    sums: PixelSums = field(default_factory=PixelSums)


def _move_finished(records: Path, digest: str) -> int:
    """Move what killed runs have finished of this plan into the output of `records`. Returns how many shards that is.

    One that another process holds, or that is of another plan, stays as it is. What can't be moved is packed again.
    """
    num_shards = 0
    for output in earlier_outputs():
        with suppress(OSError):  # it is held, or gone: `enginery gc` or another run was faster
            num_shards += _move_from(output, records, digest)
    return num_shards


def _move_from(output: Path, records: Path, digest: str) -> int:
    num_shards = 0
    with hold(output) as theirs:
        if (theirs / PLAN).read_bytes() != digest.encode():
            return 0
        for file in sorted(theirs.glob("*-*.json")):
            record = read_record(theirs, file.stem)
            if record is None or read_record(records, file.stem) is not None:
                continue
            for name in record.files:
                (output / name).replace(records.parent / name)
            for own in reversed(record_files(theirs, file.stem)):  # the record last: it says that all the rest is there
                own.replace(records / own.name)
            num_shards += 1
        for partial in (*output.glob("*.tar"), *output.glob("*.idx")):  # which nobody will finish
            partial.unlink()
        shutil.rmtree(theirs)
    return num_shards


def stratified(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """Shuffled by seed so that every stretch of the listing holds the classes in their proportions.

    The images of a class are spread evenly over the whole. So batches hold many classes before the loader shuffles,
    and calibration takes any stretch of images as a stratified sample.
    """
    chance = random.Random(seed)
    of_class: dict[int, list[Sample]] = {}
    for sample in samples:
        of_class.setdefault(sample.label, []).append(sample)
    placed: list[tuple[float, int, Sample]] = []
    for label, own in sorted(of_class.items()):
        chance.shuffle(own)
        start = chance.random()
        placed += [((rank + start) / len(own), label, sample) for rank, sample in enumerate(own)]
    return [sample for _, _, sample in sorted(placed, key=lambda entry: entry[:2])]


def plan_tasks(config: PreprocessConfig, source: Source, folder: Path) -> list[ShardTask]:
    """The shards to write, those of the training split first; with `config.part` only that part's.

    Raises:
        UserError: there is no such part.
    """
    tasks = []
    for split, samples in source.splits.items():
        first_index = 0
        # Small sets are cut too, so that every core has a shard to pack and every rank one to read.
        total = sum(_planned_bytes(sample, config.max_short_side) for sample in samples)
        shard_bytes = min(config.shard_bytes, max(1_000_000, total // 8))
        for number, own in enumerate(plan_shards(samples, shard_bytes, config.max_short_side)):
            task = ShardTask(
                storage=source.storage,
                folder=folder,
                name=f"{split}-{number:06d}",
                first_index=first_index,
                samples=own,
                config=config,
            )
            tasks.append(task)
            first_index += len(own)
    if not config.part:
        return tasks
    part, num_parts = (int(number) for number in config.part.split("/"))
    if not 1 <= part <= num_parts:
        message = f"there is no part {config.part}: of {num_parts} parts the first is 1/{num_parts}"
        raise UserError(message, code="no-such-part", setting="preprocess.part")
    return tasks[part - 1 :: num_parts]


def plan_digest(config: PreprocessConfig, source: Source) -> str:
    """Digest of all that decides what the shards of all parts hold: the listing and the settings of packing."""
    settings = {name: getattr(config, name) for name in _PACKING}
    sha = hashlib.sha256(canonical_json({"settings": settings, "classes": source.classes}))
    for split, samples in source.splits.items():
        for sample in samples:
            entry = f"{split}\0{sample.path}\0{sample.label}\0{sample.size_bytes}\0{sample.offset}\n"
            sha.update(entry.encode(errors="surrogateescape"))
            sha.update(sample.annotation or b"")
            if mask := sample.mask:
                sha.update(f"{mask.path}\0{mask.size_bytes}\0{mask.offset}\n".encode(errors="surrogateescape"))
    return "sha256:" + sha.hexdigest()


def resume(records: Path, digest: str, log: StepLog) -> None:
    """Note what is packed here and reuse what killed runs have of it, or see that one has packed the same here.

    Raises:
        UserError: it was something else.
    """
    plan = records / PLAN
    if not plan.exists():
        write_atomically(plan, digest.encode())
        if num_shards := _move_finished(records, digest):
            log.note(f"resuming where an earlier run stopped, finished shards: {num_shards}")
    elif plan.read_bytes() == digest.encode():
        log.note("resuming where an earlier run stopped")
    else:
        message = f"{records.parent} holds an unfinished dataset of other images or settings; empty it or name another"
        raise UserError(message, code="other-unfinished-output")


def pack(config: PreprocessConfig, tasks: Sequence[ShardTask], log: StepLog) -> list[ShardRecord]:
    """Write the shards that are not there yet. Returns the records of all, in order.

    Raises:
        EngineryError: the disk has too little space for them, or a process was killed.
    """
    done = {task.name: record for task in tasks if (record := _finished(task)) is not None}
    left = [task for task in tasks if task.name not in done]
    if left and not config.max_short_side:
        _check_space(left)
    total = sum(len(task.samples) for task in tasks)
    num_done = total - sum(len(task.samples) for task in left)
    for task, record in _written(left, config.num_workers or num_cores()):
        done[task.name] = record
        num_done += len(task.samples)
        log.progress("packing", num_done, total, unit="files")
    return [done[task.name] for task in tasks]


def _finished(task: ShardTask) -> ShardRecord | None:
    record = read_record(task.records, task.name)
    if record is None:
        return None
    whole = all(
        (task.folder / name).is_file() and (task.folder / name).stat().st_size == entry.size_bytes
        for name, entry in record.files.items()
    )
    whole &= task.config.near_duplicates == "keep" or has_thumbnails(task.records, record)
    return record if whole and not _may_be_fixed(task, record) else None


def _may_be_fixed(task: ShardTask, record: ShardRecord) -> bool:
    """True if a run came to its end here, was refused, and left out files of this shard that may be there by now.

    A file that was fixed has another size mostly, and so the plan is another; of some no size is known.
    """
    if not record.num_rejected or not (task.folder / REJECTED).exists():
        return False
    no_size = {
        sample.path
        for sample in task.samples
        if not sample.size_bytes or (sample.mask is not None and not sample.mask.size_bytes)
    }
    left_out = entries_of(rejected_file(task.records, task.name))
    return any(entry["reason"].startswith(UNREADABLE) or entry["path"] in no_size for entry in left_out)


def _check_space(tasks: Sequence[ShardTask]) -> None:
    """Shards hold the files as they are, so their sum is known before the first is written."""
    folder = tasks[0].folder
    thumbnail_bytes = 0 if tasks[0].config.near_duplicates == "keep" else THUMBNAIL_SIDE**2
    needed_bytes = sum(
        sample.size_bytes + _mask_bytes(sample) + thumbnail_bytes for task in tasks for sample in task.samples
    )
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise EngineryError(
            f"the disk of {folder} is too small for the shards: they take {needed_bytes / 1e6:,.1f} MB, and "
            f"{free_bytes / 1e6:,.1f} MB are free. Free some on that disk (old runs: enginery gc --keep 5), or write "
            "to another one (runs: set ENGINERY_HOME; a single step: --output)",
            code="disk-full",
        )


def _written(tasks: Sequence[ShardTask], num_workers: int) -> Iterator[tuple[ShardTask, ShardRecord]]:
    """Each task with its record, in order. Only a few are handed to the workers ahead: a task holds its samples."""
    # "spawn" because a forked child of a process with threads can deadlock.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=end_with_creator) as pool:
        waiting: deque[tuple[ShardTask, Future[ShardRecord]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, pool.submit(write_shard, task)))
                if len(waiting) > 2 * num_workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BaseException as error:  # an interrupt, too, need not wait for shards that nobody will read
            for worker in active_children():
                worker.kill()
            if isinstance(error, BrokenProcessPool):
                raise EngineryError(
                    "a process that packs images was killed, most often because memory ran out; pack with fewer than "
                    f"{num_workers}, by {how_to_set('preprocess', 'num_workers', str(max(1, num_workers // 2)))}, or "
                    "lower max_pixels. What is packed is kept",
                    code="worker-killed",
                    setting="preprocess.num_workers",
                ) from None
            raise
