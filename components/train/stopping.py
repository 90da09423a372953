"""SIGTERM: a machine that is about to be taken away. Training saves and leaves."""

import signal
import threading
from types import FrameType, TracebackType

from components.common.errors import Preempted


class StopRequest:
    """While it is entered, SIGTERM ends the work in order: at once where there is nothing to save, else on request."""

    def __init__(self) -> None:
        """Nobody has asked yet, and there is nothing to save."""
        self.requested = False
        self.has_work = False  # there is something to save, and the loop looks at `requested`
        self._before: object = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self.has_work:
            raise Preempted("stopped by SIGTERM before the first step; nothing is lost, run the same command again")
