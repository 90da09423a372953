"""FP32 engines with and without TF32. Fails, never skips, without a GPU or TensorRT."""

from pathlib import Path

import pytest
from torch import nn

from components.common.contracts.transforms import ShapeSpec
from components.export.config import EngineOption
from components.export.engines import build_engine, onnx_file_for
from components.export.inspection import inspect_engine
from components.export.onnx_export import export_onnx

SHAPES = ShapeSpec(channels=256, height=28, width=28, opt_batch=8, max_batch=8)


@pytest.mark.parametrize(("options", "precision"), [((), "FP32"), (("tf32",), "TF32")])
def test_tf32_is_asked_for(tmp_path: Path, options: tuple[EngineOption, ...], precision: str) -> None:
    # TensorRT chooses by time: so wide that tensor cores are faster by far.
    wide = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    export_onnx(wide, tmp_path / "fp32.onnx", SHAPES)
    entry = build_engine(
        tmp_path / onnx_file_for("fp32"), tmp_path / "fp32.plan", precision="fp32", shapes=SHAPES, options=options
    )
    assert ("TF32" in entry.flags) == bool(options)
    layers = inspect_engine(tmp_path / "fp32.plan", entry, SHAPES, ["/0/Conv"])
    assert layers.convolutions == {precision: 1}
