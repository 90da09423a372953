"""Pack all shards of a source in several processes, and resume where a killed run stopped."""

import fcntl
import hashlib
import random
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context
from pathlib import Path

from components.common.contracts.digests import canonical_json
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import FAILURE, MANIFEST, UNFINISHED, prepare_directory, write_atomically
from components.common.contracts.settings import how_to_set
from components.common.process.lifetime import end_with_creator
from components.common.process.partial_output import LOCK, clear_temporaries, earlier_outputs, hold
from components.common.process.steplog import StepLog
from components.preprocess.assembling import REJECTED, entries_of
from components.preprocess.config import PreprocessConfig
from components.preprocess.shards import (
    UNREADABLE,
    ShardRecord,
    ShardTask,
    plan_shards,
    planned_bytes,
    read_record,
    record_files,
    rejected_file,
    write_shard,
)
from components.preprocess.sources import Sample, Source

PLAN = "plan.json"  # in the folder of records: digest of what is packed


def move_finished(records: Path, digest: str) -> int:
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
        for half in (*output.glob("*.tar"), *output.glob("*.idx")):  # which nobody will finish
            half.unlink()
        shutil.rmtree(theirs)
    return num_shards


JOINING = "joining"  # there while merge is at work: its shards are links, and writing into them would change the parts
# What decides which bytes are packed where; the rest of the config says what is done about what is found.
_PACKING = ("shard_bytes", "max_pixels", "max_short_side", "jpeg_quality")


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
        for number, own in enumerate(_cut(config, samples)):
            task = ShardTask(
                storage=source.storage,
                folder=folder,
                records=folder / UNFINISHED,
                name=f"{split}-{number:06d}",
                first_index=first_index,
                samples=own,
                max_pixels=config.max_pixels,
                max_short_side=config.max_short_side,
                jpeg_quality=config.jpeg_quality,
            )
            tasks.append(task)
            first_index += len(own)
    if not config.part:
        return tasks
    part, num_parts = (int(number) for number in config.part.split("/"))
    if not 1 <= part <= num_parts:
        raise UserError(f"there is no part {config.part}: of {num_parts} parts the first is 1/{num_parts}")
    return tasks[part - 1 :: num_parts]


def _cut(config: PreprocessConfig, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Small sets are cut too, so that every core has a shard to pack and every rank one to read."""
    total = sum(planned_bytes(sample, config.max_short_side) for sample in samples)
    return plan_shards(samples, min(config.shard_bytes, max(1_000_000, total // 8)), config.max_short_side)


def plan_digest(config: PreprocessConfig, source: Source) -> str:
    """Digest of all that decides what the shards of all parts hold: the listing and the settings of packing."""
    settings = {name: getattr(config, name) for name in _PACKING}
    sha = hashlib.sha256(canonical_json({"settings": settings, "classes": source.classes}))
    for split, samples in source.splits.items():
        for sample in samples:
            entry = f"{split}\0{sample.path}\0{sample.label}\0{sample.size_bytes}\0{sample.offset}\n"
            sha.update(entry.encode(errors="surrogateescape"))
    return "sha256:" + sha.hexdigest()


@contextmanager
def open_output(output: Path) -> Iterator[Path]:
    """The folder for records in the output directory: new, or left by a killed run.

    It goes again where nothing was planned, so that a data folder that can't be used leaves nothing behind.

    Raises:
        UserError: the directory holds something else, or another process is at work in it.
    """
    records = output / UNFINISHED
    if records.is_dir() and not (records / JOINING).exists() and not (output / MANIFEST).exists():
        (output / FAILURE).unlink(missing_ok=True)
    else:
        prepare_directory(output)
        records.mkdir()
    with (records / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {output} at this moment; wait for it, or name another") from None
        clear_temporaries(output)
        try:
            yield records
        except BaseException:
            if not (records / PLAN).exists():
                shutil.rmtree(records)
            raise


def take_over(records: Path, digest: str, log: StepLog) -> None:
    """Note what is packed here and fetch what killed runs have of it, or see that one has packed the same here.

    Raises:
        UserError: it was something else.
    """
    plan = records / PLAN
    if not plan.exists():
        write_atomically(plan, digest.encode())
        if num_shards := move_finished(records, digest):
            log.note(f"going on where an earlier run stopped, with {num_shards} finished shards")
    elif plan.read_bytes() == digest.encode():
        log.note("going on where an earlier run stopped")
    else:
        raise UserError(
            f"{records.parent} holds an unfinished data set of other images or settings; empty it or name another"
        )


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
    return record if whole and not _may_be_mended(task, record) else None


def _may_be_mended(task: ShardTask, record: ShardRecord) -> bool:
    """Whether a run came to its end here, was refused, and left out files of this shard that may be there by now.

    A file that was mended has another size mostly, and so the plan is another; of some no size is known.
    """
    if not record.num_rejected or not (task.folder / REJECTED).exists():
        return False
    no_size = {sample.path for sample in task.samples if not sample.size_bytes}
    left_out = entries_of(rejected_file(task.records, task.name))
    return any(entry["reason"].startswith(UNREADABLE) or entry["path"] in no_size for entry in left_out)


def _check_space(tasks: Sequence[ShardTask]) -> None:
    """Shards hold the files as they are, so their sum is known before the first is written."""
    folder = tasks[0].folder
    needed_bytes = sum(sample.size_bytes for task in tasks for sample in task.samples)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise EngineryError(
            f"the disk of {folder} is too small for the shards: they take {needed_bytes / 1e6:,.1f} MB, and "
            f"{free_bytes / 1e6:,.1f} MB are free. Free some on that disk (old runs: enginery gc --keep 5), or write "
            "to another one (runs: set ENGINERY_HOME; a single step: --output)"
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
                    "lower max_pixels. What is packed is kept"
                ) from None
            raise
