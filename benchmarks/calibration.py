"""Time and peak memory of calibration: each size in a process of its own.

python -m benchmarks.calibration --machine cpu-2core
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx
import torch

from benchmarks.results import Results, result_options
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model
from components.export.calibration import collect_with_onnxruntime, collect_with_torch
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors

_BATCH = 32


@click.command()
@click.option("--architecture", default="resnet50", show_default=True, help="Model by name.")
@click.option("--image-size", default=224, show_default=True, help="Side of the input, in pixels.")
@click.option("--sizes", default="64,512,1024", show_default=True, help="Numbers of images.")
@result_options
@click.option("--one", hidden=True, type=int, help="Measure this size here.")
@click.option("--model", hidden=True, type=click.Path(path_type=Path))
def main(architecture: str, image_size: int, sizes: str, results: Results, one: int | None, model: Path | None) -> None:
    shapes = ShapeSpec(height=image_size, width=image_size)
    if one is not None and model is not None:
        print(json.dumps(_calibrate(model, shapes, one)))
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "fp32.onnx")
        torch.manual_seed(0)
        export_onnx(build_model(architecture, 1000), file, shapes)
        for size in sizes.split(","):
            command = [sys.executable, "-m", "benchmarks.calibration", "--machine", results.machine]
            command += ["--model", str(file), "--image-size", str(image_size), "--one", size]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            runs.append({"num_images": int(size), **json.loads(output.splitlines()[-1])})
            print(runs[-1], flush=True)
    measures = {}
    for run in runs:
        measures[f"calibration_seconds_{run['num_images']}"] = run["seconds"]
        measures[f"calibration_peak_mib_{run['num_images']}"] = run["peak_mib"]
    peaks = [run["peak_mib"] for run in runs]
    measures["peak_memory_last_over_first"] = peaks[-1] / peaks[0]
    if "calibration_seconds_512" in measures:
        measures["calibration_seconds"] = measures["calibration_seconds_512"]
    notes = f"{architecture} at {image_size} px, random weights and images; images are made in batches of {_BATCH}."
    results.write(f"calibration_{architecture}", measures=measures, runs=runs, notes=notes)


def _calibrate(model: Path, shapes: ShapeSpec, num_images: int) -> dict[str, float | str]:
    proto = onnx.load(model)
    tensors = activation_tensors(proto)
    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    if on_gpu:
        batches = (torch.from_numpy(batch).cuda() for batch in _batches(shapes, num_images))
        collect_with_torch(proto, tensors, batches, torch.device("cuda"))
    else:
        collect_with_onnxruntime(model, tensors, _batches(shapes, num_images))
    return {
        "runtime": "torch" if on_gpu else "onnxruntime",
        "seconds": time.perf_counter() - started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_gpu_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0,
    }


def _batches(shapes: ShapeSpec, num_images: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for start in range(0, num_images, _BATCH):
        yield rng.standard_normal(shapes.input_shape(min(_BATCH, num_images - start)), dtype=np.float32)


if __name__ == "__main__":
    main()
