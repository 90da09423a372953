"""Which process changes something, so that others can tell whether it still lives."""

import getpass
import os
import socket
from pathlib import Path

from components.common.promotions import Holder


def user_name() -> str:
    """Who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an arbitrary UID in a container has no name
        return str(os.getuid())


def this_process() -> Holder:
    """The process that asks."""
    pid = os.getpid()
    return Holder(
        user=user_name(), host=socket.gethostname(), boot=_boot(), pid=pid, started_ticks=_started_ticks(pid) or 0
    )


def is_gone(holder: Holder) -> bool:
    """Whether a process of this machine has ended. Of another machine, or another container, nothing can be told."""
    if not holder.boot or holder.boot != _boot():
        return False
    return _started_ticks(holder.pid) != holder.started_ticks


def _started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since the kernel did; None when it has ended. See proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # from the third on; the second, its name, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    """Where process ids mean the same: this start of the kernel, and this namespace. Empty where nothing tells."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
