"""What a few steps spend their time on, by torch.profiler."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from components.common.records import ProfiledOperation, ProfileRecord

TRACE = "trace.json.gz"  # for chrome://tracing or ui.perfetto.dev
NUM_SKIPPED = 8  # steps before: compilation and the search for the fastest kernels are not what is asked for
_NUM_SHOWN = 12
# Signs in a kernel's name -> what it does. The first that fits counts.
_FAMILIES = (
    (("nccl",), "communication"),
    (("memcpy", "memset"), "copies"),
    (("multi_tensor_apply", "fused_sgd", "fusedsgd", "fused_adam"), "optimizer"),
    (("batch_norm", "bn_fw", "bn_bw", "batchnorm"), "batch normalization"),
    (("triton_",), "kernels of torch.compile"),
    (
        ("conv", "gemm", "wgrad", "dgrad", "fprop", "cutlass", "xmma", "sm80_", "sm90_", "nvjet", "::mm", "::addmm"),
        "convolutions and matrix products",
    ),
)


class StepProfiler:
    """Records `num_steps` steps of one process, a few after its first. Costs nothing before and after."""

    def __init__(self, num_steps: int, device: torch.device, folder: Path | None) -> None:
        """The trace goes into `folder`; without one, or for 0 steps, nothing is recorded."""
        self.record: ProfileRecord | None = None
        self._left = 0 if folder is None else num_steps
        self._num_steps, self._device, self._folder = num_steps, device, folder
        self._to_skip = NUM_SKIPPED
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Begin to record where it is time to."""
        if self._to_skip or not self._left or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def after_step(self) -> None:
        """Write the trace after the last step that is to be recorded."""
        self._to_skip = max(0, self._to_skip - 1)
        if self._profile is None:
            return
        self._left -= 1
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """End the record, also where the training has fewer steps than were to be recorded."""
        if self._profile is None or self._folder is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / TRACE))
        self.record = summarize(self._profile, self._num_steps - self._left, on_gpu=self._device.type == "cuda")
        self._profile, self._left = None, 0


def summarize(recorded: profile, num_steps: int, *, on_gpu: bool) -> ProfileRecord:
    """The costliest operations: kernels on a GPU, torch's operators on a CPU."""
    times: dict[str, float] = defaultdict(float)  # microseconds
    calls: Counter[str] = Counter()
    for event in recorded.key_averages():
        time_us = _self_time_us(event, on_gpu=on_gpu)
        if time_us > 0:
            times[event.key] += time_us
            calls[event.key] += event.count
    total = sum(times.values()) or 1.0
    families: dict[str, float] = defaultdict(float)
    for name, time_us in times.items():
        families[_family(name)] += time_us
    return ProfileRecord(
        num_steps=num_steps,
        ms_per_step=total / num_steps / 1e3,
        families_pct={name: 100 * time_us / total for name, time_us in _largest_first(families)},
        operations=tuple(
            ProfiledOperation(name=name[:120], calls_per_step=calls[name] / num_steps, share_pct=100 * time_us / total)
            for name, time_us in _largest_first(times)[:_NUM_SHOWN]
        ),
    )


def _self_time_us(event: Any, *, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total)
    is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
    return float(event.self_device_time_total) if is_kernel else 0.0


def _largest_first(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def _family(name: str) -> str:
    lower = name.lower()
    return next((family for signs, family in _FAMILIES if any(sign in lower for sign in signs)), "the rest")
