"""Single operators of the PyTorch runner against ONNX Runtime: tricky attributes, and what is refused."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from components.common.contracts.errors import EngineryError
from components.common.runtimes.torch import TorchGraph, UnsupportedOperators
from components.common.runtimes.torch_operators import fake_quantize
from components.export.precision import FP16_QDQ_OPSET
from tests.unit.networks import onnx_model
from tests.unit.onnx_outputs import run_ort, run_torch
from tests.unit.refusals import refuses


def operator_model(op_type, arrays, attributes, num_outputs=1, opset=17):
    """A model of one node: its first input is the graph's, the others are constants (None: absent)."""
    names = [f"input_{index}" if array is not None else "" for index, array in enumerate(arrays)]
    outputs = [f"output_{index}" for index in range(num_outputs)]
    node = helper.make_node(op_type, names, outputs, **attributes)
    element = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
    graph = helper.make_graph(
        [node],
        "operator",
        [helper.make_tensor_value_info(names[0], element, arrays[0].shape)],
        [helper.make_empty_tensor_value_info(outputs[-1])],
        [numpy_helper.from_array(a, name) for name, a in zip(names[1:], arrays[1:], strict=True) if a is not None],
    )
    graph.output[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


IMAGE = normal(2, 4, 11, 9)
RESIZES = [
    ("Resize", [IMAGE, None, *size], {"mode": mode, "coordinate_transformation_mode": places, "nearest_mode": rounding})
    for size in ([None, ints(2, 4, 22, 18)], [None, ints(2, 4, 5, 13)], [np.float32([1, 1, 1.7, 0.6])])
    for places in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    for mode, rounding in (
        ("linear", "floor"),
        ("cubic", "floor"),
        *(("nearest", rounding) for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    )
]
CONV = {"kernel_shape": [3, 3]}
POOL = {"kernel_shape": [3, 3], "strides": [2, 2]}
OPERATORS = [
    ("Conv", [IMAGE, normal(6, 4, 3, 3)], {**CONV, "pads": [0, 1, 2, 1], "strides": [2, 1]}),
    ("Conv", [IMAGE, normal(8, 2, 3, 3), normal(8)], {**CONV, "pads": [2, 2, 2, 2], "dilations": [2, 2], "group": 2}),
    ("Conv", [normal(2, 4, 20), normal(6, 4, 3)], {"kernel_shape": [3], "pads": [1, 1]}),
    ("Conv", [IMAGE, normal(2, 4, 4, 3)], {"auto_pad": "SAME_UPPER"}),
    ("Conv", [IMAGE, normal(2, 4, 2, 4)], {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    ("Conv", [IMAGE, normal(2, 4, 2, 4)], {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
    ("Conv", [IMAGE, normal(2, 4, 2, 4)], {"auto_pad": "VALID"}),
    ("MaxPool", [IMAGE - 9], {**POOL, "auto_pad": "SAME_UPPER"}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 4], "auto_pad": "SAME_LOWER"}),
    ("ConvTranspose", [IMAGE, normal(4, 2, 3, 2)], {"strides": [2, 1], "group": 2, "output_padding": [1, 0]}),
    ("ConvTranspose", [IMAGE, normal(4, 3, 2, 3), normal(3)], {"pads": [0, 1, 1, 2], "dilations": [2, 1]}),
    ("MaxPool", [IMAGE], {**POOL, "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ("MaxPool", [IMAGE - 9], {**POOL, "pads": [0, 0, 1, 1]}),
    ("MaxPool", [IMAGE - 9], {**POOL, "pads": [0, 0, 1, 1], "ceil_mode": 1}),
    ("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "dilations": [2, 3], "strides": [1, 1]}),
    ("AveragePool", [IMAGE], {**POOL, "pads": [1, 1, 1, 1]}),
    ("AveragePool", [IMAGE], {**POOL, "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1}),
    ("AveragePool", [IMAGE], {**POOL, "pads": [0, 1, 1, 0]}),
    ("AveragePool", [IMAGE], {**POOL, "pads": [0, 1, 1, 0], "count_include_pad": 1}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 0, 0, 0], "ceil_mode": 1}),
    ("GlobalAveragePool", [IMAGE], {}),
    ("InstanceNormalization", [IMAGE, normal(4), normal(4)], {"epsilon": 1e-3}),
    ("LRN", [IMAGE], {"size": 3, "alpha": 0.1}),
    ("LRN", [IMAGE], {"size": 5, "alpha": 0.1, "beta": 0.5, "bias": 2.0}),
    ("Erf", [IMAGE], {}),
    ("Cos", [IMAGE], {}),
    ("Sin", [IMAGE], {}),
    ("Not", [IMAGE > 0], {}),
    ("BatchNormalization", [IMAGE, normal(4), normal(4), normal(4), np.abs(normal(4))], {"epsilon": 1e-3}),
    ("LayerNormalization", [IMAGE, normal(9), normal(9)], {}),
    ("LayerNormalization", [IMAGE, normal(11, 9)], {"axis": 2, "epsilon": 1e-3}),
    ("Gemm", [normal(3, 5), normal(7, 5), normal(7)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", [normal(5, 3), normal(5, 7)], {"transA": 1, "alpha": 0.5}),
    ("Gemm", [normal(3, 5), normal(5, 7), np.float32(3.0)], {}),
    ("MatMul", [normal(2, 3, 4, 5), normal(5, 6)], {}),
    ("Clip", [IMAGE, np.float32(-0.5)], {}),
    ("Clip", [IMAGE, None, np.float32(0.5)], {}),
    ("Clip", [IMAGE, np.float32(0.0), np.float32(6.0)], {}),
    ("HardSigmoid", [IMAGE], {}),
    ("HardSigmoid", [IMAGE * 3], {"alpha": 1 / 6}),
    ("HardSwish", [IMAGE * 3], {}),
    ("LeakyRelu", [IMAGE], {}),
    ("Elu", [IMAGE], {"alpha": 0.7}),
    ("Softplus", [IMAGE], {}),
    ("Softmax", [IMAGE], {"axis": 1}),
    ("LogSoftmax", [IMAGE], {"axis": 1}),
    ("Add", [IMAGE, np.float32(2.0)], {}),
    ("Max", [IMAGE, normal(4, 1, 1)], {}),
    ("Min", [IMAGE, normal(4, 1, 1), np.float32(0.5)], {}),
    ("Div", [ints(7, -7, 9), ints(2)], {}),
    ("Mod", [ints(7, -7, 9), ints(4)], {}),
    ("Pow", [np.abs(IMAGE), np.float32(0.5)], {}),
    ("ReduceMean", [IMAGE], {"axes": [2, 3], "keepdims": 0}),
    ("ReduceMean", [IMAGE], {"axes": [-1]}),
    ("ReduceMean", [IMAGE], {}),
    ("ReduceSum", [IMAGE, ints(1)], {"keepdims": 0}),
    ("ReduceL2", [IMAGE], {"axes": [2, 3]}),
    ("Reshape", [IMAGE, ints(0, 2, -1)], {}),
    ("Flatten", [IMAGE], {"axis": 2}),
    ("Flatten", [IMAGE], {"axis": 0}),
    ("Transpose", [IMAGE], {}),
    ("Transpose", [IMAGE], {"perm": [0, 2, 3, 1]}),
    ("Squeeze", [normal(3, 1, 4, 1), ints(-1)], {}),
    ("Squeeze", [normal(3, 1, 4, 1)], {}),
    ("Unsqueeze", [normal(3, 4), ints(-1, 0)], {}),
    ("Concat", [IMAGE, normal(2, 3, 11, 9)], {"axis": 1}),
    ("Slice", [IMAGE, ints(1, -4), ints(2**63 - 1, -1), ints(1, -1), ints(2, 1)], {}),
    ("Slice", [IMAGE, ints(-1, 6), ints(-(2**63), 1), ints(2, 3), ints(-1, -2)], {}),
    ("Gather", [IMAGE, np.int64(-1)], {"axis": 1}),
    ("Gather", [IMAGE, ints(0, -2, 3).reshape(1, 3)], {"axis": 1}),
    ("Gather", [IMAGE, ints(0, -2)], {"axis": -1}),
    ("Shape", [IMAGE], {"start": -3, "end": -1}),
    ("Expand", [normal(3, 1), ints(2, 1, 5)], {}),
    ("Range", [np.array(7), np.array(-3), np.array(-4)], {}),
    ("Range", [np.array(0.5, np.float32), np.float32(3), np.float32(0.5)], {}),
    ("CumSum", [IMAGE, np.array(1)], {}),
    ("Einsum", [normal(2, 3, 4), normal(5, 4)], {"equation": "bij,kj->bik"}),
    ("ReduceMax", [IMAGE], {"axes": [1]}),
    ("ScatterND", [normal(4, 5), ints(1, 2, -1, 0).reshape(2, 2), normal(2)], {}),
    ("ScatterND", [normal(4, 5), ints(3, 0).reshape(2, 1), normal(2, 5)], {}),
    ("Tile", [IMAGE, ints(2, 1, 1, 3)], {}),
    ("GatherElements", [normal(3, 4), ints(0, -1, 2, 1).reshape(2, 2)], {"axis": 1}),
    ("ConstantOfShape", [ints(2, 3)], {}),
    ("Cast", [IMAGE * 9], {"to": TensorProto.INT32}),
    ("Pad", [IMAGE, ints(0, 1, 2, 0, 0, 0, 1, 3), np.float32(1.5)], {}),
    ("Pad", [IMAGE, ints(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "reflect"}),
    ("Pad", [IMAGE, ints(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "edge"}),
    ("Where", [IMAGE > 0, IMAGE, np.float32(0)], {}),
    ("Dropout", [IMAGE, np.float32(0.5)], {}),
    ("QuantizeLinear", [IMAGE, np.float32(0.0123), np.int8(0)], {}),
    ("QuantizeLinear", [IMAGE, np.float32(0.0123), np.int8(-7)], {}),
    ("QuantizeLinear", [IMAGE, np.float32(0.0123), np.uint8(120)], {}),
    ("QuantizeLinear", [IMAGE, np.abs(normal(4)), np.array([0, 3, -5, 0], np.int8)], {}),
    ("QuantizeLinear", [IMAGE, np.abs(normal(9)), np.zeros(9, np.int8)], {"axis": -1}),
    ("DequantizeLinear", [np.arange(-128, 128, dtype=np.int8), np.float32(0.1), np.int8(5)], {}),
    ("DequantizeLinear", [(IMAGE * 30).astype(np.int8), np.abs(normal(4)), np.zeros(4, np.int8)], {"axis": 1}),
    ("DequantizeLinear", [(IMAGE * 3000).astype(np.int32), np.float32(0.1)], {}),
    ("Resize", [IMAGE, None, None, ints(2, 4, 22, 5)], {"mode": "cubic", "cubic_coeff_a": -0.5}),
    *RESIZES,
]


@pytest.mark.parametrize(("op_type", "arrays", "attributes"), OPERATORS)
def test_an_operator_computes_what_onnxruntime_does(op_type, arrays, attributes):
    model = operator_model(op_type, arrays, attributes)
    expected, actual = run_ort(model, arrays[0])["output_0"], run_torch(model, arrays[0])
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 if expected.dtype == np.float32 else 0)


@pytest.mark.parametrize("size", [2, 4])
def test_even_lrn_counts_the_odd_channel_behind(size):  # by ONNX's text: ONNX Runtime has odd sizes only
    model = operator_model("LRN", [IMAGE], {"size": size, "alpha": 0.5})
    before, behind = (size - 1) // 2, size // 2
    sums = [np.square(IMAGE[:, max(c - before, 0) : c + behind + 1]).sum(axis=1) for c in range(IMAGE.shape[1])]
    expected = IMAGE / (1.0 + 0.5 / size * np.stack(sums, axis=1)) ** 0.75
    np.testing.assert_allclose(run_torch(model, IMAGE), expected, rtol=1e-5)


@pytest.mark.parametrize("opset", [18, 19])
def test_attributes_that_became_inputs(opset):
    model = operator_model("ReduceMean", [IMAGE, ints(2, 3)], {"keepdims": 0}, opset=opset)
    np.testing.assert_allclose(run_torch(model, IMAGE), run_ort(model, IMAGE)["output_0"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "num_outputs"), [(ints(1, 2, 1), 3), (None, 2)])
def test_split_gives_all_its_parts(sizes, num_outputs):
    model = operator_model("Split", [IMAGE, *([] if sizes is None else [sizes])], {"axis": 1}, num_outputs)
    names = [f"output_{index}" for index in range(num_outputs)]
    _, parts = TorchGraph(model).run(torch.from_numpy(IMAGE), keep=names)
    bounds = np.cumsum(sizes)[:-1] if sizes is not None else num_outputs
    for name, expected in zip(names, np.split(IMAGE, bounds, axis=1), strict=True):
        np.testing.assert_array_equal(parts[name].numpy(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_fake_quantization_rounds_halves_as_onnxruntime(dtype):
    # Values halfway between two codes, where a product with the reciprocal of the scale goes the wrong way.
    scale = np.array(0.0123, dtype)
    images = ((np.arange(-140, 140) + 0.5) * scale.astype(np.float64)).astype(dtype)
    model = operator_model("QuantizeLinear", [images, scale, np.int8(0)], {}, opset=FP16_QDQ_OPSET)
    codes = run_ort(model, images)["output_0"]
    np.testing.assert_array_equal(run_torch(model, images), codes)
    values = fake_quantize(torch.from_numpy(images), torch.from_numpy(scale), torch.zeros((), dtype=torch.int8))
    np.testing.assert_array_equal(values.numpy(), (codes.astype(np.float32) * scale.astype(np.float32)).astype(dtype))


# --- what is refused


def test_all_that_is_unsupported_is_named_at_once():
    nodes = [
        helper.make_node("Hardmax", ["images"], ["a"]),
        helper.make_node("ConvTranspose", ["images", "w"], ["b"], auto_pad="SAME_UPPER"),
        helper.make_node("GridSample", ["images", "b"], ["c"]),
        helper.make_node("MaxPool", ["images"], ["d", "indices"], kernel_shape=[2, 2]),
        helper.make_node("FusedConv", ["images", "indices"], ["logits"], domain="com.microsoft"),
    ]
    model = onnx_model(nodes, {"images": ["batch", 3, 8, 8]}, {"logits": None}, {"w": normal(4, 3, 3, 3)})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(UnsupportedOperators) as error:
        TorchGraph(model)
    named = (
        "ConvTranspose with auto_pad=SAME_UPPER, GridSample, Hardmax, MaxPool with 2 outputs, com.microsoft.FusedConv"
    )
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("op_type", "arrays", "attributes", "opset", "code"),
    [
        ("BatchNormalization", [IMAGE, *[normal(4)] * 4], {"training_mode": 1}, 17, "unsupported-operators"),
        ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "dilations": [2, 2]}, 19, "unsupported-operators"),
        ("Squeeze", [normal(3, 1)], {"axes": [1]}, 11, "unsupported-opset"),
        ("Cast", [IMAGE], {"to": TensorProto.BFLOAT16}, 17, "unsupported-operators"),
    ],
)
def test_what_is_not_handled_is_refused_when_the_graph_is_loaded(op_type, arrays, attributes, opset, code):
    with refuses(code):
        TorchGraph(operator_model(op_type, arrays, attributes, opset=opset))


def test_a_failing_node_is_named():
    model = operator_model("Add", [IMAGE, normal(5)], {})
    with pytest.raises(EngineryError, match=r"Add 'output_0' failed on inputs of shapes \[\[2, 4, 11, 9\], \[5\]\]"):
        run_torch(model, IMAGE)
