"""Builders of what validate measures, for tests of what is judged by it, shown of it or chosen after it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from components.common.contracts.records import (
    PRECISIONS,
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    EngineEntry,
    PairedComparison,
    Precision,
    Speedup,
)

SIZE_BYTES = {"fp32": 108_000_000, "fp16": 48_000_000, "int8": 26_500_000}


def accuracy_row(precision: Precision, score_pct: float | None, **fields: Any) -> AccuracyRow:
    """Of 1,000 images; None is a top-1 that was not measured."""
    if score_pct is None:
        return AccuracyRow(precision=precision, runtime="n/a", note="needs TensorRT", **fields)
    known = {"runtime": "tensorrt", "num_images": 1000, "size_bytes": SIZE_BYTES[precision]}
    return AccuracyRow(precision=precision, score_pct=score_pct, **{**known, **fields})


def compared_row(lost: int, gained: int = 0, *, precision: Precision = "int8", **fields: Any) -> AccuracyRow:
    """Of a precision that loses and gains so many images of FP32, which is right on all of them or on `fp32_pct`."""
    num_images, fp32_pct = fields.setdefault("num_images", 1000), fields.pop("fp32_pct", 100.0)
    comparison = PairedComparison.of(num_images, lost, gained)
    return accuracy_row(precision, fp32_pct + comparison.delta_points, comparison=comparison, **fields)


def scored_row(drop_points: float, std_points: float, **fields: Any) -> AccuracyRow:
    """INT8 of a task whose score is no share of images, below FP32 with 100 %; by its interval on 400 images."""
    comparison = PairedComparison(
        num_images=400,
        num_regressed=90,
        num_improved=70,
        delta_points=-drop_points,
        drop_lower_points=drop_points - 1.645 * std_points,
        drop_upper_points=drop_points + 1.645 * std_points,
        std_points=std_points,
        mcnemar_p=0.5,
        mcnemar_test="bootstrap",
    )
    return accuracy_row("int8", 100.0 - drop_points, num_images=400, comparison=comparison, **fields)


def accuracy_report(*rows: AccuracyRow, **fields: Any) -> AccuracyReport:
    """These rows, below FP32 that is right on all images where it is not among them."""
    if rows[0].precision != "fp32":
        rows = (accuracy_row("fp32", 100.0, num_images=rows[-1].num_images), *rows)
    digests = {"dataset_digest": "d", "split_digest": "s", "bundle_digest": "sha256:b"}
    always = {"most_frequent_class": "ant", "most_frequent_pct": 10.0}
    return AccuracyReport(rows=rows, **{**digests, **always, **fields})


def benchmark_row(precision: Precision, images_per_s: float, batch_size: int = 1, **fields: Any) -> BenchmarkRow:
    """Plain, unless `fields` say otherwise; p99 is 2.5 ms."""
    known = {"runtime": "tensorrt", "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 2.5, "num_iterations": 9}
    values = {"precision": precision, "images_per_s": images_per_s, "batch_size": batch_size}
    return BenchmarkRow(**{**known, **values, **fields})


def benchmark_report(*rows: BenchmarkRow) -> BenchmarkReport:
    """Of the same bundle as `accuracy_report`. A row without speed-ups has those of the rates."""

    def over(row: BenchmarkRow) -> dict[Precision, Speedup]:
        wider = PRECISIONS[: PRECISIONS.index(row.precision)]
        others = {other.precision: other.images_per_s for other in rows if other.way == row.way}
        ratios = {name: row.images_per_s / others[name] for name in wider if name in others}
        return {name: Speedup(median=ratio, low=ratio, high=ratio) for name, ratio in ratios.items()}

    known = tuple(row.model_copy(update={"over": row.over or over(row)}) for row in rows)
    return BenchmarkReport(bundle_digest="sha256:b", rows=known)


def speeds(images_per_s: Mapping[Precision, float], **fields: Any) -> BenchmarkReport:
    """The same throughput at batch 1 and 128."""
    rows = (benchmark_row(name, rate, size, **fields) for size in (1, 128) for name, rate in images_per_s.items())
    return benchmark_report(*rows)


def predictions(right: Mapping[str, list[bool]]) -> Any:
    """By class, on which of its images they are right; where they are wrong they say the next class."""
    from components.common.data.evaluation import ClassPredictions  # imports torch

    labels = np.repeat(np.arange(len(right)), [len(images) for images in right.values()])
    wrong = ~np.concatenate(list(right.values()))
    top = np.where(wrong, (labels + 1) % len(right), labels)
    return ClassPredictions(top=top[:, None].astype(np.int16), labels=labels.astype(np.int32))


def engine_entry(precision: Precision = "int8", **fields: Any) -> EngineEntry:
    """A plan of an H200, unless `fields` say otherwise."""
    known = {"file": f"{precision}.plan", "precision": precision, "source_onnx": "int8.onnx", "build_seconds": 1.0}
    machine = {"gpu_name": "NVIDIA H200", "compute_capability": "9.0", "driver_version": "580"}
    return EngineEntry.model_validate({**known, **machine, "tensorrt_version": "8.6.0", **fields})


def power_monitor() -> Any:
    """Knows when it was started and stopped."""
    calls: list[str] = []
    return SimpleNamespace(calls=calls, start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))


def updated(record: Any, part: str, **changes: Any) -> Any:
    """The record with other fields of one of its parts."""
    return record.model_copy(update={part: getattr(record, part).model_copy(update=changes)})
