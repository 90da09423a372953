"""Close a dataset over packed shards: listings, checks over all images, statistics, manifest."""

import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from components.common.contracts.digests import digest_file
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import PARTIAL_OUTPUT, Artifact, DatasetManifest, seal, write_atomically
from components.common.contracts.records import DatasetStatistics, Split
from components.common.contracts.settings import fingerprinted, how_to_set
from components.common.data.image_files import read_listing
from components.common.dataset.data_card import (
    DATA_CARD,
    Card,
    Rejections,
    read_thumbnails,
    sample_positions,
    write_data_card,
)
from components.common.dataset.data_issues import SPLITS, Issue, IssueFinder, Issues, SplitName, listed_paths
from components.common.dataset.near_issues import LEAVES, LIKE_TRAINING, NearFindings, find_near_duplicates
from components.common.dataset.settings import DatasetSettings
from components.common.dataset.shards import (
    REJECTED,
    REJECTED_ANNOTATIONS,
    ShardRecord,
    annotations_file,
    entries_of,
    has_thumbnails,
    json_lines,
    leave_out,
    listing_file,
    rejected_file,
    thumbnails_file,
)
from components.common.process.steplog import StepLog
from components.common.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A shard that is packed, and where its records lie."""

    record: ShardRecord
    records: Path


def assemble(
    config: DatasetSettings, classes: tuple[str, ...], packed: Sequence[Packed], output: Path
) -> tuple[Artifact[DatasetManifest], Issues]:
    """Write what is about all shards, which lie in `output`, and complete the dataset.

    Raises:
        UserError: too many files were rejected, a split is empty, or the splits share images.
    """
    of_split = {split: [one for one in packed if one.record.name.startswith(f"{split}-")] for split in SPLITS}
    join_rejected(packed, output)
    check_rejected(config, packed, output)
    finder = IssueFinder(classes)
    for split, shards in of_split.items():
        listing = output / f"{split}.jsonl"
        _join(listing, [listing_file(one.records, one.record.name) for one in shards])
        finder.add(split, entries_of(listing))
        _check_any(finder, split, f"{output / REJECTED} says why of each file; put that right")
    near = _find_near_duplicates(config, packed, finder, output)
    leaving = _leave_listings(near.left_out, of_split["val"], finder, output) if near is not None else {}
    _check_any(finder, "val", f"all are {LIKE_TRAINING}, see {output / REJECTED}. Take other images to validate with")
    splits = {split: _split(split, shards, leaving, finder, output) for split, shards in of_split.items()}
    statistics = _statistics([one.record for one in of_split["train"]], finder)
    issues = finder.issues(listed_paths(output))
    if near is not None:
        issues = replace(issues, found=(*near.issues, *issues.found))
    if line := _annotation_line(config, packed, finder, output):
        issues = replace(issues, found=(Issue(kind="annotations", line=line), *issues.found))
    card = Card(
        source=config.data,
        classes=classes,
        splits=splits,
        statistics=statistics,
        sides=finder.side_histogram(),
        rejections=Rejections.of(entries_of(output / REJECTED)),
        issues=issues,
        near_duplicates=near.record if near is not None else None,
        thumbnails=read_thumbnails(output, "train", sample_positions(finder.labels("train"), len(classes))),
        config=fingerprinted(config),
    )
    write_data_card(card, output)  # before a leak stops the step: the card is the evidence
    if config.on_leak == "fail" and (message := issues.leak_message()):
        raise UserError(message, code="leak", setting="preprocess.on_leak")
    records = [
        leave_out(output, one.record, leaving[name]) if (name := one.record.name) in leaving else one.record
        for one in packed
    ]
    artifact = seal(
        output,
        DatasetManifest,
        task=config.task,
        inputs={},
        config=config,
        known={name: entry for record in records for name, entry in record.files.items()},
        classes=classes,
        splits=splits,
        statistics=statistics,
        num_rejected=sum(record.num_rejected for record in records) + sum(map(len, leaving.values())),
        num_rejected_annotations=sum(record.num_rejected_annotations for record in records),
        near_duplicates=near.record if near is not None else None,
    )
    return artifact, issues


def _check_any(finder: IssueFinder, split: SplitName, why: str) -> None:
    if not len(finder.labels(split)):
        raise UserError(f"no usable image is left in the {split} split: {why}", code="no-usable-image")


def _split(
    split: SplitName, shards: Sequence[Packed], leaving: Mapping[str, set[str]], finder: IssueFinder, output: Path
) -> Split:
    labels = finder.labels(split)
    names = [one.record.name for one in shards if one.record.num_images > len(leaving.get(one.record.name, ()))]
    return Split(
        num_images=len(labels),
        shards=tuple(f"{name}.tar" for name in names),
        class_counts=tuple(finder.class_counts(split).tolist()),
        digest=digest_file(output / f"{split}.jsonl"),
    )


def _find_near_duplicates(
    config: DatasetSettings, packed: Sequence[Packed], finder: IssueFinder, output: Path
) -> NearFindings | None:
    if config.near_duplicates == "keep":
        return None
    in_order = sorted(packed, key=lambda one: SPLITS.index(one.record.name.split("-")[0]))
    if missing := next((one for one in in_order if not has_thumbnails(one.records, one.record)), None):
        raise UserError(
            f"{missing.records} has no thumbnails of its images, so near-duplicates can't be found: the part was "
            "packed with near_duplicates=keep, or by an older enginery. Pack it again, or set merge.near_duplicates to "
            "keep",
            code="no-thumbnails",
            setting="merge.near_duplicates",
        )
    whole = output / PARTIAL_OUTPUT / "thumbnails"
    _join(whole, [thumbnails_file(one.records, one.record.name) for one in in_order])
    try:
        return find_near_duplicates(
            finder, whole, output, drops=config.near_duplicates == "drop", num_threads=config.num_workers or num_cores()
        )
    finally:
        whole.unlink()


def _leave_listings(
    reasons: Mapping[int, str], shards: Sequence[Packed], finder: IssueFinder, output: Path
) -> dict[str, set[str]]:
    """Move images of the validation split from its listing to that of rejected files. Returns their keys by shard.

    Args:
        reasons: by place in the listing.
        shards: of the validation split.
        finder: forgets the images.
        output: with the listings.
    """
    if not reasons:
        return {}
    listing = output / "val.jsonl"
    left_out = read_listing(listing, reasons)
    kept = [line for place, line in enumerate(listing.open("rb")) if place not in reasons]
    write_atomically(listing, b"".join(kept))
    with (output / REJECTED).open("ab") as rejected:
        rejected.write(json_lines({"path": entry["path"], "reason": reasons[at]} for at, entry in left_out.items()))
    finder.leave_out(left_out)
    ends = list(accumulate(one.record.num_images for one in shards))
    leaving: dict[str, set[str]] = {}
    for place, entry in left_out.items():
        leaving.setdefault(shards[bisect_right(ends, place)].record.name, set()).add(entry["key"])
    return leaving


def _join(target: Path, parts: Sequence[Path]) -> None:
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)


def join_rejected(packed: Sequence[Packed], output: Path) -> None:
    """Write rejected.jsonl of these shards, and rejected_annotations.jsonl where something is wrong with any."""
    _join(output / REJECTED, [rejected_file(one.records, one.record.name) for one in packed])
    with_boxes = [file for one in packed if (file := annotations_file(one.records, one.record.name)).exists()]
    if any(file.stat().st_size for file in with_boxes):
        _join(output / REJECTED_ANNOTATIONS, with_boxes)
    else:
        (output / REJECTED_ANNOTATIONS).unlink(missing_ok=True)


def check_rejected(config: DatasetSettings, packed: Sequence[Packed], output: Path) -> None:
    """See that the run may leave out the files listed in rejected.jsonl.

    Raises:
        UserError: it may not.
    """
    num_rejected = sum(one.record.num_rejected for one in packed)
    num_files = sum(one.record.num_images for one in packed) + num_rejected
    if not num_rejected:
        return
    first = next(entries_of(output / REJECTED))
    said = f"{num_rejected} of {num_files} files are no usable image, such as {first['path']}: {first['reason']}"
    check_share(config, num_rejected, num_files, said, output / REJECTED, "unusable-files")


def check_share(config: DatasetSettings, num_bad: int, total: int, said: str, listing: Path, code: str) -> None:
    """See that the step may leave out what can't be used, so many of `total`; `said` tells of it, with an example.

    Raises:
        UserError: it may not.
    """
    fails = config.on_bad == "fail"
    if num_bad <= (0 if fails else config.max_bad_fraction * total):
        return
    setting, value = ("on_bad", "skip") if fails else ("max_bad_fraction", "SHARE")
    limit = "on_bad is fail" if fails else f"max_bad_fraction is {config.max_bad_fraction:g}"
    merges = not fails and not TASKS[config.task].of_text
    raise UserError(
        f"{said}, and {limit}. {listing} lists all. Correct or remove them, or leave them out with "
        f"{how_to_set('preprocess', setting, value)}{'; merge has this option, too' if merges else ''}",
        code=code,
        setting=f"preprocess.{setting}",
    )


def _annotation_line(config: DatasetSettings, packed: Sequence[Packed], finder: IssueFinder, output: Path) -> str:
    """Say how many annotations something is wrong with, and what; "" where nothing is.

    Raises:
        UserError: more had to be left out than is allowed.
    """
    listing = output / REJECTED_ANNOTATIONS
    if not listing.exists():
        return ""
    kinds: Counter[str] = Counter(entry["reason"].partition(":")[0] for entry in entries_of(listing))
    first = next(entries_of(listing))
    num_rejected = sum(one.record.num_rejected_annotations for one in packed)
    total = num_rejected + finder.num_annotations
    line = (
        f"something is wrong with {kinds.total():,} of {total:,} annotations, of which {num_rejected:,} were left out "
        f"({'; '.join(f'{kind}: {number:,}' for kind, number in kinds.most_common(8))}), such as {first['annotation']} "
        f"of {first['path']}: {first['reason']}"
    )
    check_share(config, num_rejected, total, line, listing, "unusable-annotations")
    return f"{line}. {REJECTED_ANNOTATIONS} lists all"


def _statistics(training: Sequence[ShardRecord], finder: IssueFinder) -> DatasetStatistics:
    """Compute the statistics of the training split's pixels, and of the sides of all images."""
    num_pixels = sum(shard.num_pixels for shard in training)
    mean = np.sum([shard.pixel_sum for shard in training], axis=0) / num_pixels
    square_mean = np.sum([shard.pixel_square_sum for shard in training], axis=0) / num_pixels
    sides = finder.short_sides()
    max_height, max_width = finder.sizes().max(axis=0).tolist()
    return DatasetStatistics(
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(square_mean - mean**2, 0)).tolist()),
        min_side=int(sides.min()),
        median_side=round(float(np.median(sides))),
        max_side=int(sides.max()),
        max_width=max_width,
        max_height=max_height,
    )


def report(artifact: Artifact[DatasetManifest], issues: Issues, log: StepLog) -> str:
    """Tell tracking and the user what is in a dataset. Returns one line on it."""
    listing = artifact.file(REJECTED)
    warnings = [*_left_out(listing), *issues.lines()]
    number = len(artifact.manifest.classes)
    return tell(artifact, ("images", "files"), f"{number} class{'es' if number != 1 else ''}", warnings, log)


def tell(
    artifact: Artifact[DatasetManifest], units: tuple[str, str], content: str, warnings: Sequence[str], log: StepLog
) -> str:
    """Tell tracking and the user what is in a dataset, in units of what is used and of what is rejected."""
    manifest, (unit, rejected) = artifact.manifest, units
    sizes = {f"num_{split}_{unit}": float(info.num_images) for split, info in manifest.splits.items()}
    log.metrics({**sizes, f"num_rejected_{rejected}": float(manifest.num_rejected)})
    for split, info in manifest.splits.items():
        log.dataset(split, info.digest, info.num_images, "training" if split == "train" else "validation")
    log.artifact(artifact.file(REJECTED))
    log.artifact(artifact.file(DATA_CARD))
    for line in warnings:
        log.warning(line)
    counts = {split: f"{info.num_images:,}" for split, info in manifest.splits.items()}
    return (
        f"{counts['train']} training and {counts['val']} validation {unit}, {content}, {manifest.num_rejected} rejected"
    )


def _left_out(listing: Path) -> list[str]:
    """Say how many files were left out and why, the most frequent reason first, with an example.

    Near-duplicates have a line of their own.
    """
    rejections = Rejections.of(entry for entry in entries_of(listing) if not entry["reason"].startswith(LEAVES))
    if not rejections.num_files:
        return []
    kinds = "; ".join(f"{reason}: {number:,}" for reason, number in rejections.by_kind.items())
    files = "1 file" if rejections.num_files == 1 else f"{rejections.num_files:,} files"
    return [f"{files} left out ({kinds}), such as {rejections.examples[0][0]}; {listing.name} lists all"]
