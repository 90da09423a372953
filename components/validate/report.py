"""Gather report.json: what was measured, compared image by image and class by class, and where it came from."""

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from components.common.artifacts import Artifact, BundleManifest, DatasetManifest
from components.common.errors import EngineryError
from components.common.evaluation import Predictions
from components.common.records import PRECISIONS, AccuracyReport, BenchmarkReport, EngineLayer, Precision
from components.common.verdict import Thresholds, recommend, run_checks, verdict_note
from components.validate.comparison import class_changes, compare
from components.validate.config import ValidateConfig
from components.validate.provenance import gather_provenance
from components.validate.schema import (
    Calibration,
    Change,
    ConfusedPair,
    Confusion,
    Data,
    Disagreement,
    Model,
    Report,
    SplitSummary,
    Verdict,
)

MAX_DISAGREEMENTS = 24
MAX_PAIRS = 20
MAX_MATRIX_CLASSES = 200  # more could neither be read nor drawn
NO_CLASS = "nothing (NaN)"  # in place of a class, where the logits held NaN


def gather_report(
    config: ValidateConfig,
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    predictions: Mapping[str, Predictions],
    accuracy: AccuracyReport,
    benchmark: BenchmarkReport,
) -> Report:
    """All that the report says. `predictions` is by precision and holds those that were measured."""
    fp32, own = predictions.get("fp32"), predictions.get(config.gate.precision)
    compared = (fp32, own) if fp32 is not None and own is not None else None
    classes = bundle.manifest.classes
    return Report(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        model=_model(bundle, config.gate.precision),
        verdict=_verdict(config.gate, accuracy, benchmark),
        accuracy=accuracy,
        benchmark=benchmark,
        change=change(*compared) if compared else None,
        disagreements=_disagreements(data, *compared) if compared else (),
        confusion=_confusion(classes, *compared, _others(predictions, config.gate.precision)) if compared else None,
        class_changes=class_changes(classes, *compared) if compared else (),
        calibration=Calibration(
            **bundle.manifest.calibration.model_dump(),
            cpu_models=bundle.manifest.cpu_models,
            num_quantized_layers=bundle.manifest.num_quantized_layers,
            num_quantizable_layers=bundle.manifest.num_quantizable_layers,
        ),
        training=bundle.manifest.training,
        data=_data(data.manifest),
        provenance=gather_provenance(config, bundle, data),
    )


def _model(bundle: Artifact[BundleManifest], precision: str) -> Model:
    record = bundle.manifest
    return Model(
        architecture=record.architecture,
        classes=record.classes,
        transform=record.transform,
        shapes=record.shapes,
        engines=record.engines,
        engines_missing=record.engines_missing,
        layers=_layers(bundle, precision),
    )


def _layers(bundle: Artifact[BundleManifest], precision: str) -> tuple[EngineLayer, ...]:
    for engine in bundle.manifest.engines:
        if engine.precision == precision and engine.layers is not None:
            rows = json.loads(bundle.file(engine.layers.file).read_bytes())
            return tuple(EngineLayer.model_validate(row) for row in rows)
    return ()


def _verdict(thresholds: Thresholds, accuracy: AccuracyReport, benchmark: BenchmarkReport) -> Verdict:
    checks = run_checks(thresholds, accuracy, benchmark)
    return Verdict(
        passed=all(check.verdict == "pass" for check in checks),
        precision=thresholds.precision,
        thresholds=Thresholds(**thresholds.model_dump()),
        checks=tuple(checks),
        recommendation=recommend(thresholds, checks, accuracy, benchmark),
        note=verdict_note(thresholds, accuracy),
    )


def change(fp32: Predictions, own: Predictions) -> Change:
    """Lost, gained and differing images, and how certain the difference in top-1 is."""
    differing = int((fp32.top[:, 0] != own.top[:, 0]).sum())
    return Change(**compare(fp32, own).model_dump(), num_differing=differing)


def image_keys(data: Artifact[DatasetManifest], disagreements: tuple[Disagreement, ...]) -> dict[int, str]:
    """Key in the shards of each of these images, by its index."""
    wanted = {entry.index for entry in disagreements}
    return {index: str(entry["key"]) for index, entry in _listing(data, wanted).items()}


def _listing(data: Artifact[DatasetManifest], wanted: set[int]) -> dict[int, dict[str, Any]]:
    """Lines of val.jsonl, which is in the order of the evaluation loader."""
    if not wanted:
        return {}
    with data.file("val.jsonl").open(encoding="utf-8") as lines:
        return {index: json.loads(line) for index, line in enumerate(lines) if index in wanted}


def _disagreements(data: Artifact[DatasetManifest], fp32: Predictions, own: Predictions) -> tuple[Disagreement, ...]:
    classes = data.manifest.classes
    every = np.flatnonzero(fp32.top[:, 0] != own.top[:, 0])
    # Spread over the split, which is sorted by class: the first ones would show a single class.
    chosen = np.unique(np.linspace(0, len(every) - 1, min(len(every), MAX_DISAGREEMENTS)).round().astype(int))
    different = every[chosen].tolist()
    listing = _listing(data, set(different))
    if any(listing[index]["label"] != fp32.labels[index] for index in different):
        raise EngineryError(f"val.jsonl of {data.path} is not in the order of its shards; run preprocess again")
    return tuple(
        Disagreement(
            index=index,
            path=listing[index]["path"].encode(errors="backslashreplace").decode(),
            label=classes[fp32.labels[index]],
            fp32=_class_name(classes, int(fp32.top[index, 0])),
            own=_class_name(classes, int(own.top[index, 0])),
        )
        for index in different
    )


def _class_name(classes: tuple[str, ...], index: int) -> str:
    return classes[index] if index >= 0 else NO_CLASS


def _pair_counts(predictions: Predictions, num_classes: int) -> Counter[tuple[int, int]]:
    """Images by (label, prediction), which is -1 for none. No matrix: with 20,000 classes it would not fit."""
    num_answers = num_classes + 1
    codes = predictions.labels.astype(np.int64) * num_answers + predictions.top[:, 0] + 1  # [N]
    values, counts = np.unique(codes, return_counts=True)
    pairs = [(code // num_answers, code % num_answers - 1) for code in values.tolist()]
    return Counter(dict(zip(pairs, counts.tolist(), strict=True)))


def _others(predictions: Mapping[str, Predictions], judged: Precision) -> dict[Precision, Predictions]:
    return {name: predictions[name] for name in PRECISIONS if name in predictions and name != judged}


def _confusion(
    classes: tuple[str, ...], fp32: Predictions, own: Predictions, others: Mapping[Precision, Predictions] | None = None
) -> Confusion:
    counts, counts_fp32 = (_pair_counts(entry, len(classes)) for entry in (own, fp32))
    per_label = np.bincount(own.labels, minlength=len(classes)).tolist()
    wrong = sorted((pair for pair in counts if pair[0] != pair[1]), key=lambda pair: (-counts[pair], pair))
    small = len(classes) <= MAX_MATRIX_CLASSES
    found = {name: _pair_counts(entry, len(classes)) for name, entry in (others or {}).items()} if small else {}
    return Confusion(
        matrix=_matrix(counts, len(classes)) if small else None,
        others={name: _matrix(entry, len(classes)) for name, entry in found.items()},
        pairs=tuple(
            ConfusedPair(
                label=classes[label],
                predicted=_class_name(classes, predicted),
                num_images=counts[label, predicted],
                num_images_fp32=counts_fp32[label, predicted],
                share_pct=100 * counts[label, predicted] / per_label[label],
            )
            for label, predicted in wrong[:MAX_PAIRS]
        ),
    )


def _matrix(counts: Counter[tuple[int, int]], num_classes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(counts[row, column] for column in range(num_classes)) for row in range(num_classes))


def _data(data: DatasetManifest) -> Data:
    names: tuple[Literal["train", "val"], ...] = ("train", "val")
    return Data(
        num_classes=len(data.classes),
        splits=tuple(
            SplitSummary(
                name=name,
                num_images=data.splits[name].num_images,
                digest=data.splits[name].digest,
                fewest=min(data.splits[name].class_counts),
                most=max(data.splits[name].class_counts),
            )
            for name in names
        ),
        statistics=data.statistics,
        num_rejected=data.num_rejected,
    )
