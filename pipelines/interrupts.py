"""Ctrl-C and SIGTERM: the first stops the run where it can be stopped, the second the steps at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Holds SIGINT, SIGTERM and SIGHUP while a run is open, so that none ends it before its records are closed.

    Inside `raising()` the first signal raises KeyboardInterrupt. Elsewhere it is noted until the next `raising()`.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        """`on_second` is called by every further signal, wherever the program is."""
        self.num_signals = 0
        self._on_second = on_second
        self._raises = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # An interrupted run is the end of its process, which one more Ctrl-C must not turn into another.
            signal.signal(number, signal.SIG_IGN if self.num_signals else handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Where an interrupt may end things at any line."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise KeyboardInterrupt after a signal whose exception was lost, as in a destructor or a callback."""
        if self.num_signals:
            self._raises = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        if self.num_signals > 1:
            self._on_second()
        elif self._raises:
            self._raises = False  # one is enough: what it sets off must run to its end
            raise KeyboardInterrupt
