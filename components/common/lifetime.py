"""A step ends with the run that started it: no orphan keeps writing."""

import contextlib
import os
import select
import signal
import threading

import psutil

PARENT_VARIABLE = "ENGINERY_PARENT_PID"


def end_with_parent() -> None:
    """Kill this process and its children as soon as the process named in ENGINERY_PARENT_PID is gone.

    KFP starts a step through a shell, so the kernel's parent-death signal would watch the wrong process. A pidfd stays
    with one process and can't be fooled by a reused number. Does nothing where no parent is named (containers,
    a step typed by hand).
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent:
        return
    try:
        handle = os.pidfd_open(int(parent))
    except ProcessLookupError:
        _end_now()
        return
    threading.Thread(target=_watch, args=(handle,), name="end-with-parent", daemon=True).start()


def _watch(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # readable once the process has ended
    while not poll.poll():
        pass
    _end_now()


def _end_now() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
