"""Shapes and other constants computed once: the graph has fewer nodes and answers the same, for any batch."""

import collections

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torchvision.models import SwinTransformer

from components.common.contracts.transforms import ShapeSpec
from components.export.folding import fold_constants
from components.export.onnx_export import export_onnx, read_user_onnx
from components.export.placement import quantizable_layers
from tests.unit.refusals import refuses

from ..networks import onnx_model, random_images, small_vit, written_by_torch
from ..onnx_outputs import relative, run_ort

SHAPES = ShapeSpec(height=32, width=32)


def operators(model: onnx.ModelProto) -> collections.Counter:
    return collections.Counter(node.op_type for node in model.graph.node)


def assert_same_answers(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
    for batch in (1, 2, 5):
        images = random_images(SHAPES, batch)
        (expected,), (actual,) = (run_ort(model, images).values() for model in (first, second))
        assert relative(actual, expected) < 1e-5


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_vit_computes_no_shapes_but_that_of_its_class_token(tmp_path):
    written = written_by_torch(small_vit(), tmp_path / "user.onnx", SHAPES)
    taken, content = read_user_onnx(tmp_path / "user.onnx")
    assert taken.num_classes == 10
    folded = onnx.load_model_from_string(content)
    assert operators(written)["Shape"] > 10
    assert (operators(folded)["Shape"], operators(folded)["Expand"], operators(folded)["Cast"]) == (2, 1, 0)
    assert {node.name for node in folded.graph.node} < {node.name for node in written.graph.node}
    assert_same_answers(written, folded)
    onnx.checker.check_model(folded, full_check=True)
    assert fold_constants(folded).ByteSize() == folded.ByteSize()  # what is left depends on the batch


def test_windows_of_a_swin_are_constants(tmp_path):
    torch.manual_seed(0)
    swin = SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10).eval()
    written = written_by_torch(swin, tmp_path / "written.onnx", SHAPES)
    export_onnx(swin, tmp_path / "fp32.onnx", SHAPES)
    folded = onnx.load(tmp_path / "fp32.onnx")
    assert {"Shape", "ScatterND", "Range", "Not", "Pad"} < set(operators(written))
    assert not {"Shape", "ScatterND", "Range", "Not", "Pad"} & set(operators(folded))  # nothing to pad at 32 pixels
    assert len(folded.graph.node) < len(written.graph.node) / 4
    assert_same_answers(written, folded)


def graph_of(nodes, initializers=()) -> onnx.ModelProto:
    return onnx_model(nodes, {"images": ["batch", 3, 32, 32]}, {"logits": ["batch", 10]}, dict(initializers))


WEIGHTS = np.random.default_rng(0).standard_normal((10, 3072)).astype(np.float32)
FLATTEN = [
    helper.make_node("Shape", ["images"], ["shape"]),
    helper.make_node("Gather", ["shape", "first"], ["batch"]),
    helper.make_node("Concat", ["batch", "rest"], ["flat_shape"], axis=0),
    helper.make_node("Reshape", ["images", "flat_shape"], ["flat"]),
]
CONSTANTS = [("first", np.array([0])), ("rest", np.array([-1]))]


def test_transposed_weights_are_quantized_and_a_second_rest_is_no_obstacle():
    nodes = [
        *FLATTEN,  # [batch, -1]: its shape has a -1 already
        helper.make_node("Transpose", ["weights"], ["transposed"], perm=[1, 0]),
        helper.make_node("MatMul", ["flat", "transposed"], ["logits"], name="product"),
    ]
    model = graph_of(nodes, [*CONSTANTS, ("weights", WEIGHTS)])
    assert quantizable_layers(model) == []
    folded = fold_constants(model)
    assert quantizable_layers(folded) == ["product"]
    assert list(operators(folded)) == ["Reshape", "MatMul"]
    assert_same_answers(model, folded)


def test_values_that_images_decide_stay():
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("NonZero", ["flat"], ["places"]),  # its shape is no function of the batch
        helper.make_node("Shape", ["places"], ["count"]),
        helper.make_node("Cast", ["count"], ["added"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["added"], ["mean"]),
        helper.make_node("Gemm", ["flat", "weights"], ["product"], transB=1),
        helper.make_node("Add", ["product", "mean"], ["logits"]),
    ]
    model = graph_of(nodes, [("weights", WEIGHTS)])
    assert fold_constants(model) is model


def test_a_model_for_two_images_alone_is_refused():
    nodes = [
        helper.make_node("Shape", ["images"], ["shape"]),
        helper.make_node("ReduceProd", ["shape"], ["size"], keepdims=1),
        helper.make_node("Concat", ["two", "rest"], ["flat_shape"], axis=0),
        helper.make_node("Reshape", ["images", "flat_shape"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights"], ["logits"], transB=1),
    ]
    constants = [("two", np.array([2])), ("rest", np.array([3072]))]
    with refuses("onnx-does-not-run"):
        fold_constants(graph_of(nodes, [*constants, ("weights", WEIGHTS)]))
