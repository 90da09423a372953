"""Kernels of a training step beside the least time that the GPU's memory and arithmetic allow them.

    python -m benchmarks.train_roofline --machine h200

The step is that of benchmarks.train on a fixed batch. torch.profiler says which operator launched a kernel and with
which shapes. From these: the bytes of each tensor that the operator has to read or write, once, and the operations of
convolutions and matrix products. The limits are measured in the same run: a copy of 4 GB, a product of 8,192 squared.
"""

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch.utils.benchmark import Timer

from benchmarks.results import Results, result_options
from benchmarks.train_cell import Cell, train
from components.common.contracts.environment import keep_streams_apart
from components.train.distributed import find_world
from components.train.speed import TRACE

_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}
_NUM_STEPS = 3  # that benchmarks.train_cell records
_SHORTCUT, _POOLED = 2, 3  # modes of components.train.fused_norm
_KINDS = {
    "aten::convolution": "convolutions forward",
    "aten::_convolution": "convolutions forward",
    "aten::cudnn_convolution": "convolutions forward",
    "aten::convolution_backward": "convolutions backward",
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "enginery::batch_statistics": "BatchNorm sums forward",
    "enginery::batch_norm_gradient_sums": "BatchNorm sums backward",
    "enginery::affine_relu_pool": "first pooling",
    "enginery::affine_relu_pool_backward": "first pooling",
}


class Limits(NamedTuple):
    """The highest rates of a GPU."""

    bytes_per_s: float
    flop_per_s: float


class Work(NamedTuple):
    """The least that an operator has to do; None where it is not known."""

    num_bytes: float | None = None
    flop: float = 0


def work_of(operator: dict[str, Any], outputs: dict[str, list[int]]) -> Work:
    """The bytes and operations of an operator of a trace; `outputs` has the shapes of convolutions' results."""
    name, given = operator["name"], operator["args"]
    dims, types = given.get("Input Dims", []), given.get("Input type", [])
    constants = given.get("Concrete Inputs", [])
    sizes = [
        math.prod(shape) * _BYTES.get(kind, 1) if shape and not isinstance(shape[0], list) else 0
        for shape, kind in zip(dims, types, strict=True)
    ]
    if "kernel_num_gb" in given:
        return Work(1e9 * float(given["kernel_num_gb"]))
    if _KINDS.get(name) == "convolutions forward":
        result = outputs.get(str(dims[:2]))
        if result is None:
            return Work()
        return Work(sum(sizes) + math.prod(result) * _BYTES[types[0]], 2 * math.prod(result) * math.prod(dims[1][1:]))
    if name == "aten::convolution_backward":
        gradient, x, weight = sizes[:3]
        wanted = [part.strip() == "True" for part in constants[-1].strip("[]").split(",")]
        flop = 2 * math.prod(dims[0]) * math.prod(dims[2][1:])
        return Work((wanted[0] + wanted[1]) * (gradient + x + weight), (wanted[0] + wanted[1]) * flop)
    if name in ("aten::mm", "aten::addmm"):
        first, second = [shape for shape in dims if shape][-2:]
        result = first[0] * second[1]
        return Work(sum(sizes) + result * _BYTES[types[dims.index(first)]], 2 * result * first[1])
    if name == "enginery::batch_statistics":
        return Work(sizes[0])
    if name == "enginery::batch_norm_gradient_sums":
        first, second, gate, x = sizes[:4]
        mode, has_second = int(constants[7]), constants[8] == "True"
        if mode == _SHORTCUT:
            return Work(first + has_second * second + gate + 2 * x)
        return Work(first + x + (gate if mode == _POOLED else 0))
    if name == "enginery::affine_relu_pool":
        pooled = math.prod(dims[0]) // 4
        return Work(sizes[0] + pooled * (2 * _BYTES[types[0]] + 1))
    if name == "enginery::affine_relu_pool_backward":
        return Work(sum(sizes[:3]) + 4 * math.prod(dims[0]) * _BYTES[types[0]])
    if name == "aten::copy_":
        return Work(sum(sizes))
    return Work()


def kernels_of(trace: dict[str, Any], num_steps: int, limits: Limits) -> list[dict[str, Any]]:
    """One row for each operator and its shapes, the one with the most time above its least time first."""
    operators: dict[int, dict[str, Any]] = {}
    launched: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        number = event.get("args", {}).get("External id")
        if number is not None and event.get("cat") == "cpu_op":
            operators[number] = event
        if number is not None and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[number].append(event)
    outputs = {
        str(event["args"]["Input Dims"][1:3]): event["args"]["Input Dims"][0]
        for event in operators.values()
        if event["name"] == "aten::convolution_backward"
    }
    rows: dict[str, dict[str, Any]] = {}
    for number, kernels in launched.items():
        operator = operators.get(number, {"name": "none", "args": {}})
        name = operator["name"]
        shapes = [shape for shape in operator["args"].get("Input Dims", []) if shape]
        kind = _KINDS.get(name, "kernels of torch.compile" if name.startswith("triton_") else "the rest")
        row = rows.setdefault(
            f"{name} {shapes}",
            {"operator": name, "kind": kind, "shapes": shapes, "kernels": [], "calls_per_step": 0.0, "ms": 0.0},
        )
        work = work_of(operator, outputs)
        row["calls_per_step"] += 1 / num_steps
        row["ms"] += sum(kernel["dur"] for kernel in kernels) / 1e3 / num_steps
        row["kernels"] = sorted({*row["kernels"], *(kernel["name"][:100] for kernel in kernels)})
        if work.num_bytes is None:
            continue
        by_memory, by_arithmetic = work.num_bytes / limits.bytes_per_s, work.flop / limits.flop_per_s
        row["gigabytes"] = row.get("gigabytes", 0) + work.num_bytes / 1e9 / num_steps
        row["gflop"] = row.get("gflop", 0) + work.flop / 1e9 / num_steps
        row["least_ms"] = row.get("least_ms", 0) + 1e3 * max(by_memory, by_arithmetic) / num_steps
        row["bound_by"] = "memory" if by_memory >= by_arithmetic else "arithmetic"
    return sorted(rows.values(), key=lambda row: row["ms"] - row.get("least_ms", 0), reverse=True)


def measures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over the step and over each kind of kernel; what has no least time counts with its own."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        for name in ("step", row["kind"].replace(" ", "_").replace(".", "_").lower()):
            sums[name][0] += row["ms"]
            sums[name][1] += row.get("least_ms", row["ms"])
            sums[name][2] += row.get("gigabytes", 0)
    return {
        f"{name}_{what}": value
        for name, (ms, least_ms, gigabytes) in sums.items()
        for what, value in (("ms", ms), ("least_ms", least_ms), ("of_roofline", least_ms / ms), ("gb", gigabytes))
    }


def measure_limits(dtype: torch.dtype) -> Limits:
    """Rates of a copy and of a product of matrices on the GPU."""
    source = torch.empty(1 << 31, dtype=torch.int8, device="cuda")
    tensors = {"source": source, "target": torch.empty_like(source)}
    tensors["square"] = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    copied, multiplied = (
        Timer(statement, globals=tensors).blocked_autorange(min_run_time=0.5).median
        for statement in ("target.copy_(source)", "square @ square")
    )
    return Limits(2 * len(source) / copied, 2 * 8192**3 / multiplied)


@click.command()
@click.option("--architecture", default="resnet50", show_default=True)
@click.option("--batch-size", default=1024, show_default=True)
@click.option("--image-size", default=224, show_default=True)
@click.option("--variant", default="default", show_default=True, help="Mode of train.compile, without CUDA graphs.")
@click.option("--work", default=Path("/tmp/enginery-roofline"), type=click.Path(path_type=Path), help="For the trace.")
@result_options
def main(architecture: str, batch_size: int, image_size: int, variant: str, work: Path, results: Results) -> None:
    import torch._inductor.config

    keep_streams_apart()
    limits = measure_limits(torch.float16)
    torch.cuda.empty_cache()
    torch._inductor.config.benchmark_kernel = True  # its kernels then say how many bytes they need
    cell = Cell(
        kind="synthetic",
        architecture=architecture,
        image_size=image_size,
        batch_size=batch_size,
        variant=variant,
        seconds=3,
        work=str(work),
        profile=True,
    )
    measured = train(cell, find_world())
    rows = kernels_of(json.loads(gzip.decompress((work / TRACE).read_bytes())), _NUM_STEPS, limits)
    rate = measured["synthetic"]["images_per_s"]
    measures = {
        "images_per_s": rate,
        "step_wall_ms": 1e3 * batch_size / rate,
        "copy_tb_per_s": limits.bytes_per_s / 1e12,
        "product_tflops": limits.flop_per_s / 1e12,
        **measures_of(rows),
    }
    results.write(
        f"train_roofline_{architecture}",
        measures=measures,
        runs=rows,
        notes=f"A step of {batch_size} images of {image_size} px; ms, gigabytes and gflop of a step. least_ms: "
        "the bytes of each tensor once at the rate of a copy, or the operations at that of a product of matrices of "
        "8,192 squared, whichever is longer, by call. What has none (the optimizer, copies) counts with its own time "
        "in sums. of_roofline: least_ms over ms.",
    )


if __name__ == "__main__":
    main()
