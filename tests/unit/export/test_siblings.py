"""Sibling convolutions kept apart: the same logits, and no two left that a builder could merge."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torchvision.models.googlenet import Inception

from components.common.contracts.transforms import ShapeSpec
from components.export.calibration import collect_with_onnxruntime, compute_scale
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, keep_apart, with_names
from components.export.qdq import insert_qdq

SHAPES = ShapeSpec(height=16, width=16, opt_batch=2, max_batch=2)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Two blocks of GoogLeNet, four branches each, three of which start with a 1x1 convolution."""
    torch.manual_seed(0)
    blocks = [Inception(3, 8, 6, 8, 4, 8, 8), Inception(32, 8, 6, 8, 4, 8, 8)]
    model = torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5))
    file = tmp_path_factory.mktemp("onnx") / "fp32.onnx"
    export_onnx(model.eval(), file, SHAPES)
    fp32 = with_names(onnx.load(file))
    histograms = collect_with_onnxruntime(file, activation_tensors(fp32), [_images()])
    return insert_qdq(fp32, {name: compute_scale(seen, "max") for name, seen in histograms.items()})


def _images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPES.input_shape(2), dtype=np.float32)


def _logits(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits: np.ndarray = session.run(None, {SHAPES.input_name: _images()})[0]
    return logits


@pytest.mark.parametrize("left_out", [(), ("kernel_shape",), ("dilations",)])
def test_logits_stay_the_same_and_no_siblings_are_left(quantized: onnx.ModelProto, left_out: tuple[str, ...]) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(quantized)
    for node in _convolutions(model)[::2]:  # attributes that a node need not have
        kept = [entry for entry in node.attribute if entry.name not in left_out]
        del node.attribute[:]
        node.attribute.extend(kept)
    changed = keep_apart(model)
    assert len(changed) == 4  # of each block's three siblings the first stays as it is
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(_logits(model), _logits(quantized))
    assert keep_apart(model) == []
    names = {node.name for node in _convolutions(model)}
    assert set(changed) < names
    dilations = [(node.input[0], _dilation(node)) for node in _convolutions(model) if "branch" in node.name]
    rows = {tensor: sorted(own for other, own in dilations if other == tensor) for tensor, _ in dilations}
    assert sorted(row for row in rows.values() if len(row) > 1) == [[1, 2, 3]] * 2


def _convolutions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Conv"]


def _dilation(node: onnx.NodeProto) -> int:
    return next((entry.ints[0] for entry in node.attribute if entry.name == "dilations"), 1)


def test_siblings_of_other_strides_and_dilations_differ_too() -> None:
    strides, dilations = ([1, 1], [1, 1], [2, 2]), ([1, 1], [2, 2], [1, 1])
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], [f"y{number}"], strides=own, dilations=dilated)
        for number, (own, dilated) in enumerate(zip(strides, dilations, strict=True))
    ]
    weights = onnx.numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")  # all three share them
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "siblings", [], [], [weights]))
    keep_apart(model)
    assert [_dilation(node) for node in model.graph.node] == [1, 2, 3]


def test_networks_without_siblings_stay_as_they_are(tmp_path: Path) -> None:
    layers = [torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1), torch.nn.AdaptiveAvgPool2d(1)]
    export_onnx(torch.nn.Sequential(*layers, torch.nn.Flatten()).eval(), tmp_path / "fp32.onnx", SHAPES)
    chain = onnx.load(tmp_path / "fp32.onnx")
    before = chain.SerializeToString(deterministic=True)
    assert keep_apart(chain) == []
    assert chain.SerializeToString(deterministic=True) == before
