"""Speed of training: images/s, waiting, GPU utilization, FLOPs, and a profile of a few steps."""

import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from components.common.contracts.records import ProfiledOperation, ProfileRecord
from components.common.data.loader import Batch
from components.common.process.gpu_monitor import GpuReading, monitor_of
from components.common.runtimes.architectures import call_on_meta
from components.train.distributed import World, gather

# What matrix units reach without sparsity, in TFLOP/s, by NVIDIA's data sheets: (fp16 and bf16, TF32, FP32 without
# them). None where a GPU has no such unit. The first name that is part of the GPU's own counts.
_PEAKS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    ("B200", (2250.0, 1100.0, 75.0)),
    ("H200 NVL", (835.0, 417.0, 60.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("GH200", (989.4, 494.7, 66.9)),
    ("H100 NVL", (835.0, 417.0, 60.0)),
    ("H100 PCIe", (756.0, 378.0, 51.0)),
    ("H100 80GB HBM3", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A30", (165.0, 82.0, 10.3)),
    ("A10G", (70.0, 35.0, 31.2)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("V100-SXM2", (125.0, None, 15.7)),
    ("V100-PCIE", (112.0, None, 14.0)),
    ("T4", (65.0, None, 8.1)),
)
_NO_BF16 = ("V100", "T4")


def flops_per_image(model: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float | None:
    """Floating-point operations of forward and backward over one image of this shape; a multiply-add counts as two.

    Counts convolutions and matrix products, as torch's flop counter does, on tensors without data. Layers that are
    frozen count only what training needs of them. None for a model that can't run without data.
    """
    images = torch.empty(2, *shape, dtype=dtype, device="meta")  # BatchNorm wants more than one
    was_training = model.training
    model.train()
    try:
        with FlopCounterMode(display=False) as counter:
            call_on_meta(model, images).sum().backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() / len(images)


def peak_tflops(gpu_name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """TFLOP/s of a GPU for products of `dtype`, by its data sheet; None where it is not known here."""
    words = gpu_name.replace("NVIDIA ", "").replace("Tesla ", "")
    # Whole words of it: "L4" is not "L40", nor is "A100" "A1000".
    row = next((row for name, row in _PEAKS if re.match(rf"{name}($|[ -])", words)), None)
    if row is None or (dtype == torch.bfloat16 and any(name in gpu_name for name in _NO_BF16)):
        return None
    fp16, tensor32, plain = row
    if dtype in (torch.float16, torch.bfloat16):
        return fp16
    return tensor32 if tf32 and tensor32 is not None else plain


_INTERVAL_S = 0.05  # between two readings of the GPU
LIVE_S = 5.0  # between two values of `SpeedMeter.live` or `live_load`


@dataclass(frozen=True, kw_only=True)
class EpochSpeed:
    """The speed of an epoch of training, over all processes, on rank 0. None where it is not known here."""

    train_images_per_s: float
    data_wait_pct: float  # of the time, mean
    gpu_utilization_pct: float | None = None  # mean
    gpu_memory_bytes: int | None = None  # in use at most, by whatever runs there, on the GPU with the most
    gpu_power_w: float | None = None  # sum; of all GPUs or of none
    tflops_per_s: float | None = None  # sum
    peak_pct: float | None = None  # share of what the GPUs' data sheets say


class Waits:
    """Time that a process's steps wait for batches: on a GPU, between its last work and the batch's arrival there.

    A CPU that waits while the GPU has work to do costs nothing, so it is the GPU's time that counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.seconds = 0.0  # since `take_seconds`, of the batches that the GPU has had
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def next(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch."""
        if not self._on_gpu:
            before = time.perf_counter()
            batch = next(batches)
            self.seconds += time.perf_counter() - before
            return batch
        first, last = _event(), _event()
        first.record()
        batch = next(batches)
        last.record()
        self._pending.append((first, last))
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            self._add_oldest()
        return batch

    def take_seconds(self) -> float:
        """Since the last call. The GPU must have finished what it was given."""
        while self._pending:
            self._add_oldest()
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _add_oldest(self) -> None:
        first, last = self._pending.popleft()
        last.synchronize()
        self.seconds += first.elapsed_time(last) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class SpeedMeter:
    """Measures epochs of one process, and what all of them make together."""

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype, *, tf32: bool) -> None:
        """`model` computes in `dtype` on the world's device."""
        self._model, self._world = model, world
        on_gpu = world.device.type == "cuda"
        self._monitor = monitor_of(world.device, interval_s=_INTERVAL_S) if on_gpu else None
        name = torch.cuda.get_device_name(world.device) if on_gpu else ""
        self._peak = peak_tflops(name, dtype, tf32=tf32)
        self._waits = Waits(world.device)
        self._flops: dict[tuple[int, ...], float | None] = {}  # per image, by its shape
        self._shape, self._dtype = torch.Size(), torch.float32  # of an image
        self._num_images = 0
        self._began = time.perf_counter()
        self._last_load = self._began
        self._last_live = (0.0, 0, 0.0)  # `_so_far` when `live` had it; below 0 if that was in an earlier epoch
        psutil.cpu_percent()  # from here on

    def begin(self) -> None:
        """Begin an epoch, or what is left of one."""
        self._waits.take_seconds()
        self._num_images = 0
        self._began = time.perf_counter()
        self.watch()

    def next(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, and note how long it took."""
        batch = self._waits.next(batches)
        self._num_images += len(batch.images)
        self._shape, self._dtype = batch.images.shape[1:], batch.images.dtype
        return batch

    def live(self) -> dict[str, float]:
        """Return the load as `live_load`, and with it or after `LIVE_S` of training in some epochs the speed.

        Images per second are those of all processes, if the others are as fast. Waiting for data (per cent of the time)
        is this process's.
        """
        seconds, num_images, waited_s = self._since_live()
        values = self.live_load(0.5 if seconds >= LIVE_S else 1)
        if seconds < (LIVE_S / 2 if values else LIVE_S):
            return values
        self._last_live = self._so_far()
        rate = self._world.world_size * num_images / seconds
        return {"images_per_s": rate, "data_wait_pct": 100 * waited_s / seconds, **values}

    def watch(self) -> None:
        """Watch the GPU, in an epoch or outside, until `stop`."""
        if self._monitor is not None:
            self._monitor.start()

    def live_load(self, share: float = 1) -> dict[str, float]:
        """Return the load since the last values, of training or not; nothing before this share of `LIVE_S`."""
        seconds = time.perf_counter() - self._last_load
        if seconds < share * LIVE_S:
            return {}
        self._last_load += seconds
        return self._load(seconds)

    def _load(self, seconds: float) -> dict[str, float]:
        """Return CPU (per cent) and memory (bytes) of the machine, and of the process's GPU as far as NVML knows it.

        The latter's names start with gpu: per cent, bytes, W, degrees Celsius.
        """
        values = {"cpu_pct": psutil.cpu_percent(), "memory_bytes": float(psutil.virtual_memory().used)}
        if self._monitor is not None:
            reading = asdict(self._monitor.reading(seconds))
            del reading["sm_clock_mhz"]
            values |= {f"gpu_{name}": value for name, value in reading.items() if value is not None}
        return values

    def _so_far(self) -> tuple[float, int, float]:
        """Return seconds, images and seconds of waiting since `begin`."""
        return time.perf_counter() - self._began, self._num_images, self._waits.seconds

    def _since_live(self) -> tuple[float, int, float]:
        now, last = self._so_far(), self._last_live
        return now[0] - last[0], now[1] - last[1], now[2] - last[2]

    def stop(self) -> None:
        """Stop watching the GPU: the epoch was left."""
        if self._monitor is not None:
            self._monitor.stop()

    def end(self, num_images: int, seconds: float) -> EpochSpeed:
        """Return the speed of an epoch that is over and that the GPU has finished. By all processes.

        Args:
            num_images: of the whole epoch, over all processes.
            seconds: that it took, with what an earlier process had done of it.
        """
        seconds_since, images_since, waited_since = self._since_live()
        self._last_live = (-seconds_since, -images_since, -waited_since)
        wait_share = self._waits.take_seconds() / max(1e-9, time.perf_counter() - self._began)
        self.stop()
        reading = self._monitor.reading() if self._monitor is not None else GpuReading()
        every = gather((wait_share, reading), self._world) or [(wait_share, reading)]
        readings = [reading for _, reading in every]
        images_per_s = num_images / seconds
        flops = self._flops_per_image()
        tflops = None if flops is None else flops * images_per_s / 1e12
        peak = None if tflops is None or self._peak is None else 100 * tflops / self._peak / self._world.world_size
        utilizations = [one.utilization_pct for one in readings if one.utilization_pct is not None]
        powers = [one.power_w for one in readings if one.power_w is not None]
        return EpochSpeed(
            train_images_per_s=images_per_s,
            data_wait_pct=100 * sum(share for share, _ in every) / len(every),
            gpu_utilization_pct=sum(utilizations) / len(utilizations) if utilizations else None,
            gpu_memory_bytes=max((one.memory_bytes for one in readings if one.memory_bytes is not None), default=None),
            gpu_power_w=sum(powers) if len(powers) == len(every) else None,
            tflops_per_s=tflops,
            peak_pct=peak,
        )

    def _flops_per_image(self) -> float | None:
        if not self._shape:  # nothing was left of the epoch
            return None
        if self._shape not in self._flops:
            dtype = torch.float32 if self._dtype.is_floating_point else self._dtype
            self._flops[self._shape] = flops_per_image(self._model, self._shape, dtype)
        return self._flops[self._shape]


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
        self._profile = profile(activities=activities, record_shapes=True)
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
    """Return the costliest operations: kernels on a GPU, torch's operators on a CPU."""
    times_us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded.key_averages():
        if on_gpu:
            is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
            time_us = event.self_device_time_total if is_kernel else 0
        else:
            time_us = event.self_cpu_time_total
        if time_us > 0:
            times_us[event.key] += time_us
            calls[event.key] += event.count
    total_us = times_us.total() or 1
    families_us: Counter[str] = Counter()
    for name, time_us in times_us.items():
        families = (family for signs, family in _FAMILIES if any(sign in name.lower() for sign in signs))
        families_us[next(families, "the rest")] += time_us
    return ProfileRecord(
        num_steps=num_steps,
        ms_per_step=total_us / num_steps / 1e3,
        families_pct={name: 100 * time_us / total_us for name, time_us in families_us.most_common()},
        operations=tuple(
            ProfiledOperation(
                name=name[:120], calls_per_step=calls[name] / num_steps, share_pct=100 * time_us / total_us
            )
            for name, time_us in times_us.most_common(_NUM_SHOWN)
        ),
    )
