"""Typed FP16 graphs, Q/DQ in them, and weights of fewer mantissa bits, asserted on types, numbers and answers."""

from copy import deepcopy

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from components.common.contracts.errors import EngineryError
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnxruntime import new_session
from components.export.onnx_export import export_onnx
from components.export.placement import model_opset
from components.export.precision import FP16_QDQ_OPSET, raise_opset, round_weights, to_fp16
from components.export.qdq import insert_qdq
from tests.unit.refusals import refuses

from ..networks import onnx_model, random_images
from ..onnx_outputs import relative, run_ort


def logits(model, images):
    return run_ort(model, images)["logits"]


def inner_float_types(model):
    """Element types of all inner float tensors, by full type inference."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    return types & {TensorProto.FLOAT, TensorProto.FLOAT16}


def io_types(model):
    return [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]


def arrays_of(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.fixture(scope="module")
def fp16(resnet18):
    return to_fp16(resnet18[1])


@pytest.fixture(scope="module")
def int8_fp16(resnet18, fp16):
    return insert_qdq(raise_opset(fp16), resnet18[3])


def test_fp16_is_typed_with_fp32_edges_and_answers_as_fp32(resnet18, fp16):
    _, model, images, _ = resnet18
    onnx.checker.check_model(fp16, full_check=True)
    assert {tensor.data_type for tensor in fp16.graph.initializer} == {TensorProto.FLOAT16}
    assert io_types(fp16) == [TensorProto.FLOAT, TensorProto.FLOAT]
    assert inner_float_types(fp16) == {TensorProto.FLOAT16}
    assert [node.op_type for node in fp16.graph.node].count("Cast") == 2
    assert (model_opset(fp16), fp16.ir_version) == (17, 8)
    assert fp16.ByteSize() < 0.52 * model.ByteSize()
    assert fp16.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    half = to_fp16(model, [model.graph.input[0].name])
    assert io_types(half) == [TensorProto.FLOAT16, TensorProto.FLOAT]
    assert relative(logits(fp16, images), logits(model, images)) < 5e-3


def test_fp16_attention_without_biases_runs_on_onnxruntime(tmp_path):
    class Attending(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.qkv = torch.nn.Conv2d(3, 32, 4, stride=4), torch.nn.Linear(32, 96, bias=False)
            self.project, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 5)

        def forward(self, images):
            maps = self.stem(images)  # [B, 32, 4, 4]
            qkv = self.qkv(maps.flatten(2).transpose(1, 2)).reshape(-1, 16, 3, 4, 8)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, 4, 16, 8]
            found = ((q * 8**-0.5) @ k.transpose(2, 3)).softmax(3) @ v
            mixed = self.project(found.transpose(1, 2).reshape(-1, 16, 32)).transpose(1, 2)
            return self.head((maps + mixed.reshape(-1, 32, 4, 4)).mean((2, 3)))

    shapes = ShapeSpec(height=16, width=16)
    torch.manual_seed(0)
    export_onnx(Attending(), tmp_path / "fp32.onnx", shapes)
    model = onnx.load(tmp_path / "fp32.onnx")
    images = random_images(shapes, 3)
    (found,) = new_session(to_fp16(model).SerializeToString()).run(["logits"], {"images": images})
    assert relative(found, logits(model, images)) < 0.01


def test_weights_beyond_fp16_are_an_error(resnet18):
    model = deepcopy(resnet18[1])
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("fc.bias"))
    tensor.CopyFrom(numpy_helper.from_array(np.full(10, 1e5, np.float32), tensor.name))
    with pytest.raises(EngineryError, match=r"fc.bias") as error:
        to_fp16(model)
    assert error.value.code == "weights-exceed-fp16"


def test_raise_opset(resnet18):
    _, model, images, _ = resnet18
    raised = raise_opset(model)
    assert (model_opset(raised), raised.ir_version) == (FP16_QDQ_OPSET, 9)
    assert model_opset(raise_opset(raised)) == FP16_QDQ_OPSET  # never lowered
    np.testing.assert_allclose(logits(raised, images), logits(model, images), rtol=1e-6)
    unknown = helper.make_graph([helper.make_node("Mystery", ["x"], ["y"])], "g", [], [])
    with refuses("conversion-failed"):
        raise_opset(helper.make_model(unknown, opset_imports=[helper.make_opsetid("", 17)]))


def test_int8_fp16_is_typed_fp16_around_int8(int8_fp16):
    onnx.checker.check_model(int8_fp16, full_check=True)
    assert model_opset(int8_fp16) >= 19
    assert io_types(int8_fp16) == [TensorProto.FLOAT, TensorProto.FLOAT]
    assert inner_float_types(int8_fp16) == {TensorProto.FLOAT16}
    kinds = {tensor.data_type for tensor in int8_fp16.graph.initializer}
    assert kinds == {TensorProto.FLOAT16, TensorProto.INT8}
    values = arrays_of(int8_fp16)
    for node in int8_fp16.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert values[node.input[2]].dtype == np.int8
            assert not values[node.input[2]].any()  # symmetric


def test_int8_fp16_has_the_scales_of_int8_and_answers_as_it(resnet18, int8_fp16):
    _, model, images, scales = resnet18
    int8 = insert_qdq(model, scales)
    fp32, fp16 = arrays_of(int8), arrays_of(int8_fp16)
    names = [name.replace("graph_input_cast_0", "images") for name in fp16 if name.endswith("_scale")]
    assert sorted(names) == sorted(name for name in fp32 if name.endswith("_scale"))
    for name in names:
        stored = fp16[name.replace("images", "graph_input_cast_0")]
        assert stored.dtype == np.float16
        assert (stored >= np.finfo(np.float16).smallest_normal).all()
        np.testing.assert_allclose(stored.astype(np.float32), np.maximum(fp32[name], 2.0**-14), rtol=1e-3)
    pairs, typed = ([node.op_type for node in m.graph.node].count("QuantizeLinear") for m in (int8, int8_fp16))
    assert pairs == typed
    expected = logits(model, images)
    assert relative(logits(int8_fp16, images), expected) < 0.08


def test_tiny_scales_are_raised_to_normal_numbers(resnet18, fp16):
    _, _, images, scales = resnet18
    quantized = insert_qdq(raise_opset(fp16), dict.fromkeys(scales, 1e-7))
    stored = [array for name, array in arrays_of(quantized).items() if name.endswith("_scale")]
    assert min(array.min() for array in stored) == np.finfo(np.float16).smallest_normal
    assert np.isfinite(logits(quantized, images)).all()
    with refuses("unsupported-opset"):  # scales of FP16 need opset 19
        insert_qdq(fp16, scales)


# --- weights of fewer mantissa bits


def model_of(weights: np.ndarray) -> onnx.ModelProto:
    """A convolution with a bias, then a matrix product."""
    nodes = [
        helper.make_node("Conv", ["x", "kernel", "bias"], ["y"]),
        helper.make_node("Flatten", ["y"], ["z"]),
        helper.make_node("Gemm", ["z", "matrix"], ["logits"]),
    ]
    bias = np.full(weights.shape[0], 1.3, weights.dtype)
    tensors = {"kernel": weights, "bias": bias, "matrix": weights[:, :, 0, 0]}
    width = weights.shape[1]
    return onnx_model(nodes, {"x": [1, width, 1, 1]}, {"logits": [1, width]}, tensors)


def rounded(weights: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    model = model_of(weights)
    assert round_weights(model, bits) == 2
    return arrays_of(model)


def as_kernel(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(1, -1, 1, 1)


@pytest.mark.parametrize("bits", [10, 7, 5, 4, 3, 2])
def test_normal_numbers_are_off_by_half_a_bit_at_most(bits: int) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float32)
    weights = np.where(np.abs(weights) < 2**-14, 1, weights).astype(np.float32)  # subnormal in float16
    tensors = rounded(weights, bits)
    error = np.abs(tensors["kernel"] / weights - 1)
    # float16 is rounded to first, so its own half bit comes on top.
    assert 2.0 ** -(bits + 2) < error.max() <= 2.0 ** -(bits + 1) + 2.0**-11
    np.testing.assert_array_equal(tensors["matrix"], tensors["kernel"][:, :, 0, 0])
    mantissas = tensors["kernel"].astype(np.float16).view(np.uint16) & ((1 << (10 - bits)) - 1)
    assert not mantissas.any()
    np.testing.assert_array_equal(rounded(tensors["kernel"], bits)["kernel"], tensors["kernel"])


def test_three_bits_are_those_of_float8() -> None:
    weights = np.random.default_rng(1).uniform(0.02, 400, (64, 64, 1, 1)).astype(np.float16).astype(np.float32)
    expected = torch.from_numpy(weights).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(rounded(weights, 3)["kernel"], expected)


UNIT = 2.0**-24  # of float16's subnormal numbers; with two bits fewer of every number these are units of 2**-22


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (2, [1.125, 1.375, -1.125], [1.0, 1.5, -1.0]),  # ties go to the even neighbour
        # 65,504 is the largest float16, and with fewer bits the next number above it would be infinity.
        (3, [65504, -65504, 1e6, np.inf, np.nan, 0], [65504, -65504, 1e6, np.inf, np.nan, 0]),
        (8, [5 * UNIT, 6 * UNIT, 2 * UNIT, -3 * UNIT, 2.0**-15 + UNIT], [4 * UNIT, 8 * UNIT, 0, -4 * UNIT, 2.0**-15]),
    ],
)
def test_ties_infinities_and_subnormal_numbers(bits, values, expected) -> None:
    np.testing.assert_array_equal(rounded(as_kernel(*values), bits)["kernel"], as_kernel(*expected))


def test_biases_and_types_stay() -> None:
    typed = to_fp16(model_of(as_kernel(1.3, -1.3)))
    assert round_weights(typed, 2) == 2
    tensors = arrays_of(typed)
    assert {str(values.dtype) for values in tensors.values()} == {"float16"}
    assert tensors["kernel"].ravel().tolist() == [1.25, -1.25]
    assert tensors["bias"].tolist() == [np.float16(1.3)]
    del typed.graph.initializer[:]
    assert round_weights(typed, 2) == 0


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("through", ["", "Identity", "Transpose"])
def test_weights_are_found_wherever_they_are(stored: bool, left: bool, through: str) -> None:
    """As initializer or Constant node, on either side of the product, directly or through a node that keeps values."""
    weights = np.full((4, 4), 1.3, np.float32)
    nodes = [] if stored else [helper.make_node("Constant", [], ["weights"], value=numpy_helper.from_array(weights))]
    nodes += [helper.make_node(through, ["weights"], ["moved"])] if through else []
    read = "moved" if through else "weights"
    nodes.append(helper.make_node("MatMul", [read, "x"] if left else ["x", read], ["logits"]))
    nodes.append(helper.make_node("MatMul", [read, "logits"] if left else ["logits", read], ["more"]))  # shared
    nodes.append(helper.make_node("Add", ["more", "offset"], ["last"]))
    constants = {"offset": np.full(4, 1.3, np.float32), **({"weights": weights} if stored else {})}
    model = onnx_model(nodes, {"x": [4, 4]}, {"last": [4, 4]}, constants)
    assert round_weights(model, 2) == 1
    result = ReferenceEvaluator(model).run(None, {"x": np.eye(4, dtype=np.float32)})[0]
    np.testing.assert_array_equal(result, np.full((4, 4), np.float32(4 * 1.25**2) + np.float32(1.3)))
