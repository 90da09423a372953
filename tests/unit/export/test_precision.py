"""Typed FP16 graphs and FP16 graphs with Q/DQ, asserted on types and answers."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from components.common.contracts.errors import EngineryError
from components.export.placement import model_opset
from components.export.precision import FP16_QDQ_OPSET, raise_opset, to_fp16
from components.export.qdq import insert_qdq


def run(model, images):
    options = ort.SessionOptions()
    options.log_severity_level = 3  # its CPU provider says at length that it has no float16 kernels
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def relative(actual, expected):
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def float_types(model):
    """Element types of all inner float tensors, by full type inference."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    return {name: kind for name, kind in types.items() if kind in (TensorProto.FLOAT, TensorProto.FLOAT16)}


def io_types(model):
    return [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]


@pytest.fixture(scope="module")
def fp16(resnet18):
    return to_fp16(resnet18[1])


@pytest.fixture(scope="module")
def int8_fp16(resnet18, fp16):
    return insert_qdq(raise_opset(fp16), resnet18[3])


def test_fp16_is_typed_with_fp32_edges(resnet18, fp16):
    onnx.checker.check_model(fp16, full_check=True)
    assert {tensor.data_type for tensor in fp16.graph.initializer} == {TensorProto.FLOAT16}
    assert io_types(fp16) == [TensorProto.FLOAT, TensorProto.FLOAT]
    assert set(float_types(fp16).values()) == {TensorProto.FLOAT16}
    assert [node.op_type for node in fp16.graph.node].count("Cast") == 2
    assert (model_opset(fp16), fp16.ir_version) == (17, 8)
    assert fp16.ByteSize() < 0.52 * resnet18[1].ByteSize()
    assert fp16.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_fp16_answers_as_fp32(resnet18, fp16):
    _, model, images, _ = resnet18
    assert relative(run(fp16, images), run(model, images)) < 5e-3


def test_weights_beyond_fp16_are_an_error(resnet18):
    model = onnx.ModelProto()
    model.CopyFrom(resnet18[1])
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("fc.bias"))
    tensor.CopyFrom(numpy_helper.from_array(np.full(10, 1e5, np.float32), tensor.name))
    with pytest.raises(EngineryError, match=r"fc.bias' holds 100000, beyond float16's largest number 65504"):
        to_fp16(model)


def test_raise_opset(resnet18):
    _, model, images, _ = resnet18
    raised = raise_opset(model)
    assert (model_opset(raised), raised.ir_version) == (FP16_QDQ_OPSET, 9)
    assert model_opset(raise_opset(raised, 17)) == FP16_QDQ_OPSET  # never lowered
    np.testing.assert_allclose(run(raised, images), run(model, images), rtol=1e-6)


def test_raise_opset_error():
    node = helper.make_node("Mystery", ["x"], ["y"])
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)]
    )
    with pytest.raises(EngineryError, match="opset 19"):
        raise_opset(model)


def test_int8_fp16_is_typed_fp16_around_int8(int8_fp16):
    onnx.checker.check_model(int8_fp16, full_check=True)
    assert model_opset(int8_fp16) >= 19
    assert io_types(int8_fp16) == [TensorProto.FLOAT, TensorProto.FLOAT]
    assert set(float_types(int8_fp16).values()) == {TensorProto.FLOAT16}
    kinds = {tensor.data_type for tensor in int8_fp16.graph.initializer}
    assert kinds == {TensorProto.FLOAT16, TensorProto.INT8}
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in int8_fp16.graph.initializer}
    for node in int8_fp16.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert values[node.input[2]].dtype == np.int8
            assert not values[node.input[2]].any()  # symmetric


def test_int8_fp16_has_the_scales_of_int8(resnet18, int8_fp16):
    _, model, _, scales = resnet18
    int8 = insert_qdq(model, scales)
    fp32 = {tensor.name: numpy_helper.to_array(tensor) for tensor in int8.graph.initializer}
    fp16 = {tensor.name: numpy_helper.to_array(tensor) for tensor in int8_fp16.graph.initializer}
    names = [name.replace("graph_input_cast_0", "images") for name in fp16 if name.endswith("_scale")]
    assert sorted(names) == sorted(name for name in fp32 if name.endswith("_scale"))
    for name in names:
        stored = fp16[name.replace("images", "graph_input_cast_0")]
        assert stored.dtype == np.float16
        assert (stored >= np.finfo(np.float16).smallest_normal).all()
        expected = np.maximum(fp32[name], 2.0**-14)
        np.testing.assert_allclose(stored.astype(np.float32), expected, rtol=1e-3)

    def pairs(quantized):
        return sum(node.op_type == "QuantizeLinear" for node in quantized.graph.node)

    assert pairs(int8) == pairs(int8_fp16)


def test_int8_fp16_answers_as_int8(resnet18, int8_fp16):
    _, model, images, scales = resnet18
    expected = run(model, images)
    assert relative(run(int8_fp16, images), expected) < 0.08
    assert relative(run(insert_qdq(raise_opset(to_fp16(model)), scales, weights="qdq"), images), expected) < 0.08


def test_tiny_scales_are_raised_to_normal_numbers(resnet18, fp16):
    _, _, images, scales = resnet18
    quantized = insert_qdq(raise_opset(fp16), dict.fromkeys(scales, 1e-7))
    stored = [numpy_helper.to_array(t) for t in quantized.graph.initializer if t.name.endswith("_scale")]
    assert min(array.min() for array in stored) == np.finfo(np.float16).smallest_normal
    assert np.isfinite(run(quantized, images)).all()


def test_fp16_needs_opset_19(resnet18, fp16):
    with pytest.raises(EngineryError, match="has opset 17, but Q/DQ on these types needs 19"):
        insert_qdq(fp16, resnet18[3])
