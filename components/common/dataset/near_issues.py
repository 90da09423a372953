"""Consequences of near-duplicates: which validation images leave a dataset, its issues with pictures, its records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import NearDuplicates
from components.common.contracts.settings import how_to_set
from components.common.data.image_files import NEAR_DUPLICATES, read_listing
from components.common.dataset.data_card import read_thumbnails
from components.common.dataset.data_issues import (
    SPLIT_WORDS,
    SPLITS,
    FoundImage,
    Issue,
    IssueFinder,
    SimilarImages,
    SplitName,
    printable,
)
from components.common.dataset.near_duplicates import Indices, Mask, find_near_pairs
from components.common.dataset.shards import THUMBNAIL_SIDE, json_lines

_KINDS: dict[str, tuple[SplitName, SplitName]] = {
    "near_leak": ("train", "val"),
    "near_train": ("train", "train"),
    "near_val": ("val", "val"),
}
_MAX_SHOWN = 12  # pairs of a kind with pictures
LIKE_TRAINING = "near-duplicates of training images"
LEAVES = "near-duplicate of a training image"
_MAX_LISTED = 100_000  # pairs within a split; of those across the splits, all are


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Pairs of images of one kind, the best first."""

    images: Indices  # [2, P]: numbers over both splits, training first
    correlation: np.ndarray  # [P]
    changes: Sequence[str]  # [P]
    is_concerned: Mask  # [N]: images of the kind's second split that have a near-duplicate in the first


@dataclass(frozen=True, kw_only=True)
class NearFindings:
    """The near-duplicates of a dataset."""

    record: NearDuplicates
    issues: tuple[Issue, ...]
    left_out: Mapping[int, str]
    """Reasons why images leave the validation split, by their places in the split's listing."""


def find_near_duplicates(
    finder: IssueFinder, thumbnails: Path, folder: Path, *, drops: bool, num_threads: int
) -> NearFindings:
    """Look for near-duplicates in a whole dataset, and write near_duplicates.jsonl.

    Args:
        finder: knows all images of both splits.
        thumbnails: 48x48 bytes of each, in the same order.
        folder: with the shards and listings of both splits.
        drops: validation images that have a near-duplicate in training are to leave.
        num_threads: that work at once.
    """
    found, num_plain = _find(finder, thumbnails, num_threads)
    counts = {kind: int(pairs.is_concerned.sum()) for kind, pairs in found.items()}
    images = np.unique(np.concatenate([pairs.images.ravel() for pairs in found.values()]))
    entries = _entries(images, finder, folder)
    write_atomically(folder / NEAR_DUPLICATES, json_lines(_listed(found, entries)))
    return NearFindings(
        record=NearDuplicates(
            num_across=counts["near_leak"],
            num_left_out=counts["near_leak"] if drops else 0,
            num_train=counts["near_train"],
            num_val=counts["near_val"],
            num_plain=num_plain,
        ),
        issues=tuple(
            _issue(kind, pairs, counts[kind], _shown(kind, pairs, entries, finder, folder), drops)
            for kind, pairs in found.items()
            if counts[kind]
        ),
        left_out=_reasons(found["near_leak"], entries, finder) if drops else {},
    )


def _find(finder: IssueFinder, thumbnails: Path, num_threads: int) -> tuple[dict[str, _Pairs], int]:
    # Equal files are one content here: other checks speak of them.
    content, in_val, sizes = finder.contents(), finder.in_val(), finder.sizes()
    first = {split: np.full(int(content.max()) + 1, -1) for split in SPLITS}  # its first image, -1 for none
    for split in SPLITS:
        images = np.flatnonzero(in_val == (split == "val"))[::-1]
        first[split][content[images]] = images
    numbers = np.sort(np.where(first["train"] >= 0, first["train"], first["val"]))
    pixels = np.memmap(thumbnails, np.uint8, "r", shape=(len(content), THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    near = find_near_pairs(pixels, numbers, in_val[numbers], num_threads=num_threads)
    order = np.argsort(-near.correlation, kind="stable")
    one, other = content[near.first[order]], content[near.second[order]]
    both = np.stack([np.stack([one, other], 1).ravel(), np.stack([other, one], 1).ravel()])  # each pair in both ways
    found = {}
    for kind, (left, right) in _KINDS.items():
        images = np.stack([first[left][both[0]], first[right][both[1]]])
        has: Mask = np.all(images >= 0, axis=0)
        is_concerned = np.isin(content, both[1][has]) & (in_val == (right == "val"))
        if left == right:
            has[1::2] = False  # the same pairs again
            has[np.flatnonzero(has)[_MAX_LISTED:]] = False
        chosen, places = images[:, has], order[np.flatnonzero(has) // 2]
        changes = [
            _change(near.is_mirrored[place], near.is_cropped[place], (sizes[a] != sizes[b]).any())
            for place, a, b in zip(places, *chosen, strict=True)
        ]
        found[kind] = _Pairs(
            images=chosen, correlation=near.correlation[places], changes=changes, is_concerned=is_concerned
        )
    return found, near.num_plain


def _change(is_mirrored: bool, is_cropped: bool, is_resized: bool) -> str:
    words = {"mirrored": is_mirrored, "cropped": is_cropped, "another size": is_resized and not is_cropped}
    return ", ".join(word for word, holds in words.items() if holds) or "compression or brightness"


def _entries(images: Indices, finder: IssueFinder, folder: Path) -> dict[int, Mapping[str, Any]]:
    """Entries of the listings by image."""
    num_train = len(finder.labels("train"))
    entries: dict[int, Mapping[str, Any]] = {}
    for split, start, own in (("train", 0, images < num_train), ("val", num_train, images >= num_train)):
        places = set((images[own] - start).tolist())
        listed = read_listing(folder / f"{split}.jsonl", places) if places else {}
        entries |= {start + place: entry for place, entry in listed.items()}
    return entries


def _listed(found: Mapping[str, _Pairs], entries: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    for kind, pairs in found.items():
        for place, images in enumerate(pairs.images.T.tolist()):
            ends = [
                {"split": split, "key": entries[image]["key"], "path": entries[image]["path"]}
                for split, image in zip(_KINDS[kind], images, strict=True)
            ]
            yield {
                "images": ends,
                "correlation": round(float(pairs.correlation[place]), 4),
                "change": pairs.changes[place],
            }


def _reasons(pairs: _Pairs, entries: Mapping[int, Mapping[str, Any]], finder: IssueFinder) -> dict[int, str]:
    """Return the reasons why images leave, by place in the validation split."""
    content, num_train = finder.contents(), len(finder.labels("train"))
    reasons = {}
    for place, (one, other) in reversed(list(enumerate(pairs.images.T.tolist()))):  # the best comes last and stays
        reasons[int(content[other])] = f"{LEAVES}: {entries[one]['path']} ({pairs.changes[place]})"
    leaving = np.flatnonzero(pairs.is_concerned).tolist()
    return {image - num_train: reasons[int(content[image])] for image in leaving}


def _shown(
    kind: str, pairs: _Pairs, entries: Mapping[int, Mapping[str, Any]], finder: IssueFinder, folder: Path
) -> tuple[SimilarImages, ...]:
    """Pairs with pictures, the least sure first: whoever looks at them sees whether the rest can be trusted."""
    places = range(len(pairs.changes) - 1, -1, -1)[:_MAX_SHOWN]
    num_train = len(finder.labels("train"))
    pictures: dict[tuple[str, str], bytes] = {}
    for split, start in (("train", 0), ("val", num_train)):
        images = [int(pairs.images[end, place]) for end in (0, 1) for place in places if _KINDS[kind][end] == split]
        small = read_thumbnails(folder, split, [image - start for image in images])
        pictures |= {(split, one.path): one.data for one in small}
    shown = []
    for place in places:
        ends = list(zip(_KINDS[kind], (entries[image] for image in pairs.images[:, place].tolist()), strict=True))
        found = tuple(
            FoundImage(
                split=split,
                path=printable(entry["path"]),
                class_name=finder.classes[entry["label"]],
                height=entry["height"],
                width=entry["width"],
            )
            for split, entry in ends
        )
        own = tuple(pictures.get((split, entry["path"]), b"") for split, entry in ends)
        shown.append(
            SimilarImages(
                images=found, pictures=own, correlation=float(pairs.correlation[place]), change=pairs.changes[place]
            )
        )
    return tuple(shown)


def _issue(kind: str, pairs: _Pairs, number: int, shown: tuple[SimilarImages, ...], drops: bool) -> Issue:
    one, other = shown[-1].images
    split = _KINDS[kind][1]
    same = "is the same picture as a" if number == 1 else "are the same pictures as"
    s = "" if number == 1 else "s"
    like = "but for size, compression, brightness, a mirror or a crop"
    if kind == "near_leak":
        found = f"{number:,} validation image{s} {same} training image{s} {like}, such as {other.path} and {one.path}"
        if drops:
            how = how_to_set("preprocess", "near_duplicates", "report")
            line = (
                f"{found}. Left out of the validation split, where they would raise the accuracy; keep them with {how}"
            )
        else:
            how = how_to_set("preprocess", "near_duplicates", "drop")
            line = f"{found}. The measured accuracy may be too high, so the report shows it without them, too; leave "
            line += f"them out with {how}"
    else:
        effect = "in every epoch" if split == "train" else "in the accuracy"
        line = f"{number:,} {SPLIT_WORDS[split]} image{s} {same} other{s} there {like}, such as {one.path} and "
        line += f"{other.path}. Their subjects count more {effect}; keep one of each ({NEAR_DUPLICATES} lists them)"
    return Issue(kind=kind, line=line, pairs=shown)
