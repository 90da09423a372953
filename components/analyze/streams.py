"""Several videos at once: a thread decodes each, and their frames wait in short queues for a batch."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from components.analyze.config import AnalyzeConfig
from components.analyze.videos import OpenVideo, VideoFrame, VideoSource
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError

_RETRY_S = 1.0  # between two tries to reach a lost source
_POLL_S = 0.2
_JOIN_S = 2.0  # that readers get to end, all together
_MORE = 4  # times as many frames of files may wait, since decoders give several at a time, within these bytes of RGB
_MORE_BYTES = 512 << 20


@dataclass(kw_only=True)
class StreamState:
    """One stream, as its reader sees it."""

    index: int
    source: VideoSource
    drops: bool  # frames that come faster than they are labelled
    codec: str = ""
    on_gpu: bool = False
    size: tuple[int, int] = (0, 0)  # width and height of the last frame
    num_decoded: int = 0
    num_dropped: int = 0
    num_corrupt: int = 0
    num_lost: int = 0  # times that it broke off
    problem: str = ""  # why it ended before its end; empty where it did not
    queue: deque[VideoFrame] = field(default_factory=deque)
    num_open: int = 0  # frames that wait or were taken, until they are written
    is_done: bool = False
    time_s: float = 0.0  # of the last frame, by the video's own clock
    began_s: float = 0.0  # when its first frame came, on time.monotonic's clock
    is_open: bool = False
    last_frame_s: float = 0.0  # or when it was opened, on that clock, too
    is_stalled: bool = False

    @property
    def has_ended(self) -> bool:
        """True once nothing more is read of it, and all that was is written."""
        return self.is_done and not self.num_open


def _no_frame(state: StreamState) -> str:
    return (
        f"no frame of {state.source.name} can be decoded: it is empty or broken, its pictures are larger than 8K, or "
        "it is an MP4 in a pipe with its index last (ffmpeg -movflags +faststart puts it first)"
    )


class Streams:
    """Readers of all videos. A context: at its end the readers stop."""

    def __init__(
        self,
        sources: Sequence[VideoSource],
        config: AnalyzeConfig,
        num_threads: int,
        say: Callable[..., None],
        on_gpu: bool = False,
    ) -> None:
        """`say(kind, stream, frame or None, **fields)` is called with what happens to a stream, from any thread.

        Live sources are read at once, files by `num_threads` threads, one after the other.
        """
        self.config, self._say, self._on_gpu = config, say, on_gpu
        self.states = [
            StreamState(
                index=index,
                source=source,
                drops=config.live == "always" or (config.live == "auto" and source.is_live),
            )
            for index, source in enumerate(sources)
        ]
        self._stop = threading.Event()
        self._ends_s = time.monotonic() + (config.max_seconds or math.inf)
        # One lock; who takes frames waits for them, and readers for room, so that a frame wakes no other reader.
        lock = threading.RLock()
        self._changed, self._taken = threading.Condition(lock), threading.Condition(lock)
        self._files = deque(state for state in self.states if not state.source.is_live)
        self._num_left = len(self.states)  # streams that have not ended
        self._waiting: deque[StreamState] = deque()  # streams with frames, the next in turn first
        self._lives = [state for state in self.states if state.source.is_live]
        self._num_readers = min(len(self._files), num_threads)  # of files
        readers = [partial(self._read_live, state) for state in self._lives] + self._num_readers * [self._read_files]
        self._threads = [threading.Thread(target=self._run, args=(read,), daemon=True) for read in readers]
        self._failure: Exception | None = None  # of a thread
        self._num_reading, self._num_full = len(self._threads), 0  # threads, and those that wait for room in a queue
        self._num_waiting, self._wanted = 0, 1  # frames, and those that a batch takes
        self._num_kept = 0  # frames that wait and can't be dropped

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: Any) -> None:
        self.stop()
        ends = time.monotonic() + _JOIN_S
        for thread in self._threads:  # one that waits for a source that is silent is left to end by itself
            thread.join(timeout=max(0.0, ends - time.monotonic()))
        if kind is None:
            for state in self.states:
                if state not in self._files:
                    self._end(state)

    def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            self._taken.notify_all()

    def take(self, max_frames: int) -> list[tuple[StreamState, VideoFrame]]:
        """Wait for frames, and for more that can come up to `max_wait_ms`. Empty once all streams have ended.

        The streams have turns, so that none waits for another; the frames of each come in order.

        Raises:
            Exception: what a reader failed with, such as a full disk over an event.
        """
        deadline = None
        with self._changed:
            self._wanted = max_frames
            while True:
                num_frames, now = self._num_waiting, time.monotonic()
                if num_frames and deadline is None:
                    deadline = now + self.config.max_wait_ms / 1e3
                if now >= self._ends_s:
                    self.stop()
                is_over = self._stop.is_set() or not self._num_left
                is_full = num_frames >= max_frames or (num_frames > 0 and self._num_full == self._num_reading)
                if is_over or is_full or (deadline is not None and now >= deadline):
                    break
                self._find_stalls(now)
                self._changed.wait(_POLL_S if deadline is None else min(_POLL_S, deadline - now))
            if self._failure is not None:
                raise self._failure
            taken: list[tuple[StreamState, VideoFrame]] = []
            while len(taken) < max_frames and self._waiting:
                state = self._waiting.popleft()
                taken.append((state, state.queue.popleft()))
                if state.queue:
                    self._waiting.append(state)
            self._num_waiting -= len(taken)
            self._num_kept -= sum(not state.drops for state, _ in taken)
            self._taken.notify_all()
        return taken

    def wrote(self, batch: Sequence[tuple[StreamState, VideoFrame]]) -> None:
        """A stream has ended once all of its frames are written."""
        with self._changed:
            for state, _ in batch:
                state.num_open -= 1
                self._say_end(state)

    def _find_stalls(self, now: float) -> None:
        for state in self._lives:
            if state.is_open and not state.is_stalled and now - state.last_frame_s > self.config.stall_seconds:
                state.is_stalled = True
                self._say("stalled", state, None)

    def _put(self, state: StreamState, frame: VideoFrame) -> None:
        if state.is_stalled:
            state.is_stalled = False
            self._say("resumed", state, frame, seconds=round(frame.received_s - state.last_frame_s, 3))
        state.last_frame_s, state.time_s = frame.received_s, frame.time_s
        height, width = frame.pixels.shape[:2]
        if state.size != (width, height):
            if state.num_decoded:
                self._say("size", state, frame, width=width, height=height)
            state.size = width, height
        state.num_decoded += 1
        if frame.number % self.config.every:
            return
        room = self.config.queue_frames
        if not state.drops:
            fits = _MORE_BYTES // (math.prod(frame.pixels.shape) * len(self._threads))
            room = max(room, min(_MORE * room, fits))
        with self._changed:
            # Frames of files that were read before count, too: of short ones dozens could wait.
            def has_room() -> bool:
                return len(state.queue) < room and self._num_kept < room * max(1, self._num_readers)

            if not state.drops and not has_room():
                self._num_full += 1
                self._changed.notify_all()
                self._taken.wait_for(lambda: self._stop.is_set() or has_room())
                self._num_full -= 1
            if self._stop.is_set():
                return
            if not state.queue:
                self._waiting.append(state)
            elif len(state.queue) >= room:
                state.queue.popleft()
                state.num_dropped += 1
                state.num_open -= 1
                self._num_waiting -= 1
            state.queue.append(frame)
            state.num_open += 1
            self._num_waiting += 1
            self._num_kept += not state.drops
            if self._num_waiting == 1 or self._num_waiting >= self._wanted:
                self._changed.notify_all()

    def _end(self, state: StreamState, problem: str = "") -> None:
        with self._changed:
            if state.is_done:
                return
            state.problem, state.is_done = problem, True
            self._num_left -= 1
            self._say_end(state)
            self._changed.notify_all()

    def _say_end(self, state: StreamState) -> None:
        if state.has_ended:
            self._say("ended", state, None, **({"problem": state.problem} if state.problem else {}))

    def _run(self, read: Callable[[], None]) -> None:
        try:
            read()
        except Exception as error:  # raised by `take`, in its thread
            self._failure = error
            self.stop()
        with self._changed:
            self._num_reading -= 1
            self._changed.notify_all()

    def _read_files(self) -> None:
        while not self._stop.is_set():
            try:
                state = self._files.popleft()
            except IndexError:
                break
            problem = self._try_to_read(state)
            if not (problem or state.num_decoded or self._stop.is_set()):
                problem = _no_frame(state)
            self._end(state, problem)

    def _read_live(self, state: StreamState) -> None:
        """Read a live source, and try again while it does not answer. Numbers of frames continue."""
        problem, lost_at = "", None
        while not self._stop.is_set():
            before = state.num_decoded
            problem = self._try_to_read(state) or f"{state.source.name} ended"
            if self._stop.is_set():
                problem = "" if state.num_decoded else problem
                break
            now = time.monotonic()
            if state.num_decoded > before or lost_at is None:
                lost_at = now
                state.num_lost += 1
                self._say("lost", state, None, problem=problem)
            if now - lost_at >= self.config.reconnect_seconds:
                break
            self._stop.wait(_RETRY_S)
        self._end(state, problem)

    def _try_to_read(self, state: StreamState) -> str:
        """Read a stream to its end. Returns why that failed; empty where it did not."""
        try:
            self._read(state)
        except EngineryError as error:
            return str(error)
        except Exception as error:  # a library's, over a file that is not ours: the others are read all the same
            return f"{state.source.name} can't be read: {type(error).__name__}"
        return ""

    def _read(self, state: StreamState) -> None:
        timeout_s = 2 * max(self.config.stall_seconds, 0.5)
        decoder = self.config.decoder
        threads = max(1, num_cores() // len(self._threads))
        video = OpenVideo(
            state.source, decoder=decoder, read_timeout_s=timeout_s, on_gpu=self._on_gpu, num_threads=threads
        )
        num_before, num_corrupt, base_s = state.num_decoded, state.num_corrupt, 0.0
        try:
            state.codec, state.on_gpu = video.codec, video.decodes_on_gpu
            state.is_open, state.is_stalled, state.last_frame_s = True, False, time.monotonic()
            self._say("back" if num_before else "opened", state, None, codec=state.codec)
            if num_before:  # a source that comes back begins at 0: its time continues by this machine's clock
                base_s = time.monotonic() - state.began_s
            for frame in video.frames():
                state.began_s = state.began_s or frame.received_s
                self._put(state, replace(frame, number=num_before + frame.number, time_s=base_s + frame.time_s))
                state.num_corrupt = num_corrupt + video.num_corrupt
                if self._stop.is_set():
                    return
        finally:
            state.is_open = False
            state.num_corrupt = num_corrupt + video.num_corrupt
            video.close()
