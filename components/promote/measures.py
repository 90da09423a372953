"""What MLflow's own pages show of a version and compare: what was measured, and the settings that led there."""

from collections.abc import Mapping
from typing import Any

from components.common.artifacts import BundleManifest, ReportManifest


def measures(report: ReportManifest) -> dict[str, float]:
    """The numbers of a report, named PRECISION_MEASURE as those of a pipeline's run."""
    accuracy, benchmark = report.accuracy, report.benchmark
    largest = max((row.batch_size for row in benchmark.rows), default=0)
    found: dict[str, float | None] = {}
    for row in accuracy.rows:
        single, batched = benchmark.row(row.precision, 1), benchmark.row(row.precision, largest)
        found[f"{row.precision}_top1_pct"] = row.top1_pct
        found[f"{row.precision}_p50_ms"] = single.p50_ms if single else None
        found[f"{row.precision}_images_per_s"] = benchmark.sure_images_per_s(batched) if batched else None
        if row.precision != "fp32":
            found[f"{row.precision}_delta_top1_points"] = row.delta_top1_points
            speedup = benchmark.speedup(row.precision, "fp32", largest)
            found[f"{row.precision}_speedup"] = speedup.median if speedup and not speedup.doubt else None
    return {name: value for name, value in found.items() if value is not None}


def settings(bundle: BundleManifest, report: ReportManifest) -> Mapping[str, Mapping[str, Any]]:
    """The settings of the steps, by step."""
    training = {"train": bundle.training.config} if bundle.training is not None else {}
    return {**training, "export": bundle.config, "validate": report.config}
