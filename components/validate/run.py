"""validate: Bundle + validation split -> Report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import (
    ALL_FILES,
    Artifact,
    BundleManifest,
    DatasetManifest,
    ReportManifest,
    check_task,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.contracts.records import (
    PRECISIONS,
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    CorruptedRow,
    measures,
)
from components.common.contracts.statistics import holm
from components.common.data.baseline import STATISTICS, Baseline, StatisticName, baseline_file, make_baseline
from components.common.data.corruptions import CORRUPTIONS, Corruption
from components.common.data.evaluation import ClassPredictions, predict_in_parts
from components.common.data.image_files import near_duplicates_of_training
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.runtimes import RUNTIMES, runs_plans
from components.common.runtimes.runner import Runner
from components.common.runtimes.selection import RuntimeSelection, select_runtimes
from components.common.tasks import TASKS
from components.common.tasks.predictions import Predictions
from components.validate.config import ValidateConfig
from components.validate.report import (
    REPORT_FILES,
    class_changes,
    class_losses,
    gather_report,
    read_thumbnails,
    write_report,
)
from components.validate.schema import Report
from components.validate.speed import budget_metrics, budget_text, measure_speed, within_budget

_CPU_BATCH_SIZE = 32


def run(config: ValidateConfig, log: StepLog, *, bundle: Path, dataset: Path, output: Path) -> str:
    """Measure accuracy, then speed, and write the report. See the package's docstring."""
    models = load(bundle, BundleManifest, verify=(".onnx", ".plan", ".layers.json", ".model"))
    data = load(dataset, DatasetManifest, verify=ALL_FILES if config.verify else (".tsv",))
    check_task(f"the dataset {dataset}", data.manifest.task, models.manifest.task, "name one of the bundle's task")
    if models.manifest.classes != data.manifest.classes:
        message = f"the bundle {bundle} and the dataset {dataset} have different classes"
        raise UserError(message, code="other-classes")
    prepare_directory(output)
    if TASKS[models.manifest.task].of_text:
        from components.validate.translation import measure  # which needs what images do without
    else:
        measure = _measure
    shown, pictures = measure(config, log, models, data, output)
    accuracy, benchmark = shown.accuracy, shown.benchmark
    write_atomically(output / "accuracy.json", accuracy.model_dump_json(indent=1).encode())
    write_atomically(output / "benchmark.json", benchmark.model_dump_json(indent=1).encode())
    write_report(shown, pictures, output)
    report = seal(
        output,
        ReportManifest,
        inputs={"bundle": models.digest, "dataset": data.digest},
        config=config,
        accuracy=accuracy,
        benchmark=benchmark,
    )
    _track(report, models, data, log)
    budget = benchmark.latency_budget
    return _outcome(accuracy) + (f"; {budget_text(budget, accuracy.unit)}" if budget is not None else "")


def _measure(
    config: ValidateConfig,
    log: StepLog,
    models: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    output: Path,
) -> tuple[Report, dict[int, str]]:
    """Report on images, and its pictures; predictions and baselines are written into `output`."""
    log.progress("loading models", 0, 1)
    devices = open_devices(config, models, data)
    selections = devices[0].selections
    predictions = predict_validation(config, devices, models, data, log)
    corrupted = (
        predict_validation(config, devices, models, data, log, corruptions=CORRUPTIONS) if config.corruptions else {}
    )
    for device in devices[1:]:
        device.close()
    distinct = _distinct(data)
    most_frequent = next(iter(predictions.values())).chance(models.manifest.classes)
    accuracy = AccuracyReport(
        dataset_digest=data.digest,
        split_digest=data.manifest.splits["val"].digest,
        bundle_digest=models.digest,
        task=models.manifest.task,
        rows=tuple(
            _accuracy_row(selection, predictions, corrupted, models.manifest.classes, distinct)
            for selection in selections
        ),
        num_near_duplicates=0 if distinct is None else int((~distinct).sum()),
        most_frequent_class=most_frequent[0],
        most_frequent_pct=most_frequent[1],
    )
    benchmark = _benchmark(config, selections, models, accuracy, log)
    devices[0].close()
    arrays = {key or name: array for name, own in predictions.items() for key, array in own.arrays().items()}
    with (output / "predictions.npz").open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its stub takes no keywords
    for baseline in baselines(data, predictions):
        write_atomically(output / baseline_file(baseline.precision), baseline.model_dump_json(indent=1).encode())
    log.progress("writing the report", 0, 1)
    shown = gather_report(config, models, data, predictions, accuracy, benchmark)
    transform = models.manifest.image_transform

    def drawn(image: Image.Image, place: int) -> Image.Image:
        return predictions[config.gate.precision].picture(image, transform, predictions["fp32"], place)

    pictures = read_thumbnails(data, [entry.index for entry in shown.disagreements], drawn)
    return shown, pictures


@dataclass(frozen=True)
class OpenedDevice:
    """The device on which engines are open: a GPU, or 0 and the host."""

    gpu: int
    selections: list[RuntimeSelection]
    loader: Loader
    """Of the device's part of the validation split."""

    @property
    def runners(self) -> Mapping[str, Runner]:
        """Runners by precision, those that there are."""
        return {one.precision: one.runner for one in self.selections if one.runner is not None}

    def close(self) -> None:
        """Let go of all runners."""
        for runner in self.runners.values():
            runner.close()


def open_devices(
    config: ValidateConfig, bundle: Artifact[BundleManifest], data: Artifact[DatasetManifest], max_gpus: int = 0
) -> list[OpenedDevice]:
    """Open a bundle's engines, and loaders, on all GPUs like the first that CUDA_VISIBLE_DEVICES leaves, at once.

    Args:
        config: what to measure with.
        bundle: the models.
        data: the images. A GPU has a batch of them at least.
        max_gpus: use no more than these; 0 for all.

    Returns:
        One device where other runtimes than TensorRT run a precision, or nothing runs on a GPU.
    """
    alike: Sequence[int] = (0,)
    if config.loader == "auto" and torch.cuda.is_available() and bundle.manifest.engines:
        num_batches = data.manifest.splits["val"].num_images // _batch_size(config, bundle)
        alike = gpus_alike()[: max(1, num_batches)][: max_gpus or None]

    def select(gpu: int) -> list[RuntimeSelection]:
        with torch.cuda.device(gpu) if len(alike) > 1 else nullcontext():
            return select_runtimes(bundle, config.runtime)

    with ThreadPoolExecutor(2 * len(alike)) as pool:
        loaders = pool.map(lambda index: _open_loader(config, bundle, data, alike, index), range(len(alike)))
        selections = pool.map(select, alike)
        devices = [OpenedDevice(*opened) for opened in zip(alike, selections, loaders, strict=True)]
    if len(alike) == 1 or all(runs_plans(runner.runtime) for runner in devices[0].runners.values()):
        return devices
    for device in devices[1:]:
        device.close()
    return [replace(devices[0], loader=_open_loader(config, bundle, data, alike[:1], 0))]


def _open_loader(
    config: ValidateConfig,
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    gpus: Sequence[int],
    index: int,
    corruptions: Sequence[Corruption] = (),
) -> Loader:
    """The loader of one of several GPUs, or of the host, each of which has a part of the validation split."""
    on_gpu = config.loader == "auto" and torch.cuda.is_available()
    return Loader(
        data,
        "val",
        bundle.manifest.image_transform,
        batch_size=_batch_size(config, bundle),
        seed=config.corruption_seed,
        corruptions=corruptions,
        shard_id=index,
        num_shards=len(gpus),
        device_id=gpus[index] if on_gpu else None,
        num_threads=max(1, num_cores() // len(gpus)),
    )


def _batch_size(config: ValidateConfig, bundle: Artifact[BundleManifest]) -> int:
    most = bundle.manifest.image_shapes.max_batch
    on_gpu = config.loader == "auto" and torch.cuda.is_available()
    return min(config.batch_size or (most if on_gpu else _CPU_BATCH_SIZE), most)


def predict_validation(
    config: ValidateConfig,
    devices: Sequence[OpenedDevice],
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    log: StepLog,
    *,
    corruptions: Sequence[Corruption] = (),
) -> dict[str, Predictions]:
    """Predictions by precision, on every image of the split in the order of its listing.

    Args:
        config: what to measure with.
        devices: each takes a part of the split.
        bundle: the models.
        data: the images.
        log: shows the progress.
        corruptions: degrade every image in these ways instead; its versions follow each other.
    """
    if len(devices) > 1:
        log.note(f"accuracy is measured on {len(devices)} GPUs")
    loaders = [device.loader for device in devices]
    if corruptions:
        gpus = [device.gpu for device in devices]
        loaders = [_open_loader(config, bundle, data, gpus, index, corruptions) for index in range(len(gpus))]
    degraded = " on degraded images" if corruptions else ""
    return predict_in_parts(
        [(device.runners, loader) for device, loader in zip(devices, loaders, strict=True)],
        data.manifest.splits["val"].num_images * max(1, len(corruptions)),
        partial(log.progress, f"measuring accuracy{degraded}", unit="images"),
        None if corruptions else bundle.manifest.image_transform,
    )


def baselines(data: Artifact[DatasetManifest], predictions: Mapping[str, Predictions]) -> Iterator[Baseline]:
    """The histograms with which a server of each precision compares its requests.

    Args:
        data: the images.
        predictions: by precision, of its validation split, with image statistics.
    """
    sizes = image_sizes(data)
    for precision in PRECISIONS:
        own = predictions.get(precision)
        if isinstance(own, ClassPredictions) and own.num_undefined < own.num_images:
            yield make_baseline(precision, observed_values(own, sizes))


def image_sizes(data: Artifact[DatasetManifest]) -> np.ndarray | None:
    """Pixels of each validation image, [N] float32; None where preprocess made them smaller than clients send them."""
    if data.manifest.config.get("max_short_side"):
        return None
    with data.file("val.jsonl").open("rb") as lines:
        return np.fromiter((entry["width"] * entry["height"] for entry in map(json.loads, lines)), np.float32)


def observed_values(own: ClassPredictions, sizes: np.ndarray | None) -> dict[StatisticName, np.ndarray]:
    """Statistics of each validation image whose logits name a class, [N] each: as a server has them of requests.

    Args:
        own: with image statistics.
        sizes: see `image_sizes`.
    """
    values = (own.top[:, 0], own.confidences, own.entropies, *own.image_statistics.T, sizes)  # as STATISTICS
    known = own.top[:, 0] >= 0
    return {name: each[known] for name, each in zip(STATISTICS, values, strict=True) if each is not None}


def gpus_alike() -> tuple[int, ...]:
    """CUDA's indices of the GPUs that run the first one's engines: same name, same compute capability."""
    kinds = [
        (torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu))
        for gpu in range(torch.cuda.device_count())
    ]
    return tuple(gpu for gpu, kind in enumerate(kinds) if kind == kinds[0])


def _distinct(data: Artifact[DatasetManifest]) -> np.ndarray | None:
    """The validation images without a near-duplicate in training, [N] bool; None where all known ones have left."""
    found = data.manifest.near_duplicates
    if found is None or found.num_across == found.num_left_out:
        return None
    mask = np.ones(data.manifest.splits["val"].num_images, bool)
    mask[near_duplicates_of_training(data.path)] = False
    return mask


def _accuracy_row(
    selection: RuntimeSelection,
    predictions: dict[str, Predictions],
    corrupted: dict[str, Predictions],
    classes: tuple[str, ...],
    distinct: np.ndarray | None,
) -> AccuracyRow:
    if selection.runner is None or selection.file is None:
        return AccuracyRow(precision=selection.precision, runtime="n/a", note=selection.note)
    own, fp32 = predictions[selection.precision], predictions.get("fp32")
    compared = fp32 if selection.precision != "fp32" else None
    worse, largest = class_losses(class_changes(classes, compared, own)) if compared else ((), None)
    return AccuracyRow(
        precision=selection.precision,
        runtime=selection.runner.runtime,
        device=selection.runner.device,
        instruction_set=instruction_set() if RUNTIMES[selection.runner.runtime].depends_on_instruction_set else "",
        file=selection.file.name,
        size_bytes=selection.file.stat().st_size,
        num_images=own.num_images,
        score_pct=own.score_pct,
        score_low_pct=own.score_low_pct,
        **own.measures(),
        distinct_score_pct=own.select(distinct).score_pct if distinct is not None and distinct.any() else None,
        delta_points=own.score_pct - fp32.score_pct if fp32 else None,
        agreement_pct=own.agreement_pct(fp32) if fp32 else None,
        comparison=own.comparison(compared) if compared else None,
        worse_classes=worse,
        largest_loss=largest,
        num_unseen_classes=own.num_unseen(len(classes)),
        corrupted=corrupted_rows(corrupted, selection.precision),
        note="; ".join(filter(None, (selection.note, _undefined_note(own)))),
    )


def corrupted_rows(predictions: Mapping[str, Predictions], precision: str) -> tuple[CorruptedRow, ...]:
    """Accuracy of a precision by corruption, and against FP32; empty where it was not measured.

    Args:
        predictions: by precision, of each image in the order of CORRUPTIONS, image by image.
        precision: one of them.
    """
    places = range(len(CORRUPTIONS) if precision in predictions else 0)

    def version(name: str, place: int) -> Predictions:
        return predictions[name].select(slice(place, None, len(CORRUPTIONS)))

    own = [version(precision, place) for place in places]
    is_compared = precision != "fp32" and "fp32" in predictions
    pairs = [own[place].comparison(version("fp32", place)) if is_compared else None for place in places]
    corrected = holm([pair.mcnemar_p for pair in pairs if pair])
    return tuple(
        CorruptedRow(
            kind=CORRUPTIONS[place].kind,
            strength=CORRUPTIONS[place].strength,
            score_pct=own[place].score_pct,
            comparison=pairs[place],
            p_corrected=corrected[place] if corrected else None,
        )
        for place in places
    )


def _undefined_note(own: Predictions) -> str:
    if not own.num_undefined:
        return ""
    return (
        f"the logits of {own.num_undefined:,} of {own.num_images:,} images hold NaN or infinity, which counts as wrong"
    )


def _benchmark(
    config: ValidateConfig,
    selections: list[RuntimeSelection],
    models: Artifact[BundleManifest],
    accuracy: AccuracyReport,
    log: StepLog,
) -> BenchmarkReport:
    max_batch = models.manifest.image_shapes.max_batch
    if too_large := [str(size) for size in config.benchmark_batch_sizes if size > max_batch]:
        log.warning(
            f"the speed of batch {', '.join(too_large)} is not measured: the models take up to {max_batch} images"
        )
    # The speed of a numerical reference says nothing, so that no check and no recommendation may rest on it.
    runners = [
        (selection.precision, selection.runner)
        for selection in selections
        if selection.runner is not None and RUNTIMES[selection.runner.runtime].measures_speed
    ]
    rows = measure_speed(config, runners, max_batch, partial(log.progress, "measuring speed"))
    budget_ms = config.latency_budget_ms
    budget = within_budget(budget_ms, rows, accuracy, config.gate) if budget_ms is not None else None
    return BenchmarkReport(bundle_digest=models.digest, rows=rows, latency_budget=budget)


def _track(
    report: Artifact[ReportManifest],
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    log: StepLog,
) -> None:
    accuracy, benchmark = report.manifest.accuracy, report.manifest.benchmark
    split = data.manifest.splits["val"]
    log.dataset("val", split.digest, split.num_images, "validation")
    log.event(
        "results",
        accuracy=accuracy.model_dump(mode="json"),
        benchmark=benchmark.model_dump(mode="json"),
        report=str(report.file("report.html")),
    )
    if benchmark.latency_budget is not None:
        log.tags({"enginery.latency_budget": budget_text(benchmark.latency_budget, accuracy.unit)})
        log.metrics(budget_metrics(benchmark.latency_budget))
    for row in accuracy.rows:
        if row.score_pct is None:
            continue  # nothing here runs it: a model without a number can't be compared
        degraded = {f"{row.precision}_{one.name.replace(' ', '_')}_score_pct": one.score_pct for one in row.corrupted}
        log.metrics({f"{row.precision}_score_pct": row.score_pct, **degraded})
        own = (entry for entry in benchmark.rows if entry.precision == row.precision)
        rows = [entry for entry in own if benchmark.sure_images_per_s(entry) is not None]
        tags = {"architecture": bundle.manifest.architecture, "bundle_digest": bundle.digest}
        log.model(row, rows, tags, dataset_digest=split.digest)
    for name in ("accuracy.json", "benchmark.json", *REPORT_FILES):
        log.artifact(report.file(name))
    log.result(metrics=measures(accuracy, benchmark), artifacts=[report.file("report.html")])


def _outcome(accuracy: AccuracyReport) -> str:
    parts = [f"{row.precision.upper()} {row.score_pct:.2f} %" for row in accuracy.rows if row.score_pct is not None]
    num_images = max(row.num_images for row in accuracy.rows)
    return f"{accuracy.score_name} on {num_images:,} {accuracy.unit}: {', '.join(parts)}"
