"""Label the frames of some streams: batches over all of them, what they show, and where that is written."""

import json
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import numpy as np
from PIL import Image

from components.analyze.annotation import AnnotatedVideo
from components.analyze.answers import FrameAnswers
from components.analyze.config import AnalyzeConfig
from components.analyze.results import StreamResult
from components.analyze.streams import Streams, StreamState
from components.analyze.videos import VideoFrame, VideoSource, empty_planes, rgb_images
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import RuntimeUnavailable
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import StreamRecord
from components.common.data.dali_pipelines import FrameBatches
from components.common.process.steplog import StepLog
from components.common.runtimes import runs_plans
from components.common.runtimes.runner import Runner
from components.common.runtimes.selection import select_runtime
from components.common.tasks.answers import Answer

MOST_FRAMES = {"cpu": 32, "gpu": 64}  # of a batch, unless it is set
_AHEAD = 2  # batches that are transformed and labelled while one is written
_FLUSH_S = 1.0
NO_FRAME = "no frame came before the end"  # that Ctrl-C or max_seconds made: no fault of the stream
Kind = Literal["frames", "events"]
_as_json = json.JSONEncoder(ensure_ascii=False).encode
_Batch = list[tuple[StreamState, VideoFrame]]
_Answered = tuple[np.ndarray, list[Future[list[Answer]]]]  # outputs of a batch, [B, ...] float32, and what they say


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """The outcome of some streams, and the runtime and device that labelled their frames."""

    records: Sequence[StreamRecord]
    results: Sequence[StreamResult]
    runtime: str
    device: str
    began_s: float  # on time.monotonic's clock, which all processes of a machine share
    ended_s: float  # when the last frame was written


class Sink(Protocol):
    """Takes what is known of frames and events, line by line."""

    def write(self, kind: Kind, line: str) -> None:
        """Take a line, from any thread."""
        ...

    def flush(self) -> None:
        """Let others see what was written."""
        ...


class FileSink(AbstractContextManager["FileSink"]):
    """The files frames.jsonl and events.jsonl. A context: in the end they are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Kind, TextIO] = {}
        self._lock = threading.Lock()

    def __exit__(self, kind: object, *_: Any) -> None:
        if kind is None:  # else nothing is left where nothing was labelled
            self.flush()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def write(self, kind: Kind, line: str) -> None:
        """See Sink."""
        with self._lock:
            file = self._file(kind)
            if not file.closed:
                file.write(line)
                if kind == "events":  # of a stream that is silent: nothing else may come for long
                    file.flush()

    def flush(self) -> None:
        """See Sink."""
        with self._lock:
            self._file("frames").flush()
            self._file("events").flush()

    def _file(self, kind: Kind) -> TextIO:
        if kind not in self._files:
            self._files[kind] = (self._folder / f"{kind}.jsonl").open("w", encoding="utf-8")
        return self._files[kind]


def label(
    config: AnalyzeConfig,
    bundle: Artifact[BundleManifest],
    output: Path,
    sources: Sequence[tuple[int, VideoSource]],
    sink: Sink,
    log: StepLog,
    call_at_end: Callable[[Callable[[], None]], AbstractContextManager[None]] | None = None,
    meet: Callable[[], object] = lambda: None,
) -> Labelled:
    """Label the frames of some streams until these end.

    Args:
        config: how.
        bundle: the models.
        output: directory of annotated videos.
        sources: with their numbers among all.
        sink: takes what is known of frames.
        log: takes the progress.
        call_at_end: has what it is given called when the streams are to end; by signals without it.
        meet: waits for other processes, once all is ready to read.

    Raises:
        RuntimeUnavailable: nothing here runs the precision.
        Exception: what a reader failed with, such as a full disk over an event.
    """
    selected = select_runtime(bundle, config.precision, config.runtime)
    runner = selected.runner
    if runner is None:
        raise RuntimeUnavailable(selected.note, code="precision-missing")
    shapes, on_gpu = bundle.manifest.image_shapes, runs_plans(runner.runtime)
    batch_size = min(config.batch_size or MOST_FRAMES["gpu" if on_gpu else "cpu"], shapes.max_batch)
    transform = FrameBatches(bundle.manifest.image_transform, batch_size, 0 if on_gpu else None)
    with ExitStack() as stack:
        stack.callback(runner.close)
        writer = stack.enter_context(_FrameWriter(config, FrameAnswers(bundle.manifest, config), output, sources, sink))
        if on_gpu:
            from components.common.runtimes.tensorrt import TensorRTRunner

            assert isinstance(runner, TensorRTRunner)
            runner.capture_only(batch_size)
            runner.infer(transform.transform(rgb_images([empty_planes()] * batch_size)))  # loads kernels
        sink.flush()  # who follows the files finds them
        meet()
        began_s = time.monotonic()
        # In the order of exits: the readers stop, what they have read is labelled, the files are closed.
        videos = [source for _, source in sources]
        streams = stack.enter_context(Streams(videos, config, num_readers(on_gpu), writer.say, on_gpu))
        with (call_at_end or signals_call)(streams.stop):
            _label_all(streams, transform, runner, batch_size, writer, log)
            ended_s = time.monotonic()
    return Labelled(
        records=writer.records(streams.states),
        results=writer.results,
        runtime=runner.runtime,
        device=runner.device,
        began_s=began_s,
        ended_s=ended_s,
    )


def num_readers(on_gpu: bool) -> int:
    """Threads that read files. On a GPU more than 8 decode no faster, seen on an H200, and hold up the rest."""
    return min(num_cores(), 8) if on_gpu else num_cores()


def _label_all(
    streams: Streams,
    transform: FrameBatches,
    runner: Runner,
    batch_size: int,
    writer: "_FrameWriter",
    log: StepLog,
) -> None:
    """Take batches over all streams until they end. One is transformed, one labelled and one written at a time."""
    waiting: deque[tuple[_Batch, Future[_Answered]]] = deque()
    done, num_workers = 0, num_cores()
    with (
        ThreadPoolExecutor(num_workers) as answering,
        ThreadPoolExecutor(1) as labelling,
        ThreadPoolExecutor(1) as transforming,
    ):

        def transformed(batch: _Batch) -> Any:
            return transform.transform(rgb_images([frame.pixels for _, frame in batch]))

        def infer(batch: _Batch, images: Future[Any]) -> _Answered:
            outputs = runner.infer(images.result())
            # Frames of a classifier take longer apart than together.
            step = len(batch) if writer.answers.shows_one else -(-len(batch) // num_workers)
            sizes = [frame.pixels.shape[1::-1] for _, frame in batch]
            parts = [slice(start, start + step) for start in range(0, len(batch), step)]
            return outputs, [answering.submit(writer.answers.answers, outputs[part], sizes[part]) for part in parts]

        def write_first() -> None:
            nonlocal done
            batch, answered = waiting.popleft()
            outputs, parts = answered.result()
            writer.write(batch, outputs, [answer for part in parts for answer in part.result()])
            streams.wrote(batch)
            writer.close_ended(streams.states)
            done += len(batch)
            log.progress("labelling", done, max(done + 1, sum(s.num_decoded for s in streams.states)), unit="frames")

        while batch := streams.take(batch_size):
            waiting.append((batch, labelling.submit(infer, batch, transforming.submit(transformed, batch))))
            # A full batch leaves others waiting, so that the next is transformed meanwhile; what comes slowly is
            # answered at once.
            while len(waiting) > (_AHEAD if len(batch) == batch_size else 0):
                write_first()
        while waiting:
            write_first()


@contextmanager
def signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the streams alone, so that no frame is written in part; a second one interrupts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: object) -> None:
        restore()
        stop()

    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield
        return
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


class _FrameWriter(AbstractContextManager["_FrameWriter"]):
    """Says frames and events line by line, and keeps what the page needs. A context: in the end videos are whole."""

    def __init__(
        self,
        config: AnalyzeConfig,
        answers: FrameAnswers,
        output: Path,
        sources: Sequence[tuple[int, VideoSource]],
        sink: Sink,
    ) -> None:
        self.config, self.answers = config, answers
        self.results = [StreamResult(config.hold_frames, shows_one=answers.shows_one) for _ in sources]
        self._sources, self._output, self._sink = sources, output, sink
        self._lock = threading.Lock()  # of events, which readers write, too
        self._videos: dict[int, AnnotatedVideo] = {}
        self._flushed_s = time.monotonic()

    def __exit__(self, kind: object, *_: Any) -> None:
        if kind is None:
            for video in self._videos.values():
                video.close()
        self._sink.flush()

    def close_ended(self, states: Sequence[StreamState]) -> None:
        """Complete the videos of streams that have ended: an open one holds dozens of frames."""
        for index in [index for index in self._videos if states[index].has_ended]:
            self._videos.pop(index).close()

    def say(self, kind: str, state: StreamState, frame: VideoFrame | None, **fields: Any) -> None:
        """Write an event of a stream: opened, size, stalled, resumed, lost, back, ended. From any thread."""
        time_s, number = (state.time_s, state.num_decoded) if frame is None else (frame.time_s, frame.number)
        event = {"event": kind, "frame": number, "time_s": round(time_s, 3), **_clock(state, frame), **fields}
        self._event(state, event)

    def write(self, batch: _Batch, outputs: np.ndarray, answers: Sequence[Answer]) -> None:
        """Write what a batch shows. `outputs`: [B, ...] float32."""
        now = time.monotonic()
        for (state, frame), output, answer in zip(batch, outputs, answers, strict=True):
            self._write_one(state, frame, output, answer, 1e3 * (now - frame.received_s))
        if now - self._flushed_s > _FLUSH_S:  # who follows the file sees it grow
            self._sink.flush()
            self._flushed_s = now

    def _write_one(
        self, state: StreamState, frame: VideoFrame, output: np.ndarray, answer: Answer, latency_ms: float
    ) -> None:
        result, answers = self.results[state.index], self.answers
        place = {"frame": frame.number, "time_s": round(frame.time_s, 3), **_clock(state, frame)}
        line = {"stream": state.source.name, **place, **answers.line(answer)}
        if state.drops:
            line["latency_ms"] = round(latency_ms, 1)
            result.latencies.add(latency_ms)
        self._sink.write("frames", _as_json(line) + "\n")
        shown = answers.shown(answer)
        event = result.held.update(shown, frame.number, frame.time_s)
        if event is not None:
            kind = "changed" if "before" in event else "held"
            self._event(state, {"event": kind, **place, **event})
        if event is not None or not result.num_labelled:

            def draw(small: Image.Image) -> Image.Image:
                return answers.drawn(small, answers.answer(output, small.size))

            result.thumbnails.offer(frame.array, frame.time_s, shown, answers.caption(answer), draw)
        result.count(shown, frame.time_s)
        if self.config.annotate:
            picture = answers.drawn(Image.fromarray(frame.array()), answer)
            if state.index not in self._videos:
                number, source = self._sources[state.index]
                # The file of an annotated stream, such as "0003_entrance.mp4"
                plain = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source.name).stem).strip("_")[:60]
                self.results[state.index].video = f"{number:04}_{plain or 'stream'}.mp4"
                self._videos[state.index] = AnnotatedVideo(self._output / self.results[state.index].video)
            self._videos[state.index].write(picture, frame.time_s, answers.caption(answer) if answers.shows_one else "")

    def _event(self, state: StreamState, event: dict[str, Any]) -> None:
        with self._lock:
            self.results[state.index].keep_event(event)
        self._sink.write("events", _as_json({"stream": state.source.name, **event}) + "\n")

    def records(self, states: Sequence[StreamState]) -> tuple[StreamRecord, ...]:
        """Return a record of each stream."""
        return tuple(self._record(state, self.results[state.index]) for state in states)

    def _record(self, state: StreamState, result: StreamResult) -> StreamRecord:
        total = max(result.num_labelled, 1)
        return StreamRecord(
            name=state.source.name,
            codec=state.codec,
            decoder="cuda" if state.on_gpu else "cpu",
            width=state.size[0],
            height=state.size[1],
            seconds=round(result.last_s, 3),
            num_decoded=state.num_decoded,
            num_labelled=result.num_labelled,
            num_dropped=state.num_dropped,
            num_corrupt=state.num_corrupt,
            num_lost=state.num_lost,
            num_events=result.num_events,
            shares_pct={name: round(100 * count / total, 3) for name, count in result.counts.most_common(10)},
            latency_p50_ms=result.latencies.percentile_ms(50),
            latency_p99_ms=result.latencies.percentile_ms(99),
            problem=state.problem or ("" if result.num_labelled else NO_FRAME),
        )


def _clock(state: StreamState, frame: VideoFrame | None) -> dict[str, str]:
    """Return the time at which a live stream's frame came, or now."""
    if not state.source.is_live:
        return {}
    age_s = 0.0 if frame is None else time.monotonic() - frame.received_s
    return {"at": datetime.fromtimestamp(time.time() - age_s, UTC).isoformat(timespec="milliseconds")}
