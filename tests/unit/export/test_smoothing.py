"""Transformers in INT8: what is smoothed computes the same, outliers do no harm, and products run in integers."""

import collections

import numpy as np
import onnx
import openvino
import pytest
import torch
from onnx import helper
from torch import nn
from torchvision.models import SwinTransformer

from components.common.contracts.transforms import ShapeSpec
from components.export.calibration import collect_with_onnxruntime, collect_with_torch, compute_scale
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, inline_constants, quantizable_layers
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import Arithmetic, insert_qdq
from components.export.smoothing import channels, smooth, smoothable, smoothed_scales

from ..networks import onnx_model, random_images, small_vit, with_outliers
from ..onnx_outputs import relative, run_ort
from .conftest import max_scales

SHAPES = ShapeSpec(height=32, width=32)
IMAGES = random_images(SHAPES, 16)


class Attention(nn.Module):
    """A pre-norm block with three projections of their own."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 8, 8), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out, self.head = (nn.Linear(width, width) for _ in range(5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        normed = self.norm(tokens)
        read = nn.functional.scaled_dot_product_attention(self.query(normed), self.key(normed), self.value(normed))
        return self.head((tokens + self.out(read)).mean(1))


class PostNorm(Attention):
    """Its normalized tokens are added, too: dividing them would change the sum."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.patches(images).flatten(2).transpose(1, 2))
        return self.head((tokens + self.out(tokens)).mean(1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(module)`: path and graph of its ONNX file."""

    def write(module):
        path = tmp_path_factory.mktemp("transformer") / "fp32.onnx"
        export_onnx(module.eval(), path, SHAPES)
        return path, onnx.load(path)

    return write


def maxima_of(path, model):
    by_channel = channels(model)
    found = collect_with_onnxruntime(path, list(by_channel), [IMAGES], channels=by_channel)
    return {name: histogram.channel_max for name, histogram in found.items()}


def swin():
    torch.manual_seed(0)
    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


# Before attention and MLP; that before the head, of the one token that it reads; those of Swin's patches that merge.
@pytest.mark.parametrize(("build", "num_smoothed"), [(small_vit, 5), (swin, 9), (Attention, 1), (PostNorm, 0)])
def test_a_smoothed_network_computes_the_same(exported, build, num_smoothed):
    torch.manual_seed(0)
    path, model = exported(build())
    assert len(smoothable(model)) == num_smoothed
    maxima = maxima_of(path, model) if num_smoothed else {}
    smoothed, balanced = smooth(model, maxima)
    onnx.checker.check_model(smoothed, full_check=True)
    assert [node.name for node in smoothed.graph.node] == [node.name for node in model.graph.node]
    assert smoothed.ByteSize() < 1.1 * model.ByteSize()  # the constants are replaced, not added
    expected, actual = (run_ort(graph, IMAGES, every_tensor=True) for graph in (model, smoothed))
    assert relative(actual["logits"], expected["logits"]) < 1e-5
    for name, largest in balanced.items():
        seen = np.abs(actual[name]).reshape(-1, actual[name].shape[-1]).max(0)
        np.testing.assert_allclose(largest, seen, rtol=1e-3)
    changed = sum(relative(actual[name], expected[name]) > 1e-5 for name in balanced)
    assert changed == len(balanced)


def test_maxima_by_channel_are_the_same_by_both_runtimes(exported):
    path, model = exported(small_vit())
    by_channel = channels(model)
    batches = [torch.from_numpy(IMAGES[:5]), torch.from_numpy(IMAGES[5:])]
    found = collect_with_torch(model, list(by_channel), batches, torch.device("cpu"), channels=by_channel)
    for name, largest in maxima_of(path, model).items():
        assert largest.shape == (64,)
        assert largest.max() == pytest.approx(found[name].max_abs, rel=1e-4)
        np.testing.assert_allclose(found[name].channel_max, largest, rtol=1e-3)


def error_of(model, scales, expected):
    actual = run_ort(insert_qdq(model, scales), IMAGES)["logits"]
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def test_smoothing_undoes_the_harm_of_outlier_channels(exported):
    errors = {}
    for factor in (1.0, 40.0):
        path, model = exported(with_outliers(small_vit(), factor))
        expected = run_ort(model, IMAGES)["logits"]
        histograms = collect_with_onnxruntime(path, activation_tensors(model), [IMAGES])
        for method in ("max", "percentile", "entropy", "mse"):
            scales = {name: compute_scale(histogram, method) for name, histogram in histograms.items()}
            errors[method, factor] = error_of(model, scales, expected)
        smoothed, balanced = smooth(model, maxima_of(path, model))  # the scales of mse elsewhere
        errors["smoothquant", factor] = error_of(smoothed, scales | smoothed_scales(balanced), expected)
    assert errors["smoothquant", 40.0] < 1.1 * errors["smoothquant", 1.0]  # as if there were none
    assert all(errors[way, 40.0] > 2 * errors["smoothquant", 40.0] for way in ("max", "percentile", "entropy", "mse"))


def test_scale_and_bias_may_be_nodes_of_their_own():
    """As exporters before opset 17 write a LayerNormalization, around which a window is moved."""
    rng = np.random.default_rng(0)
    constants = {name: rng.standard_normal(8) for name in ("gamma", "beta")} | {"weights": rng.standard_normal((6, 8))}
    nodes = [
        helper.make_node("Mul", ["gamma", "images"], ["scaled"]),
        helper.make_node("Add", ["scaled", "beta"], ["normed"]),
        helper.make_node("Slice", ["normed", "start", "end", "rows"], ["tail"]),
        helper.make_node("Concat", ["normed", "tail"], ["tokens"], axis=1),
        helper.make_node("Reshape", ["tokens", "shape"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights"], ["logits"], transB=1),
    ]
    whole = {"start": [1], "end": [3], "rows": [1], "shape": [-1, 8]}

    def graph(nodes, shape=(2, 4, 8)):
        tensors = {name: value.astype(np.float32) for name, value in constants.items()}
        tensors |= {name: np.array(value) for name, value in whole.items()}
        return inline_constants(onnx_model(nodes, {"images": shape}, {"logits": None}, tensors))

    model, images = graph(nodes), rng.standard_normal((2, 4, 8)).astype(np.float32)
    assert channels(model) == {"tokens": 8}
    tokens = run_ort(model, images, every_tensor=True)["tokens"]
    smoothed, _ = smooth(model, {"tokens": np.abs(tokens).reshape(-1, 8).max(0)})
    assert relative(run_ort(smoothed, images)["logits"], run_ort(model, images)["logits"]) < 1e-5
    for index, other in (
        (3, helper.make_node("Concat", ["images", "tail"], ["tokens"], axis=1)),  # of other tokens, too
        (3, helper.make_node("Transpose", ["tail"], ["tokens"], perm=[0, 2, 1])),  # channels are elsewhere
        (0, helper.make_node("Mul", ["images", "images"], ["scaled"])),
        (5, helper.make_node("Gemm", ["weights", "flat"], ["logits"], transB=1)),  # weights first
    ):
        assert channels(graph([*nodes[:index], other, *nodes[index + 1 :]])) == {}


# --- placement


@pytest.mark.parametrize("build", [small_vit, swin, Attention])
def test_products_with_weights_read_codes_and_nothing_else_does(exported, build):
    _, model = exported(build())
    quantized = insert_qdq(model, dict.fromkeys(activation_tensors(model), 0.05))
    made_by = {output: node.op_type for node in quantized.graph.node for output in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    layers = set(quantizable_layers(model))
    weighted = [
        node for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in constants
    ]
    assert layers == {node.name for node in weighted}
    reading = {node.name for node in quantized.graph.node if "DequantizeLinear" in map(made_by.get, node.input)}
    pools = {node.name for node in model.graph.node if node.op_type == "GlobalAveragePool"}
    assert reading - pools == layers  # no LayerNormalization, Softmax, GELU, residual Add or product of activations
    if build is Attention:
        read = {node.input[0] for node in quantized.graph.node if node.name in layers and "/out" not in node.name}
        assert len(read) == len(layers) - 3  # three projections share one pair; that of /out is left out


@pytest.mark.parametrize("build", [small_vit, swin, Attention])
def test_attention_scores_read_codes_where_asked(exported, build):
    """Of two products of activations the first makes scores, whatever is between it and the softmax."""
    _, model = exported(build())
    quantized = insert_qdq(
        model, dict.fromkeys(activation_tensors(model, scores=True), 0.05), arithmetic=Arithmetic(scores="int8")
    )
    codes = {node.output[0] for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    inputs = {node.name: node.input for node in quantized.graph.node}
    constants = {tensor.name for tensor in model.graph.initializer}
    products = [n.name for n in model.graph.node if n.op_type == "MatMul" and not constants & set(n.input)]
    assert products
    for place, name in enumerate(products):
        assert [tensor in codes for tensor in inputs[name]] == 2 * [place % 2 == 0], name
    kept = insert_qdq(
        model,
        dict.fromkeys(activation_tensors(model), 0.05),
        arithmetic=Arithmetic(scores="int8"),
        exclude=products[::2],
    )
    assert len(kept.graph.node) < len(quantized.graph.node)


@pytest.mark.parametrize("build", [small_vit, swin])
def test_openvino_multiplies_in_integers_and_fp16_files_run(exported, build):
    path, model = exported(build())
    scales = max_scales(path, IMAGES, scores=True)
    quantized = insert_qdq(model, scales, arithmetic=Arithmetic(weight_bits=7))
    with_scores = insert_qdq(model, scales, arithmetic=Arithmetic(weight_bits=7, scores="int8"))
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(quantized.SerializeToString(), b""), "CPU", hints)
    runs_in = collections.Counter(
        node.get_rt_info()["runtimePrecision"].astype(str)
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) in ("FullyConnected", "Convolution")
    )
    assert set(runs_in) <= {"i8", "u8"}
    assert runs_in.total() >= len(quantizable_layers(model))
    expected = run_ort(model, IMAGES)["logits"]
    assert relative(compiled(IMAGES)[0], expected) < 0.2
    compiled = core.compile_model(core.read_model(with_scores.SerializeToString(), b""), "CPU", hints)
    assert relative(compiled(IMAGES)[0], expected) < 0.2
    typed = insert_qdq(raise_opset(to_fp16(model)), scales)
    assert relative(run_ort(typed, IMAGES)["logits"], expected) < 0.2
