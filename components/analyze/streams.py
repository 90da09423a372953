"""Several videos at once: a thread decodes each, and their frames wait in short queues for a batch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.analyze.config import AnalyzeConfig
from components.analyze.videos import OpenVideo, VideoFrame, VideoSource
from components.common.contracts.errors import EngineryError

_RETRY_S = 1.0  # between two tries to reach a lost source
_POLL_S = 0.2


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
    is_done: bool = False
    time_s: float = 0.0  # of the last frame, by the video's own clock
    began_s: float = 0.0  # when its first frame came, on time.monotonic's clock
    last_frame_s: float = field(default_factory=time.monotonic)
    is_stalled: bool = False


class Streams:
    """Readers of all videos. A context: at its end the readers stop."""

    def __init__(
        self, sources: Sequence[VideoSource], config: AnalyzeConfig, num_threads: int, say: Callable[..., None]
    ) -> None:
        """`say(kind, stream, frame or None, **fields)` is called with what happens to a stream, from any thread.

        Live sources are read at once, files by `num_threads` threads, one after the other.
        """
        self.config, self._say = config, say
        self.states = [
            StreamState(
                index=index,
                source=source,
                drops=config.live == "always" or (config.live == "auto" and source.is_live),
            )
            for index, source in enumerate(sources)
        ]
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._files = deque(state for state in self.states if not state.source.is_live)
        self._turn = 0
        lives = [state for state in self.states if state.source.is_live]
        num_readers = min(len(self._files), num_threads)
        self._threads = [threading.Thread(target=self._read_live, args=(state,), daemon=True) for state in lives]
        self._threads += [threading.Thread(target=self._read_files, daemon=True) for _ in range(num_readers)]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
        for thread in self._threads:  # one that waits for a source that is silent is left to end by itself
            thread.join(timeout=2.0)

    def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    def take(self, max_frames: int) -> list[tuple[StreamState, VideoFrame]]:
        """Wait for frames, and for more of them up to `max_wait_ms`. Empty once all streams have ended.

        The streams have turns, so that none waits for another; the frames of each come in order.
        """
        config, deadline = self.config, None
        with self._changed:
            while True:
                num_waiting = sum(len(state.queue) for state in self.states)
                is_over = self._stop.is_set() or all(state.is_done for state in self.states)
                now = time.monotonic()
                if num_waiting and deadline is None:
                    deadline = now + config.max_wait_ms / 1e3
                if is_over or num_waiting >= max_frames or (deadline is not None and now >= deadline):
                    break
                self._find_stalls(now)
                self._changed.wait(_POLL_S if deadline is None else min(_POLL_S, deadline - now))
            taken: list[tuple[StreamState, VideoFrame]] = []
            while len(taken) < max_frames and any(state.queue for state in self.states):
                state = self.states[self._turn % len(self.states)]
                self._turn += 1
                if state.queue:
                    taken.append((state, state.queue.popleft()))
            self._changed.notify_all()
        return taken

    def _find_stalls(self, now: float) -> None:
        for state in self.states:
            waits = not state.is_done and state.source.is_live and not state.is_stalled and state.num_decoded
            if waits and now - state.last_frame_s > self.config.stall_seconds:
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
        with self._changed:
            while len(state.queue) >= self.config.queue_frames:
                if state.drops:
                    state.queue.popleft()
                    state.num_dropped += 1
                elif self._stop.is_set():
                    return
                else:
                    self._changed.wait(_POLL_S)
            state.queue.append(frame)
            self._changed.notify_all()

    def _end(self, state: StreamState, problem: str = "") -> None:
        state.problem = problem
        self._say("ended", state, None, **({"problem": problem} if problem else {}))
        with self._changed:
            state.is_done = True
            self._changed.notify_all()

    def _read_files(self) -> None:
        while not self._stop.is_set():
            try:
                state = self._files.popleft()
            except IndexError:
                return
            problem = ""
            try:
                self._read(state)
            except EngineryError as error:
                problem = str(error)
            except Exception as error:  # a library's, over a file that is not ours: the others are read all the same
                problem = f"{state.source.name} can't be read: {type(error).__name__}"
            self._end(state, problem)

    def _read_live(self, state: StreamState) -> None:
        """Read a live source, and try again while it does not answer. One that comes back goes on in its numbers."""
        problem, lost_at = "", None
        while not self._stop.is_set():
            before = state.num_decoded
            try:
                self._read(state)
                problem = f"{state.source.name} ended"
            except EngineryError as error:
                problem = str(error)
            except Exception as error:
                problem = f"{state.source.name} can't be read: {type(error).__name__}"
            if self._stop.is_set():
                problem = ""
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

    def _read(self, state: StreamState) -> None:
        timeout_s = max(self.config.stall_seconds, 1.0)
        video = OpenVideo(state.source, decoder=self.config.decoder, read_timeout_s=timeout_s)
        num_before, num_corrupt, base_s = state.num_decoded, state.num_corrupt, 0.0
        try:
            state.codec, state.on_gpu = video.codec, video.decodes_on_gpu
            self._say("back" if num_before else "opened", state, None, codec=state.codec)
            if num_before:  # a source that comes back begins at 0: its time goes on by this machine's clock
                base_s = time.monotonic() - state.began_s
            for frame in video.frames():
                state.began_s = state.began_s or frame.received_s
                self._put(state, replace(frame, number=num_before + frame.number, time_s=base_s + frame.time_s))
                state.num_corrupt = num_corrupt + video.num_corrupt
                if self._stop.is_set():
                    return
        finally:
            state.num_corrupt = num_corrupt + video.num_corrupt
            video.close()
