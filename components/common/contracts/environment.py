"""The machine that a step ran on: library, GPU and driver versions, as recorded in every manifest."""

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.common.runtimes import RUNTIMES

KFP_RUN_VARIABLE = "ENGINERY_KFP_RUN_ID"  # on a cluster, of the run that a step belongs to
EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"

# Name in manifests -> the distributions that may provide it.
_DISTRIBUTIONS = {
    "torchvision": ("torchvision",),
    "timm": ("timm",),
    "dali": ("nvidia-dali-cuda130",),
    "onnx": ("onnx",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "kfp": ("kfp",),
    "numpy": ("numpy",),
    "pillow": ("pillow",),
    **{runtime.name: runtime.distributions for runtime in RUNTIMES.values()},
}


class Gpu(BaseModel):
    """One GPU as NVML names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: int
    driver: str


class Environment(BaseModel):
    """Hardware and software a step ran on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    platform: str
    cpu: str
    num_cores: int
    gpus: tuple[Gpu, ...]
    versions: dict[str, str] = Field(description="Installed versions of the libraries that matter to the result.")


@cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver: a machine without a GPU
    driver = pynvml.nvmlSystemGetDriverVersion()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if visible is not None:
        handles = _visible(visible, handles)
    return tuple(
        Gpu(name=pynvml.nvmlDeviceGetName(handle), memory_bytes=gpu_memory_bytes(handle), driver=driver)
        for handle in handles
    )


def gpu_memory_bytes(handle: Any) -> int:
    """Memory of a GPU by its NVML handle; the machine's where the GPU shares that (Jetson Orin, DGX Spark)."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _visible(names: str, handles: list[Any]) -> list[Any]:
    """The NVML handles that CUDA_VISIBLE_DEVICES names, by index, by the start of a UUID, or as a part (MIG).

    As CUDA reads it: the first name that is unknown or not unique ends the list, and one named twice leaves none.
    """
    import pynvml

    of_uuid = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    chosen: dict[str, Any] = {}
    for name in map(str.strip, names.split(",")):
        if name.isdecimal():
            found = list(of_uuid)[int(name) :][:1]
        elif name.startswith("MIG-"):
            found = [name]
            with suppress(pynvml.NVMLError):
                of_uuid[name] = pynvml.nvmlDeviceGetHandleByUUID(name)
        else:
            found = [uuid for uuid in of_uuid if name.startswith("GPU-") and uuid.startswith(name)]
        if len(found) != 1 or found[0] not in of_uuid:
            break
        if found[0] in chosen:
            return []
        chosen[found[0]] = of_uuid[found[0]]
    return list(chosen.values())


@cache
def cpu_name() -> str:
    """The processor's marketing name."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def own_version() -> str:
    """Version of this package; empty in a checkout that was not installed."""
    try:
        return metadata.version("enginery")
    except metadata.PackageNotFoundError:
        return ""


def utc_now() -> str:
    """The time as records have it: YYYY-MM-DDThh:mm:ssZ."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def num_cores() -> int:
    """Cores this process may run on (respects affinity and thus container CPU sets)."""
    return len(os.sched_getaffinity(0))


def keep_streams_apart() -> None:
    """Let CUDA spread its streams over 32 hardware queues, all there are, instead of 8; before it is first used.

    The image decoder has dozens of streams. Where they share a queue with a model's, decoding waits until all that was
    enqueued before it is done: on an H200, training from shards then waited for data in 19 % of the time, not 0.3 %
    (benchmarks/results/h200/train_resnet50*.json).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def torchrun_rank() -> int | None:
    """This process's rank among those that torchrun, or something that sets the same variables, has started."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and "WORLD_SIZE" in os.environ else None


@cache
def _library_versions() -> dict[str, str]:
    """Return installed versions by library, of package metadata only: none of them is imported."""
    versions: dict[str, str] = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            with suppress(metadata.PackageNotFoundError):
                versions.setdefault(name, metadata.version(distribution))
    return versions


def environment() -> Environment:
    """Describe the machine and the installed libraries."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu_name(),
        num_cores=num_cores(),
        gpus=gpus(),
        versions=dict(_library_versions()),
    )
