"""Weights of fewer mantissa bits."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from pydantic import ValidationError

from components.export.config import ExportConfig
from components.export.precision import round_weights, to_fp16


def model_of(weights: np.ndarray) -> onnx.ModelProto:
    """A convolution with a bias, then a matrix product."""
    nodes = [
        helper.make_node("Conv", ["x", "kernel", "bias"], ["y"]),
        helper.make_node("Flatten", ["y"], ["z"]),
        helper.make_node("Gemm", ["z", "matrix"], ["logits"]),
    ]
    bias = np.full(weights.shape[0], 1.3, weights.dtype)
    tensors = {"kernel": weights, "bias": bias, "matrix": weights[:, :, 0, 0]}
    initializers = [numpy_helper.from_array(values, name) for name, values in tensors.items()]
    graph = helper.make_graph(
        nodes,
        "rounded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, weights.shape[1], 1, 1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, weights.shape[1]])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def rounded(weights: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    model = model_of(weights)
    assert round_weights(model, bits) == 2
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def as_kernel(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(1, -1, 1, 1)


@pytest.mark.parametrize("bits", [10, 7, 5, 4, 3, 2])
def test_normal_numbers_are_off_by_half_a_bit_at_most(bits: int) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float32)
    weights = np.where(np.abs(weights) < 2**-14, 1, weights).astype(np.float32)  # subnormal in float16
    tensors = rounded(weights, bits)
    relative = np.abs(tensors["kernel"] / weights - 1)
    # float16 is rounded to first, so its own half bit comes on top.
    assert 2.0 ** -(bits + 2) < relative.max() <= 2.0 ** -(bits + 1) + 2.0**-11
    np.testing.assert_array_equal(tensors["matrix"], tensors["kernel"][:, :, 0, 0])
    mantissas = tensors["kernel"].astype(np.float16).view(np.uint16) & ((1 << (10 - bits)) - 1)
    assert not mantissas.any()
    np.testing.assert_array_equal(rounded(tensors["kernel"], bits)["kernel"], tensors["kernel"])


def test_three_bits_are_those_of_float8() -> None:
    weights = np.random.default_rng(1).uniform(0.02, 400, (64, 64, 1, 1)).astype(np.float16).astype(np.float32)
    expected = torch.from_numpy(weights).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(rounded(weights, 3)["kernel"], expected)


def test_biases_and_types_stay() -> None:
    typed = to_fp16(model_of(as_kernel(1.3, -1.3)))
    assert round_weights(typed, 2) == 2
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in typed.graph.initializer}
    assert {str(values.dtype) for values in tensors.values()} == {"float16"}
    assert tensors["kernel"].ravel().tolist() == [1.25, -1.25]
    assert tensors["bias"].tolist() == [np.float16(1.3)]


def test_ties_go_to_the_even_neighbour() -> None:
    assert rounded(as_kernel(1.125, 1.375, -1.125), 2)["kernel"].ravel().tolist() == [1.0, 1.5, -1.0]


def test_nothing_becomes_infinite() -> None:
    """65,504 is the largest float16, and with fewer bits the next number above it would be infinity."""
    weights = as_kernel(65504, -65504, 1e6, np.inf, np.nan, 0)
    np.testing.assert_array_equal(rounded(weights, 3)["kernel"], weights)


def test_numbers_that_are_subnormal_lose_as_many_bits() -> None:
    """float16 counts them in units of 2**-24; with two bits fewer of every number these are units of 2**-22."""
    unit = 2.0**-24
    weights = as_kernel(5 * unit, 6 * unit, 2 * unit, -3 * unit, 2.0**-15 + unit)
    expected = [4 * unit, 8 * unit, 0, -4 * unit, 2.0**-15]
    assert rounded(weights, 8)["kernel"].ravel().tolist() == expected


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("through", ["", "Identity", "Transpose"])
def test_weights_are_found_wherever_they_are(stored: bool, left: bool, through: str) -> None:
    """As initializer or Constant node, on either side of the product, directly or through a node that keeps values."""
    values = numpy_helper.from_array(np.full((4, 4), 1.3, np.float32), "weights")
    nodes = [] if stored else [helper.make_node("Constant", [], ["weights"], value=values)]
    nodes += [helper.make_node(through, ["weights"], ["moved"])] if through else []
    read = "moved" if through else "weights"
    nodes.append(helper.make_node("MatMul", [read, "x"] if left else ["x", read], ["logits"]))
    nodes.append(helper.make_node("MatMul", [read, "logits"] if left else ["logits", read], ["more"]))  # shared
    nodes.append(helper.make_node("Add", ["more", "offset"], ["last"]))
    square = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "last")]
    offset = numpy_helper.from_array(np.full(4, 1.3, np.float32), "offset")
    graph = helper.make_graph(nodes, "one", square[:1], square[1:], [values, offset] if stored else [offset])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert round_weights(model, 2) == 1
    ones = np.eye(4, dtype=np.float32)
    result = ReferenceEvaluator(model).run(None, {"x": ones})[0]
    np.testing.assert_array_equal(result, np.full((4, 4), np.float32(4 * 1.25**2) + np.float32(1.3)))


def test_a_stripped_plan_has_no_weights_of_its_own() -> None:
    with pytest.raises(ValidationError, match=r"got 7, but export\.engine_options has stripped"):
        ExportConfig(engine_options=("stripped",), fp16_mantissa_bits=7)
    assert ExportConfig(engine_options=("stripped",)).fp16_mantissa_bits == 10
    assert ExportConfig(engine_options=("refittable",), fp16_mantissa_bits=7).fp16_mantissa_bits == 7


def test_operators_in_a_graph_without_weights() -> None:
    model = model_of(as_kernel(1.3))
    del model.graph.initializer[:]
    assert round_weights(model, 2) == 0
