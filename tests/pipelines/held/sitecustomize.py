"""The step named in HELD_STEP stops itself as it makes its output directory, which is where its work begins."""

import os
import signal
import sys
from typing import Any

_step = os.environ.get("HELD_STEP")
_to_stop = sys.orig_argv[-2:] == ["--function_to_execute", _step]


def _stop(event: str, arguments: tuple[Any, ...]) -> None:
    global _to_stop
    if _to_stop and event == "os.mkdir" and os.path.basename(os.path.dirname(arguments[0])) == _step:
        _to_stop = False
        os.kill(os.getpid(), signal.SIGSTOP)


if _to_stop:
    sys.addaudithook(_stop)
