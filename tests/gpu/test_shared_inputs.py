"""Blocks of an Inception network and heads of a detector in INT8, which 8.6.0 fails to merge. Fails, never skips."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torchvision.models.googlenet import Inception

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.tensorrt import TensorRTRunner
from components.export.calibration import collect_with_onnxruntime, compute_scale
from components.export.engines import build_engine, onnx_file_for
from components.export.inspection import inspect_engine
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, node_id, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import insert_qdq

SHAPES = ShapeSpec(height=32, width=32, opt_batch=8, max_batch=8)


class Heads(torch.nn.Module):
    """Two rows of convolutions of 3 x 3 pixels on the same maps, as for the boxes and the classes of a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.classes = (
            torch.nn.Sequential(*(layer for _ in range(2) for layer in (_convolution(64, 64), torch.nn.ReLU())))
            for _ in range(2)
        )

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.boxes(maps), self.classes(maps)], dim=1)


def _convolution(channels: int, width: int) -> torch.nn.Module:
    return torch.nn.Conv2d(channels, width, 3, padding=1)


NETWORKS = {
    "inception": ([Inception(64, 64, 64, 64, 32, 32, 32), Inception(192, 64, 64, 64, 32, 32, 32)], 192, 13),
    "heads": ([Heads()], 128, 5),
}
"""By name: the blocks, how many maps they return, and the convolutions of the whole."""


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_that_share_an_input_are_built_in_int8(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks, width, num_convolutions = NETWORKS[name]
    stem = [_convolution(3, 64), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10)]
    export_onnx(torch.nn.Sequential(*stem, *blocks, *head).eval(), tmp_path / "fp32.onnx", SHAPES)
    fp32 = with_names(onnx.load(tmp_path / "fp32.onnx"))
    images = np.random.default_rng(0).standard_normal(SHAPES.input_shape(8), dtype=np.float32)
    histograms = collect_with_onnxruntime(tmp_path / "fp32.onnx", activation_tensors(fp32), [images])
    scales = {name: compute_scale(seen, "max") for name, seen in histograms.items()}
    onnx.save(insert_qdq(fp32, scales), tmp_path / "int8.onnx")
    onnx.save(insert_qdq(to_fp16(raise_opset(fp32)), scales), tmp_path / "int8_fp16.onnx")
    entry = build_engine(
        tmp_path / onnx_file_for("int8"), tmp_path / "int8.plan", precision="int8", shapes=SHAPES, optimization_level=1
    )
    convolutions = [node_id(node) for node in fp32.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == num_convolutions
    layers = inspect_engine(tmp_path / "int8.plan", entry, SHAPES, convolutions)
    assert layers.convolutions == {"INT8": num_convolutions}
    engine = TensorRTRunner(tmp_path / "int8.plan", SHAPES)
    reference = OnnxRuntimeRunner(tmp_path / "int8.onnx", SHAPES)
    answers, expected = (runner.infer(images) for runner in (engine, reference))
    engine.close()
    assert np.abs(answers - expected).max() <= 0.02 * np.abs(expected).max()
