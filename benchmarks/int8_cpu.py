"""INT8 over FP32 for ResNet-50 at 224 px on OpenVINO, both in one process, taking turns.

    python -m benchmarks.int8_cpu --machine cpu-2core

The weights are random: speed does not depend on them. Scales come from the export step's own calibration.
"""

import statistics
import tempfile
from pathlib import Path

import click
import numpy as np
import onnx
import torch

from benchmarks.results import write_result
from components.common.models import build_model
from components.common.runners.openvino import OpenVINORunner
from components.common.shapes import ShapeSpec
from components.export.calibration import CalibrationMethod, compute_scale
from components.export.collection import collect_with_onnxruntime
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors
from components.export.qdq import insert_qdq

_NUM_CALIBRATION_IMAGES = 16


@click.command()
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option("--architecture", default="resnet50", show_default=True, help="Model by name.")
@click.option("--image-size", default=224, show_default=True, help="Side of the input, in pixels.")
@click.option("--batch-sizes", default="1,16", show_default=True, help="Batches, in images.")
@click.option("--seconds", default=3.0, show_default=True, help="Length of one measurement.")
@click.option("--repeat", default=5, show_default=True, help="Turns.")
def main(machine: str, architecture: str, image_size: int, batch_sizes: str, seconds: float, repeat: int) -> None:
    torch.manual_seed(0)
    shapes = ShapeSpec(height=image_size, width=image_size)
    sizes = [int(size) for size in batch_sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        files = _write_models(Path(folder), architecture, shapes)
        runners = {precision: OpenVINORunner(file, shapes) for precision, file in files.items()}
        runs = [
            {"turn": turn, "precision": precision, "batch_size": size, **_measure(runner, size, seconds)}
            for turn in range(repeat)
            for size in sizes
            for precision, runner in runners.items()
        ]
    measures = {}
    for size in sizes:
        for precision in files:
            own = [run for run in runs if run["precision"] == precision and run["batch_size"] == size]
            measures[f"images_per_s_{precision}_b{size}"] = statistics.median(run["images_per_s"] for run in own)
            measures[f"p50_ms_{precision}_b{size}"] = statistics.median(run["p50_ms"] for run in own)
        ratio = measures[f"images_per_s_int8_b{size}"] / measures[f"images_per_s_fp32_b{size}"]
        measures[f"int8_over_fp32_cpu_b{size}"] = ratio
    notes = f"{architecture} at {image_size} px, random weights; medians over {repeat} turns of {seconds:g} s each."
    write_result(machine, f"int8_cpu_{architecture}", measures=measures, runs=runs, notes=notes)


def _write_models(folder: Path, architecture: str, shapes: ShapeSpec) -> dict[str, Path]:
    files = {"fp32": folder / "fp32.onnx", "int8": folder / "int8.onnx"}
    export_onnx(build_model(architecture, 1000), files["fp32"], shapes)
    fp32 = onnx.load(files["fp32"])
    images = np.random.default_rng(0).standard_normal(shapes.input_shape(_NUM_CALIBRATION_IMAGES), dtype=np.float32)
    histograms = collect_with_onnxruntime(files["fp32"], activation_tensors(fp32), [images])
    scales = {name: compute_scale(histogram, CalibrationMethod.MAX) for name, histogram in histograms.items()}
    onnx.save(insert_qdq(fp32, scales), files["int8"])
    return files


def _measure(runner: OpenVINORunner, batch_size: int, seconds: float) -> dict[str, float]:
    timing = runner.measure(batch_size, warmup_s=0.5, duration_s=seconds, min_iterations=10)
    return {"images_per_s": timing.images_per_s, "p50_ms": timing.percentile_ms(50)}


if __name__ == "__main__":
    main()
