"""Events, timeline, thumbnails and latencies of a stream, in memory that stays flat however long it is."""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

_MAX_BINS = 512  # of a timeline
_FIRST_BIN_S = 0.25
_MAX_THUMBNAILS = 16
_NEAR_S = 1.0  # a frame that tells no more than the one before it
_THUMBNAIL_PIXELS = 192  # of the longer side
_MAX_SHOWN_EVENTS = 200  # kept for the page; the file has all
_NONE = -1  # the class of a frame without one


class HeldLabel:
    """The class that holds: likeliest in `hold_frames` labelled frames in a row."""

    def __init__(self, hold_frames: int) -> None:
        self._hold_frames = hold_frames
        self._candidate, self._length, self._since = _NONE, 0, (0, 0.0)
        self.held = _NONE
        self._held_since_s = 0.0

    def update(self, label: int, number: int, time_s: float) -> dict[str, Any] | None:
        """Take the next frame's class, -1 for none. Returns the event that it completes, or None.

        An event has the class (`label`), the first frame that showed it (`since_frame`, `since_s`), and where another
        was held before, that one (`before`) and for how long (`before_s`).
        """
        if label != self._candidate:
            self._candidate, self._length, self._since = label, 0, (number, time_s)
        self._length += 1
        if self._length != self._hold_frames or label in (_NONE, self.held):
            return None
        since_frame, since_s = self._since
        event: dict[str, Any] = {"label": label, "since_frame": since_frame, "since_s": since_s}
        if self.held != _NONE:
            event |= {"before": self.held, "before_s": since_s - self._held_since_s}
        self.held, self._held_since_s = label, since_s
        return event


class Timeline:
    """The most frequent class by time, in at most 512 parts of equal length."""

    def __init__(self) -> None:
        self.bin_s = _FIRST_BIN_S
        self._bins: list[Counter[int]] = []

    def add(self, label: int, time_s: float) -> None:
        """Count a frame's class, -1 for none."""
        index = int(time_s / self.bin_s)
        while index >= _MAX_BINS:
            pairs = zip(self._bins[::2], [*self._bins[1::2], Counter()], strict=False)
            self._bins = [first + second for first, second in pairs]
            self.bin_s *= 2
            index = int(time_s / self.bin_s)
        self._bins += [Counter() for _ in range(index + 1 - len(self._bins))]
        self._bins[index][label] += 1

    def segments(self) -> Iterator[tuple[int | None, float, float]]:
        """Class, begin and end in seconds of each stretch with the same one; None where there was no frame."""
        labels = [bin_.most_common(1)[0][0] if bin_ else None for bin_ in self._bins]
        start = 0
        for index in range(1, len(labels) + 1):
            if index == len(labels) or labels[index] != labels[start]:
                yield labels[start], start * self.bin_s, index * self.bin_s
                start = index


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small picture of a frame."""

    time_s: float
    label: int
    probability: float
    jpeg: bytes


class Thumbnails:
    """At most 16 frames that tell most: those where a class began to hold, as far apart as there is room for."""

    def __init__(self) -> None:
        self.kept: list[Thumbnail] = []
        self._least_gap_s = 0.0

    def offer(self, pixels: np.ndarray, time_s: float, label: int, probability: float) -> None:
        """Keep a frame, unless it is too near to the last one. `pixels`: [H, W, 3] uint8 RGB."""
        last = self.kept[-1] if self.kept else None
        if last is not None and time_s - last.time_s < (_NEAR_S if last.label == label else self._least_gap_s):
            return
        image = Image.fromarray(pixels)
        image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        self.kept.append(Thumbnail(time_s=time_s, label=label, probability=probability, jpeg=buffer.getvalue()))
        if len(self.kept) > _MAX_THUMBNAILS:
            self._least_gap_s = max(2 * self._least_gap_s, 2 * self.kept[-1].time_s / _MAX_THUMBNAILS)
            self.kept = self.kept[::2]


class Latencies:
    """Times from frame to label as a histogram of bins that grow by 2 %, from 0.1 ms to over 16 minutes."""

    _GROWTH = 1.02
    _LEAST_MS = 0.1

    def __init__(self) -> None:
        self._counts = np.zeros(820, np.int64)

    def add(self, milliseconds: float) -> None:
        """Count one."""
        place = np.log(max(milliseconds, self._LEAST_MS) / self._LEAST_MS) / np.log(self._GROWTH)
        self._counts[min(int(place), len(self._counts) - 1)] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The time below which `percent` per cent lie, at most 2 % too large; None where nothing was counted."""
        total = int(self._counts.sum())
        if not total:
            return None
        index = int(np.searchsorted(np.cumsum(self._counts), percent / 100 * total))
        return float(self._LEAST_MS * self._GROWTH ** (index + 1))


class StreamResult:
    """Everything that is kept of one stream."""

    def __init__(self, hold_frames: int) -> None:
        self.held = HeldLabel(hold_frames)
        self.timeline = Timeline()
        self.thumbnails = Thumbnails()
        self.latencies = Latencies()
        self.counts: Counter[int] = Counter()  # labelled frames by class
        self.shown_events: list[dict[str, Any]] = []
        self.num_events = 0
        self.last_s = 0.0

    @property
    def num_labelled(self) -> int:
        """Frames that the model saw."""
        return self.counts.total()

    def keep_event(self, event: dict[str, Any]) -> None:
        """Keep an event for the page, the first ones."""
        self.num_events += 1
        if len(self.shown_events) < _MAX_SHOWN_EVENTS:
            self.shown_events.append(event)
