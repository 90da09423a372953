"""Cases run in a worker process, so that a crash, a hang or growth is seen and named by the case's number."""

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

MAX_SECONDS = 10.0  # of a case
MAX_GROWTH_BYTES = 10**9  # of a worker, over what it had before its first case
_PATIENCE_S = 60.0  # for a batch: the worker may hang in C

Check = Callable[[range, int], dict[int, str]]

_idle_bytes: int | None = None  # of this worker before its first case; None in any other process


def run_cases(
    cases: int | range, seed: int, check: Check, batch: int, growths: list[int] | None = None
) -> Iterator[tuple[int, str]]:
    """Cases that went wrong, with what did. A worker that dies or hangs is named by its first unfinished batch.

    Args:
        cases: how many, or their numbers.
        seed: of the damage.
        check: returns the failures of some cases by number; see `limited`.
        batch: cases between two words of a worker.
        growths: to which each worker's growth in bytes is appended after each batch.
    """
    context = multiprocessing.get_context("spawn")
    numbers = range(cases) if isinstance(cases, int) else cases
    batches = [numbers[start : start + batch] for start in range(0, len(numbers), batch)]
    while batches:
        results: multiprocessing.Queue[tuple[dict[int, str], int]] = context.Queue()
        worker = context.Process(target=_work, args=(batches, seed, check, results))
        worker.start()
        failure = ""
        while batches and not failure:
            found = _next_result(worker, results)
            numbers, *batches = batches
            if isinstance(found, str):
                failure = found
                yield numbers.start, f"{failure}, in the cases {numbers.start} to {numbers.stop - 1}"
                continue
            wrong, grown = found
            yield from wrong.items()
            if growths is not None:
                growths.append(grown)
        worker.kill()
        worker.join()


@contextmanager
def limited(number: int, what: str, wrong: dict[int, str]) -> Iterator[None]:
    """Note in `wrong` a case that takes too long, or by which the worker grows too much."""
    started, before = _own_seconds(), peak_bytes()
    yield
    if (seconds := _own_seconds() - started) > MAX_SECONDS:
        wrong[number] = f"{what} took {seconds:.0f} s"
    if peak_bytes() > before and (grown := _growth_bytes()) > MAX_GROWTH_BYTES:
        wrong[number] = f"with {what} the process had {grown:,} bytes more than before its first case"


def grow(numbers: range, seed: int) -> dict[int, str]:
    """Cases whose memory stays, of which no single one takes too much; here, where a worker imports little."""
    wrong: dict[int, str] = {}
    kept = []
    for number in numbers:
        with limited(number, "it", wrong):
            kept.append(bytearray(b"x") * 400_000_000)
    return wrong


def _next_result(worker: Any, results: "multiprocessing.Queue[Any]") -> tuple[dict[int, str], int] | str:
    """The failures of the next batch and the worker's growth, or why there are none."""
    waited = _own_seconds(worker.pid)
    while _own_seconds(worker.pid) - waited <= _PATIENCE_S:
        try:
            return results.get(timeout=1.0)
        except queue.Empty:
            if not worker.is_alive():
                return f"the process died with exit code {worker.exitcode}"
            if psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED:  # by somebody: no hang
                waited = _own_seconds(worker.pid)
    return f"nothing came for {_PATIENCE_S:g} s"


def _work(batches: list[range], seed: int, check: Check, results: "multiprocessing.Queue[Any]") -> None:
    global _idle_bytes
    _idle_bytes = peak_bytes()
    for numbers in batches:
        results.put((check(numbers, seed), _growth_bytes()))
    results.close()
    results.join_thread()


def _own_seconds(process: int | str = "self") -> float:
    """A clock that stands while a process's first thread waits for a core of a busy machine."""
    try:
        delay_ns = int(Path(f"/proc/{process}/schedstat").read_bytes().split()[1])
    except OSError:  # it has ended, or this Linux keeps no such statistics
        delay_ns = 0
    return time.monotonic() - delay_ns / 1e9


def _growth_bytes() -> int:
    return 0 if _idle_bytes is None else peak_bytes() - _idle_bytes


def peak_bytes() -> int:
    """Of this program: ru_maxrss would begin with the peak of the process that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
