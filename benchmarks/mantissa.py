"""FP16 with weights of fewer mantissa bits: what they cost in top-1 and, on a GPU, gain in speed at the power limit.

    python -m benchmarks.mantissa --bundle DIR --dataset DIR --work DIR --machine h200

With a GPU each number of bits is an FP16 engine. Without one it is fp32.onnx with the rounded weights, run by
OpenVINO: the same weights in FP32 arithmetic.
"""

import statistics
from pathlib import Path
from typing import Any

import click
import onnx
import torch

from benchmarks.results import Results, result_options
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.contracts.statistics import difference_interval, paired_counts
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import predict
from components.common.data.loader import Loader
from components.common.process.gpu_monitor import GpuMonitor, monitor_of
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import Runner
from components.common.runtimes.tensorrt import TensorRTRunner, load_tensorrt
from components.export.config import TIMING_CACHES
from components.export.engines import build_engine, onnx_file_for
from components.export.precision import round_weights

_BATCH = 128
_TURNS = 3
_TIMES: dict[str, Any] = {"warmup_s": 1.0, "duration_s": 2.0, "min_iterations": 20}


@click.command()
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="From export.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Empty directory.")
@click.option("--name", default="", help="Of the network in the result.  [default: the bundle's]")
@click.option(
    "--bits", default="10,7,5,4,3", help="Explicit mantissa bits; all are compared with the first.", show_default=True
)
@click.option("--optimization-level", default=3, type=click.IntRange(0, 5), show_default=True, help="Of TensorRT.")
@result_options
def main(
    bundle: Path, dataset: Path, work: Path, name: str, bits: str, optimization_level: int, results: Results
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    models, data = load(bundle, BundleManifest, verify=(".onnx",)), load(dataset, DatasetManifest)
    numbers = [int(number) for number in bits.split(",")]
    on_gpu = torch.cuda.is_available()
    shapes = models.manifest.shapes.model_copy(update={"opt_batch": _BATCH} if on_gpu else {})
    build = _engine if on_gpu else _rounded_model
    runners: dict[int, Runner] = {number: build(models, shapes, number, work, optimization_level) for number in numbers}
    measures: dict[str, float] = {}
    runs: list[dict[str, Any]] = []
    if on_gpu:
        runs = _speeds(runners)
        measures |= _medians(runs, numbers)
    measures |= _accuracy(runners, models, data)
    network = name or models.manifest.architecture
    notes = (
        f"{network}, trained, {'FP16 engines' if on_gpu else 'OpenVINO in FP32'} with weights of that many "
        f"explicit mantissa bits; differences in top-1 are to {numbers[0]} bits, with 95 % intervals of paired images."
    )
    if on_gpu:
        notes += (
            f" Level {optimization_level}, batches of {_BATCH}, copies included. Medians of {_TURNS} turns of 2 s "
            f"after 1 s, the numbers of bits alternating; over_{numbers[0]}_bits is the median of the turns' ratios. "
            "Power is the board's."
        )
    results.write(
        f"mantissa_{network}",
        measures=measures,
        runs=runs,
        versions={"tensorrt": load_tensorrt().__version__} if on_gpu else {},
        notes=notes,
    )


def _engine(models: Artifact[BundleManifest], shapes: ShapeSpec, bits: int, work: Path, level: int) -> Runner:
    file = onnx_file_for("fp16")
    entry = build_engine(
        models.path / file,
        work / f"{bits}.plan",
        precision="fp16",
        shapes=shapes,
        timing_cache_path=work / TIMING_CACHES,
        optimization_level=level,
        mantissa_bits=bits,
    )
    print(f"{bits} bits: built in {entry.build_seconds:.0f} s", flush=True)
    return TensorRTRunner(work / f"{bits}.plan", shapes)


def _rounded_model(models: Artifact[BundleManifest], shapes: ShapeSpec, bits: int, work: Path, level: int) -> Runner:
    model = onnx.load(models.file("fp32.onnx"))
    round_weights(model, bits)
    onnx.save(model, work / f"{bits}.onnx")
    return OpenVINORunner(work / f"{bits}.onnx", shapes)


def _speeds(runners: dict[int, Runner]) -> list[dict[str, Any]]:
    monitor: GpuMonitor | None = monitor_of(torch.device("cuda", 0))
    runs: list[dict[str, Any]] = []
    for turn in range(_TURNS):
        for streams in (1, 2):
            for bits in sorted(runners, reverse=turn % 2 == 0):  # none is always the one after a pause
                timing = runners[bits].measure(_BATCH, **_TIMES, num_streams=streams, monitor=monitor)
                reading = monitor.reading() if monitor else None
                run = {"turn": turn, "streams": streams, "bits": bits, "images_per_s": timing.images_per_s}
                if reading is not None:
                    run |= {"power_w": reading.power_w, "sm_clock_mhz": reading.sm_clock_mhz}
                print(run, flush=True)
                runs.append(run)
    return runs


def _medians(runs: list[dict[str, Any]], numbers: list[int]) -> dict[str, float]:
    measures = {}
    for streams in (1, 2):
        full = [run["images_per_s"] for run in runs if run["streams"] == streams and run["bits"] == numbers[0]]
        for bits in numbers:
            of_these = [run for run in runs if run["streams"] == streams and run["bits"] == bits]
            rates = [run["images_per_s"] for run in of_these]
            key = f"{bits}_bits_streams{streams}"
            measures[f"engine_images_per_s_fp16_b{_BATCH}_{key}"] = statistics.median(rates)
            measures[f"over_{numbers[0]}_bits_{key}"] = statistics.median(
                rate / reference for rate, reference in zip(rates, full, strict=True)
            )
            for name in ("power_w", "sm_clock_mhz"):
                seen = [run[name] for run in of_these if run.get(name) is not None]
                if seen:
                    measures[f"{name}_{key}"] = statistics.median(seen)
    return measures


def _accuracy(
    runners: dict[int, Runner], models: Artifact[BundleManifest], data: Artifact[DatasetManifest]
) -> dict[str, float]:
    named = {str(bits): runner for bits, runner in runners.items()}
    loader = Loader(
        data,
        "val",
        models.manifest.transform,
        batch_size=models.manifest.shapes.max_batch,
        device_id=0 if torch.cuda.is_available() else None,
    )
    predictions = predict(named, loader, loader.num_images, lambda done, total: print(f"{done}/{total}", flush=True))
    full = next(iter(predictions.values()))
    measures = {"num_images": float(loader.num_images)}
    for bits, entry in predictions.items():
        measures[f"top1_pct_{bits}_bits"] = entry.score_pct
        if entry is not full:
            low, high = difference_interval(*paired_counts(full.right, entry.right))
            measures[f"delta_points_{bits}_bits"] = entry.score_pct - full.score_pct
            measures |= {f"delta_low_points_{bits}_bits": low, f"delta_high_points_{bits}_bits": high}
    return measures


if __name__ == "__main__":
    main()
