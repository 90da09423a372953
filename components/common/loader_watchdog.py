"""Calls with a time limit, for libraries that may wait for ever on storage that does not answer."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Watchdog:
    """Runs calls, one after the other, in a thread of its own, and waits for each no longer than `limit_s` seconds.

    A call that is stuck stays so: nothing can end a thread that hangs in a library. Its thread is a daemon, so the
    process can still end, and holds what the call belongs to, so that no destructor waits for it either.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stuck = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises.

        Raises:
            TimeoutError: this call, or one before it, did not come back in time.
        """
        future: Future[Result] = Future()
        if self._stuck:
            raise TimeoutError
        self._calls.put((future, function))
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            self._stuck = not future.done()  # or the function raised it
            raise


def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        _run(*call)
        del call  # it would keep a batch alive while this thread waits for the next call


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # whatever it is, the caller raises it
        future.set_exception(error)
