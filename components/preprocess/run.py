"""preprocess: image folder -> WebDataset shards."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import median

import numpy as np

from components.common.artifacts import Artifact, DatasetManifest, prepare_directory, seal, write_atomically
from components.common.digests import digest_file
from components.common.environment import num_cores
from components.common.errors import EngineryError, UserError
from components.common.lifetime import end_with_creator
from components.common.records import DatasetStatistics, Split
from components.common.steplog import StepLog
from components.preprocess.config import PreprocessConfig, check_data_folder
from components.preprocess.shards import ShardResult, ShardTask, plan_shards, write_shard
from components.preprocess.sources import Sample, Source, counts_by_label, find_samples


def run(config: PreprocessConfig, log: StepLog, *, output: Path) -> str:
    """Scan, decode, split and pack. See the package's docstring."""
    check_data_folder(config.data)  # before a URI is taken for a path
    root = Path(config.data).absolute()
    source = find_samples(
        root, val_fraction=config.val_fraction, seed=config.seed, class_names_file=config.class_names_file
    )
    prepare_directory(output)
    _check_space(source, output)
    # Training batches should hold many classes even before the loader shuffles.
    random.Random(config.seed).shuffle(source.splits["train"])
    results = _pack(config, root, source, output, log)
    rejected = [entry for shards in results.values() for shard in shards for entry in shard.rejected]
    _check_rejected(config, rejected, sum(len(samples) for samples in source.splits.values()), output)
    splits = {split: _close_split(split, shards, source, output) for split, shards in results.items()}
    artifact = seal(
        output,
        DatasetManifest,
        inputs={},
        config=config,
        classes=source.classes,
        splits=splits,
        statistics=_statistics(results),
        num_rejected=len(rejected),
    )
    _report(artifact, log)
    return _outcome(artifact)


def _check_space(source: Source, output: Path) -> None:
    """Shards hold the files as they are, so their sum is known before the first is written.

    Raises:
        EngineryError: the disk of `output` has less free.
    """
    needed_bytes = sum(sample.size_bytes for samples in source.splits.values() for sample in samples)
    free_bytes = shutil.disk_usage(output).free
    if needed_bytes > free_bytes:
        raise EngineryError(
            f"the disk of {output} is too small for the shards: they take {needed_bytes / 1e6:,.1f} MB, and "
            f"{free_bytes / 1e6:,.1f} MB are free. Free some on that disk (old runs: enginery gc --keep 5), or write "
            "to another one (runs: set ENGINERY_HOME; a single step: --output)"
        )


def _pack(
    config: PreprocessConfig, root: Path, source: Source, output: Path, log: StepLog
) -> dict[str, list[ShardResult]]:
    tasks: list[tuple[str, ShardTask]] = []
    for split, samples in source.splits.items():
        first_index = 0
        for number, part in enumerate(plan_shards(samples, _shard_bytes(config, samples))):
            file = output / f"{split}-{number:06d}.tar"
            task = ShardTask(root=root, file=file, first_index=first_index, samples=part, max_pixels=config.max_pixels)
            tasks.append((split, task))
            first_index += len(part)
    results: dict[str, list[ShardResult]] = {split: [] for split in source.splits}
    total = sum(len(task.samples) for _, task in tasks)
    done = 0
    # "spawn" because a forked child of a process with threads can deadlock.
    with ProcessPoolExecutor(
        config.num_workers or num_cores(), mp_context=get_context("spawn"), initializer=end_with_creator
    ) as pool:
        try:
            for (split, task), result in zip(tasks, pool.map(write_shard, [task for _, task in tasks]), strict=True):
                results[split].append(result)
                done += len(task.samples)
                log.progress("packing", done, total, "images")
        except BaseException:  # an interrupt, too, need not wait for shards that nobody will read
            for worker in active_children():
                worker.kill()
            raise
    return results


def _shard_bytes(config: PreprocessConfig, samples: list[Sample]) -> int:
    """Small sets are cut too, so that every core has a shard to pack and every rank one to read."""
    total = sum(sample.size_bytes for sample in samples)
    return min(config.shard_bytes, max(1_000_000, total // 8))


def _check_rejected(config: PreprocessConfig, rejected: list[dict[str, str]], num_files: int, output: Path) -> None:
    write_atomically(output / "rejected.jsonl", _json_lines(rejected))
    if not rejected:
        return
    example = f"{rejected[0]['path']}: {rejected[0]['reason']}"
    where = f"All {len(rejected)} are listed in {output / 'rejected.jsonl'}"
    if config.on_bad == "fail":
        raise UserError(
            f"{len(rejected)} of {num_files} files are no usable image, such as {example}, and on_bad is fail. "
            f"{where}. Mend or remove them, or leave them out with --set preprocess.on_bad=skip"
        )
    if len(rejected) > config.max_bad_fraction * num_files:
        raise UserError(
            f"{len(rejected)} of {num_files} files are no usable image, more than max_bad_fraction = "
            f"{config.max_bad_fraction:g} allows, such as {example}. {where}. Mend or remove them, or allow more with "
            "--set preprocess.max_bad_fraction=SHARE, a number up to 1"
        )


def _close_split(split: str, results: list[ShardResult], source: Source, output: Path) -> Split:
    accepted = [entry for shard in results for entry in shard.accepted]
    if not accepted:
        raise UserError(
            f"no usable image is left in the {split} split: {output / 'rejected.jsonl'} says why of each file. Replace "
            "them with images that open in a viewer"
        )
    listing = output / f"{split}.jsonl"
    write_atomically(listing, _json_lines(accepted))
    return Split(
        num_images=len(accepted),
        shards=tuple(sorted(path.name for path in output.glob(f"{split}-*.tar"))),
        class_counts=counts_by_label([int(str(entry["label"])) for entry in accepted], len(source.classes)),
        digest=digest_file(listing),
    )


def _json_lines(entries: Sequence[Mapping[str, object]]) -> bytes:
    # File names that are not UTF-8 hold lone surrogates; written as \udcXX they are JSON and come back the same.
    return "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries).encode(errors="backslashreplace")


def _statistics(results: dict[str, list[ShardResult]]) -> DatasetStatistics:
    training = results["train"]
    num_pixels = sum(shard.num_pixels for shard in training)
    mean = np.sum([shard.pixel_sum for shard in training], axis=0) / num_pixels
    square_mean = np.sum([shard.pixel_square_sum for shard in training], axis=0) / num_pixels
    sides = [
        min(int(str(entry["height"])), int(str(entry["width"])))
        for shards in results.values()
        for shard in shards
        for entry in shard.accepted
    ]
    return DatasetStatistics(
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(square_mean - mean**2, 0)).tolist()),
        min_side=min(sides),
        median_side=round(median(sides)),
        max_side=max(sides),
    )


def _report(artifact: Artifact[DatasetManifest], log: StepLog) -> None:
    manifest = artifact.manifest
    sizes = {f"num_{split}_images": float(info.num_images) for split, info in manifest.splits.items()}
    log.metrics({**sizes, "num_rejected_files": float(manifest.num_rejected)})
    for split, info in manifest.splits.items():
        log.dataset(split, info.digest, info.num_images, "training" if split == "train" else "validation")
    log.artifact(artifact.file("rejected.jsonl"))
    if manifest.num_rejected:
        log.warning(f"{manifest.num_rejected} unusable files left out, see {artifact.file('rejected.jsonl')}")
    for split, info in manifest.splits.items():
        empty = [name for name, count in zip(manifest.classes, info.class_counts, strict=True) if count == 0]
        if empty:
            log.warning(f"the {split} split has no image of {len(empty)} classes, such as {empty[0]!r}")


def _outcome(artifact: Artifact[DatasetManifest]) -> str:
    splits = artifact.manifest.splits
    return (
        f"{splits['train'].num_images:,} training and {splits['val'].num_images:,} validation images, "
        f"{len(artifact.manifest.classes)} classes, {artifact.manifest.num_rejected} files rejected"
    )
