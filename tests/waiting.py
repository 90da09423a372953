"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], object],
    say: Callable[[], object] = str,
    *,
    process: Any = None,
    seconds: float = 600,
    every_s: float = 0.02,
) -> None:
    """Wait until a condition holds, as long as `process` lives, if one is given; `say` tells how things stand."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, say()
        assert time.monotonic() < deadline, say()
        time.sleep(every_s)
