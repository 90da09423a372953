"""`enginery doctor`: what this machine can do.

Checks of system, memory, limits, software, storage and tracking, and the list of all, those of the GPU among them.
"""

import asyncio
import contextlib
import os
import platform
import resource
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from urllib.parse import quote, urlsplit

import aiohttp
import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from components.common.contracts.environment import cpu_name, num_cores
from components.common.contracts.errors import EXIT_FAILURE, RuntimeUnavailable, UserError
from components.common.contracts.instruction_sets import SATURATING, cpu_flags, instruction_set
from components.common.contracts.manifests import BundleManifest
from components.common.data.web import open_session
from components.common.registry.store import sqlite_file
from components.common.runtimes.selection import fit_model
from enginery.doctor.checks import Check, Diagnosis, Finding, Planned, missing, ok, warning
from enginery.doctor.gpu import GpuChecks
from enginery.doctor.probes import ProbeError, Probes
from enginery.formats import size_text
from enginery.local.state import StateDirectory, state_path
from enginery.pins import required

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # what cgroup v1 writes for "no limit" is larger
_MIN_MEMORY_BYTES = 4 * 10**9
MIN_SHM_BYTES = 10**9
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


_ACTIVATIONS = "activations signed or unsigned as export has measured"


def instruction_sets() -> Finding:
    """The arithmetic of INT8 on this CPU, and the file of a bundle for it."""
    here = instruction_set()
    if not cpu_flags():
        return warning("not known: /proc/cpuinfo names no flags", "compare INT8 accuracy with another machine's")
    if here not in SATURATING:
        return ok(f"{here}: INT8 runs with int8_cpu.onnx: 8-bit weights, {_ACTIVATIONS}")
    return ok(
        f"{here}, without VNNI: INT8 runs with int8_cpu_7bit.onnx, which is fit for every CPU: 7-bit weights, "
        f"{_ACTIVATIONS}. Sums of 8-bit weights (int8_cpu.onnx) saturate at 16 bits, unless export has measured that "
        "they do not"
    )


def int8_files(bundle: BundleManifest) -> Finding:
    """Check how each INT8 file of a bundle for CPUs is written, where its sums saturate, and which one is fit here."""
    files = bundle.cpu_models
    text = "; ".join(
        f"{file.file} ({file.arithmetic}) saturates on {', '.join(file.saturates_on) or 'no CPU'}" for file in files
    )
    try:
        return ok(f"{text}. This CPU runs {fit_model(files).file}")
    except RuntimeUnavailable as error:
        return warning(text, str(error))


def memory() -> Finding:
    """Memory that is free now, or that the container may still have."""
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
    """Containers get 64 MB by default; NCCL and workers need more."""
    fix = (
        "docker run --shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory and sizeLimit: 8Gi at "
        "/dev/shm (the pipelines of enginery ask for it); on a machine of your own: "
        "sudo mount -o remount,size=8G /dev/shm"
    )
    if not path.is_dir():
        return missing(f"there is no {path}", fix)
    total_bytes = shutil.disk_usage(path).total
    found = f"{size_text(total_bytes)} at {path}"
    if total_bytes >= MIN_SHM_BYTES:
        return ok(found)
    return warning(f"{found}: under {size_text(MIN_SHM_BYTES)} training on several GPUs ends in bus errors", fix)


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
    return warning(f"{found}; large datasets need {_MIN_OPEN_FILES:,}", fix)


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


_CHECKOUT = Path(__file__).resolve().parents[2]
_CONSTRAINTS = _CHECKOUT / "constraints.txt"  # only in a checkout
_REINSTALL = "run: make install (without make: pip install -c constraints.txt -e .)"


def versions(requirements: Iterable[str] | None = None, constraints: Path = _CONSTRAINTS) -> Finding:
    """The packages that enginery requires, and what is pinned: by constraints.txt, or by a requirement with "=="."""
    requirements = requirements if requirements is not None else required()
    if not requirements:
        return warning("not known: enginery is not installed, and its pyproject.toml is not beside it", _REINSTALL)
    wanted = list(_applicable(requirements))
    wrong, names, exact = [], {}, {}
    for requirement in wanted:
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        name = canonicalize_name(requirement.name)
        names[name] = installed
        if str(requirement.specifier).startswith("=="):  # what was tested; others work, too
            exact[name] = str(requirement.specifier).removeprefix("==")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} is {installed}, needed is {requirement.specifier}")
    if wrong:
        return missing("; ".join(wrong), _REINSTALL)
    pins = _pins(constraints)
    tested = exact | pins
    other = [f"{name} {have} (pin {tested[name]})" for name, have in names.items() if have != tested.get(name, have)]
    if other:
        return warning(f"all as required, but not what was tested: {', '.join(other)}", _REINSTALL)
    return ok(f"{len(names)} packages as required" + (", as pinned in constraints.txt" if pins else ""))


def _applicable(requirements: Iterable[str]) -> Iterator[Requirement]:
    """Those that hold here: extras are optional, but the extras a requirement asks for itself are not."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        yield requirement
        for extra in sorted(requirement.extras):
            try:
                of_package = metadata.requires(requirement.name) or []
            except metadata.PackageNotFoundError:
                continue  # reported above
            for inner in map(Requirement, of_package):
                marker = inner.marker
                if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                    yield inner


def _pins(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    pins: dict[str, str] = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pins


def probed(find: Callable[[Probes], Finding], probes: Probes) -> Finding:
    """Run a check of a library, which must import and work."""
    try:
        return find(probes)
    except ProbeError as error:
        return missing(f"does not work: {error}", _REINSTALL)


def torch(probes: Probes) -> Finding:
    """PyTorch, which must import."""
    version, cuda = probes.ask("torch", "version"), probes.ask("torch", "cuda")
    return ok(f"{version}, built for CUDA {cuda}" if cuda else f"{version}, built without CUDA")


def dali(probes: Probes) -> Finding:
    """DALI, which must import and decode on the CPU."""
    version, decodes = probes.ask("dali", "version"), probes.ask("dali", "cpu_decodes")
    if not decodes:
        return missing(f"{version} decodes a JPEG to a wrong shape", _REINSTALL)
    return ok(f"{version}; a JPEG decoded on the CPU")


def openvino(probes: Probes) -> Finding:
    """The runtime of models on the CPU."""
    version, devices = probes.ask("openvino", "version"), probes.ask("openvino", "devices")
    if "CPU" not in devices:
        return missing(f"{version} finds no CPU device (it finds {', '.join(devices) or 'nothing'})", _REINSTALL)
    return ok(f"{version} on the CPU, INT8 in integer arithmetic")


def video(probes: Probes) -> Finding:
    """The decoder of videos, and where it decodes."""
    version, on_cpu, on_gpu = (probes.ask("video", key) for key in ("version", "cpu", "cuda"))
    nvdec = f", and {', '.join(on_gpu)} on the GPU by NVDEC" if on_gpu else ""
    return ok(f"PyAV {version} decodes {', '.join(on_cpu)} on the CPU{nvdec}")


_LIMIT_S = 3.0
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_OR_LOCAL = "or unset MLFLOW_TRACKING_URI to track in a local SQLite file"


def state_directory() -> Finding:
    """Write a file there. What did not exist before is taken away again."""
    path = state_path()
    existed = path.exists()
    try:
        state = StateDirectory.current()
        with tempfile.TemporaryFile(dir=state.path) as file:
            file.write(b"0")
    except UserError as error:  # not makeable, or a path that KFP's local runner would change
        text, _, fix = str(error).rpartition("; ")
        return missing(text, fix)
    except OSError as error:
        return missing(f"{path} can't be written: {error.strerror}", "set ENGINERY_HOME to a writable directory")
    if not existed:
        with contextlib.suppress(OSError):
            path.rmdir()
    return ok(f"{path} is writable" if existed else f"{path} can be made")


def tracking() -> Finding:
    """MLflow's store, which must take a run."""
    uri = StateDirectory(path=state_path()).tracking_uri
    if file := sqlite_file(uri):
        return _sqlite(file)
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        return server(uri)
    if parts.scheme.partition("+")[0] in _PORTS:
        return _database(uri)
    return ok(f"{_shown(uri)} (not tried)")


def _shown(uri: str) -> str:
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _sqlite(path: Path) -> Finding:
    if not path.exists():
        return ok(f"{path} will be made by the first run")
    try:
        opened = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=_LIMIT_S)
        with contextlib.closing(opened) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master")
            connection.rollback()
    except sqlite3.DatabaseError as error:
        text = f"{path} can't be written: {error}"
        if "locked" in str(error):
            return missing(text, "wait for the run or `enginery ui` that writes to it, or end it")
        if "readonly" in str(error) or "unable to open" in str(error):
            return missing(text, f"make it and its folder writable for you: sudo chown -R $USER {path.parent}")
        return missing(text, f"move it away, and the next run makes a new one: mv {path} {path}.broken")
    return ok(f"{path} is writable")


def server(uri: str) -> Finding:
    """The answer of an MLflow server. Its /health answers to any name of its host, what steps ask for does not."""
    address = _shown(uri).rstrip("/")
    try:
        status = asyncio.run(_status(f"{address}/health"))
        if status < 400 and asyncio.run(_status(f"{address}/api/2.0/mlflow/experiments/get?experiment_id=0")) == 403:
            status = 403
    except (OSError, ValueError, aiohttp.ClientError) as error:
        reason = str(error) or type(error).__name__
        return missing(f"{_shown(uri)} can't be reached: {reason}", f"start the server, or check the URI, {_OR_LOCAL}")
    if status < 400:
        return ok(f"{_shown(uri)} answers")
    fixes = {
        401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        403: "name this host in the server's --allowed-hosts, and check your credentials",
    }
    fix = fixes.get(status, f"check that MLFLOW_TRACKING_URI names an MLflow server, {_OR_LOCAL}")
    return missing(f"{_shown(uri)} answers {status}", fix)


async def _status(url: str) -> int:
    limit = aiohttp.ClientTimeout(total=_LIMIT_S)
    session = await open_session(named=url, loop=asyncio.get_running_loop())
    async with session, session.get(url, timeout=limit) as answer:
        return answer.status


def _database(uri: str) -> Finding:
    parts = urlsplit(uri)
    address = (parts.hostname or "localhost", parts.port or _PORTS[parts.scheme.partition("+")[0]])
    try:
        socket.create_connection(address, timeout=_LIMIT_S).close()
    except OSError as error:
        text = f"{_shown(uri)} can't be reached: {error}"
        return missing(text, f"start the database, or check host and port ({address[0]}:{address[1]}), {_OR_LOCAL}")
    return ok(f"{_shown(uri)} listens (credentials not tried)")


def diagnose(bundle: BundleManifest | None = None) -> Diagnosis:
    """Run all checks, those of a bundle, too. One that breaks is a line of its own; the others still run."""
    with contextlib.closing(Probes()) as probes:
        return conclude([planned.run() for planned in all_checks(probes, bundle)])


def all_checks(probes: Probes, bundle: BundleManifest | None = None) -> list[Planned]:
    """Every check. The quick ones come first, while the probes import their libraries."""
    gpu = GpuChecks(probes)
    return [
        Planned("machine", "system", operating_system, required=True),
        Planned("machine", "cores", cores),
        Planned("machine", "instruction sets", instruction_sets),
        Planned("machine", "memory", memory),
        Planned("machine", "shared memory", shared_memory),
        Planned("machine", "open files", open_files),
        Planned("storage", "state directory", state_directory, required=True),
        Planned("storage", "disk space", partial(disk, state_path()), required=True),
        Planned("storage", "MLflow tracking", tracking, required=True),
        Planned("software", "Python", python),
        Planned("software", "versions", versions, required=True),
        Planned("software", "PyTorch", partial(probed, torch, probes), required=True),
        Planned("software", "DALI", partial(probed, dali, probes), required=True),
        Planned("software", "OpenVINO", partial(probed, openvino, probes)),
        Planned("software", "video", partial(probed, video, probes)),
        Planned("GPU", "GPU", gpu.gpus),
        Planned("GPU", "driver", gpu.driver),
        Planned("GPU", "PyTorch on GPU", partial(gpu.guard, gpu.torch_sees_cuda)),
        Planned("GPU", "compute capability", partial(gpu.guard, gpu.capability)),
        Planned("GPU", "DALI on GPU", partial(gpu.guard, gpu.dali_decodes)),
        Planned("GPU", "TensorRT", partial(gpu.guard, gpu.tensorrt)),
        *([Planned("bundle", "INT8 files", partial(int8_files, bundle))] if bundle else []),
        *([Planned("bundle", "plans", partial(gpu.plans, bundle))] if bundle else []),
    ]


def conclude(checks: Sequence[Check]) -> Diagnosis:
    """Say what follows."""
    blocking = [check for check in checks if check.required and check.status == "missing"]
    if blocking:
        names = ", ".join(check.name for check in blocking)
        text = f"Nothing runs here before this is fixed: {names}."
        return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=EXIT_FAILURE)
    return Diagnosis(checks=tuple(checks), conclusion=_abilities({check.name: check for check in checks}), exit_code=0)


def _abilities(checks: dict[str, Check]) -> str:
    on_gpu = checks["PyTorch on GPU"].status == "ok" and checks["compute capability"].status == "ok"
    if on_gpu and checks["TensorRT"].status in ("ok", "warning"):
        return "Runs here: training on the GPU; FP32, FP16 and INT8 as TensorRT engines."
    trains = "training on the GPU" if on_gpu else "training on the CPU"
    if checks["OpenVINO"].status == "missing":
        runs = "nothing that measures INT8, as OpenVINO does not work"
    else:
        runs = "FP32 and INT8 on the CPU"
    return f"Runs here: {trains}; {runs}. No TensorRT engines, because {_why_no_engines(checks)}."


def _why_no_engines(checks: dict[str, Check]) -> str:
    """The first thing in the way, from the card to the library."""
    if checks["GPU"].status == "absent":
        return "there is no NVIDIA GPU"
    if checks["GPU"].status == "warning":
        return "the GPU is hidden by CUDA_VISIBLE_DEVICES"
    for name, reason in (
        ("GPU", "the NVIDIA GPU has no working driver"),
        ("driver", "the GPU's driver is too old"),
        ("PyTorch on GPU", "PyTorch can't use the GPU"),
        ("compute capability", "PyTorch has no code for this GPU"),
    ):
        if checks[name].status != "ok":
            return reason
    return checks["TensorRT"].found
