"""Look for what is wrong with a data set as a whole: copies, leaks, contradicting labels, uneven classes, odd sizes.

Equal content means that the files have the same sha256. Near-duplicates (another size, another compression, a crop)
are not looked for.
"""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.preprocess.findings import (
    MAX_ASPECT,
    SPLITS,
    EmptyClasses,
    EqualImages,
    FoundImage,
    FoundImages,
    Imbalance,
    OddSizes,
    Problems,
    SameContent,
    SideHistogram,
    SplitName,
)

Lookup = Callable[[SplitName, Sequence[int]], Sequence[str]]
"""Paths of images by split and position in the split's listing; the positions come in ascending order."""

_MAX_EXAMPLES = 20  # of each kind
_MAX_SHOWN = 6  # images of one content
_FENCE = 3.0  # interquartile ranges beyond the quartiles
_FACTOR = 4.0  # from the median
_MAX_BARS = 36  # of the histogram of sides
_DIGEST_BYTES = 16  # of sha256; chance makes no two of a billion files equal in them


class ProblemFinder:
    """Takes the listing entry by entry and keeps about 30 bytes of each, so that millions of images fit in memory."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._digests = bytearray()
        self._labels = array("i")
        self._heights = array("I")
        self._widths = array("I")
        self._in_val = bytearray()  # 1 or 0 for each image

    def add(self, split: SplitName, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take entries of a split's listing, in its order. Further calls continue where the last one ended.

        Args:
            split: whose listing it is.
            entries: with "label", "height", "width" and "sha256" (in hexadecimal digits).
        """
        in_val = int(split == "val")
        for entry in entries:
            self._digests += bytes.fromhex(entry["sha256"][: 2 * _DIGEST_BYTES])
            self._labels.append(entry["label"])
            self._heights.append(entry["height"])
            self._widths.append(entry["width"])
            self._in_val.append(in_val)

    @property
    def num_classes(self) -> int:
        """Of the data set."""
        return len(self._classes)

    def labels(self, split: SplitName) -> np.ndarray:
        """Labels of a split's images in the order of its listing: [N] int32."""
        return np.frombuffer(self._labels, np.int32)[self._is_of(split)]

    def side_histogram(self) -> SideHistogram:
        """How many images have which shorter side."""
        sides = self.short_sides()
        if not sides.size:
            return SideHistogram(edges=(), counts=())
        low, high = math.log2(int(sides.min())), math.log2(int(sides.max()) + 1)
        steps = (1 / 8, 1 / 4, 1 / 2, 1.0)  # octaves
        step = next((step for step in steps if (high - low) / step <= _MAX_BARS - 2), steps[-1])
        exponents = np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step
        edges = np.unique(np.ceil(2**exponents).astype(np.int64))  # below 16 px, neighbours can be the same pixel
        counts, _ = np.histogram(sides, edges)
        return SideHistogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))

    def problems(self, lookup: Lookup) -> Problems:
        """Look at all that was added.

        Args:
            lookup: gives the paths of the few images that are shown, see `listed_paths`. Called once for each split
                in which something was found.
        """
        groups = self._groups()
        masks = {
            "train": groups.num_train > 1,
            "val": groups.num_val > 1,
            "leaks": (groups.num_train > 0) & (groups.num_val > 0),
            "conflicts": groups.has_conflict,
        }
        shown = {name: self._shown(groups, mask, name) for name, mask in masks.items()}
        sizes = self._odd_sizes()
        odd = [index for _, indices in sizes.found.values() for index in indices] if sizes else []
        images = self._images([*odd, *(i for groups in shown.values() for _, group in groups for i in group)], lookup)

        def same_content(name: str) -> SameContent:
            mask = masks[name]
            return SameContent(
                num_contents=int(mask.sum()),
                num_train_images=0 if name == "val" else int(groups.num_train[mask].sum()),
                num_val_images=0 if name == "train" else int(groups.num_val[mask].sum()),
                examples=tuple(
                    EqualImages(num_images=number, images=tuple(images[index] for index in group))
                    for number, group in shown[name]
                ),
            )

        return Problems(
            num_images={split: int(self._is_of(split).sum()) for split in SPLITS},
            num_classes=len(self._classes),
            duplicates={split: same_content(split) for split in SPLITS},
            leaks=same_content("leaks"),
            conflicts=same_content("conflicts"),
            imbalance=self._imbalance(),
            empty_classes={split: self._empty_classes(split) for split in SPLITS},
            odd_sizes=sizes.record(images) if sizes else None,
        )

    def _is_of(self, split: SplitName) -> np.ndarray:
        return np.frombuffer(self._in_val, np.uint8) == (split == "val")

    def _class_counts(self, split: SplitName) -> np.ndarray:
        return np.bincount(self.labels(split), minlength=len(self._classes))

    def short_sides(self) -> np.ndarray:
        """[N] uint32, px: of every image, the training split's first."""
        return np.minimum(np.frombuffer(self._heights, np.uint32), np.frombuffer(self._widths, np.uint32))

    def max_width(self) -> int:
        """Of all images, px."""
        return max(self._widths)

    def max_height(self) -> int:
        """Of all images, px."""
        return max(self._heights)

    def _groups(self) -> "_Groups":
        """Sort by the first half of the digests; only what is equal there is compared in full."""
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 2)
        order = np.argsort(digests[:, 0])
        repeats = np.append(False, np.diff(digests[order, 0]) == 0)[: len(order)]  # no image, no member
        members = order[repeats | np.append(repeats[1:], False)[: len(order)]]
        members = members[np.lexsort((members, digests[members, 1], digests[members, 0]))]
        is_first = np.append(True, (np.diff(digests[members], axis=0) != 0).any(axis=1))[: len(members)]
        starts = np.flatnonzero(is_first)
        in_val = np.frombuffer(self._in_val, np.uint8)[members].astype(np.int64)
        labels = np.frombuffer(self._labels, np.int32)[members]
        return _Groups(
            members=members,
            starts=starts,
            num_train=np.add.reduceat(1 - in_val, starts),
            num_val=np.add.reduceat(in_val, starts),
            has_conflict=np.minimum.reduceat(labels, starts) != np.maximum.reduceat(labels, starts),
        )

    def _shown(self, groups: "_Groups", mask: np.ndarray, name: str) -> list[tuple[int, list[int]]]:
        """The largest groups: how many images, and some of them; one of every split, then of every label first."""
        found = np.flatnonzero(mask)
        sizes = {"train": groups.num_train, "val": groups.num_val}.get(name, groups.num_train + groups.num_val)
        chosen = found[np.lexsort((groups.members[groups.starts[found]], -sizes[found]))][:_MAX_EXAMPLES]
        shown = []
        for group in chosen.tolist():
            start = groups.starts[group]
            members = groups.members[start : start + groups.num_train[group] + groups.num_val[group]]
            if name in SPLITS:
                members = members[[self._in_val[member] == (name == "val") for member in members]]
            of_split: dict[int, int] = {}
            of_kind: dict[tuple[int, int], int] = {}
            for member in members.tolist():
                of_split.setdefault(self._in_val[member], member)
                of_kind.setdefault((self._in_val[member], self._labels[member]), member)
            first = list(dict.fromkeys([*of_split.values(), *of_kind.values()]))[:_MAX_SHOWN]
            rest = [member for member in members[: 2 * _MAX_SHOWN].tolist() if member not in first]
            shown.append((len(members), sorted([*first, *rest[: _MAX_SHOWN - len(first)]])))
        return shown

    def _images(self, indices: Sequence[int], lookup: Lookup) -> dict[int, FoundImage]:
        images: dict[int, FoundImage] = {}
        in_val = np.frombuffer(self._in_val, np.uint8)
        for split in SPLITS:
            wanted = sorted({index for index in indices if in_val[index] == (split == "val")})
            if not wanted:
                continue
            of_split = np.flatnonzero(self._is_of(split))
            paths = lookup(split, np.searchsorted(of_split, wanted).tolist())
            for index, path in zip(wanted, paths, strict=True):
                images[index] = FoundImage(
                    split=split,
                    path=printable(path),
                    class_name=self._classes[self._labels[index]],
                    height=self._heights[index],
                    width=self._widths[index],
                )
        return images

    def _imbalance(self) -> Imbalance | None:
        counts = self._class_counts("train")
        if not counts.any():
            return None
        largest, smallest = int(counts.argmax()), int(np.where(counts > 0, counts, counts.max() + 1).argmin())
        return Imbalance(
            largest=self._classes[largest],
            num_largest=int(counts[largest]),
            smallest=self._classes[smallest],
            num_smallest=int(counts[smallest]),
        )

    def _empty_classes(self, split: SplitName) -> EmptyClasses:
        empty = np.flatnonzero(self._class_counts(split) == 0)
        names = tuple(self._classes[label] for label in empty[:_MAX_EXAMPLES].tolist())
        return EmptyClasses(num_classes=len(empty), names=names)

    def _odd_sizes(self) -> "_OddSizes | None":
        """The rule is that of `OddSizes`."""
        sides = self.short_sides()
        if not sides.size:
            return None
        quartile, median, upper_quartile = np.quantile(np.log(sides), (0.25, 0.5, 0.75)).tolist()
        reach = _FENCE * (upper_quartile - quartile)
        low = round(math.exp(min(quartile - reach, median - math.log(_FACTOR))), 3)
        high = round(math.exp(max(upper_quartile + reach, median + math.log(_FACTOR))), 3)
        aspects = np.maximum(np.frombuffer(self._heights, np.uint32), np.frombuffer(self._widths, np.uint32)) / sides
        return _OddSizes(
            min_side=low,
            max_side=high,
            found={
                "small": _worst(sides < low, sides),
                "large": _worst(sides > high, -sides.astype(np.int64)),
                "elongated": _worst(aspects > MAX_ASPECT, -aspects),
            },
        )


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """Images of equal content. Group g starts at starts[g] of `members`."""

    members: np.ndarray  # [M] int64, indices of images; ascending within a group
    starts: np.ndarray  # [G] int64
    num_train: np.ndarray  # [G] int64
    num_val: np.ndarray  # [G] int64
    has_conflict: np.ndarray  # [G] bool


@dataclass(frozen=True, kw_only=True)
class _OddSizes:
    """Number of images and indices of the worst ones, by kind."""

    min_side: float
    max_side: float
    found: dict[str, tuple[int, list[int]]]

    def record(self, images: Mapping[int, FoundImage]) -> OddSizes:
        kinds = {
            name: FoundImages(num_images=number, examples=tuple(images[index] for index in indices))
            for name, (number, indices) in self.found.items()
        }
        return OddSizes(min_side=self.min_side, max_side=self.max_side, **kinds)


def _worst(mask: np.ndarray, order: np.ndarray) -> tuple[int, list[int]]:
    """How many images the mask has, and those lowest in the order."""
    found = np.flatnonzero(mask)
    return len(found), found[np.argsort(order[found], kind="stable")][:_MAX_EXAMPLES].tolist()


def listed_paths(folder: Path) -> Lookup:
    """Look paths up in train.jsonl and val.jsonl of a folder, reading line by line."""

    def lookup(split: SplitName, positions: Sequence[int]) -> list[str]:
        wanted = set(positions)
        with (folder / f"{split}.jsonl").open("rb") as lines:
            return [json.loads(line)["path"] for position, line in enumerate(lines) if position in wanted]

    return lookup


def printable(text: str) -> str:
    """With escapes for what can't be printed or is no Unicode: line breaks, lone surrogates of names not in UTF-8."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
