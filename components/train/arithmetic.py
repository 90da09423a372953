"""How numbers are computed: precision, TF32, determinism, threads."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from components.common.environment import num_cores
from components.common.errors import UserError
from components.common.steplog import StepLog
from components.train.config import TrainConfig

_Result = TypeVar("_Result")


def pick_precision(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of autocast: what the config asks for, or what the device is good at."""
    if config.precision != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision]
    if device.type != "cuda":
        return torch.float32
    # Older GPUs emulate bf16, and more slowly than they compute in FP32.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def pick_compile_mode(config: TrainConfig, device: torch.device, log: StepLog) -> str:
    """The mode of torch.compile; empty for none. A CPU run is over before compiling would pay.

    Raises:
        UserError: a mode is asked for that this machine lacks the tools for.
    """
    on_gpu = device.type == "cuda"
    if config.compile == "off" or (config.compile == "auto" and not on_gpu):
        return ""
    missing = _missing_for_triton() if on_gpu else ""
    if config.compile != "auto":
        if missing:
            raise UserError(f"train.compile is {config.compile}, and this machine has no {missing}; or set it to off")
        return config.compile
    if missing:
        log.warning(f"training is not compiled and so is slower, because this machine has no {missing}")
        return ""
    return "default"


def _missing_for_triton() -> str:
    """What torch.compile's kernels for GPUs are built with and is not here; empty if all is."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "C compiler (Debian, Ubuntu: sudo apt-get install gcc)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "headers of Python (Debian, Ubuntu: sudo apt-get install python3-dev)"
    return ""


def compiled(function: Callable[..., _Result], mode: str) -> Callable[..., _Result]:
    """The function through torch.compile, for sizes that are few and known. Unchanged for an empty mode."""
    if not mode:
        return function
    if mode == "tuned":
        return torch.compile(function, dynamic=False, options={"coordinate_descent_tuning": True})
    return torch.compile(function, dynamic=False, mode=mode)


def set_arithmetic(config: TrainConfig, device: torch.device, num_local_processes: int) -> None:
    """Set what torch keeps per process. Before anything is computed: cuBLAS reads its variable only once."""
    torch.set_num_threads(threads_per_process(num_local_processes))
    torch.backends.cudnn.benchmark = not config.deterministic  # shapes change once per epoch at most
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32


def threads_per_process(num_local_processes: int) -> int:
    """A process's share of the cores."""
    return max(1, num_cores() // num_local_processes)
