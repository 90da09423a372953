"""The places of Q/DQ nodes, asserted on the graph of real networks; and what the quantized files compute."""

import collections
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torchvision.models.googlenet import Inception

from components.common.contracts.errors import EngineryError
from components.common.contracts.transforms import ShapeSpec
from components.export import placement
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, inline_constants, keep_apart, quantizable_layers, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import Arithmetic, insert_qdq, scales_below_fp16
from tests.unit.refusals import refuses

from ..networks import onnx_model, random_images
from ..onnx_outputs import relative, run_ort
from .conftest import max_scales

# name, Conv nodes, Gemm nodes, residual Adds, poolings
SLOW = ("resnet50", "vgg19")  # their kinds of layers are resnet18's and alexnet's
NETWORKS = [
    pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * (row[0] in SLOW))
    for row in (
        ("resnet18", 20, 1, 8, 2),
        ("resnet50", 53, 1, 16, 2),
        ("googlenet", 57, 1, 0, 14),
        ("vgg19", 16, 3, 0, 6),
        ("alexnet", 5, 3, 0, 4),
        ("mobilenet_v2", 52, 1, 10, 1),
        ("efficientnet_b0", 81, 1, 9, 17),
    )
]
POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
ACTIVATIONS = ("Relu", "Clip", "Sigmoid", "HardSwish")


class Graph:
    """Lookups over a quantized graph, written apart from the code under test."""

    def __init__(self, model):
        self.nodes = list(model.graph.node)
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.producer = {output: node for node in self.nodes for output in node.output}
        self.consumers = collections.defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.consumers[name].append(node)

    def of_type(self, *op_types):
        return [node for node in self.nodes if node.op_type in op_types]

    def array(self, name):
        return numpy_helper.to_array(self.initializers[name])

    def is_dequantized(self, name):
        return name in self.producer and self.producer[name].op_type == "DequantizeLinear"

    def pair(self, name):
        """The Q and DQ nodes behind a dequantized tensor."""
        dequantize = self.producer[name]
        return self.producer[dequantize.input[0]], dequantize


@pytest.fixture(scope="module")
def quantized(onnx_of):
    """`quantized("resnet18")`: the network with all activation scales 0.1."""
    graphs = {}

    def graph_of(name):
        if name not in graphs:
            model = onnx.load(onnx_of(name))
            model = insert_qdq(model, dict.fromkeys(activation_tensors(model), 0.1))
            onnx.checker.check_model(model, full_check=True)
            graphs[name] = Graph(model)
        return graphs[name]

    return graph_of


@pytest.mark.parametrize(("name", "convs", "gemms", "adds", "pools"), NETWORKS)
def test_what_is_quantized_in_a_network_and_by_which_scales(quantized, onnx_of, name, convs, gemms, adds, pools):
    graph, float_model = quantized(name), onnx.load(onnx_of(name))
    counts = collections.Counter(node.op_type for node in graph.nodes)
    assert (counts["Conv"], counts["Gemm"], counts["Add"]) == (convs, gemms, adds)
    assert sum(counts[pool] for pool in POOLS) == pools
    assert counts["Identity"] == counts["Constant"] == 0
    weights = [node for node in graph.of_type("DequantizeLinear") if node.input[0] in graph.initializers]
    assert len(weights) == convs + gemms
    assert counts["QuantizeLinear"] + len(weights) == counts["DequantizeLinear"]
    sources = [node.input[0] for node in graph.of_type("QuantizeLinear")]
    assert len(sources) == len(set(sources))  # one pair per tensor
    assert all(graph.is_dequantized(node.input[0]) for node in graph.of_type(*POOLS))
    for node in graph.of_type(*ACTIVATIONS, "Mul"):  # nothing between a convolution and its activation
        assert not any(graph.is_dequantized(tensor) for tensor in node.input), node.name
    for node in graph.of_type("Relu", "Clip"):
        assert graph.producer[node.input[0]].op_type in ("Conv", "Gemm", "Add")
    tensors = activation_tensors(float_model)
    producers = {output: node.op_type for node in float_model.graph.node for output in node.output}
    assert not {producers.get(tensor) for tensor in tensors} & {"MaxPool", "Flatten", "Reshape"}  # they keep the scale
    assert tensors[0] == "images" == graph.pair(graph.of_type("Conv")[0].input[0])[0].input[0]
    float_weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in float_model.graph.initializer}
    weights_of = {node.name: node.input[1] for node in float_model.graph.node if len(node.input) > 1}
    for node in graph.of_type("Conv", "Gemm"):
        assert graph.is_dequantized(node.input[0]), node.name
        for activation in graph.pair(node.input[0]):
            scale = graph.array(activation.input[1])
            assert (scale.shape, scale.dtype) == ((), np.float32)
        dequantize = graph.producer[node.input[1]]
        assert dequantize.op_type == "DequantizeLinear"
        assert [(entry.name, entry.i) for entry in dequantize.attribute[:1]] == [("axis", 0)]
        expected = float_weights[weights_of[node.name]]
        codes, scales, zero_points = (graph.array(tensor) for tensor in dequantize.input)
        largest = np.abs(expected).reshape(len(expected), -1).max(axis=1)
        np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
        assert codes.dtype == zero_points.dtype == np.int8
        assert zero_points.shape == scales.shape
        assert not zero_points.any()
        steps = scales.reshape(-1, *[1] * (expected.ndim - 1))
        assert np.abs(codes * steps - expected).max() <= 0.501 * scales.max()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_b0"])
def test_residual_adds_quantize_the_shortcut_alone(quantized, name):
    graph = quantized(name)
    for add in graph.of_type("Add"):
        (shortcut,) = (tensor for tensor in add.input if graph.is_dequantized(tensor))
        (main,) = (tensor for tensor in add.input if not graph.is_dequantized(tensor))
        conv = graph.producer[main]
        assert conv.op_type == "Conv"
        # Names tell which block a node belongs to: /layer1/layer1.0/Add, /layer1/layer1.0/conv3/Conv.
        block = add.name.rsplit("/", 1)[0]
        assert conv.name.startswith(f"{block}/")
        assert "downsample" not in conv.name
        source = graph.producer[graph.pair(shortcut)[0].input[0]]
        assert not source.name.startswith(f"{block}/") or "downsample" in source.name


def test_downsampling_convs_are_the_only_ones_quantized_at_once(quantized):
    graph = quantized("resnet18")
    after_conv = [
        conv.name
        for conv in graph.of_type("Conv")
        if any(node.op_type == "QuantizeLinear" for node in graph.consumers[conv.output[0]])
    ]
    assert len(after_conv) == 3
    assert all("downsample" in name for name in after_conv)


def run(model, images):
    return run_ort(model, images)[model.graph.output[0].name]


def test_int8_agrees_with_fp32_and_weight_storage_changes_size_alone(resnet18):
    _, model, images, scales = resnet18
    float_weights = insert_qdq(model, scales, weights="qdq")
    int8_weights = insert_qdq(model, scales, weights="dq")
    onnx.checker.check_model(int8_weights, full_check=True)
    assert int8_weights.ByteSize() < 0.3 * float_weights.ByteSize()
    actual = run(int8_weights, images)
    np.testing.assert_allclose(actual, run(float_weights, images), rtol=1e-5, atol=1e-6)
    assert 1e-4 < relative(actual, run(model, images)) < 0.08


@pytest.mark.parametrize("weights", ["qdq", "dq"])
def test_openvino_runs_the_same_file_in_int8(resnet18, tmp_path, weights):
    import openvino

    _, model, images, scales = resnet18
    # Of 7 bits, so that no sum saturates whatever CPU this is; contracts/test_instruction_sets.py has the others.
    quantized = insert_qdq(model, scales, weights=weights, arithmetic=Arithmetic(weight_bits=7))
    onnx.save(quantized, tmp_path / "int8.onnx")
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(tmp_path / "int8.onnx", "CPU", hints)
    assert relative(compiled(images)[0], run(quantized, images)) < 0.08
    precisions = collections.Counter(
        node.get_rt_info()["runtimePrecision"].astype(str)
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "Convolution"
    )
    # Named after the weights where the CPU has AMX, after what comes in elsewhere.
    assert precisions in ({"i8": 20}, {"u8": 20})


def test_fewer_bits_of_weights_beside_signed_activations(resnet18):
    """The images can be negative; everything else in a ResNet is read behind a ReLU."""
    _, model, _, scales = resnet18
    mixed = insert_qdq(model, scales, arithmetic=Arithmetic(activations="unsigned", signed_weight_bits=7))
    graph = Graph(mixed)
    weights = [graph.array(graph.producer[node.input[1]].input[0]) for node in graph.of_type("Conv", "Gemm")]
    assert [int(np.abs(codes).max()) for codes in weights] == [63] + [127] * (len(weights) - 1)


def test_unsigned_codes_where_nothing_is_negative(resnet18):
    """The same range in twice as many steps after a ReLU; the images and downsampled shortcuts keep their sign."""
    _, model, images, scales = resnet18
    unsigned = insert_qdq(model, scales, arithmetic=Arithmetic(activations="unsigned"))
    graph = Graph(unsigned)
    for node in graph.of_type("QuantizeLinear"):
        relu = graph.producer.get(node.input[0])
        after_relu = relu is not None and relu.op_type in ("Relu", "MaxPool", "GlobalAveragePool", "Flatten")
        assert graph.array(node.input[2]).dtype == (np.uint8 if after_relu else np.int8), node.input[0]
    expected = run(model, images)
    assert relative(run(unsigned, images), expected) < relative(run(insert_qdq(model, scales), images), expected)


def test_excluded_nodes_stay_in_float(resnet18):
    _, model, images, scales = resnet18
    layers = quantizable_layers(model)
    assert len(layers) == 21
    excluded = next(name for name in layers if name.endswith("layer1.0/conv2/Conv"))
    graph = Graph(insert_qdq(model, scales, exclude={excluded}))
    conv = next(node for node in graph.nodes if node.name == excluded)
    assert not graph.is_dequantized(conv.input[0])
    assert conv.input[1] in graph.initializers
    add = next(node for node in graph.of_type("Add") if node.name == "/layer1/layer1.0/Add")
    assert not any(graph.is_dequantized(name) for name in add.input)  # nothing to fuse it into
    everything = {node.name for node in model.graph.node}
    untouched = insert_qdq(model, {}, exclude=everything)
    np.testing.assert_array_equal(run(untouched, images), run(model, images))
    assert activation_tensors(model, everything) == []


@pytest.mark.parametrize(
    ("change", "exclude", "code", "said"),
    [
        (lambda scales: {}, (), "scale-missing", "'images'"),
        (lambda scales: scales | {"images": 0.0}, (), "wrong-scale", "'images'"),
        (lambda scales: scales, ("nowhere",), "unknown-layer", "nowhere"),
    ],
)
def test_errors_name_what_is_wrong(resnet18, change, exclude, code, said):
    _, model, _, scales = resnet18
    with pytest.raises(EngineryError, match=said) as error:
        insert_qdq(model, change(scales), exclude=exclude)
    assert error.value.code == code


def test_a_quantized_model_is_refused_and_the_input_left_alone(resnet18):
    _, model, _, scales = resnet18
    before = model.SerializeToString()
    quantized = insert_qdq(model, scales)
    activation_tensors(model)
    assert model.SerializeToString() == before
    with refuses("already-quantized"):
        insert_qdq(quantized, scales)


def test_scales_below_fp16():
    assert scales_below_fp16({"a": 1e-5, "b": 0.1}) == ["a"]


def graph_model(nodes, weights):
    """A model of one input x [N, 4, 8, 8] and the output y with the given nodes and initializers."""
    model = onnx_model(nodes, {"x": ["N", 4, 8, 8]}, {"y": None}, weights)
    model = onnx.shape_inference.infer_shapes(model)  # fills in the output's shape
    onnx.checker.check_model(model)
    return model


def conv_weights():
    return np.random.default_rng(0).standard_normal((4, 4, 1, 1), dtype=np.float32)


def quantize_all(model, **options):
    return Graph(insert_qdq(model, dict.fromkeys(activation_tensors(model), 0.05), **options))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        *[((op, ["relu", "relu"]), True) for op in ("Add", "Concat", "Mul")],
        *[((op, ["relu", "x"]), False) for op in ("Add", "Concat", "Mul")],
        *[((op, [of]), of == "relu") for op in ("MaxPool", "Flatten") for of in ("relu", "x")],
        *[(("Clip", ["x", low]), low == "zero") for low in ("zero", "below")],
        (("Conv", ["relu", "w"]), False),
    ],
)
def test_tensors_that_can_not_be_negative(node, expected):
    attributes = {"Concat": {"axis": 1}, "MaxPool": {"kernel_shape": [2, 2]}}.get(node[0], {})
    nodes = [helper.make_node("Relu", ["x"], ["relu"]), helper.make_node(*node, ["y"], **attributes)]
    limits = {"zero": np.float32(0), "below": np.float32(-1)}
    model = graph_model(nodes, {"w": conv_weights(), **{name: np.asarray(low) for name, low in limits.items()}})
    assert placement.GraphIndex(model.graph).is_nonnegative("y") == expected


def test_batch_normalization_does_not_hide_the_main_branch():
    ones = np.ones(4, np.float32)
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Conv", ["r", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "one", "one", "one", "one"], ["b"]),
        helper.make_node("Add", ["b", "r"], ["y"]),
    ]
    graph = quantize_all(graph_model(nodes, {"w": conv_weights(), "one": ones}))
    add = graph.of_type("Add")[0]
    assert [graph.is_dequantized(name) for name in add.input] == [False, True]


def test_an_add_without_a_conv_of_its_own_stays_in_float():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["c", "r"], ["s"]),  # c has two readers: no convolution can take the Add in
        helper.make_node("Add", ["s", "k"], ["y"]),  # a constant is no shortcut
    ]
    graph = quantize_all(graph_model(nodes, {"w": conv_weights(), "k": np.ones((1, 4, 1, 1), np.float32)}))
    assert not any(graph.is_dequantized(name) for node in graph.of_type("Add") for name in node.input)


def test_matmul_and_untransposed_gemm_have_their_channels_last():
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["m", "w1"], ["h"]),
        helper.make_node("Gemm", ["h", "w2"], ["g"]),
        helper.make_node("Transpose", ["g"], ["g2"]),
        helper.make_node("MatMul", ["g", "g2"], ["y"]),
    ]
    shapes = {"w1": (4, 6), "w2": (6, 5)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    graph = quantize_all(graph_model(nodes, weights))
    assert graph.is_dequantized(graph.of_type("ReduceMean")[0].input[0])
    for node, channels in ((graph.of_type("MatMul")[0], 6), (graph.of_type("Gemm")[0], 5)):
        dequantize = graph.producer[node.input[1]]
        assert helper.get_attribute_value(dequantize.attribute[0]) == 1
        assert graph.array(dequantize.input[1]).shape == (channels,)
    assert not any(graph.is_dequantized(name) for name in graph.of_type("MatMul")[1].input)  # no weights


@pytest.mark.parametrize("runtime", ["tensorrt", "openvino"])
def test_openvino_averages_in_float_what_float_operators_read(runtime):
    pool = {"kernel_shape": [3, 3], "pads": [1] * 4}
    nodes = [
        helper.make_node("AveragePool", ["x"], ["first"], **pool),
        helper.make_node("Sub", ["first", "x"], ["mixed"]),
        helper.make_node("AveragePool", ["mixed"], ["second"], **pool),
        helper.make_node("Conv", ["second", "w"], ["y"]),
    ]
    model = graph_model(nodes, {"w": np.ones((4, 4, 1, 1), np.float32)})
    graph = quantize_all(model, arithmetic=Arithmetic(runtime=runtime))
    in_int8 = [graph.is_dequantized(node.input[0]) for node in graph.of_type("AveragePool")]
    assert in_int8 == [runtime == "tensorrt", True]


def test_what_a_pool_was_padded_with_has_no_scale():
    nodes = [
        helper.make_node("Pad", ["images", "pads", "least"], ["padded"]),
        helper.make_node("MaxPool", ["padded"], ["pooled"], kernel_shape=[3, 3]),
        helper.make_node("Conv", ["pooled", "w"], ["logits"], "conv"),
    ]
    constants = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "least": np.float32(-np.inf), "w": np.ones((4, 3, 1, 1))}
    constants["w"] = constants["w"].astype(np.float32)
    model = onnx_model(nodes, {"images": ["N", 3, 8, 8]}, {"logits": ["N", 4, 8, 8]}, constants)
    assert activation_tensors(model) == ["pooled"]
    typed = {each.name: numpy_helper.to_array(each) for each in to_fp16(model).graph.initializer}
    assert typed["least"] == -np.inf


def test_shared_and_zero_weights():
    weights = conv_weights()
    weights[2] = 0.0
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Conv", ["a", "w"], ["y"])]
    model = graph_model(nodes, {"w": weights})
    scales = dict.fromkeys(activation_tensors(model), 0.05)
    for storage in ("qdq", "dq"):
        quantized = insert_qdq(model, scales, weights=storage)
        graph = Graph(quantized)
        first, second = graph.of_type("Conv")
        assert first.input[1] == second.input[1]
        assert (graph.array("w_scale") > 0).all()
        assert np.isfinite(run(quantized, np.ones((1, 4, 8, 8), np.float32))).all()


def test_inline_constants_reads_initializers_directly():
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(conv_weights(), "value")),
        helper.make_node("Identity", ["b"], ["b2"]),
        helper.make_node("Conv", ["x", "w", "b2"], ["y"]),
    ]
    model = graph_model(nodes, {"b": np.ones(4, np.float32)})
    inlined = inline_constants(model)
    onnx.checker.check_model(inlined, full_check=True)
    assert [node.op_type for node in inlined.graph.node] == ["Conv"]
    assert list(inlined.graph.node[0].input) == ["x", "w", "b"]
    images = np.ones((2, 4, 8, 8), np.float32)
    np.testing.assert_array_equal(run(inlined, images), run(model, images))


# --- convolutions that share an input, kept apart

SHAPES = ShapeSpec(height=16, width=16, opt_batch=2, max_batch=2)


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Two blocks of GoogLeNet, four branches each, three of which start with a 1x1 convolution."""
    torch.manual_seed(0)
    blocks = [Inception(3, 8, 6, 8, 4, 8, 8), Inception(32, 8, 6, 8, 4, 8, 8)]
    model = torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5))
    file = tmp_path_factory.mktemp("onnx") / "fp32.onnx"
    export_onnx(model.eval(), file, SHAPES)
    fp32 = with_names(onnx.load(file))
    return insert_qdq(fp32, max_scales(file, random_images(SHAPES, 2)))


@pytest.mark.parametrize("left_out", [(), ("kernel_shape",), ("dilations",)])
def test_logits_stay_and_no_convolutions_can_be_merged(inception: onnx.ModelProto, left_out: tuple[str, ...]) -> None:
    model = deepcopy(inception)
    for node in _convolutions(model)[::2]:  # attributes that a node need not have
        kept = [entry for entry in node.attribute if entry.name not in left_out]
        del node.attribute[:]
        node.attribute.extend(kept)
    images = random_images(SHAPES, 2)
    changed = keep_apart(model)
    assert len(changed) == 4  # of the three that share each block's input, the first stays as it is
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(run(model, images), run(inception, images))
    before = model.SerializeToString(deterministic=True)
    assert keep_apart(model) == []
    assert model.SerializeToString(deterministic=True) == before
    names = {node.name for node in _convolutions(model)}
    assert set(changed) < names
    dilations = [(node.input[0], _dilation(node)) for node in _convolutions(model) if "branch" in node.name]
    rows = {tensor: sorted(own for other, own in dilations if other == tensor) for tensor, _ in dilations}
    assert sorted(row for row in rows.values() if len(row) > 1) == [[1, 2, 3]] * 2


def _convolutions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Conv"]


def _dilation(node: onnx.NodeProto) -> int:
    return placement.attribute(node, "dilations", [1])[0]


def test_convolutions_of_other_strides_and_dilations_differ_too() -> None:
    strides, dilations = ([1, 1], [1, 1], [2, 2]), ([1, 1], [2, 2], [1, 1])
    nodes = [
        helper.make_node("Conv", ["x", "w"], [f"y{number}"], strides=own, dilations=dilated)
        for number, (own, dilated) in enumerate(zip(strides, dilations, strict=True))
    ]
    weights = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")  # all three share them
    model = helper.make_model(helper.make_graph(nodes, "shared", [], [], [weights]))
    keep_apart(model)
    assert [_dilation(node) for node in model.graph.node] == [1, 2, 3]


def test_relus_behind_larger_kernels_become_clips_that_change_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleList(torch.nn.Conv2d(3, 4, 3, padding=1) for _ in range(4))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            first, second, third, fourth = (branch(images) for branch in self.branches)
            found = [first.relu(), second.relu(), third.relu(), fourth]
            return torch.cat(found, dim=1).mean(dim=(2, 3))

    export_onnx(Heads().eval(), tmp_path / "fp32.onnx", SHAPES)
    fp32 = with_names(onnx.load(tmp_path / "fp32.onnx"))
    int8 = insert_qdq(fp32, max_scales(tmp_path / "fp32.onnx", random_images(SHAPES, 2)))
    typed = to_fp16(raise_opset(fp32))
    for model in (fp32, int8, typed):
        apart = deepcopy(model)
        assert len(keep_apart(apart)) == 2  # neither the first nor that without a ReLU
        onnx.checker.check_model(apart, full_check=True)
        kinds = [node.op_type for node in apart.graph.node if node.op_type in ("Relu", "Clip")]
        assert kinds == ["Relu", "Clip", "Clip"]
        values = {each.name: numpy_helper.to_array(each) for each in apart.graph.initializer}
        limits = [values[node.input[2]] for node in apart.graph.node if node.op_type == "Clip"]
        assert limits == [np.finfo(limits[0].dtype).max, np.finfo(limits[0].dtype).max / 2]
        images = random_images(SHAPES, 2)
        # ONNX Runtime rounds FP16 where an operator has such a kernel
        rtol = 0 if model is not typed else 1e-3
        np.testing.assert_allclose(run(apart, images), run(model, images), rtol=rtol)
        assert keep_apart(apart) == []
