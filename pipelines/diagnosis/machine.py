"""Checks of the machine below the GPU: system, cores, memory, and limits of containers and shells."""

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import psutil

from components.common.environment import cpu_name, num_cores
from components.common.instruction_sets import SATURATING, cpu_flags, instruction_set
from pipelines.diagnosis.checks import Finding, missing, ok, warning
from pipelines.formats import size_text

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # what cgroup v1 writes for "no limit" is larger
_MIN_MEMORY_BYTES = 4 * 10**9
_MIN_SHM_BYTES = 10**9
_MIN_DISK_BYTES = 10 * 10**9
_MIN_DISK_TO_START_BYTES = 10**9
_MIN_OPEN_FILES = 4096


def operating_system() -> Finding:
    """Linux on x86-64 is what runs are tested on."""
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return missing(found, "use a Linux machine, or WSL 2 on Windows")
    if platform.machine() == "x86_64":
        return ok(found)
    if platform.machine() == "aarch64":
        return warning(f"{found}: not tested", "use x86-64 if something fails; on Arm most parts have wheels")
    return missing(found, "use an x86-64 machine: the libraries have no builds for this one")


def python() -> Finding:
    """The version that pins exist for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= (3, 14):
        return warning(f"{found}: no pins for it", "run: make clean install PYTHON=python3.12")
    return ok(found)


def cores() -> Finding:
    """Threads are started one per usable core; a CPU quota below that makes them wait for each other."""
    usable, quota = num_cores(), cpu_quota()
    found = f"{cpu_name()}, {usable} usable of {os.cpu_count()} cores"
    if quota is None or quota >= usable:
        return ok(found)
    last = max(int(quota), 1) - 1
    return warning(
        f"{found}, but a CPU quota of {quota:g}: more threads start than may run, and slow each other down",
        f"start with `taskset -c 0-{last} enginery ...`, or give the container whole cores: docker run --cpuset-cpus "
        f"0-{last}; in Kubernetes the static CPU manager policy and whole-number CPU limits equal to the requests",
    )


def instruction_sets() -> Finding:
    """What INT8 runs with on this CPU, and from which file of a bundle."""
    here = instruction_set()
    if not cpu_flags():
        return warning("not known: /proc/cpuinfo names no flags", "compare INT8 accuracy with another machine's")
    if here not in SATURATING:
        return ok(f"{here}: INT8 runs with 8-bit weights (int8_cpu.onnx)")
    return ok(
        f"{here}, without VNNI: INT8 runs with 7-bit weights (int8_cpu_7bit.onnx), since sums of 8-bit ones saturate "
        "at 16 bits, unless export has measured that they do not"
    )


def memory() -> Finding:
    """What is free now, or what the container may still have."""
    available_bytes = psutil.virtual_memory().available
    found = f"{size_text(psutil.virtual_memory().total)}, {size_text(available_bytes)} available"
    limit_bytes = memory_limit()
    if limit_bytes is not None:
        found += f", limited to {size_text(limit_bytes)} by the container (cgroup)"
        available_bytes = min(available_bytes, limit_bytes)
    if available_bytes >= _MIN_MEMORY_BYTES:
        return ok(found)
    return warning(
        f"{found}: a step may be killed for memory below {size_text(_MIN_MEMORY_BYTES)}",
        "end other programs, or raise the limit: docker run --memory 16g; in Kubernetes resources.limits.memory: 16Gi",
    )


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Containers get 64 MB unless told otherwise; NCCL and workers need more."""
    fix = (
        "docker run --shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory and sizeLimit: 8Gi at "
        "/dev/shm (the pipelines of enginery ask for it); on a machine of your own: "
        "sudo mount -o remount,size=8G /dev/shm"
    )
    if not path.is_dir():
        return missing(f"there is no {path}", fix)
    total_bytes = shutil.disk_usage(path).total
    found = f"{size_text(total_bytes)} at {path}"
    if total_bytes >= _MIN_SHM_BYTES:
        return ok(found)
    return warning(f"{found}: under {size_text(_MIN_SHM_BYTES)} training on several GPUs ends in bus errors", fix)


def open_files() -> Finding:
    """Shards, loader threads and MLflow each hold files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} may be open at once"
    if soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES:
        return ok(found)
    if hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES:
        fix = f"run in this shell: ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}"
    else:
        fix = (
            "raise the hard limit: a line `* - nofile 65536` in /etc/security/limits.conf and a new login, or "
            "docker run --ulimit nofile=65536:65536"
        )
    return warning(f"{found}; large data sets need {_MIN_OPEN_FILES:,}", fix)


def disk(path: Path) -> Finding:
    """Free space where runs are written."""
    while not path.exists():
        path = path.parent
    free_bytes = shutil.disk_usage(path).free
    found = f"{size_text(free_bytes)} free at {path}"
    fix = "remove old runs (enginery gc --keep 5), or set ENGINERY_HOME to a directory on a larger disk"
    if free_bytes < _MIN_DISK_TO_START_BYTES:
        return missing(found, fix)
    if free_bytes < _MIN_DISK_BYTES:
        return warning(f"{found}: shards, checkpoints and engines may need {size_text(_MIN_DISK_BYTES)}", fix)
    return ok(found)


def cpu_quota(own: Path = _OWN_CGROUP, root: Path = _CGROUP) -> float | None:
    """CPUs that the control group may use at once; None without a quota."""
    quotas = []
    for text in _cgroup_values("", "cpu.max", own, root):
        quota, _, period = text.partition(" ")
        if quota != "max":
            quotas.append(int(quota) / int(period or 100000))
    periods = _cgroup_values("cpu", "cpu.cfs_period_us", own, root)
    for quota, period in zip(_cgroup_values("cpu", "cpu.cfs_quota_us", own, root), periods, strict=False):
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(own: Path = _OWN_CGROUP, root: Path = _CGROUP) -> int | None:
    """Bytes that the control group may use; None without a limit."""
    texts = _cgroup_values("", "memory.max", own, root) + _cgroup_values("memory", "memory.limit_in_bytes", own, root)
    limits = [int(text) for text in texts if text != "max"]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _cgroup_values(controller: str, file: str, own: Path, root: Path) -> list[str]:
    """The contents of `file` in this process's control group and those above. `controller` is "" for cgroup v2."""
    if not own.is_file():
        return []
    values = []
    for line in own.read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        top = root / controller
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            found = top.joinpath(*parts[:depth], file)
            if found.is_file():
                values.append(found.read_text(encoding="utf-8").strip())
    return values
