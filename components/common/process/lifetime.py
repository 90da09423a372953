"""A step ends with the run that started it: no orphan keeps writing."""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

PARENT_VARIABLE = "ENGINERY_PARENT_PID"
PARENT_LOCK_VARIABLE = "ENGINERY_PARENT_LOCK"  # a file that the run holds locked, for steps in containers
_TIDYING_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def process_age_s() -> float:
    """Seconds since this process was started, in steps of the kernel's clock (10 ms).

    psutil's time of the start counts from the time of boot, which the kernel tells in whole seconds.
    """
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # see proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def end_with_parent() -> None:
    """Kill this process and its children as soon as the process named in ENGINERY_PARENT_PID is gone.

    KFP starts a step through a shell, so the kernel's parent-death signal would watch the wrong process. A pidfd stays
    with one process and can't be fooled by a reused number. In a container the run's processes have no numbers, and
    the lock of its directory says the same. Does nothing where no parent is named (a cluster, a step started alone).
    """
    if lock := os.environ.get(PARENT_LOCK_VARIABLE):
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        _end_after(lambda: fcntl.flock(handle, fcntl.LOCK_SH))  # free once the run has ended, however it did
    elif parent := os.environ.get(PARENT_VARIABLE):
        try:
            _end_after(partial(_wait_for_end, os.pidfd_open(int(parent))))
        except ProcessLookupError:
            _end_now()


def end_with_creator() -> None:
    """Kill this worker and its children as soon as the process that created it is gone, and leave Ctrl-C to that one.

    For the workers of multiprocessing, whose sentinel tells of a creator that ended before this was called, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    creator = multiprocessing.parent_process()
    assert creator is not None  # true of every process that multiprocessing starts
    _end_after(partial(_wait_for_end, creator.sentinel))


def adopt_orphans() -> None:
    """Let this process inherit what its children leave behind, so that `end_children` finds it.

    A killed step can't end its own workers, which would else belong to init and continue to write.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans_of(pid: int) -> None:
    """Once a step has ended, however it did, end what it left behind: workers, which also keep its output open.

    Needs `adopt_orphans`. KFP reads a step's output to its end, so it would wait for them for ever.
    """
    with contextlib.suppress(ProcessLookupError):  # it is over: it can leave nothing that this could tell apart
        handle = os.pidfd_open(pid)
        threading.Thread(target=_clear_after, args=(handle,), name=f"end-orphans-of-{pid}", daemon=True).start()


def _clear_after(handle: int) -> None:
    _wait_for_end(handle)
    os.close(handle)
    time.sleep(_TIDYING_S)  # what ends by itself may
    orphans = [child for child in psutil.Process().children() if not _is_shell(child)]
    time.sleep(_TIDYING_S / 10)  # the shell of the next step is none before its exec
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _is_shell(orphan):
                _kill([*orphan.children(recursive=True), orphan])


def _is_shell(process: psutil.Process) -> bool:
    """True for a shell that KFP starts a step through; everything else directly below the run was adopted."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "sh"
    return False


def end_children(grace_s: float = 0.0) -> None:
    """End everything below this process: politely first where there is a grace, so that steps can say so in MLflow."""
    children = psutil.Process().children(recursive=True)
    if grace_s:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        psutil.wait_procs(children, timeout=grace_s)
        children += psutil.Process().children(recursive=True)  # what they left
    _kill(children)
    psutil.wait_procs(children, timeout=5.0)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end_after(wait: Callable[[], object]) -> None:
    """End this process and its children when `wait` returns, in a thread of its own."""

    def watch() -> None:
        wait()
        _end_now()

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _wait_for_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # a pidfd or sentinel is readable once the process has ended
    while not poll.poll():
        pass


def _end_now() -> None:
    _kill(psutil.Process().children(recursive=True))
    os.kill(os.getpid(), signal.SIGKILL)
