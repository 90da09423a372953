"""Look for issues of a dataset as a whole: copies, leaks, contradicting labels, uneven classes, odd sizes."""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from components.common.contracts.records import Record
from components.common.contracts.settings import how_to_set

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")
MAX_RATIO = 10.0  # of the largest class to the smallest
MAX_ASPECT = 5.0  # of the longer side to the shorter
_WORDS = {"train": "training", "val": "validation"}


class FoundImage(Record):
    """An image that was found to have a problem."""

    split: SplitName
    path: str = Field(description="As in the listing; what can't be printed is written as an escape such as \\udce9.")
    class_name: str
    height: int = Field(description="In pixels.")
    width: int = Field(description="In pixels.")


class FoundImages(Record):
    """Images with the same problem."""

    num_images: int
    examples: tuple[FoundImage, ...] = Field(description="At most 20, the worst first.")


class EqualImages(Record):
    """Images of one content."""

    num_images: int
    images: tuple[FoundImage, ...] = Field(description="At most 6; those of other splits and classes come with them.")


class SameContent(Record):
    """Contents that several images share."""

    num_contents: int
    num_train_images: int = Field(description="Training images that have one of these contents.")
    num_val_images: int = Field(description="Validation images that have one of these contents.")
    examples: tuple[EqualImages, ...] = Field(description="At most 20, those of most images first.")


class Imbalance(Record):
    """The largest and the smallest class of the training split that has images."""

    largest: str
    num_largest: int
    smallest: str
    num_smallest: int

    @property
    def ratio(self) -> float:
        """Images of the largest class for one of the smallest."""
        return self.num_largest / self.num_smallest

    @property
    def is_problem(self) -> bool:
        """Whether the ratio is above 10."""
        return self.ratio > MAX_RATIO


class EmptyClasses(Record):
    """Classes without an image in a split."""

    num_classes: int
    names: tuple[str, ...] = Field(description="At most 20 of them.")


class OddSizes(Record):
    """Images whose size is far from the others'.

    A shorter side is odd when it is both more than three interquartile ranges outside the quartiles of its logarithm
    (Tukey's outer fences) and more than a factor of four away from the median; quartiles and median are those of all
    images. The fences alone would flag harmless images of a set whose sizes hardly vary, the factor alone the ends of
    a set whose sizes vary much. Whatever the others are like, an image is odd whose longer side is more than five
    times its shorter one: the crop of the transform sees less than a fifth of it.
    """

    min_side: float = Field(description="Shorter sides below this are odd, in pixels.")
    max_side: float = Field(description="Shorter sides above this are odd, in pixels.")
    small: FoundImages
    large: FoundImages
    elongated: FoundImages


class SideHistogram(Record):
    """Images by their shorter side, over all splits; the bars are about equally wide on a logarithmic scale."""

    edges: tuple[int, ...] = Field(description="In pixels. Bar i holds the sides from edge i to below edge i + 1.")
    counts: tuple[int, ...]


class Problems(Record):
    """What was found, with evidence. An image can have several problems and then counts in each."""

    num_images: dict[SplitName, int]
    num_classes: int
    duplicates: dict[SplitName, SameContent] = Field(description="Contents that a split holds more than once.")
    leaks: SameContent = Field(description="Contents that are both in training and in validation.")
    conflicts: SameContent = Field(description="Contents with more than one label, in whichever split.")
    imbalance: Imbalance | None = Field(description="None where the training split holds no image.")
    empty_classes: dict[SplitName, EmptyClasses]
    odd_sizes: OddSizes | None = Field(description="None where there is no image.")

    def lines(self) -> list[str]:
        """One sentence for each problem: how many, an example, what to do. Empty where nothing was found."""
        lines = [self.duplicate_line(split) for split in SPLITS]
        lines += [self.leak_line(), self.conflict_line(), self.imbalance_line()]
        lines += [self.empty_line(split) for split in SPLITS]
        return [line for line in [*lines, self.size_line()] if line]

    def leak_message(self) -> str:
        """For the error that stops the step; empty where nothing leaks."""
        line = self.leak_line()
        how = how_to_set("preprocess", "on_leak", "warn")
        return line and f"{line}, or go on all the same with {how}; merge has this option, too"

    def duplicate_line(self, split: SplitName) -> str:
        """About copies within a split; empty where it has none."""
        found = self.duplicates[split]
        if not found.num_contents:
            return ""
        first, second, *_ = found.examples[0].images
        num_copies = found.num_train_images + found.num_val_images - found.num_contents
        where = "in every epoch" if split == "train" else "in the accuracy"
        are_copies = "is a copy of another" if num_copies == 1 else "are copies of others"
        return (
            f"{num_copies:,} of {self.num_images[split]:,} {_WORDS[split]} images {are_copies} there, such as "
            f"{second.path} of {first.path}. A copy counts once more {where}; remove the copies"
        )

    def leak_line(self) -> str:
        """About what is both in training and in validation; empty where nothing is."""
        if not self.leaks.num_contents:
            return ""
        train = next(image for image in self.leaks.examples[0].images if image.split == "train")
        val = next(image for image in self.leaks.examples[0].images if image.split == "val")
        num_leaks = self.leaks.num_val_images
        are_images = "is a training image" if num_leaks == 1 else "are training images"
        return (
            f"{num_leaks:,} of {self.num_images['val']:,} validation images {are_images} too, such as {val.path}, "
            f"which is the same file as {train.path} of the training split. The measured accuracy would be too high; "
            "remove what is in both from one of them"
        )

    def conflict_line(self) -> str:
        """About contents with several labels; empty where there are none."""
        found = self.conflicts
        if not found.num_contents:
            return ""
        first = found.examples[0].images[0]
        other = next(image for image in found.examples[0].images if image.class_name != first.class_name)
        num_images = found.num_train_images + found.num_val_images
        return (
            f"{num_images:,} images have the same content as one of another class, such as {first.path} "
            f"({first.class_name!r}) and {other.path} ({other.class_name!r}). A classifier gives one answer for both; "
            "keep each content in one class only"
        )

    def imbalance_line(self) -> str:
        """About uneven classes; empty where the largest has at most 10 times the images of the smallest."""
        found = self.imbalance
        if found is None or not found.is_problem:
            return ""
        return (
            f"the classes are uneven: {found.largest!r} has {found.ratio:,.1f} times as many training images as "
            f"{found.smallest!r} ({found.num_largest:,} and {found.num_smallest:,}). Small classes are learned worse, "
            "and top-1 hardly shows it; add images to them, and look at the report's accuracy by class"
        )

    def empty_line(self, split: SplitName) -> str:
        """About classes without an image; empty where every class has one."""
        found = self.empty_classes[split]
        if not found.num_classes:
            return ""
        effect = "The model can't learn them" if split == "train" else "Nothing tells how well they are recognized"
        return (
            f"the {_WORDS[split]} split has no image of {found.num_classes:,} of {self.num_classes:,} classes, such as "
            f"{found.names[0]!r}. {effect}; add images of them"
        )

    def size_line(self) -> str:
        """About odd sizes; empty where there are none."""
        sizes = self.odd_sizes
        if sizes is None:
            return ""
        kinds = (
            (sizes.small, f"a shorter side below {sizes.min_side:,.0f} px"),
            (sizes.large, f"a shorter side above {sizes.max_side:,.0f} px"),
            (sizes.elongated, f"a longer side of more than {MAX_ASPECT:g} times the shorter"),
        )
        found = [
            f"{images.num_images:,} {'has' if images.num_images == 1 else 'have'} {what}, such as "
            f"{images.examples[0].path} ({images.examples[0].width} x {images.examples[0].height})"
            for images, what in kinds
            if images.num_images
        ]
        advice = "Look whether they are what the others are, and remove thumbnails, banners and strips"
        return f"the size of some images is far from the others': {'; '.join(found)}. {advice}" if found else ""


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
