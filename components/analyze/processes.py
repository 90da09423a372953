"""Labelling by several processes, each of which has a share of the streams: a GPU is faster than one Python."""

import os
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
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
Share = Sequence[tuple[int, VideoSource]]


def num_processes(config: AnalyzeConfig, bundle: Artifact[BundleManifest], sources: Sequence[VideoSource]) -> int:
    """One where a CPU labels, or a pipe is read, which has one reader; see AnalyzeConfig."""
    wanted = config.num_processes
    if not wanted:
        on_gpu = choose_runtime(bundle, config.runtime)[0].runs_plans
        wanted = min(_MOST, num_cores() // _CORES_EACH) if on_gpu else 1
    return 1 if any(source.address == STDIN for source in sources) else max(1, min(wanted, len(sources)))


def label_by_processes(
    config: AnalyzeConfig,
    bundle: Artifact[BundleManifest],
    output: Path,
    sources: Share,
    sink: Sink,
    log: StepLog,
    processes: int,
) -> Labelled:
    """See `label`. What processes say comes here, and is written here.

    Raises:
        EngineryError: one was killed.
        Exception: what one failed with.
    """
    context, shares = get_context("spawn"), _shares(sources, processes)
    cores = sorted(os.sched_getaffinity(0))
    workers, ends = [], []
    for number, share in enumerate(shares):
        end, other = context.Pipe()
        own_cores = cores[number::processes] or cores
        workers.append(context.Process(target=_work, args=(other, own_cores, config, bundle, output, share)))
        workers[-1].start()
        other.close()
        ends.append(end)
    left, done, progress = list(ends), dict[Connection, Labelled](), dict[Connection, tuple[int, int]]()

    def stop() -> None:
        for end in left:
            with suppress(OSError):  # it has just ended
                end.send(None)

    try:
        with signals_call(stop):
            while left:
                waiting = wait(left)
                for end in [end for end in left if end in waiting]:
                    kind, value = _heard(end, processes)
                    if kind == "done":
                        done[end] = value
                        left.remove(end)
                    elif kind == "progress":
                        progress[end] = value
                        labelled, decoded = map(sum, zip(*progress.values(), strict=True))
                        log.progress("labelling", labelled, decoded, unit="frames")
                    else:
                        sink.write(kind, value)
                        sink.flush()
    finally:
        for worker in workers:
            if left:
                worker.kill()
            worker.join()
    every = [done[end] for end in ends]
    rows = {
        number: (record, result)
        for share, each in zip(shares, every, strict=True)
        for (number, _), record, result in zip(share, each.records, each.results, strict=True)
    }
    records, results = zip(*(rows[number] for number in sorted(rows)), strict=True)
    began_s = min(each.began_s for each in every)
    return replace(every[0], records=records, results=results, began_s=began_s)


def _heard(end: Connection, processes: int) -> tuple[Any, Any]:
    """What a process says: of which kind, and that."""
    try:
        kind, value = end.recv()
    except EOFError:
        raise EngineryError(
            "a process that labels frames was killed, most often because memory ran out; label with fewer than "
            f"{processes}, by {how_to_set('analyze', 'num_processes', str(processes // 2))}",
            code="worker-killed",
            setting="analyze.num_processes",
        ) from None
    if kind == "failed":
        raise value
    return kind, value


def _shares(sources: Share, count: int) -> list[list[tuple[int, VideoSource]]]:
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
    cores: Sequence[int],
    config: AnalyzeConfig,
    bundle: Artifact[BundleManifest],
    output: Path,
    share: Share,
) -> None:
    """A process: label a share, and say what comes of it."""
    end_with_creator()
    for number in (signal.SIGTERM, signal.SIGHUP):  # of a group: the process that created this one says when to end
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, cores)
    try:
        found = label(config, bundle, output, share, _PipeSink(end), _PipeLog(end), partial(_call_when_told, end))
        end.send(("done", found))
    except Exception as error:
        error.add_note(traceback.format_exc())
        end.send(("failed", error))


@contextmanager
def _call_when_told(end: Connection, stop: Callable[[], None]) -> Iterator[None]:
    def listen() -> None:
        with suppress(EOFError, OSError):
            end.recv()
        stop()

    threading.Thread(target=listen, daemon=True).start()
    yield


class _PipeSink:
    """Lines go to the process that writes them. See Sink."""

    def __init__(self, end: Connection) -> None:
        self._end, self._lines, self._lock = end, defaultdict[Kind, list[str]](list), threading.Lock()

    def write(self, kind: Kind, line: str) -> None:
        """See Sink."""
        with self._lock:
            self._lines[kind].append(line)

    def flush(self) -> None:
        """See Sink; for the process's main thread, which alone sends."""
        with self._lock:
            lines, self._lines = self._lines, defaultdict(list)
        for kind, some in lines.items():
            self._end.send((kind, "".join(some)))


class _PipeLog(QuietLog):
    """Progress goes to the process that shows it."""

    def __init__(self, end: Connection) -> None:
        super().__init__("analyze")
        self._end, self._said_s = end, 0.0

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """See StepLog."""
        if time.monotonic() - self._said_s > _PROGRESS_S:
            self._said_s = time.monotonic()
            self._end.send(("progress", (done, total)))
