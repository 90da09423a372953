"""Close a dataset over packed shards: listings, checks over all images, statistics, manifest."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest, seal
from components.common.contracts.records import DatasetStatistics, Split
from components.common.contracts.settings import fingerprinted, how_to_set
from components.common.process.steplog import StepLog
from components.preprocess.config import PreprocessConfig
from components.preprocess.data_card import (
    DATA_CARD,
    Card,
    Rejections,
    read_thumbnails,
    sample_positions,
    write_data_card,
)
from components.preprocess.data_issues import SPLITS, IssueFinder, Issues, SplitName, listed_paths
from components.preprocess.packing import REJECTED, ShardRecord, entries_of, listing_file, rejected_file

RECORDS = "records"  # folder of a part with its shards' records


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A shard that is packed, and where its records lie."""

    record: ShardRecord
    records: Path


def assemble(
    config: PreprocessConfig, classes: tuple[str, ...], packed: Sequence[Packed], output: Path
) -> tuple[Artifact[DatasetManifest], Issues]:
    """Write what is about all shards, which lie in `output`, and complete the dataset.

    Raises:
        UserError: too many files were rejected, a split is empty, or the splits share images.
    """
    of_split = {split: [one for one in packed if one.record.name.startswith(f"{split}-")] for split in SPLITS}
    join_rejected(packed, output)
    check_rejected(config, packed, output)
    finder = IssueFinder(classes)
    splits = {split: _close_split(split, shards, finder, output) for split, shards in of_split.items()}
    statistics = _statistics([one.record for one in of_split["train"]], finder)
    issues = finder.issues(listed_paths(output))
    card = Card(
        source=config.data,
        classes=classes,
        splits=splits,
        statistics=statistics,
        sides=finder.side_histogram(),
        rejections=Rejections.of(entries_of(output / REJECTED)),
        issues=issues,
        thumbnails=read_thumbnails(output, "train", sample_positions(finder.labels("train"), len(classes))),
        config=fingerprinted(config),
    )
    write_data_card(card, output)  # before a leak stops the step: the card is the evidence
    if config.on_leak == "fail" and (message := issues.leak_message()):
        raise UserError(message, code="leak", setting="preprocess.on_leak")
    artifact = seal(
        output,
        DatasetManifest,
        inputs={},
        config=config,
        known={name: entry for one in packed for name, entry in one.record.files.items()},
        classes=classes,
        splits=splits,
        statistics=statistics,
        num_rejected=sum(one.record.num_rejected for one in packed),
    )
    return artifact, issues


def _close_split(split: SplitName, shards: Sequence[Packed], finder: IssueFinder, output: Path) -> Split:
    listing = output / f"{split}.jsonl"
    _join(listing, [listing_file(one.records, one.record.name) for one in shards])
    finder.add(split, entries_of(listing))
    labels = finder.labels(split)
    if not len(labels):
        raise UserError(
            f"no usable image is left in the {split} split: {output / REJECTED} says why of each file. Replace "
            "them with images that open in a viewer",
            code="no-usable-image",
        )
    return Split(
        num_images=len(labels),
        shards=tuple(f"{one.record.name}.tar" for one in shards if one.record.num_images),
        class_counts=tuple(np.bincount(labels, minlength=finder.num_classes).tolist()),
        digest=digest_file(listing),
    )


def _join(target: Path, parts: Sequence[Path]) -> None:
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)


def join_rejected(packed: Sequence[Packed], output: Path) -> None:
    """Write rejected.jsonl of these shards."""
    _join(output / REJECTED, [rejected_file(one.records, one.record.name) for one in packed])


def check_rejected(config: PreprocessConfig, packed: Sequence[Packed], output: Path) -> None:
    """See that the run may leave out the files listed in rejected.jsonl.

    Raises:
        UserError: it may not.
    """
    num_rejected = sum(one.record.num_rejected for one in packed)
    num_files = sum(one.record.num_images for one in packed) + num_rejected
    if not num_rejected:
        return
    first = next(entries_of(output / REJECTED))
    example = f"{first['path']}: {first['reason']}"
    where = f"All are listed in {output / REJECTED}"
    if config.on_bad == "fail":
        raise UserError(
            f"{num_rejected} of {num_files} files are no usable image, such as {example}, and on_bad is fail. "
            f"{where}. Fix or remove them, or leave them out with {how_to_set('preprocess', 'on_bad', 'skip')}",
            code="unusable-files",
            setting="preprocess.on_bad",
        )
    if num_rejected > config.max_bad_fraction * num_files:
        raise UserError(
            f"{num_rejected} of {num_files} files are no usable image, more than max_bad_fraction = "
            f"{config.max_bad_fraction:g} allows, such as {example}. {where}. Fix or remove them, or allow more, "
            f"up to 1, with {how_to_set('preprocess', 'max_bad_fraction', 'SHARE')}; merge has this option, too",
            code="unusable-files",
            setting="preprocess.max_bad_fraction",
        )


def _statistics(training: Sequence[ShardRecord], finder: IssueFinder) -> DatasetStatistics:
    """Compute the statistics of the training split's pixels, and of the sides of all images."""
    num_pixels = sum(shard.num_pixels for shard in training)
    mean = np.sum([shard.pixel_sum for shard in training], axis=0) / num_pixels
    square_mean = np.sum([shard.pixel_square_sum for shard in training], axis=0) / num_pixels
    sides = finder.short_sides()
    return DatasetStatistics(
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(square_mean - mean**2, 0)).tolist()),
        min_side=int(sides.min()),
        median_side=round(float(np.median(sides))),
        max_side=int(sides.max()),
        max_width=finder.max_width(),
        max_height=finder.max_height(),
    )


def report(artifact: Artifact[DatasetManifest], issues: Issues, log: StepLog) -> str:
    """Tell tracking and the user what is in a dataset. Returns one line on it."""
    manifest = artifact.manifest
    sizes = {f"num_{split}_images": float(info.num_images) for split, info in manifest.splits.items()}
    log.metrics({**sizes, "num_rejected_files": float(manifest.num_rejected)})
    for split, info in manifest.splits.items():
        log.dataset(split, info.digest, info.num_images, "training" if split == "train" else "validation")
    log.artifact(artifact.file(REJECTED))
    log.artifact(artifact.file(DATA_CARD))
    if manifest.num_rejected:
        log.warning(_left_out(artifact.file(REJECTED)))
    for line in issues.lines():
        log.warning(line)
    counts = {split: f"{info.num_images:,}" for split, info in manifest.splits.items()}
    return (
        f"{counts['train']} training and {counts['val']} validation images, {len(manifest.classes)} classes, "
        f"{manifest.num_rejected} rejected"
    )


def _left_out(listing: Path) -> str:
    """Say how many files were left out and why, the most frequent reason first, with an example."""
    rejections = Rejections.of(entries_of(listing))
    kinds = "; ".join(f"{reason}: {number:,}" for reason, number in rejections.by_kind.items())
    files = "1 unusable file" if rejections.num_files == 1 else f"{rejections.num_files:,} unusable files"
    return f"{files} left out ({kinds}), such as {rejections.examples[0][0]}; {listing} lists all"
