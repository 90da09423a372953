"""One measurement of benchmarks/train.py, in a process of its own or in torchrun's: `train_cell CELL`, as JSON.

The last line of rank 0 is PREFIX and a JSON object. Training is components.train.trainer's own: an epoch of it, of as
many steps as fill the time, by its own clock.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loader import torchvision_loader, try_workers
from components.common.contracts.environment import keep_streams_apart, num_cores
from components.common.contracts.manifests import DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.loader import Batch, Loader
from components.common.process.steplog import QuietLog
from components.common.runtimes.architectures import build_model
from components.common.tasks import load_task
from components.train import speed
from components.train.arithmetic import set_arithmetic
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import World, broadcast, find_world, process_group
from components.train.speed import EpochSpeed, StepProfiler
from components.train.trainer import Trainer

PREFIX = "@cell "
_LIVE_S = speed.LIVE_S
_NUM_CLASSES = 1000  # ImageNet's, whatever the images are
_ENOUGH = 1 << 30  # images that a dataset without an end has


class Cell(BaseModel):
    """The settings of one measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str  # synthetic, shards, live, workers or torchvision
    architecture: str = "resnet50"
    image_size: int = 224
    precision: str = "fp16"
    variant: str = "default"  # mode of TrainConfig.compile, +NAME=VALUE for settings of torch (see `apply_variant`)
    batch_size: int = 256  # per process
    num_processes: int = 1
    bucket_mb: float = 25
    static_graph: bool = False
    split_graph: bool = False
    seconds: float = 5.0  # of each turn
    turns: int = 3
    work: str = ""  # what make_data has made
    num_workers: int = 0  # of torchvision's DataLoader
    decode_on: Literal["gpu", "cpu"] = "gpu"  # of shards
    profile: bool = False

    @property
    def label(self) -> str:
        """A plain name for keys of results."""
        name = f"{self.kind}_{self.precision}_{self.variant}_b{self.batch_size}"
        if self.kind == "torchvision":
            return f"{self.kind}_b{self.batch_size}"
        if self.num_processes > 1:
            name += f"_x{self.num_processes}_bucket{self.bucket_mb:g}"
            name += ("_static" if self.static_graph else "") + ("_split" if self.split_graph else "")
        return name


class Stream:
    """Batches without an end, in place of a Loader: what comes next is what the epoch before left."""

    num_classes = _NUM_CLASSES

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)

    def __len__(self) -> int:
        return _ENOUGH

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


def apply_variant(variant: str) -> str:
    """Set what a variant says and return the mode for TrainConfig.compile.

    `default+coordinate_descent_tuning=true+triton.cudagraphs=true` sets torch._inductor.config;
    `dynamo.optimize_ddp=false` torch._dynamo.config, `functorch.NAME` torch._functorch.config, and
    `cudnn.benchmark_limit=0` torch.backends.cudnn. `fused_norm.IS_ON=false` leaves out kernels of our own.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    from components.train import fused_norm

    places: dict[str, Any] = {
        "dynamo": torch._dynamo.config,
        "functorch": torch._functorch.config,
        "cudnn": torch.backends.cudnn,
        "fused_norm": fused_norm,
    }
    mode, *changes = variant.split("+")
    for change in changes:
        name, _, value = change.partition("=")
        path = name.split(".")
        place = places.get(path[0])
        path = path[1:] if place is not None else path
        owner = reduce(getattr, path[:-1], place or torch._inductor.config)
        if not hasattr(owner, path[-1]):
            raise SystemExit(f"torch {torch.__version__} has no setting {name}")
        setattr(owner, path[-1], json.loads(value))
    return mode


def main(cell: Cell) -> None:
    keep_streams_apart()
    world = find_world()
    if cell.kind == "workers":
        result: dict[str, Any] = {"trials": try_workers(reference_loader(cell, world.device), world.device.index)}
    elif cell.kind == "torchvision":
        result = reference_recipe(cell, world.device)
    else:
        result = train(cell, world)
    if world.is_main:
        name = device_name(world.device)
        print("\n" + PREFIX + json.dumps({"device": name, "torch": torch.__version__, **result}), flush=True)


def device_name(device: torch.device) -> str:
    """Return the name of a device in results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def train(cell: Cell, world: World) -> dict[str, Any]:
    """Rates of turns by the trainer's own clock; of shards beside those of the synthetic batch."""
    mode = apply_variant(cell.variant)
    settings = {
        "architecture": cell.architecture,
        "image_size": cell.image_size,
        "precision": cell.precision,
        "compile": mode,
        "global_batch_size": cell.batch_size * world.world_size,
        "learning_rate": 1e-4,  # a single batch is soon learnt, and nothing may overflow
        "bucket_mb": cell.bucket_mb,
        "static_graph": cell.static_graph,
        "split_graph": cell.split_graph,
    }
    config = resolve(TrainConfig, "train", settings)
    set_arithmetic(config, world.device, world.local_world_size)
    apply_variant(cell.variant)  # what it says of cuDNN comes after what the trainer says
    torch.manual_seed(0)
    model = build_model(cell.architecture, _NUM_CLASSES)
    plan = plan_batches(config, world.world_size, num_train_images=_ENOUGH, num_val_images=1)
    with process_group(world, 120):
        streams = {"synthetic": Stream(itertools.repeat(fixed_batch(cell, world)))}
        first = streams["synthetic"]
        trainer = Trainer(
            model, config, plan, first, first, world=world, log=QuietLog("train"), task=load_task("classification")
        )  # type: ignore[arg-type]
        started = time.perf_counter()
        turn(trainer, first, 4)
        compile_s = time.perf_counter() - started
        probe = turn(trainer, first, 4).train_images_per_s
        num_steps = broadcast(max(3, math.ceil(cell.seconds * probe / config.global_batch_size)), world)
        if cell.kind == "shards":
            streams["shards"] = Stream(shard_batches(cell, world))
        if cell.kind == "live":
            streams["live"] = first
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        seen: dict[str, list[EpochSpeed]] = {name: [] for name in streams}
        for _ in range(cell.turns):
            for name, stream in streams.items():
                speed.LIVE_S = _LIVE_S if name == "live" else math.inf
                turn(trainer, stream, min(8, num_steps))  # what was prepared ahead is no gain
                seen[name].append(turn(trainer, stream, num_steps))
        result: dict[str, Any] = {name: summary(turns) for name, turns in seen.items()}
        result |= {"compile_s": round(compile_s, 1), "num_steps": num_steps, **peak_memory(world.device)}
        if cell.profile:
            result["profile"] = profiled(trainer, first, Path(cell.work))
    return result


def turn(trainer: Trainer, stream: Stream, num_steps: int) -> EpochSpeed:
    """An epoch of that many steps, as if it were the first."""
    trainer.train = stream  # type: ignore[assignment]
    trainer.steps_per_epoch = num_steps
    trainer.resume(0, [], 0.0, 0.0)
    return trainer.train_epoch()[1]


def summary(turns: list[EpochSpeed]) -> dict[str, Any]:
    middle = sorted(turns, key=lambda speed: speed.train_images_per_s)[len(turns) // 2]
    rates = [speed.train_images_per_s for speed in turns]
    return {
        "images_per_s": round(statistics.median(rates), 1),
        "turns": [round(rate, 1) for rate in rates],
        "data_wait_share": round(statistics.median(speed.data_wait_pct for speed in turns) / 100, 5),
        "tflops_per_s": middle.tflops_per_s,
        "peak_pct": middle.peak_pct,
        "power_w": middle.gpu_power_w,
        "utilization_pct": middle.gpu_utilization_pct,
    }


def peak_memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"memory_gb": round(allocated / 1e9, 2), "memory_reserved_gb": round(reserved / 1e9, 2)}


def profiled(trainer: Trainer, stream: Stream, folder: Path) -> dict[str, Any]:
    """Profile three more steps."""
    trainer.profiler = StepProfiler(3, trainer.world.device, folder)
    turn(trainer, stream, 16)
    return trainer.profiler.record.model_dump() if trainer.profiler.record else {}


def fixed_batch(cell: Cell, world: World) -> Batch:
    generator = torch.Generator(world.device).manual_seed(world.rank)
    shape = (cell.batch_size, cell.image_size, cell.image_size, 3)
    images = torch.randn(shape, generator=generator, device=world.device).permute(0, 3, 1, 2)
    if cell.precision != "fp32":
        images = images.half()  # as the loader gives them
    labels = torch.randint(0, _NUM_CLASSES, shape[:1], generator=generator, device=world.device)
    return Batch(images=images, labels=labels)


def shard_batches(cell: Cell, world: World) -> Iterator[Batch]:
    """Batches of the loader as the train step makes it, epoch after epoch."""
    loader = Loader(
        load(Path(cell.work) / "dataset", DatasetManifest),
        "train",
        transform_for(cell.image_size, resize_ratio=256 / 224),
        batch_size=cell.batch_size,
        augmentation=Augmentation(),
        fp16=cell.precision != "fp32",
        shard_id=world.rank,
        num_shards=world.world_size,
        device_id=world.device_id,
        num_threads=max(1, num_cores() // world.local_world_size),
        decode_on=cell.decode_on,
    )
    while True:
        yield from loader


def reference_loader(cell: Cell, device: torch.device) -> Callable[[int], DataLoader[Any]]:
    """torchvision's loader by its number of workers."""
    spec, folder = transform_for(cell.image_size, resize_ratio=256 / 224), Path(cell.work) / "images/train"
    return partial(torchvision_loader, folder, cell.batch_size, pin=device.type == "cuda", spec=spec)


def reference_recipe(cell: Cell, device: torch.device) -> dict[str, Any]:
    """torchvision's references/classification with --amp --channels-last, in bf16 and without its logging."""
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(num_cores())
    torch.manual_seed(0)
    model = build_model(cell.architecture, _NUM_CLASSES).to(device, memory_format=torch.channels_last).train()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
    loader = reference_loader(cell, device)(cell.num_workers)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    rates = []
    for _ in range(cell.turns + 1):
        num_images, batches = 0, iter(loader)
        for images, labels in itertools.islice(batches, 4):
            step(images, labels)
        synchronize(device)
        started = time.perf_counter()
        for images, labels in batches:
            step(images, labels)
            num_images += len(images)
        synchronize(device)
        rates.append(num_images / (time.perf_counter() - started))
    rates = rates[1:]  # the first one warms up
    return {"images_per_s": round(statistics.median(rates), 1), "turns": [round(rate, 1) for rate in rates]}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(Cell.model_validate_json(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # workers and CUDA graphs may take their time to go
