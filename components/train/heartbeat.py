"""A training on other nodes saves and stops when nobody waits for it any more.

The step that waits touches a file that all of them see. Where it is killed outright, it can't remove its job, and the
job's GPUs would work on for nobody.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.common.steplog import StepLog

VARIABLE = "ENGINERY_HEARTBEAT"  # the file
_BEAT_S = 15.0
_SILENCE_S = 600.0  # longer than a network file system may hide what is new, or a node be out of reach


@contextmanager
def beating(file: Path, *, every_s: float = _BEAT_S) -> Iterator[None]:
    """Touch the file until the end of the block, or of this process."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_s):
            with suppress(OSError):  # the next one may arrive
                file.touch()

    file.touch()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stop_when_silent(log: StepLog, *, silence_s: float = _SILENCE_S) -> None:
    """From now on send this process SIGTERM once $ENGINERY_HEARTBEAT was not touched for so long; once, if it is set.

    By this machine's own clock, from one change of the file's time to the next: clocks of machines differ.
    """
    if name := os.environ.get(VARIABLE):
        threading.Thread(target=_listen, args=(Path(name), log, silence_s), name="heartbeat", daemon=True).start()


def _listen(file: Path, log: StepLog, silence_s: float) -> None:
    seen, since = None, time.monotonic()
    while True:
        time.sleep(silence_s / 40)
        with suppress(OSError):
            beat = file.stat().st_mtime_ns
            if beat != seen:
                seen, since = beat, time.monotonic()
        if time.monotonic() - since >= silence_s:  # behind the look: this machine may have stood still itself
            break
    log.warning(
        f"nobody waits for this training any more: {file} was not touched for {silence_s / 60:g} minutes, so the step "
        "that started it is gone. It saves and stops; another try of that step goes on from there"
    )
    os.kill(os.getpid(), signal.SIGTERM)
