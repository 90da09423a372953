"""Networks with random weights are measured for real, and fail; and the gate's rate of wrong passes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gate_power import shares
from components.common.contracts.records import AccuracyReport, AccuracyRow, BenchmarkReport
from components.common.contracts.transforms import ShapeSpec
from components.common.contracts.verdict import Thresholds, run_checks
from components.common.data.evaluation import Predictions, top_classes
from components.common.runtimes.architectures import build_model
from components.common.runtimes.openvino import OpenVINORunner
from components.export.onnx_export import export_onnx
from components.validate.report import compare


@pytest.mark.parametrize("architecture", ["shufflenet_v2_x0_5", "mobilenet_v3_small"])
def test_a_network_with_random_weights_fails(architecture: str, tmp_path: Path) -> None:
    """It answers one class whatever it sees: right on a third of three classes, in every precision."""
    torch.manual_seed(0)
    shapes = ShapeSpec(height=32, width=32, max_batch=90)
    export_onnx(build_model(architecture, 3).eval(), tmp_path / "fp32.onnx", shapes)
    images = torch.randn(90, 3, 32, 32).numpy()
    runner = OpenVINORunner(tmp_path / "fp32.onnx", shapes)
    top = np.concatenate([top_classes(runner.infer(images[start : start + 30])) for start in range(0, 90, 30)])
    runner.close()
    own = Predictions(top=top, labels=np.repeat(np.arange(3, dtype=np.int32), 30))
    rows = tuple(
        AccuracyRow(
            precision=name,
            runtime="openvino",
            num_images=90,
            top1_pct=own.top1_pct,
            comparison=compare(own, own) if name == "int8" else None,
        )
        for name in ("fp32", "int8")
    )
    accuracy = AccuracyReport(
        dataset_digest="d",
        split_digest="s",
        bundle_digest="b",
        rows=rows,
        most_frequent_class="ant",
        most_frequent_pct=100 / 3,
    )
    thresholds = Thresholds(max_top1_drop_points=5, min_relative_top1_pct=0, min_validation_images=0)
    drop, chance = run_checks(thresholds, accuracy, BenchmarkReport(bundle_digest="b", rows=()))
    assert drop.verdict == "pass"
    assert (chance.name, chance.verdict) == ("above_chance", "fail")
    assert f"top-1 of FP32 {own.top1_pct:.2f} is not above the 33.33 % of always answering 'ant'" in chance.explanation
    assert "the model has learned nothing" in chance.explanation


@pytest.mark.parametrize(
    ("num_images", "budget", "discordance"), [(359, 0.5, 2.0), (270, 1.0, 1.0), (719, 1.0, 2.0), (2000, 0.5, 0.5)]
)
def test_a_drop_of_the_whole_budget_passes_in_5_of_100(num_images: int, budget: float, discordance: float) -> None:
    found = shares(num_images, budget, drop_pct=budget, discordance_pct=discordance, num_draws=2000)
    assert found["pass"] <= 6.5  # 5 %, and three standard errors of 2,000 draws


def test_no_drop_passes_on_enough_images() -> None:
    assert shares(5000, 0.5, drop_pct=0.0, discordance_pct=1.0, num_draws=500)["pass"] >= 90
