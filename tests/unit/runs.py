"""Builders of finished runs, as `enginery run` leaves them."""

from pathlib import Path
from typing import Any

from components.common.contracts.environment import environment
from enginery.local.summary import PrecisionRow, RunSummary


def precision_row(precision: str, score_pct: float, **values: Any) -> PrecisionRow:
    """A line of a run's table, against FP32 with 90 %."""
    measured: dict[str, Any] = {
        "precision": precision,
        "runtime": "openvino",
        "device": "CPU, 2 cores",
        "num_images": 100,
        "score_pct": score_pct,
        "top5_pct": 100.0,
        "delta_points": score_pct - 90,
        "p50_ms": 2.5,
        "images_per_s": 1234.0,
        "throughput_batch_size": 16,
        "size_bytes": 45_000_000,
        "verdict": "reference" if precision == "fp32" else "pass",
        "note": "",
    }
    return PrecisionRow.model_validate({**measured, **values})


def run_summary(directory: Path, **values: Any) -> RunSummary:
    """Results of the run in a directory of its name: nothing, unless `values` say otherwise."""
    fields: dict[str, Any] = {
        "pipeline": directory.name.split("-")[0],
        "run_id": directory.name,
        "status": "done",
        "exit_code": 0,
        "message": "",
        "seconds_total": 60.0,
        "arguments": {},
        "steps": [],
        "rows": [],
        "checks": [],
        "run_directory": str(directory),
        "tracking_uri": "sqlite:///mlflow.db",
        "mlflow_run_id": "m",
        "environment": environment(),
    }
    return RunSummary.model_validate({**fields, **values})


def write_run(directory: Path, **values: Any) -> Path:
    """The directory of a run, with its summary."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(run_summary(directory, **values).model_dump_json())
    return directory
