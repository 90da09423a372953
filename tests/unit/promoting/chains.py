"""Artifacts as the chain leaves them for promote, small and of any top-1, and promote itself in a process of its own.

    python tests/unit/promoting/chains.py URI FOLDER MODEL NAME ...

makes one chain for each NAME in FOLDER (its digits are the top-1: "a-070") and promotes them, one after the other.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from components.common.contracts.manifests import (
    BundleManifest,
    DatasetManifest,
    ReportManifest,
    VerdictManifest,
    load,
    seal,
)
from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    CalibrationEntry,
    DatasetStatistics,
    Split,
)
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.contracts.verdict import run_checks
from components.gate.config import GateConfig

NUM_IMAGES = 100


def make_dataset(path: Path, split: str = "one") -> Path:
    """A data set without shards, whose validation split has the digest "split-SPLIT"."""
    path.mkdir(parents=True)
    statistics = DatasetStatistics(mean=(0, 0, 0), std=(1, 1, 1), min_side=32, median_side=32, max_side=32)
    splits = {
        name: Split(num_images=NUM_IMAGES, shards=(), class_counts=(50, 50), digest=f"{name}-{split}")
        for name in ("train", "val")
    }
    fields = {"classes": ("a", "b"), "splits": splits, "statistics": statistics, "num_rejected": 0}
    seal(path, DatasetManifest, inputs={}, config=StepConfig(), **fields)
    return path


def make_chain(
    folder: Path, top1_pct: int, *, split: str = "one", passed: bool = True, **model: Any
) -> dict[str, Path]:
    """A bundle, its report, the verdict on it and the data set: the inputs of promote. `model` is of the bundle."""
    dataset = load(make_dataset(folder / "dataset", split), DatasetManifest)
    paths = {name: folder / name for name in ("bundle", "report", "verdict")}
    for path in paths.values():
        path.mkdir()
    (paths["bundle"] / "int8.onnx").write_bytes(f"the model of {folder.name}".encode())
    bundle = seal(
        paths["bundle"],
        BundleManifest,
        inputs={"model": model.pop("digest", "sha256:" + "c" * 64), "dataset": dataset.digest},
        config=StepConfig(),
        architecture=model.pop("architecture", "resnet18"),
        classes=model.pop("classes", ("a", "b")),
        transform=transform_for(32, resize_ratio=1.0),
        shapes=ShapeSpec(height=32, width=32),
        models={"int8": "int8.onnx"},
        engines=(),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
    )
    labels = np.zeros(NUM_IMAGES, np.int32)
    top = np.ones((NUM_IMAGES, 2), np.int16)
    top[:top1_pct] = 0  # right
    np.savez_compressed(paths["report"] / "predictions.npz", int8=top, labels=labels)
    (paths["report"] / "report.html").write_text("<p>the report</p>")
    facts: dict[str, Any] = {"runtime": "openvino", "device": "a CPU", "num_images": NUM_IMAGES}
    rows = (
        AccuracyRow(precision="fp32", top1_pct=90.0, delta_top1_points=0.0, **facts),
        AccuracyRow(precision="int8", top1_pct=top1_pct, delta_top1_points=top1_pct - 90.0, **facts),
    )
    speed = BenchmarkRow(
        precision="int8",
        runtime="openvino",
        batch_size=1,
        images_per_s=9,
        p50_ms=1,
        p90_ms=2,
        p99_ms=3,
        num_iterations=9,
    )
    digests = {"dataset_digest": dataset.digest, "split_digest": f"val-{split}", "bundle_digest": bundle.digest}
    report = seal(
        paths["report"],
        ReportManifest,
        inputs={"bundle": bundle.digest, "dataset": dataset.digest},
        config=StepConfig(),
        accuracy=AccuracyReport(rows=rows, **digests),
        benchmark=BenchmarkReport(bundle_digest=bundle.digest, rows=(speed,)),
    )
    # The right thresholds for any chain, so that the verdict follows from the report, as everybody checks.
    gate = GateConfig(
        confident=False,
        max_top1_drop_points=100,
        min_relative_top1_pct=0,
        require_above_chance=False,
        min_top1_pct=0 if passed else 100,
    )
    checks = run_checks(gate, report.manifest.accuracy, report.manifest.benchmark)
    seal(
        paths["verdict"],
        VerdictManifest,
        inputs={"report": report.digest, "bundle": bundle.digest},
        config=gate,
        passed=all(check.verdict == "pass" for check in checks),
        precision="int8",
        checks=tuple(checks),
    )
    return {**paths, "dataset": folder / "dataset"}


def promote_chain(uri: str, paths: dict[str, Path], output: Path, model: str = "m", **settings: Any) -> str:
    """The step itself, tracked at a URI. Returns its closing line."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    import mlflow

    mlflow.set_tracking_uri(uri)
    from components.common.process.steplog import StepLog
    from components.common.registry.tracking import step_run
    from components.promote.config import PromoteConfig
    from components.promote.run import run

    config = PromoteConfig(registered_model=model, **settings)
    with step_run("promote") as tracked:
        return run(config, StepLog("promote", tracked), output=output, **paths)


def make_and_promote(uri: str, folder: Path, name: str, model: str = "m", **settings: Any) -> str:
    """A chain called "a-070" gets a top-1 of 70 %."""
    paths = make_chain(folder / name, int(name.rpartition("-")[2]), split=settings.pop("split", "one"))
    return promote_chain(uri, paths, folder / name / "promotion", model, **settings)


def main() -> None:
    uri, folder, model, *names = sys.argv[1:]
    for name in names:
        print(make_and_promote(uri, Path(folder), name, model), flush=True)


if __name__ == "__main__":
    main()
