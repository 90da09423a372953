"""Arithmetic of training: precision, TF32, determinism, threads, small convolutions as matrix products."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.process.steplog import StepLog
from components.common.tasks import TASKS, task_of
from components.train.config import TrainConfig

_Result = TypeVar("_Result")


def pick_precision(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of autocast: what the config asks for, or what the device is good at."""
    if config.precision != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision]
    if device.type != "cuda":
        return torch.float32
    # Older GPUs emulate bf16, and more slowly than they compute in FP32.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def pick_compile_mode(config: TrainConfig, device: torch.device, log: StepLog) -> str:
    """Return the mode of torch.compile; empty for none. A CPU run is over before compiling would pay.

    Batches of sentences have many lengths, and each would be compiled for longer than an epoch takes.

    Raises:
        UserError: a mode is asked for that this machine lacks the tools for.
    """
    on_gpu = device.type == "cuda"
    pays = on_gpu and not TASKS[task_of(config.architecture)].of_text
    if config.compile == "off" or (config.compile == "auto" and not pays):
        return ""
    missing = _missing_for_triton() if on_gpu else ""
    if config.compile != "auto":
        if missing:
            text = f"train.compile is {config.compile}, and this machine has no {missing}; or set it to off"
            raise UserError(text, code="no-compiler", setting="train.compile")
        return config.compile
    if missing:
        log.warning(f"training is not compiled and so is slower, because this machine has no {missing}")
        return ""
    return "default"


def _missing_for_triton() -> str:
    """Return the missing tool that torch.compile's kernels for GPUs are built with; empty if all are here."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "C compiler (Debian, Ubuntu: sudo apt-get install gcc)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "headers of Python (Debian, Ubuntu: sudo apt-get install python3-dev)"
    return ""


def compiled(function: Callable[..., _Result], mode: str) -> Callable[..., _Result]:
    """Return the function through torch.compile, for sizes that are few and known. Unchanged for an empty mode."""
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
    """Return a process's share of the cores."""
    return max(1, num_cores() // num_local_processes)


_MAX_ROWS = 144  # input pixels times kernel size: up to 12x12 pixels for 1x1 and 4x4 for 3x3; above, oneDNN is as fast
_FEW_CHANNELS = 16


class SmallConv2d(nn.Conv2d):
    """A Conv2d, same weights and result, that is one matrix product per batch where the input has few pixels.

    So is a 1x1 with strides over few channels, as RepVGG, MobileOne and FastViT have of the image itself: its backward
    pass ends in a segmentation fault in oneDNN (seen with torch 2.15 from 96 px on).
    """

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # input: [B, C, H, W] float32, channels_last
        (kernel_h, kernel_w), (stride_h, stride_w) = self.kernel_size, self.stride
        padding = (0, 0) if self.padding == "valid" else self.padding
        skips = self.kernel_size == (1, 1) and max(self.stride) > 1 and self.in_channels < _FEW_CHANNELS
        is_small = skips or input.shape[2] * input.shape[3] * kernel_h * kernel_w <= _MAX_ROWS
        if isinstance(padding, str) or not is_small:
            return super()._conv_forward(input, weight, bias)
        pad_h, pad_w = padding
        rows = _windows(input.shape[2], kernel_h, stride_h, pad_h)
        columns = _windows(input.shape[3], kernel_w, stride_w, pad_w)
        images = nn.functional.pad(input.permute(0, 2, 3, 1), (0, 0, pad_w, pad_w, pad_h, pad_h))
        # [B, OH, OW, KH * KW * C], as the weights lie in memory: [O, KH, KW, C]
        seen = [images[:, row, column] for row in rows.values() for column in columns.values()]
        windows = torch.cat(seen, dim=3) if len(seen) > 1 else seen[0]
        if len(rows) < kernel_h or len(columns) < kernel_w:
            weight = weight[:, :, min(rows) : max(rows) + 1, min(columns) : max(columns) + 1]
        result = nn.functional.linear(windows, weight.permute(0, 2, 3, 1).flatten(1), bias)
        return result.permute(0, 3, 1, 2)


def _windows(size: int, kernel: int, stride: int, padding: int) -> dict[int, slice]:
    """Return the window of a padded side at each place of the kernel, without the outer ones of padding alone."""
    length = (size + 2 * padding - kernel) // stride * stride + 1
    windows = {place: slice(place, place + length, stride) for place in range(kernel)}
    pixels = range(padding, padding + size)
    used = [place for place in windows if any(seen in pixels for seen in range(place, place + length, stride))]
    return {place: windows[place] for place in range(used[0], used[-1] + 1)} if used else windows


def speed_up_small_convolutions(model: nn.Module) -> None:
    """Make the plain convolutions of a model SmallConv2d; names, weights and results stay the same."""
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.dilation == (1, 1)
            and module.padding_mode == "zeros"
        ):
            module.__class__ = SmallConv2d
