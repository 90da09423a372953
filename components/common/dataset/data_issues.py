"""Look for issues of a dataset as a whole: copies, leaks, contradicting labels, uneven classes, odd sizes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from components.common.contracts.settings import how_to_set
from components.common.data.image_files import read_listing

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")
SPLIT_WORDS = {"train": "training", "val": "validation"}
_MAX_RATIO = 10.0  # of the largest class to the smallest
_MAX_ASPECT = 5.0  # of the longer side to the shorter
_MAX_EXAMPLES = 20  # of each kind
_MAX_SHOWN = 6  # images of one content
_FENCE = 3.0  # interquartile ranges beyond the quartiles
_FACTOR = 4.0  # from the median
_MAX_BARS = 36  # of the histogram of sides
_DIGEST_BYTES = 16  # of sha256; chance makes no two of a billion files equal in them

Lookup = Callable[[SplitName, Sequence[int]], Sequence[str]]
"""Paths of images by split and position in the split's listing; the positions come in ascending order."""


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """An image that has an issue."""

    split: SplitName
    path: str
    """As in the listing; what can't be printed is written as an escape such as \\udce9."""
    class_name: str
    height: int
    """px"""
    width: int
    """px"""


@dataclass(frozen=True, kw_only=True)
class EqualImages:
    """Images of one content."""

    num_images: int
    images: tuple[FoundImage, ...]
    """The first ones, at most 6; those of other splits and classes come with them."""


@dataclass(frozen=True, kw_only=True)
class SimilarImages:
    """Near-duplicates."""

    images: tuple[FoundImage, ...]
    """Two."""
    pictures: tuple[bytes, ...]
    """A small copy of each, JPEG or PNG; empty where there is none."""
    correlation: float
    """Similarity of their details, 0.96 to 1."""
    change: str
    """The difference, such as "mirrored, cropped"."""


@dataclass(frozen=True, kw_only=True)
class Issue:
    """The finding of one kind, with evidence. An image can have several issues and then counts in each."""

    kind: str
    """leak, conflict, train or val (copies within that split), imbalance, no_train or no_val (classes without an
    image there), sizes; near_leak, near_train and near_val of near-duplicates"""
    line: str
    """A sentence: how many, an example, what to do."""
    groups: tuple[EqualImages, ...] = ()
    """Groups with most images first, at most 20."""
    images: tuple[FoundImage, ...] = ()
    """Images of each kind of odd size, the worst first, at most 20."""
    pairs: tuple[SimilarImages, ...] = ()
    """Pairs, the least similar first, at most 12."""


@dataclass(frozen=True, kw_only=True)
class Issues:
    """All that was found."""

    found: tuple[Issue, ...]
    min_side: float
    """Shorter sides below this are odd, px."""
    max_side: float
    """Shorter sides above this are odd, px."""
    things: Literal["images", "objects"]
    """Things that are counted by class."""

    def lines(self) -> list[str]:
        """One sentence for each issue."""
        return [issue.line for issue in self.found]

    def leak_message(self) -> str:
        """Message of the error that stops the step; empty where nothing leaks."""
        line = next((issue.line for issue in self.found if issue.kind == "leak"), "")
        how = how_to_set("preprocess", "on_leak", "warn")
        return line and f"{line}, or continue all the same with {how}; merge has this option, too"


@dataclass(frozen=True, kw_only=True)
class SideHistogram:
    """Images by their shorter side, over all splits; the bars are about equally wide on a logarithmic scale."""

    edges: tuple[int, ...]
    """px. Bar i holds the sides from edge i to below edge i + 1."""
    counts: tuple[int, ...]


_ROW = np.dtype(
    [
        ("digest", np.void, _DIGEST_BYTES),
        ("label", np.int32),
        ("height", np.uint32),
        ("width", np.uint32),
        ("val", bool),
    ]
)


_WHOLE = 0.999  # what the shares of a mask's classes, rounded, add up to where nothing is void


class IssueFinder:
    """Takes the listing entry by entry and keeps about 30 bytes of each, so that millions of images fit in memory."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self._parts = [np.empty(0, _ROW)]
        self._counts = {split: np.zeros(len(self.classes), np.int64) for split in SPLITS}  # of images, or of objects
        self._has_objects = self._has_masks = self._has_void = False
        self.num_annotations = 0  # objects, masks or classes of all images

    def add(self, split: SplitName, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take entries of a split's listing, in its order. Further calls continue where the last one ended.

        Args:
            split: whose listing it is.
            entries: with "label", "height", "width" and "sha256" (in hexadecimal digits); perhaps with "objects", whose
                fifth value is a class, and the sixth 1 if it is ignored, or with "shares", whose first is a class.
        """

        def counted(entry: Mapping[str, Any]) -> Mapping[str, Any]:
            self._count(split, entry, 1)
            return entry

        rows = (
            (bytes.fromhex(e["sha256"][: 2 * _DIGEST_BYTES]), e["label"], e["height"], e["width"], split == "val")
            for e in map(counted, entries)
        )
        self._parts.append(np.fromiter(rows, _ROW))

    @property
    def _rows(self) -> np.ndarray:
        """[N]: all images in the order they were added."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def _count(self, split: SplitName, entry: Mapping[str, Any], times: int) -> None:
        self._has_objects |= "objects" in entry
        self._has_masks |= "shares" in entry
        labels = [entry["label"]]
        if "objects" in entry:
            labels = [int(row[4]) for row in entry["objects"] if not row[5]]  # crowds are neither learned nor counted
        elif "shares" in entry:
            labels = [label for label, _ in entry["shares"]]
            self._has_void |= sum(share for _, share in entry["shares"]) < _WHOLE
        np.add.at(self._counts[split], labels, times)
        number = len(entry["objects"]) if "objects" in entry else entry.get("num_annotations", 1)
        self.num_annotations += times * number

    def leave_out(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Forget images of the validation split: entries by their places in its listing, once all are added."""
        self._parts = [np.delete(self._rows, np.flatnonzero(self.in_val())[list(entries)])]
        for entry in entries.values():
            self._count("val", entry, -1)

    def class_counts(self, split: SplitName) -> np.ndarray:
        """[classes] int64: images of each class in a split; objects, where images have several.

        An image with a mask counts in each class that its mask shows.
        """
        return self._counts[split]

    @property
    def _things(self) -> Literal["images", "objects"]:
        return "objects" if self._has_objects else "images"

    def labels(self, split: str) -> np.ndarray:
        """Labels of a split's images in the order of its listing: [N] int32."""
        return self._rows["label"][self._is_of(split)]

    def in_val(self) -> np.ndarray:
        """[N] bool: the images of the validation split, over both splits in the order they were added."""
        return self._rows["val"]

    def contents(self) -> np.ndarray:
        """[N] integers from 0: equal files have the same."""
        digests = np.ascontiguousarray(self._rows["digest"]).view(np.uint64).reshape(-1, 2)
        order = np.lexsort(digests.T)
        digests = digests[order]
        contents = np.zeros(len(order), np.int32)
        contents[order[1:]] = np.cumsum((digests[1:] != digests[:-1]).any(1), dtype=np.int32)
        return contents

    def sizes(self) -> np.ndarray:
        """[N, 2] uint32, px: height and width."""
        return np.stack([self._rows["height"], self._rows["width"]], axis=1)

    def side_histogram(self) -> SideHistogram:
        """Count the images by their shorter side."""
        sides = self.short_sides()
        low, high = math.log2(int(sides.min())), math.log2(int(sides.max()) + 1)
        steps = (1 / 8, 1 / 4, 1 / 2, 1.0)  # octaves
        step = next((step for step in steps if (high - low) / step <= _MAX_BARS - 2), steps[-1])
        exponents = np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step
        edges = np.unique(np.ceil(2**exponents).astype(np.int64))  # below 16 px, neighbours can be the same pixel
        counts, _ = np.histogram(sides, edges)
        return SideHistogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))

    def issues(self, lookup: Lookup) -> Issues:
        """Look at all that was added, which are images of both splits.

        Args:
            lookup: gives the paths of the few images that are shown, see `listed_paths`. Called once for each split
                in which something was found.
        """
        contents, in_val, labels = self.contents(), self.in_val(), self._rows["label"]
        number = int(contents.max(initial=-1)) + 1
        num_train, num_val = (
            np.bincount(contents[is_in], minlength=number).astype(np.int32) for is_in in (~in_val, in_val)
        )
        lowest, highest = np.full(number, len(self.classes), np.int32), np.zeros(number, np.int32)
        np.minimum.at(lowest, contents, labels)
        np.maximum.at(highest, contents, labels)
        masks = {
            "leak": (num_train > 0) & (num_val > 0),
            "conflict": (lowest < highest) & (not self._has_objects) & (not self._has_masks),
            "train": num_train > 1,
            "val": num_val > 1,
        }
        sizes = {"train": num_train, "val": num_val}
        shown = {
            kind: self._shown(contents, mask, sizes.get(kind, num_train + num_val), kind)
            for kind, mask in masks.items()
            if mask.any()
        }
        low, high, odd = self._odd_sizes()
        images = self._images(
            [index for examples in (*shown.values(), odd.values()) for _, own in examples for index in own], lookup
        )
        found = []
        for kind, examples in shown.items():
            equal = tuple(
                EqualImages(num_images=number, images=tuple(images[index] for index in own)) for number, own in examples
            )
            totals = {split: int(number[masks[kind]].sum()) for split, number in sizes.items()}
            line = self._same_line(kind, equal[0].images, totals, int(masks[kind].sum()))
            found.append(Issue(kind=kind, line=line, groups=equal))
        found += self._class_issues()
        if odd:
            worst = {what: (number, [images[index] for index in own]) for what, (number, own) in odd.items()}
            every = tuple(dict.fromkeys(image for _, own in worst.values() for image in own))
            found.append(Issue(kind="sizes", line=_size_line(worst), images=every))
        return Issues(found=tuple(found), min_side=low, max_side=high, things=self._things)

    def _same_line(self, kind: str, images: Sequence[FoundImage], totals: Mapping[str, int], num_contents: int) -> str:
        """Return a line on images of equal content, the `images` those of the largest group."""
        if kind == "leak":
            train, val = (next(image for image in images if image.split == split) for split in SPLITS)
            are_images = "is a training image" if totals["val"] == 1 else "are training images"
            return (
                f"{totals['val']:,} of {len(self.labels('val')):,} validation images {are_images} too, such as "
                f"{val.path}, which is the same file as {train.path} of the training split. The measured accuracy "
                "would be too high; remove what is in both from one of them"
            )
        first, second, *_ = images
        if kind == "conflict":
            other = next(image for image in images if image.class_name != first.class_name)
            return (
                f"{sum(totals.values()):,} images have the same content as one of another class, such as {first.path} "
                f"({first.class_name!r}) and {other.path} ({other.class_name!r}). A classifier gives one answer for "
                "both; keep each content in one class only"
            )
        num_copies = totals[kind] - num_contents
        are_copies = "is a copy of another" if num_copies == 1 else "are copies of others"
        where = "in every epoch" if kind == "train" else "in the accuracy"
        return (
            f"{num_copies:,} of {len(self.labels(kind)):,} {SPLIT_WORDS[kind]} images {are_copies} there, such as "
            f"{second.path} of {first.path}. A copy counts once more {where}; remove the copies"
        )

    def _class_issues(self) -> Iterable[Issue]:
        """Classes without images, and a largest class of more than 10 times the images of the smallest."""
        counts, things = self.class_counts("train"), self._things
        largest, smallest = int(counts.argmax()), int(np.where(counts > 0, counts, counts.max() + 1).argmin())
        if counts[largest] > _MAX_RATIO * counts[smallest]:
            ratio = counts[largest] / counts[smallest]
            line = (
                f"the classes are uneven: {self.classes[largest]!r} has {ratio:,.1f} times as many training {things} "
                f"as {self.classes[smallest]!r} ({counts[largest]:,} and {counts[smallest]:,}). Small classes are "
                "learned worse, and the score hardly shows it; add images to them, and look at the report's accuracy "
                "by class"
            )
            yield Issue(kind="imbalance", line=line)
        for split in SPLITS:
            empty = np.flatnonzero(self.class_counts(split) == 0)
            if len(empty):
                effect = (
                    "The model can't learn them" if split == "train" else "Nothing tells how well they are recognized"
                )
                line = (
                    f"the {SPLIT_WORDS[split]} split has no {things[:-1]} of {len(empty):,} of {len(self.classes):,} "
                    f"classes, such as {self.classes[empty[0]]!r}. {effect}; add images of them"
                )
                if self._has_void:
                    line += ", and see that none of them is 255 in the masks, which is void"
                yield Issue(kind=f"no_{split}", line=line)

    def _is_of(self, split: str) -> np.ndarray:
        return self.in_val() == (split == "val")

    def short_sides(self) -> np.ndarray:
        """[N] uint32, px: of every image, the training split's first."""
        return self.sizes().min(axis=1)

    def _shown(
        self, contents: np.ndarray, mask: np.ndarray, sizes: np.ndarray, name: str
    ) -> list[tuple[int, list[int]]]:
        """The contents of most images: how many, and some of them; one of every split, then of every label first."""
        found = np.flatnonzero(mask)
        first = np.full(len(mask), len(contents), np.int32)
        np.minimum.at(first, contents, np.arange(len(contents), dtype=np.int32))
        shown = []
        for content in found[np.lexsort((first[found], -sizes[found]))][:_MAX_EXAMPLES].tolist():
            members = np.flatnonzero(contents == content)
            if name in SPLITS:
                members = members[self._is_of(name)[members]]
            of_split: dict[int, int] = {}
            of_kind: dict[tuple[int, int], int] = {}
            kinds = zip(members.tolist(), self._rows[["val", "label"]][members].tolist(), strict=True)
            for member, (in_val, label) in kinds:
                of_split.setdefault(in_val, member)
                of_kind.setdefault((in_val, label), member)
            chosen = list(dict.fromkeys([*of_split.values(), *of_kind.values()]))[:_MAX_SHOWN]
            rest = [member for member in members[: 2 * _MAX_SHOWN].tolist() if member not in chosen]
            shown.append((len(members), sorted([*chosen, *rest[: _MAX_SHOWN - len(chosen)]])))
        return shown

    def _images(self, indices: Sequence[int], lookup: Lookup) -> dict[int, FoundImage]:
        images: dict[int, FoundImage] = {}
        for split in SPLITS:
            is_of_split = self._is_of(split)
            wanted = sorted({index for index in indices if is_of_split[index]})
            if not wanted:
                continue
            of_split = np.flatnonzero(is_of_split)
            paths = lookup(split, np.searchsorted(of_split, wanted).tolist())
            for index, path in zip(wanted, paths, strict=True):
                _, label, height, width, _ = self._rows[index].tolist()
                images[index] = FoundImage(
                    split=split, path=printable(path), class_name=self.classes[label], height=height, width=width
                )
        return images

    def _odd_sizes(self) -> tuple[float, float, dict[str, tuple[int, list[int]]]]:
        """Images whose size is far from the others'.

        A shorter side is odd when it is both more than three interquartile ranges outside the quartiles of its
        logarithm (Tukey's outer fences) and more than a factor of four away from the median; quartiles and median are
        those of all images. The fences alone would flag harmless images of a set whose sizes hardly vary, the factor
        alone the ends of a set whose sizes vary much. Whatever the others are like, an image is odd whose longer side
        is more than five times its shorter one: the crop of the transform sees less than a fifth of it.

        Returns:
            The smallest and the largest usual side, px; and by what is odd, the number of images and indices of the
            worst ones.
        """
        sides = self.short_sides()
        quartile, median, upper_quartile = np.quantile(np.log(sides), (0.25, 0.5, 0.75)).tolist()
        reach = _FENCE * (upper_quartile - quartile)
        low = round(math.exp(min(quartile - reach, median - math.log(_FACTOR))), 3)
        high = round(math.exp(max(upper_quartile + reach, median + math.log(_FACTOR))), 3)
        aspects = self.sizes().max(axis=1) / sides
        found = {
            f"a shorter side below {low:,.0f} px": _worst(sides < low, sides),
            f"a shorter side above {high:,.0f} px": _worst(sides > high, -sides.astype(np.int64)),
            f"a longer side of more than {_MAX_ASPECT:g} times the shorter": _worst(aspects > _MAX_ASPECT, -aspects),
        }
        return low, high, {what: worst for what, worst in found.items() if worst[0]}


def _size_line(worst: Mapping[str, tuple[int, Sequence[FoundImage]]]) -> str:
    found = [
        f"{number:,} {'has' if number == 1 else 'have'} {what}, such as {first.path} ({first.width} x {first.height})"
        for what, (number, (first, *_)) in worst.items()
    ]
    advice = "Look whether they are what the others are, and remove thumbnails, banners and strips"
    return f"the size of some images is far from the others': {'; '.join(found)}. {advice}"


def _worst(mask: np.ndarray, order: np.ndarray) -> tuple[int, list[int]]:
    """Return how many images the mask has, and those lowest in the order."""
    found = np.flatnonzero(mask)
    return len(found), found[np.argsort(order[found], kind="stable")][:_MAX_EXAMPLES].tolist()


def listed_paths(folder: Path) -> Lookup:
    """Look paths up in train.jsonl and val.jsonl of a folder, reading line by line."""

    def lookup(split: SplitName, positions: Sequence[int]) -> list[str]:
        return [entry["path"] for entry in read_listing(folder / f"{split}.jsonl", set(positions)).values()]

    return lookup


def printable(text: str) -> str:
    """Escape what can't be printed or is no Unicode: line breaks, lone surrogates of names not in UTF-8."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
