"""Labelling by several processes, each of which has a share of the streams: a GPU is faster than one Python."""

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from components.analyze.config import AnalyzeConfig
from components.analyze.labelling import Kind, Labelled, Sink, label, signals_call
from components.analyze.videos import STDIN, VideoSource
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.settings import how_to_set
from components.common.process.lifetime import end_with_creator
from components.common.process.steplog import QuietLog, StepLog
from components.common.runtimes.selection import choose_runtime

_MOST = 4
_CORES_EACH = 4
_PROGRESS_S = 0.5
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # of this process, which others don't have
Share = Sequence[tuple[int, VideoSource]]


def num_processes(config: AnalyzeConfig, bundle: Artifact[BundleManifest], sources: Sequence[VideoSource]) -> int:
    """One where a CPU labels, or a pipe is read, which has one reader; see AnalyzeConfig."""
    wanted = config.num_processes
    if not wanted:
        on_gpu = choose_runtime(bundle, config.runtime)[0].runs_plans
        wanted = min(_MOST, num_cores() // _CORES_EACH) if on_gpu else 1
    is_own = any(source.address.startswith((STDIN, *_DESCRIPTORS)) for source in sources)
    return 1 if is_own else max(1, min(wanted, len(sources)))


def label_by_processes(
    config: AnalyzeConfig,
    bundle: Artifact[BundleManifest],
    output: Path,
    sources: Share,
    sink: Sink,
    log: StepLog,
    processes: int,
) -> Labelled:
    """See `label`. Lines and progress of the processes come here, and are written here.

    Raises:
        EngineryError: one was killed.
        Exception: what one failed with.
    """
    context, shares = get_context("spawn"), shares_of(sources, processes)
    ready = context.Barrier(processes)  # who starts first would have the decoder alone, and end first
    cores = sorted(os.sched_getaffinity(0))
    workers, done, progress = dict[Connection, SpawnProcess](), dict[Connection, Labelled](), dict[Connection, Any]()

    def stop() -> None:
        for end in workers:
            with suppress(OSError):  # it has just ended
                end.send(None)

    try:
        with signals_call(stop):
            resource_tracker.ensure_running()  # which would let signals through again
            # Processes inherit what is blocked: signals of a group are for this one, which tells them when to end.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            try:
                for number, share in enumerate(shares):
                    end, other = context.Pipe()
                    own_cores = cores[number::processes] or cores
                    job = (other, ready, own_cores, config, bundle, output, share)
                    worker = context.Process(target=_work, args=job)
                    worker.start()
                    workers[end] = worker
                    other.close()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            while left := [end for end in workers if end not in done]:
                waiting = wait(left)
                for end in [end for end in left if end in waiting]:
                    kind, value = _heard(end, workers[end], processes)
                    if kind == "done":
                        done[end] = value
                    elif kind == "progress":
                        progress[end] = value
                        labelled, decoded = map(sum, zip(*progress.values(), strict=True))
                        log.progress("labelling", labelled, decoded, unit="frames")
                    else:
                        sink.write(kind, value)
                        sink.flush()
    finally:
        for end, worker in workers.items():
            if end not in done:
                worker.kill()
            worker.join()
    every = [done[end] for end in workers]
    rows = {
        number: (record, result)
        for share, each in zip(shares, every, strict=True)
        for (number, _), record, result in zip(share, each.records, each.results, strict=True)
    }
    records, results = zip(*(rows[number] for number in sorted(rows)), strict=True)
    began_s, ended_s = min(each.began_s for each in every), max(each.ended_s for each in every)
    return replace(every[0], records=records, results=results, began_s=began_s, ended_s=ended_s)


def _heard(end: Connection, worker: SpawnProcess, processes: int) -> tuple[Any, Any]:
    """Receive a message of a process: its kind and its value."""
    try:
        kind, value = end.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        why = f"ended with exit code {worker.exitcode}; what it said stands above"
        if (worker.exitcode or 0) < 0:
            why = "was killed, most often because memory ran out"
        raise EngineryError(
            f"a process that labels frames {why}. Label with fewer than {processes}, by "
            f"{how_to_set('analyze', 'num_processes', str(processes // 2))}",
            code="worker-killed",
            setting="analyze.num_processes",
        ) from None
    if kind == "failed":
        raise value
    return kind, value


def shares_of(sources: Share, count: int) -> list[list[tuple[int, VideoSource]]]:
    """Every source in one of the shares, whose files are of about the same size together."""
    shares: list[list[tuple[int, VideoSource]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for each in sorted(sources, key=lambda each: -_size(each[1])):
        least = sizes.index(min(sizes))
        shares[least].append(each)
        sizes[least] += _size(each[1])
    return shares


def _size(source: VideoSource) -> int:
    try:
        return max(1, Path(source.address).stat().st_size)
    except OSError:  # it is no file
        return 1


def _work(
    end: Connection,
    ready: Barrier,
    cores: Sequence[int],
    config: AnalyzeConfig,
    bundle: Artifact[BundleManifest],
    output: Path,
    share: Share,
) -> None:
    """A process: label a share, and say what comes of it."""
    end_with_creator()
    os.sched_setaffinity(0, cores)
    sink = _PipeSink(end)
    try:
        on_stop = partial(_stop_on_message, end)
        sink.send("done", label(config, bundle, output, share, sink, _PipeLog(sink), on_stop, ready.wait))
    except Exception as error:
        error.add_note(traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # what this process has just written
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        sink.send("failed", error)


@contextmanager
def _stop_on_message(end: Connection, stop: Callable[[], None]) -> Iterator[None]:
    def listen() -> None:
        with suppress(EOFError, OSError):
            end.recv()
        stop()

    threading.Thread(target=listen, daemon=True).start()
    yield


class _PipeSink:
    """Lines go to the process that writes them: events at once, frames with the next flush. See Sink."""

    def __init__(self, end: Connection) -> None:
        self._end, self._lines, self._lock = end, list[str](), threading.RLock()

    def send(self, kind: str, value: Any) -> None:
        """Send a message; any thread may call it."""
        with self._lock:
            self._end.send((kind, value))

    def write(self, kind: Kind, line: str) -> None:
        """See Sink."""
        with self._lock:
            if kind == "frames":
                self._lines.append(line)
            else:
                self.send(kind, line)

    def flush(self) -> None:
        """See Sink."""
        with self._lock:
            if self._lines:
                self.send("frames", "".join(self._lines))
            self._lines.clear()


class _PipeLog(QuietLog):
    """Progress goes to the process that shows it."""

    def __init__(self, sink: _PipeSink) -> None:
        super().__init__("analyze")
        self._sink, self._said_s = sink, 0.0

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """See StepLog."""
        if time.monotonic() - self._said_s > _PROGRESS_S:
            self._said_s = time.monotonic()
            self._sink.send("progress", (done, total))
