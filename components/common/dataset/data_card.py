"""Write data_card.html: what is in a dataset, what it looks like, and its issues."""

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import DatasetStatistics, NearDuplicates, Split
from components.common.data.image_files import read_images, read_listing, thumbnail
from components.common.data.pages import data_uri, templates
from components.common.data.read_alike import Rejected, decode
from components.common.dataset.data_issues import SPLIT_WORDS, Issues, SideHistogram, SplitName

DATA_CARD = "data_card.html"
_MAX_ROWS = 30  # classes whose table is open; of more, the largest and the smallest are
_MAX_REJECTED = 50
_MAX_KINDS = 20  # reasons of rejection
_MAX_OPEN = 3  # examples that are shown at once; more are folded
_MAX_NAME, _MAX_PATH, _MAX_TEXT = 80, 160, 2000  # characters
_MAX_CLASSES = 10
_MAX_PER_CLASS = 6
_MAX_SIDE = 112  # pixels; sixty thumbnails of this size stay far below a megabyte, noise too
_SMALL_SIDE = 40  # thumbnails up to this size stay exact
_ANY_SIZE = 1 << 62  # pixels; what is packed was let in


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small copy of one image."""

    path: str
    label: int
    data: bytes
    """JPEG or PNG file."""


def sample_positions(labels: np.ndarray, num_classes: int) -> list[int]:
    """Choose the images of a split to show, at most 60: up to six of each class, spread over the listing.

    Of more than ten classes with images, the five largest and the five smallest are shown.

    Args:
        labels: [N] integers, in the order of the listing.
        num_classes: more than any label.

    Returns:
        Positions in the listing, in ascending order.
    """
    counts = np.bincount(labels, minlength=num_classes)
    by_size = [label for label in np.argsort(-counts, kind="stable").tolist() if counts[label]]
    half = _MAX_CLASSES // 2
    chosen = by_size if len(by_size) <= _MAX_CLASSES else [*by_size[:half], *by_size[-half:]]
    positions = []
    for label in chosen:
        own = np.flatnonzero(labels == label)
        spread = np.linspace(0, len(own) - 1, min(_MAX_PER_CLASS, len(own))).round().astype(int)
        positions += own[spread].tolist()
    return sorted(positions)


def read_thumbnails(folder: Path, split: str, positions: Iterable[int]) -> tuple[Thumbnail, ...]:
    """Thumbnails of images of a split, in the order of its listing.

    Args:
        folder: with the split's shards, their indexes and its listing.
        split: train or val.
        positions: in the listing.
    """
    wanted = set(positions)
    entries = [*read_listing(folder / f"{split}.jsonl", wanted).values()]
    keys = {entry["key"] for entry in entries}
    thumbnails: dict[str, bytes] = {}
    for key, file in read_images(sorted(folder.glob(f"{split}-*.tar")), keys):
        with suppress(Rejected):  # an image of a size that Pillow refuses in this process: a thumbnail less
            thumbnails[key] = thumbnail(decode(file, _ANY_SIZE)[1], max_side=_MAX_SIDE, exact_side=_SMALL_SIDE)
    return tuple(
        Thumbnail(path=entry["path"], label=entry["label"], data=thumbnails[entry["key"]])
        for entry in entries
        if entry["key"] in thumbnails
    )


@dataclass(frozen=True, kw_only=True)
class Rejections:
    """Files that were left out."""

    num_files: int
    by_kind: Mapping[str, int]
    """Number of files by the kind of reason, the most frequent first."""
    examples: tuple[tuple[str, str], ...]
    """Path and reason of the first 50."""

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> "Rejections":
        """Summarize the entries of rejected.jsonl, each with "path" and "reason"; they need not fit in memory."""
        kinds: Counter[str] = Counter()
        examples: list[tuple[str, str]] = []
        for entry in entries:
            kinds[_kind(entry["reason"])] += 1
            if len(examples) < _MAX_REJECTED:
                examples.append((entry["path"], entry["reason"]))
        return cls(num_files=kinds.total(), by_kind=dict(kinds.most_common(_MAX_KINDS)), examples=tuple(examples))


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of a data card."""

    source: str
    """Folder or URI of the images."""
    classes: Sequence[str]
    splits: Mapping[SplitName, Split]
    statistics: DatasetStatistics
    sides: SideHistogram
    rejections: Rejections
    issues: Issues
    thumbnails: Sequence[Thumbnail]
    """Some training images."""
    config: Mapping[str, Any]
    near_duplicates: NearDuplicates | None = None
    """None where they were not looked for."""


@dataclass(frozen=True, kw_only=True)
class _ClassRow:
    name: str
    num_train: int
    num_val: int
    share_pct: float  # of the largest class, in the training split


def write_data_card(card: Card, folder: Path) -> Path:
    """Write data_card.html: one file that needs no network, and is the same for the same card.

    Returns:
        Its path.
    """
    train, val = card.splits["train"].class_counts, card.splits["val"].class_counts
    most = max(*train, 1)
    rows = [
        _ClassRow(name=name, num_train=in_train, num_val=in_val, share_pct=100 * in_train / most)
        for name, in_train, in_val in zip(card.classes, train, val, strict=True)
    ]
    page = (
        templates(filters=_FILTERS)
        .get_template("data_card.html.j2")
        .render(
            card=card,
            rows=rows,
            shown_rows=_largest_and_smallest(rows),
            samples=_samples(card),
            chart=Markup(side_chart(card.sides)),  # noqa: S704  # drawn here, of numbers alone
            words=SPLIT_WORDS,
            max_open=_MAX_OPEN,
        )
    )
    path = folder / DATA_CARD
    # Paths that are not UTF-8 hold lone surrogates; they are shown as \udcXX, as the listing writes them.
    write_atomically(path, page.encode(errors="backslashreplace"))
    return path


def _kind(reason: str) -> str:
    """A reason without what is about one file: "damaged", "more than max_pixels = 100000000 pixels"."""
    return re.split("[:;]", re.sub(r"^\d+x\d+ has ", "", reason), maxsplit=1)[0].strip()


def _largest_and_smallest(rows: Sequence[_ClassRow]) -> list[_ClassRow]:
    """All rows, or the ten largest and the ten smallest."""
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    by_size = sorted(rows, key=lambda row: -row.num_train)
    return [*by_size[:10], *by_size[-10:]]


def _samples(card: Card) -> list[tuple[str, int, list[tuple[str, str]]]]:
    """Class, its training images, and path and data URI of each picture; of many classes the largest first."""
    counts = card.splits["train"].class_counts
    in_order = len({thumbnail.label for thumbnail in card.thumbnails}) == sum(map(bool, counts))
    ordered = sorted(
        card.thumbnails, key=lambda thumbnail: (0 if in_order else -counts[thumbnail.label], thumbnail.label)
    )
    return [
        (card.classes[label], counts[label], [(thumbnail.path, data_uri(thumbnail.data)) for thumbnail in thumbnails])
        for label, thumbnails in groupby(ordered, key=lambda one: one.label)
    ]


def side_chart(sides: SideHistogram) -> str:
    """Histogram as inline SVG in the colours of the page, or "" for a single bar, which would say nothing."""
    if len(sides.counts) < 2:
        return ""
    left, right, top, bottom = 8.0, 472.0, 26.0, 196.0  # of the bars, in units of the drawing
    width, most = (right - left) / len(sides.counts), max(sides.counts)
    parts = [
        '<svg viewBox="0 0 480 236" role="img" aria-label="Images by shorter side">',
        f'<text x="{left}" y="14">highest bar: {most:,} image{"s" if most > 1 else ""}</text>',
    ]
    for index, (count, (low, high)) in enumerate(zip(sides.counts, pairwise(sides.edges), strict=True)):
        if count:
            height = max(2.0, (bottom - top) * count / most)  # a single image is seen too
            name = html.escape(f"{low:,} to {high - 1:,} px: {count:,} image{'s' if count > 1 else ''}")
            place = f'x="{left + index * width:.1f}" y="{bottom - height:.1f}"'
            parts.append(f'<rect {place} width="{width * 0.88:.1f}" height="{height:.1f}"><title>{name}</title></rect>')
    parts.append(f'<path d="M{left} {bottom}H{right}"/>')
    for index in _ticks(sides.edges):
        parts.append(f'<text class="tick" x="{left + index * width:.1f}" y="213">{sides.edges[index]:,}</text>')
    parts.append(f'<text class="tick" x="{(left + right) / 2}" y="233">shorter side in px, logarithmic</text></svg>')
    return "".join(parts)


def _ticks(edges: Sequence[int]) -> Sequence[int]:
    """Return the edges that have their number: the powers of two, or every so many."""
    powers = [index for index, edge in enumerate(edges) if edge.bit_count() == 1]
    return powers if 3 <= len(powers) <= 9 else range(0, len(edges), -(-len(edges) // 8))


_FILTERS: dict[str, Callable[..., Any]] = {
    "count": "{:,}".format,
    "name": lambda text: _cut(text, _MAX_NAME),
    "path": lambda text: _cut(text, _MAX_PATH),
    "text": lambda text: _cut(text, _MAX_TEXT),
    "picture": data_uri,
    "zip": zip,
    "setting": lambda value: json.dumps(value, ensure_ascii=False),
}


def _cut(text: str, max_characters: int) -> str:
    """Without the middle of what is too long, so that the size of the page has a bound."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} … {text[-half:]}"
