"""What promote refuses before it talks to MLflow."""

from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError, GateFailed, UserError
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
    CalibrationEntry,
    DatasetStatistics,
    EngineEntry,
    Split,
)
from components.common.contracts.settings import StepConfig, resolve
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.promote.config import PromoteConfig
from components.promote.run import _made_for, run


def chain(folder: Path, *, planned: tuple[str, ...], measured: dict[str, str], passed: bool = True) -> dict[str, Path]:
    """A bundle with these plans, a report with rows of file and runtime, a verdict, and the data set."""
    paths = {name: folder / name for name in ("bundle", "report", "verdict", "dataset")}
    for path in paths.values():
        path.mkdir()
    facts = {"tensorrt_version": "8.6.0", "gpu_name": "NVIDIA H200", "compute_capability": "9.0"}
    engines = [
        EngineEntry(
            file=file, precision="int8", source_onnx="int8.onnx", driver_version="580", build_seconds=1, **facts
        )
        for file in planned
    ]
    bundle = seal(
        paths["bundle"],
        BundleManifest,
        inputs={},
        config=StepConfig(),
        architecture="resnet18",
        classes=("a", "b"),
        transform=transform_for(32, resize_ratio=1.0),
        shapes=ShapeSpec(height=32, width=32),
        models={},
        engines=tuple(engines),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
    )
    rows = [
        AccuracyRow(precision="int8", runtime=runtime, file=file, top1_pct=90.0) for file, runtime in measured.items()
    ]
    digests = {"dataset_digest": "d", "split_digest": "s", "bundle_digest": bundle.digest}
    report = seal(
        paths["report"],
        ReportManifest,
        inputs={"bundle": bundle.digest},
        config=StepConfig(),
        accuracy=AccuracyReport(rows=tuple(rows), **digests),
        benchmark=BenchmarkReport(bundle_digest=bundle.digest, rows=()),
    )
    seal(
        paths["verdict"],
        VerdictManifest,
        inputs={"report": report.digest},
        config=StepConfig(),
        passed=passed,
        precision="int8",
        checks=(),
    )
    statistics = DatasetStatistics(mean=(0, 0, 0), std=(1, 1, 1), min_side=32, median_side=32, max_side=32)
    split = Split(num_images=1, shards=(), class_counts=(1, 0), digest="s")
    fields = {"classes": ("a", "b"), "splits": {"train": split, "val": split}, "num_rejected": 0}
    seal(paths["dataset"], DatasetManifest, inputs={}, config=StepConfig(), statistics=statistics, **fields)
    return paths


def promote(folder: Path, paths: dict[str, Path]) -> str:
    return run(PromoteConfig(), StepLog("promote"), output=folder / "promotion", **paths)


@pytest.mark.parametrize(
    "measured",
    [{"int8.onnx": "openvino"}, {"int8.plan": "openvino"}, {}],
    ids=["by OpenVINO", "a plan that no TensorRT ran", "nothing"],
)
def test_a_plan_that_was_not_measured(tmp_path, measured):
    paths = chain(tmp_path, planned=("int8.plan",), measured=measured)
    with pytest.raises(EngineryError, match=r"does not measure int8\.plan: only measured plans are promoted"):
        promote(tmp_path, paths)
    assert not (tmp_path / "promotion").exists()


def test_all_but_one_were_measured(tmp_path):
    paths = chain(tmp_path, planned=("fp16.plan", "int8.plan"), measured={"int8.plan": "tensorrt"})
    with pytest.raises(EngineryError, match=r"does not measure fp16\.plan"):
        promote(tmp_path, paths)


@pytest.mark.parametrize(
    ("planned", "measured"),
    [(("int8.plan",), {"int8.plan": "tensorrt"}), ((), {"int8.onnx": "openvino"})],
    ids=["measured", "no plans"],
)
def test_what_was_measured_goes_on(tmp_path, planned, measured):
    with pytest.raises(UserError, match="set MLFLOW_TRACKING_URI"):  # the next thing that it needs
        promote(tmp_path, chain(tmp_path, planned=planned, measured=measured))


def test_a_verdict_that_is_no_pass(tmp_path):
    paths = chain(tmp_path, planned=(), measured={}, passed=False)
    with pytest.raises(GateFailed, match="only a bundle that passed its gate is promoted"):
        promote(tmp_path, paths)


def test_the_alias_of_every_new_version_is_not_champion():
    with pytest.raises(UserError, match=r"promote.alias: every new version gets this alias, so it can't be champion"):
        resolve(PromoteConfig, "promote", {"alias": "champion"})


@pytest.mark.parametrize(
    ("planned", "tags"),
    [(("int8.plan",), {"gpu": "NVIDIA H200", "tensorrt": "8.6.0"}), ((), {})],
    ids=["plans", "none"],
)
def test_a_version_says_which_gpu_it_is_for(tmp_path, planned, tags):
    paths = chain(tmp_path, planned=planned, measured={})
    assert _made_for(load(paths["bundle"], BundleManifest).manifest) == tags
