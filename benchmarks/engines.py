"""TensorRT engines of one model: build time, layers, speed, and top-1 where there are images.

    python -m benchmarks.engines --architecture vgg19 --optimization-level 1 --work DIR --machine h200
    python -m benchmarks.engines --bundle DIR --dataset DIR --work DIR --machine h200

A bundle brings its ONNX files and scales; an architecture gets random weights: kernels take as long with any.
"""

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import click
import onnx
import torch

from benchmarks.results import Results, result_options
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import BundleManifest, DatasetManifest, load
from components.common.contracts.records import PRECISIONS, EngineEntry, Precision
from components.common.contracts.statistics import difference_interval, paired_counts
from components.common.contracts.transforms import ShapeSpec, TransformSpec
from components.common.runtimes.runner import Runner
from components.common.runtimes.tensorrt import TensorRTRunner, load_engine
from components.export.config import TIMING_CACHES
from components.export.engines import build_engine, onnx_file_for
from components.export.inspection import inspect_engine
from components.export.placement import node_id, with_names
from enginery.benchmark.measuring import write_network

BATCHES = (1, 8, 64, 128)
_TIMES: dict[str, Any] = {"warmup_s": 0.3, "duration_s": 1.0, "min_iterations": 20}

_NOTES = (
    "{name}, {weights} weights, optimization level {level}, kernels tuned for batch {opt}. Images per s count the "
    "copies to and from the GPU, engine_compute_... and int8_over_fp16_compute_b128 do not. Each speed is "
    "measured once, for 1 s or longer; runner_over_graph_replay is the least of three medians of 5 turns. Builds "
    "with timing cache follow the cold ones; engine_build_seconds_... without a precision are sums."
)


@click.command()
@click.option("--architecture", default="", help="A torchvision or timm/NAME model with 1,000 classes.")
@click.option("--bundle", type=click.Path(exists=True, path_type=Path), help="From export, in place of it.")
@click.option("--dataset", type=click.Path(exists=True, path_type=Path), help="From preprocess: measures top-1.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Empty directory.")
@click.option("--optimization-level", default=3, type=click.IntRange(0, 5), show_default=True, help="Of TensorRT.")
@click.option("--opt-batch", default=128, help="Batch that kernels are tuned for.  [default: 128]")
@click.option(
    "--streams", default="1,2,4", help="How many batches run at once at 8 and 128; '' for none.", show_default=True
)
@result_options
def main(
    architecture: str,
    bundle: Path | None,
    dataset: Path | None,
    work: Path,
    optimization_level: int,
    opt_batch: int,
    streams: str,
    results: Results,
) -> None:
    numbers_of_streams = [int(number) for number in streams.split(",") if number]
    work.mkdir(parents=True, exist_ok=True)
    shapes, transform, name = _onnx_files(architecture, bundle, opt_batch, work)
    entries, measures, failures = _build_all(work, shapes, optimization_level)
    runs: list[dict[str, Any]] = [{"engine": entry.model_dump(mode="json")} for entry in entries.values()]
    runs += [{"failed": failure} for failure in failures]

    def save(*, complete: bool = False) -> None:
        notes = _NOTES.format(
            name=name, weights="trained" if bundle else "random", level=optimization_level, opt=opt_batch
        )
        results.write(
            f"engines_{name}",
            measures=measures | _compared(measures, entries),
            runs=runs,
            versions={"tensorrt": next(iter(entries.values())).tensorrt_version},
            notes=notes if complete else f"{notes} Incomplete: the run was cut here, or is not finished.",
        )

    save()  # a run that is cut keeps what it has measured
    for precision in entries:
        measures |= _speed(work / f"{precision}.plan", shapes, precision, numbers_of_streams)
        measures |= _over_replay(work / f"{precision}.plan", shapes, precision)
        save()
    if dataset is not None and transform is not None and not failures:
        measures |= _accuracy(work, shapes, transform, dataset)
    save(complete=True)


def _compared(measures: dict[str, float], entries: dict[Precision, EngineEntry]) -> dict[str, float]:
    """Derived measures: sums, ratios and shares."""
    compared = {}
    for run in ("cold", "cached"):
        built = [measures.get(f"engine_build_seconds_{run}_{name}") for name in entries]
        if None not in built:
            compared[f"engine_build_seconds_{run}"] = sum(seconds for seconds in built if seconds is not None)
    replays = [value for key, value in measures.items() if key.startswith("runner_over_graph_replay_")]
    if replays:
        compared["runner_over_graph_replay"] = min(replays)
    for key, rate in (("int8_over_fp16_b128", "images_per_s"), ("int8_over_fp16_compute_b128", "compute_images_per_s")):
        int8, fp16 = (measures.get(f"engine_{rate}_{name}_b128") for name in ("int8", "fp16"))
        if int8 is not None and fp16 is not None:
            compared[key] = int8 / fp16
    if "int8" in entries:
        layers = entries["int8"].layers
        assert layers is not None
        compared["int8_layer_share"] = layers.convolutions.get("INT8", 0) / sum(layers.convolutions.values())
    return compared


def _onnx_files(
    architecture: str, bundle: Path | None, opt_batch: int, work: Path
) -> tuple[ShapeSpec, TransformSpec | None, str]:
    """Write the four ONNX files into `work`."""
    if bundle is not None:
        models = load(bundle, BundleManifest, verify=(".onnx",))
        for file in models.manifest.models.values():
            shutil.copyfile(models.file(file), work / file)
        shapes = models.manifest.shapes.model_copy(update={"opt_batch": opt_batch})
        return shapes, models.manifest.transform, models.manifest.architecture
    shapes = ShapeSpec(height=224, width=224, opt_batch=opt_batch, max_batch=max(BATCHES))
    write_network(architecture, shapes, work)
    return shapes, None, architecture


def _build_all(
    work: Path, shapes: ShapeSpec, level: int
) -> tuple[dict[Precision, EngineEntry], dict[str, float], list[str]]:
    """Build every engine cold, then again with the timing cache that the cold build left. Last, what failed and why."""
    graph = with_names(onnx.load(work / "fp32.onnx")).graph
    convolutions = [node_id(node) for node in graph.node if node.op_type == "Conv"]
    entries: dict[Precision, EngineEntry] = {}
    measures: dict[str, float] = {}
    failures: list[str] = []
    for precision in PRECISIONS:
        try:
            for run, folder in (("cold", work), ("cached", work / "cached")):
                plan = folder / f"{precision}.plan"
                entry = build_engine(
                    work / onnx_file_for(precision),
                    plan,
                    precision=precision,
                    shapes=shapes,
                    timing_cache_path=work / TIMING_CACHES,
                    optimization_level=level,
                )
                measures[f"engine_build_seconds_{run}_{precision}"] = entry.build_seconds
                print(f"{precision} {run}: {entry.build_seconds:.1f} s", flush=True)
                if run == "cold":
                    layers = inspect_engine(plan, entry, shapes, convolutions)
                    entries[precision] = entry.model_copy(update={"layers": layers})
                    print(f"  {layers.convolutions}, {layers.num_reformats} of {layers.num_layers} layers reformat")
                    measures[f"plan_mib_{precision}"] = plan.stat().st_size / 2**20
        except EngineryError as error:
            print(error, flush=True)
            failures.append(f"{precision}: {error}")
    if not entries:
        raise EngineryError("no engine was built", code="build-failed")
    return entries, measures, failures


def _speed(plan: Path, shapes: ShapeSpec, precision: Precision, numbers_of_streams: list[int]) -> dict[str, float]:
    runner = TensorRTRunner(plan, shapes)
    measures: dict[str, float] = {}
    for batch in BATCHES:
        timing = runner.measure(batch, **_TIMES)
        compute = runner.measure(batch, **_TIMES, with_transfers=False)
        measures[f"engine_images_per_s_{precision}_b{batch}"] = timing.images_per_s
        measures[f"engine_p50_ms_{precision}_b{batch}"] = timing.percentile_ms(50)
        measures[f"engine_p99_ms_{precision}_b{batch}"] = timing.percentile_ms(99)
        measures[f"engine_compute_images_per_s_{precision}_b{batch}"] = compute.images_per_s
        print(f"{precision} b{batch}: {timing.images_per_s:,.0f} images/s, {compute.images_per_s:,.0f} without copies")
    for batch in (8, 128):
        for streams in numbers_of_streams:
            for copies, key in ((True, "engine"), (False, "engine_compute")):
                rate = runner.measure(batch, **_TIMES, num_streams=streams, with_transfers=copies).images_per_s
                measures[f"{key}_images_per_s_{precision}_b{batch}_streams{streams}"] = rate
    runner.close()
    return measures


def _over_replay(plan: Path, shapes: ShapeSpec, precision: Precision) -> dict[str, float]:
    """Our runner over bare replays of a CUDA graph of the same engine, alternating in one process."""
    batch = max(BATCHES)
    runtime, engine = load_engine(plan, None)
    context = engine.create_execution_context()
    classes = tuple(engine.get_tensor_shape(shapes.output_name))[1]
    images = torch.randn(shapes.input_shape(batch), device="cuda")
    logits = torch.empty((batch, classes), device="cuda")
    context.set_input_shape(shapes.input_name, shapes.input_shape(batch))
    context.set_tensor_address(shapes.input_name, images.data_ptr())
    context.set_tensor_address(shapes.output_name, logits.data_ptr())
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        context.execute_async_v3(stream.cuda_stream)
    runner = TensorRTRunner(plan, shapes)
    ratios, rates = [], []
    for _ in range(5):
        bare = _replays_per_s(graph, stream) * batch
        own = runner.measure(batch, warmup_s=0.2, duration_s=0.7, min_iterations=20, with_transfers=False).images_per_s
        ratios.append(own / bare)
        rates.append(bare)
    runner.close()
    del graph, context, engine, runtime  # in this order: each needs the next while it lives
    return {
        f"runner_over_graph_replay_{precision}_b{batch}": statistics.median(ratios),
        f"graph_replay_images_per_s_{precision}_b{batch}": statistics.median(rates),
    }


def _replays_per_s(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    def replay(times: int) -> float:
        started = time.perf_counter()
        with torch.cuda.stream(stream):
            for _ in range(times):
                graph.replay()
        stream.synchronize()
        return time.perf_counter() - started

    times = max(20, int(0.7 / (replay(20) / 20)))  # for as long as the runner is measured
    return times / replay(times)


def _accuracy(work: Path, shapes: ShapeSpec, transform: TransformSpec, dataset: Path) -> dict[str, float]:
    from components.common.data.evaluation import predict  # with DALI, which only images need
    from components.common.data.loader import Loader

    data = load(dataset, DatasetManifest)
    runners: dict[str, Runner] = {name: TensorRTRunner(work / f"{name}.plan", shapes) for name in PRECISIONS}
    loader = Loader(data, "val", transform, batch_size=shapes.max_batch, device_id=0)
    predictions = predict(runners, loader, loader.num_images, lambda done, total: None)
    measures = {f"top1_pct_{name}": entry.score_pct for name, entry in predictions.items()}
    for name in ("fp16", "int8"):
        low, high = difference_interval(*paired_counts(predictions["fp32"].right, predictions[name].right))
        measures[f"{name}_delta_points"] = measures[f"top1_pct_{name}"] - measures["top1_pct_fp32"]
        measures |= {f"{name}_delta_low_points": low, f"{name}_delta_high_points": high}
    measures["num_images"] = float(loader.num_images)
    return measures


if __name__ == "__main__":
    main()
