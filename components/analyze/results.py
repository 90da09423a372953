"""Events, timeline, thumbnails and latencies of a stream, in memory that stays flat however long it is."""

import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator
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
NONE = "(none)"  # the class of a frame without one
_ALL = ""  # no class's name


@dataclass(kw_only=True)
class _Run:
    """Labelled frames in a row that show a class, or that do not."""

    is_shown: bool
    since_frame: int
    since_s: float
    length: int = 0


class HeldClasses:
    """The classes that hold: from `hold_frames` labelled frames in a row that show one, to as many that do not."""

    def __init__(self, hold_frames: int, *, shows_one: bool) -> None:
        """`shows_one`: a frame shows one class at most, which holds until another does."""
        self._hold_frames, self._shows_one = hold_frames, shows_one
        self.held: tuple[str, ...] = ()
        self._held_since_s: float | None = None
        self._runs: dict[str, _Run] = {}  # of classes that are shown or held

    def update(self, shown: Collection[str], number: int, time_s: float) -> dict[str, Any] | None:
        """Take the classes of the next frame. Returns the event that it completes, or None.

        An event has the classes that are held (`classes`), the first frame that showed them so (`since_frame`,
        `since_s`), and unless it is the first event, those before (`before`) and for how long (`before_s`).
        """
        self._runs = {name: run for name, run in self._runs.items() if run.is_shown or name in self.held}
        for name in {*shown, *self._runs}:
            if name not in self._runs or self._runs[name].is_shown != (name in shown):
                self._runs[name] = _Run(is_shown=name in shown, since_frame=number, since_s=time_s)
            self._runs[name].length += 1
        complete = {name: run for name, run in self._runs.items() if run.length >= self._hold_frames}
        begun = {name: run for name, run in complete.items() if run.is_shown and name not in self.held}
        gone = {name: run for name, run in complete.items() if not run.is_shown and name in self.held}
        changed = begun if self._shows_one else begun | gone
        if not changed:
            return None
        run = next(iter(changed.values()))  # all of them began with the same frame
        held = tuple(sorted(begun if self._shows_one else {*self.held, *begun} - {*gone}))
        event: dict[str, Any] = {"classes": held, "since_frame": run.since_frame, "since_s": round(run.since_s, 3)}
        if self._held_since_s is not None:
            event |= {"before": self.held, "before_s": round(run.since_s - self._held_since_s, 3)}
        self.held, self._held_since_s = held, run.since_s
        return event


class Timeline:
    """The classes by time, in at most 512 parts of equal length."""

    def __init__(self) -> None:
        self.bin_s = _FIRST_BIN_S
        self._bins: list[Counter[str]] = []  # frames by class, and of all by _ALL

    def add(self, shown: Collection[str], time_s: float) -> None:
        """Count a frame's classes."""
        index = int(time_s / self.bin_s)
        while index >= _MAX_BINS:
            pairs = zip(self._bins[::2], [*self._bins[1::2], Counter()], strict=False)
            self._bins = [first + second for first, second in pairs]
            self.bin_s *= 2
            index = int(time_s / self.bin_s)
        self._bins += [Counter() for _ in range(index + 1 - len(self._bins))]
        for name in (_ALL, *(shown or [NONE])):
            self._bins[index][name] += 1

    def segments(self) -> Iterator[tuple[str, float, float]]:
        """Class, begin and end in seconds of each stretch of parts that show it, in the order of their ends.

        A part shows its most frequent class, and those of more than half of its frames.
        """
        begun: dict[str, int] = {}
        for index, bin_ in enumerate([*self._bins, Counter[str]()]):
            classes = Counter({name: count for name, count in bin_.items() if name != _ALL})
            shown = {name for name, _ in classes.most_common(1)}
            shown |= {name for name, count in classes.items() if 2 * count > bin_[_ALL]}
            for name in [name for name in begun if name not in shown]:
                yield name, begun.pop(name) * self.bin_s, index * self.bin_s
            for name in sorted(shown - {*begun}):
                begun[name] = index


@dataclass(frozen=True, kw_only=True)
class FrameThumbnail:
    """A small picture of a frame."""

    time_s: float
    shown: Collection[str]
    caption: str
    jpeg: bytes


class Thumbnails:
    """The frames that tell most, at most 16: those where a class began to hold, as far apart as there is room for."""

    def __init__(self) -> None:
        self.kept: list[FrameThumbnail] = []
        self._least_gap_s = 0.0

    def offer(
        self,
        pixels: Callable[[], np.ndarray],
        time_s: float,
        shown: Collection[str],
        caption: str,
        draw: Callable[[Image.Image], Image.Image],
    ) -> None:
        """Keep a frame, unless it is too near to the last one.

        Args:
            pixels: gives [H, W, 3] uint8 RGB.
            time_s: of the frame.
            shown: its classes.
            caption: the same for people.
            draw: from the small picture to one with the answer.
        """
        last = self.kept[-1] if self.kept else None
        if last is not None and time_s - last.time_s < (_NEAR_S if last.shown == shown else self._least_gap_s):
            return
        image = Image.fromarray(pixels())
        image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
        buffer = io.BytesIO()
        draw(image).save(buffer, "JPEG", quality=80)
        self.kept.append(FrameThumbnail(time_s=time_s, shown=shown, caption=caption, jpeg=buffer.getvalue()))
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
        return round(self._LEAST_MS * self._GROWTH ** (index + 1), 2)


class StreamResult:
    """Everything that is kept of one stream."""

    def __init__(self, hold_frames: int, *, shows_one: bool) -> None:
        self.held = HeldClasses(hold_frames, shows_one=shows_one)
        self.timeline = Timeline()
        self.thumbnails = Thumbnails()
        self.latencies = Latencies()
        self.counts: Counter[str] = Counter()  # labelled frames by class
        self.num_labelled = 0
        self.shown_events: list[dict[str, Any]] = []
        self.num_events = 0
        self.last_s = 0.0
        self.video = ""  # the file of the annotated one

    def count(self, shown: Collection[str], time_s: float) -> None:
        """Count a frame that the model saw, by the classes that it shows."""
        for name in shown or [NONE]:
            self.counts[name] += 1
        self.timeline.add(shown, time_s)
        self.num_labelled += 1
        self.last_s = time_s

    def keep_event(self, event: dict[str, Any]) -> None:
        """Keep an event for the page, the first ones."""
        self.num_events += 1
        if len(self.shown_events) < _MAX_SHOWN_EVENTS:
            self.shown_events.append(event)
