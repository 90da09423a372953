"""All checks, run one by one, and what follows from them."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from components.common.contracts.errors import EXIT_FAILURE
from enginery.doctor import machine
from enginery.doctor.checks import Check, Planned, run_check
from enginery.doctor.gpu import GpuChecks
from enginery.doctor.probes import Probes


class Diagnosis(BaseModel):
    """What `enginery doctor --json` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    checks: tuple[Check, ...]
    conclusion: str = Field(description="What this machine can run.")
    exit_code: int = Field(description="0, or 1 when something that every run needs is missing.")


def diagnose() -> Diagnosis:
    """Run all checks. A check that breaks is a line of its own; the others still run."""
    probes = Probes()
    try:
        return conclude([run_check(planned) for planned in all_checks(probes)])
    finally:
        probes.close()


def all_checks(probes: Probes) -> list[Planned]:
    """Every check. The quick ones come first, while the probes import their libraries."""
    gpu = GpuChecks(probes)
    return [
        Planned("machine", "system", machine.operating_system, required=True),
        Planned("machine", "cores", machine.cores),
        Planned("machine", "instruction sets", machine.instruction_sets),
        Planned("machine", "memory", machine.memory),
        Planned("machine", "shared memory", machine.shared_memory),
        Planned("machine", "open files", machine.open_files),
        Planned("storage", "state directory", machine.state_directory, required=True),
        Planned("storage", "disk space", lambda: machine.disk(machine.state_path()), required=True),
        Planned("storage", "MLflow tracking", machine.tracking, required=True),
        Planned("software", "Python", machine.python),
        Planned("software", "versions", machine.versions, required=True),
        Planned("software", "PyTorch", lambda: machine.torch(probes), required=True),
        Planned("software", "DALI", lambda: machine.dali(probes), required=True),
        Planned("software", "OpenVINO", lambda: machine.openvino(probes)),
        Planned("GPU", "GPU", gpu.gpus),
        Planned("GPU", "driver", gpu.driver),
        Planned("GPU", "PyTorch on GPU", gpu.torch_sees_cuda),
        Planned("GPU", "compute capability", gpu.capability),
        Planned("GPU", "DALI on GPU", gpu.dali_decodes),
        Planned("GPU", "TensorRT", gpu.tensorrt),
    ]


def conclude(checks: Sequence[Check]) -> Diagnosis:
    """Say what follows."""
    blocking = [check for check in checks if check.required and check.status == "missing"]
    if blocking:
        names = ", ".join(check.name for check in blocking)
        text = f"Nothing runs here before this is mended: {names}."
        return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=EXIT_FAILURE)
    return Diagnosis(checks=tuple(checks), conclusion=_abilities({check.name: check for check in checks}), exit_code=0)


def _abilities(checks: dict[str, Check]) -> str:
    on_gpu = checks["PyTorch on GPU"].status == "ok" and checks["compute capability"].status == "ok"
    if on_gpu and checks["TensorRT"].status == "ok":
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
