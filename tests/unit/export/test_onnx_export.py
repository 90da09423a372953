"""The FP32 file: what torch exports, and what a user brings."""

import warnings

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper

from components.common.contracts.transforms import ShapeSpec
from components.export.onnx_export import check_against_torch, export_onnx, read_user_onnx
from components.export.placement import attribute
from tests.unit.refusals import refuses

from ..networks import build, random_images, shapes_of, written_by_torch
from ..onnx_outputs import run_ort

SHAPES = ShapeSpec(height=16, width=24)


class Net(torch.nn.Module):
    """A tiny classifier, [B, 3, 16, 24] to [B, 5]."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2)
        self.norm = torch.nn.BatchNorm2d(8)
        self.fc = torch.nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(torch.relu(self.norm(self.conv(images))).mean((2, 3)))


class Forgetful(Net):
    """Depends on a Python value that the export freezes."""

    calls = 0

    def forward(self, images):
        self.calls += 1
        return super().forward(images) * self.calls


class Inverse(Net):
    """Has an operator that the exporter lacks."""

    def forward(self, images):
        return torch.linalg.inv(images[:, 0, :5, :5] + torch.eye(5))[:, 0]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def taken_over(source, destination):
    """What a user's file is; the model goes to a file of its own."""
    classifier, content = read_user_onnx(source)
    destination.write_bytes(content)
    return classifier


# --- what torch exports


def dims(value):
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_resnet18(resnet18, tmp_path):
    path, model, images, _ = resnet18
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    assert model.ir_version == 8
    onnx.checker.check_model(model, full_check=True)
    assert (dims(model.graph.input[0]), dims(model.graph.output[0])) == (["batch", 3, 64, 64], ["batch", 10])
    operators = {node.op_type for node in model.graph.node}
    assert ("GlobalAveragePool" in operators, "Identity" in operators) == (True, False)
    assert check_against_torch(build("resnet18"), path, shapes_of("resnet18"), images) < 1e-4
    assert taken_over(path, tmp_path / "taken.onnx").num_classes == 10


def test_names_and_size_come_from_the_shape_spec(net, tmp_path):
    shapes = ShapeSpec(input_name="pixels", output_name="scores", height=16, width=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only the known ones are hidden
        export_onnx(net, tmp_path / "a.onnx", shapes)
    classifier = taken_over(tmp_path / "a.onnx", tmp_path / "taken.onnx")
    assert (classifier.shapes, classifier.num_classes) == (shapes, 5)
    assert check_against_torch(net, tmp_path / "a.onnx", shapes, random_images(shapes, 3)) < 1e-4
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["a.onnx", "taken.onnx"]


def test_modules_keep_their_modes(net, tmp_path):
    net.train()
    net.norm.eval()  # frozen batch norm
    before = {name: value.clone() for name, value in net.state_dict().items()}
    export_onnx(net, tmp_path / "a.onnx", SHAPES)
    check_against_torch(net, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 2))
    assert [net.training, net.conv.training, net.norm.training] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_flags_of_a_network_are_no_tensors(tmp_path):
    class Attending(torch.nn.Module):
        def forward(self, images: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
            rows = images.flatten(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=is_causal).mean(1)

    model = Attending()
    export_onnx(model, tmp_path / "fp32.onnx", ShapeSpec(height=8, width=8))
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("epsilon", "has_weight"), [(None, True), (0.5, False)])
def test_a_normalization_that_the_exporter_lacks(epsilon, has_weight, tmp_path):
    norm = torch.nn.RMSNorm([2, 24], eps=epsilon, elementwise_affine=has_weight)
    for weight in norm.parameters():
        torch.nn.init.normal_(weight)
    model = torch.nn.Sequential(torch.nn.Unflatten(2, (8, 2)), norm, torch.nn.Flatten(), torch.nn.Linear(1152, 5))
    export_onnx(model, tmp_path / "a.onnx", SHAPES)
    assert check_against_torch(model, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 3)) < 1e-5


def test_pooling_of_maps_whose_sizes_the_exporter_lost(tmp_path):
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool = torch.nn.Conv2d(3, 3, 1), torch.nn.AdaptiveAvgPool2d((4, 6))
            self.fc = torch.nn.Linear(72, 5)

        def forward(self, images):
            maps = images
            for _ in range(2):
                batch, channels, height, width = maps.shape
                tokens = maps.flatten(2).transpose(1, 2).reshape(batch, -1, channels)
                maps = self.conv(tokens.reshape(batch, height, width, -1).permute(0, 3, 1, 2))
            return self.fc(self.pool(maps).flatten(1))

    model = Tokens()
    export_onnx(model, tmp_path / "a.onnx", SHAPES)
    assert check_against_torch(model, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 3)) < 1e-5


def test_what_torch_can_not_export(tmp_path):
    with refuses("exporter-failed") as caught:
        export_onnx(Inverse(), tmp_path / "a.onnx", SHAPES)
    assert "linalg_inv" in str(caught.value)
    assert "Choose another architecture" in str(caught.value)
    rotary = timm.create_model(
        "vit_small_patch16_rope_mixed_224", embed_dim=32, depth=1, num_heads=2, img_size=(32, 32), num_classes=3
    )
    with refuses("exporter-failed", says="Expand"):  # its graph does not run
        export_onnx(rotary, tmp_path / "b.onnx", ShapeSpec(height=32, width=32))
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize(
    ("model", "images"),
    [
        (Net, random_images(SHAPES, 2)),  # its weights change below
        (Forgetful, random_images(SHAPES, 2)),
        (Net, np.full(SHAPES.input_shape(2), np.nan, np.float32)),
    ],
)
def test_a_file_that_answers_otherwise_than_torch(model, images, tmp_path):
    torch.manual_seed(0)
    net = model().eval()
    export_onnx(net, tmp_path / "a.onnx", SHAPES)
    if model is Net:
        torch.nn.init.normal_(net.fc.weight)
    with refuses("export-differs"):
        check_against_torch(net, tmp_path / "a.onnx", SHAPES, images)


# --- what a user brings


def user_file(path, input_shape=("N", 3, 16, 24), opset=17, ir=8, **changes):
    """Writes the classifier mean(x) @ w: opset 17 style by default, with anything about it changed."""
    weights = numpy_helper.from_array(np.arange(15, dtype=np.float32).reshape(3, 5) / 15, "w")
    nodes = [*POOLED[:2], helper.make_node("Gemm", ["flat", "w"], ["y"])]
    if "last" in changes:  # an activation, and a reshape behind it
        scores, last = POOLED[2], helper.make_node(changes["last"], ["scores"], ["odds"])
        nodes[2:] = [scores, last, helper.make_node("Flatten", ["odds"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", changes.get("type", TensorProto.FLOAT), input_shape)]
    shape, kind = changes.get("output_shape", [input_shape[0], 5]), changes.get("output_type", TensorProto.FLOAT)
    output = helper.make_tensor_value_info("y", kind, shape)
    inputs += changes.get("more_inputs", [])
    graph = helper.make_graph(changes.get("nodes", nodes), "user", inputs, [output], [weights])
    imports = [helper.make_opsetid("", opset), *changes.get("imports", [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir)
    changes.get("damage", lambda graph: None)(model.graph)
    onnx.save(model, path)
    return path


def constant(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))


POOLED = [
    helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
    helper.make_node("Flatten", ["pooled"], ["flat"]),
    helper.make_node("Gemm", ["flat", "w"], ["scores"]),
]


def tail(*steps, first="scores"):
    """Nodes after `first`, each an operator and its constants; a None among these is the tensor before."""
    nodes, tensor = [], first
    for index, (operator, *constants) in enumerate(steps):
        names = [tensor]
        if constants:
            names = [tensor if value is None else f"constant{index}-{i}" for i, value in enumerate(constants)]
            values = dict(zip(names, constants, strict=True)).items()
            nodes += [constant(name, np.float32(value)) for name, value in values if value is not None]
        tensor = "y" if index == len(steps) - 1 else f"tail{index}"
        nodes.append(helper.make_node(operator, names, [tensor]))
    return nodes


TIMES, PLUS = (lambda value: ("Mul", None, value)), (lambda value: ("Add", None, value))
LOGISTIC = [("Neg",), ("Exp",), PLUS(1), ("Reciprocal",)]  # a sigmoid of other operators
SOFTMAX = [  # of other operators
    helper.make_node("Exp", ["scores"], ["odds"]),
    helper.make_node("ReduceSum", ["odds", "axes"], ["sum"]),
    helper.make_node("Div", ["odds", "sum"], ["y"]),
]
MEAN_OF_SOFTMAXES = [
    helper.make_node("Softmax", ["scores"], ["first"]),
    helper.make_node("Softmax", ["first"], ["second"]),
    helper.make_node("Add", ["first", "second"], ["sum"]),
    constant("half", np.float32(0.5)),
    helper.make_node("Mul", ["sum", "half"], ["y"]),
]
CHOICE = [helper.make_node("ArgMax", ["scores"], ["class"], axis=1, keepdims=0)]
ONE_HOT = [
    constant("depth", 5),
    constant("values", np.float32([0, 1])),
    helper.make_node("OneHot", ["class", "depth", "values"], ["choice"]),
    helper.make_node("Cast", ["choice"], ["y"], to=TensorProto.FLOAT),
]
FROM_TABLE = [constant("table", np.eye(5, dtype=np.float32)), helper.make_node("Gather", ["table", "class"], ["y"])]
DROPOUT = [
    constant("share", np.float32(0.5)),
    constant("trains", True),
    helper.make_node("Dropout", ["scores", "share", "trains"], ["y"]),
]
LAST = helper.make_node("Identity", ["scores"], ["y"])
DROPOUT_FIRST = [  # which ONNX Runtime leaves out, and OpenVINO can't read
    *DROPOUT[:2],
    helper.make_node("Relu", ["x"], ["positive"]),
    helper.make_node("Dropout", ["positive", "share", "trains"], ["less"]),
    helper.make_node("GlobalAveragePool", ["less"], ["pooled"]),
]
BATCH_NORM = [
    *POOLED[:2],
    *(constant(name, np.ones(3, np.float32)) for name in ("gamma", "beta", "mean", "variance")),
    helper.make_node(
        "BatchNormalization",
        ["flat", "gamma", "beta", "mean", "variance"],
        ["normed", "new_mean", "new_variance"],
        training_mode=1,
    ),
    helper.make_node("Gemm", ["normed", "w"], ["scores"]),
]
PAIRS = [  # its batch is that of the export
    POOLED[0],
    constant("pairs", [2, 3]),
    helper.make_node("Reshape", ["pooled", "pairs"], ["flat"]),
    helper.make_node("Gemm", ["flat", "w"], ["y"]),
]
IN_HALF = [
    helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
    helper.make_node("GlobalAveragePool", ["half"], ["pooled_half"]),
    helper.make_node("Cast", ["pooled_half"], ["pooled"], to=TensorProto.FLOAT),
    *POOLED[1:],
    LAST,
]
OVER_HALF = [
    helper.make_node("Sigmoid", ["scores"], ["odds"]),
    constant("half", np.float32(0.5)),
    helper.make_node("Greater", ["odds", "half"], ["choice"]),
    helper.make_node("Cast", ["choice"], ["y"], to=TensorProto.FLOAT),
]
RING = ("onnx-does-not-run", "")
MASK = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N"])
FUSED = helper.make_node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft")
NUMBERS = [*POOLED, helper.make_node("ArgMax", ["scores"], ["y"])]
SORTED = [*POOLED, constant("k", [5]), helper.make_node("TopK", ["scores", "k"], ["y", "class"])]
NAN_BIAS = [constant("bias", np.full(5, np.nan, np.float32)), helper.make_node("Add", ["scores", "bias"], ["y"])]
ZERO = [constant("none", np.float32(0)), helper.make_node("Mul", ["scores", "none"], ["zeros"])]
IDENTITY, SHARES, ODDS = (helper.make_node(name, ["zeros"], ["y"]) for name in ("Identity", "Softmax", "Sigmoid"))
ONE_IMAGE = [  # its batch is dynamic in name only
    helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
    constant("shape", [1, -1]),
    helper.make_node("Reshape", ["pooled", "shape"], ["flat"]),
    constant("zero", [0]),
    constant("three", [3]),
    constant("one", [1]),
    helper.make_node("Slice", ["flat", "zero", "three", "one"], ["three_values"]),
    helper.make_node("Gemm", ["three_values", "w"], ["y"]),
]
MEAN_OF_ALL = [
    helper.make_node("ReduceMean", ["x"], ["m"], axes=[0, 2, 3], keepdims=0),
    helper.make_node("Unsqueeze", ["m", "axis"], ["u"]),
    helper.make_node("Gemm", ["u", "w"], ["y"]),
]


def test_a_fitting_file_is_copied(tmp_path):
    source = user_file(tmp_path / "user.onnx")
    classifier = taken_over(source, tmp_path / "fp32.onnx")
    assert (tmp_path / "fp32.onnx").read_bytes() == source.read_bytes()
    assert classifier.num_classes == 5
    assert (classifier.shapes.input_name, classifier.shapes.output_name) == ("x", "y")
    assert classifier.shapes.input_shape(4) == (4, 3, 16, 24)


@pytest.mark.parametrize(
    ("opset", "ir", "more"),
    [
        (13, 8, []),
        (15, 8, []),
        (18, 8, []),
        (19, 10, []),
        (21, 10, []),
        (17, 10, [helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 5])]),  # an initializer among the inputs
    ],
)
def test_other_opsets_are_converted(tmp_path, opset, ir, more):
    taken_over(user_file(tmp_path / "user.onnx", opset=opset, ir=ir, more_inputs=more), tmp_path / "fp32.onnx")
    model = onnx.load(tmp_path / "fp32.onnx")
    assert (model.opset_import[0].version, model.ir_version) == (17, 8)
    assert [value.name for value in model.graph.input] == ["x"]


def test_imports_of_operators_that_are_not_used_are_left_out(tmp_path):
    """As ONNX Runtime writes them at its basic level; onnx knows no IR version for them."""
    imports = [helper.make_opsetid("ai.onnx.ml", 5), helper.make_opsetid("com.microsoft.nchwc", 1)]
    taken_over(user_file(tmp_path / "user.onnx", imports=imports), tmp_path / "fp32.onnx")
    assert [(entry.domain, entry.version) for entry in onnx.load(tmp_path / "fp32.onnx").opset_import] == [("", 17)]


@pytest.mark.parametrize("opset", [7, 9, 12])
def test_older_operators_inputs_and_attributes_are_converted(tmp_path, opset):
    """As in the ONNX model zoo: initializers are inputs too, and Softmax is over all axes that follow."""
    norm = [numpy_helper.from_array(np.float32([1, 2, 3]), name) for name in ("gamma", "beta", "mean", "variance")]
    bias = numpy_helper.from_array(np.zeros(5, np.float32), "bias")
    older = {"ratio": 0.5} if opset < 12 else {}
    nodes = [
        helper.make_node("BatchNormalization", ["x", *(tensor.name for tensor in norm)], ["normed"], epsilon=1e-3),
        helper.make_node("Dropout", ["normed"], ["kept", "mask"], **older),
        helper.make_node("ReduceSum", ["kept"], ["sums"], axes=[2, 3]),
        helper.make_node("Squeeze", ["sums"], ["flat"], axes=[2, 3]),
        helper.make_node("Gemm", ["flat", "w", "bias"], ["scores"], alpha=1e-3),
        helper.make_node("Unsqueeze", ["scores"], ["maps"], axes=[2, 3]),
        helper.make_node("Softmax", ["maps"], ["odds"]),
        helper.make_node("Flatten", ["odds"], ["y"]),
    ]
    more = [*norm, bias]
    inputs = [helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims) for tensor in more]
    inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 5]))
    source = user_file(
        tmp_path / "user.onnx",
        opset=opset,
        ir=3,
        nodes=nodes,
        more_inputs=inputs,
        damage=lambda graph: graph.initializer.extend(more),
    )
    assert taken_over(source, tmp_path / "fp32.onnx").had_softmax
    images = random_images(SHAPES, 3)
    logits, odds = (run_ort(onnx.load(path), images)["y"] for path in (tmp_path / "fp32.onnx", source))
    np.testing.assert_allclose(torch.from_numpy(logits).softmax(1).numpy(), odds, atol=1e-6)
    model = onnx.load(tmp_path / "fp32.onnx")
    assert (model.opset_import[0].version, model.ir_version) == (17, 8)


@pytest.mark.parametrize("opset", [20, 21])
def test_newer_operators_inputs_and_attributes_are_lowered(tmp_path, opset):
    """As torch.onnx.export writes them by default; onnx itself does not convert them back."""
    nodes = [
        helper.make_node("Gelu", ["x"], ["exact"], approximate="none"),
        helper.make_node("Gelu", ["exact"], ["gelu"], approximate="tanh"),
        helper.make_node("Mish", ["gelu"], ["mish"]),
        helper.make_node("Split", ["mish"], ["red", "green", "blue"], axis=1, num_outputs=3),
        helper.make_node("Concat", ["blue", "green", "red"], ["swapped"], axis=1),
        helper.make_node("Cast", ["swapped"], ["cast"], to=TensorProto.FLOAT, saturate=1),
        constant("axes", np.int64([2, 3])),
        helper.make_node("ReduceMean", ["cast", "axes"], ["flat"], keepdims=0, noop_with_empty_axes=0),
        helper.make_node("Gemm", ["flat", "w"], ["y"]),
    ]
    source = user_file(tmp_path / "user.onnx", opset=opset, ir=10, nodes=nodes)
    taken_over(source, tmp_path / "fp32.onnx")  # which compares the answers
    model = onnx.load(tmp_path / "fp32.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 17
    (mean,) = (node for node in model.graph.node if node.op_type == "ReduceMean")
    assert attribute(mean, "axes", None) == [2, 3]


@pytest.mark.parametrize("opset", [13, 18])
def test_torch_exports_of_other_opsets(net, tmp_path, opset):
    written_by_torch(net, tmp_path / "user.onnx", SHAPES, opset=opset)
    assert taken_over(tmp_path / "user.onnx", tmp_path / "fp32.onnx").shapes == SHAPES
    assert check_against_torch(net, tmp_path / "fp32.onnx", SHAPES, random_images(SHAPES, 2)) < 1e-4


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"input_shape": (1, 3, 16, 24)}, "fixed-batch", "dynamic_axes"),
        ({"input_shape": ("N", 3, "H", "W")}, "dynamic-size", "--dim_param H --dim_value"),
        ({"input_shape": ("N", "C", "H", "W")}, "dynamic-size", "Fix each of C, H, W "),
        ({"input_shape": ("N", 3, None, None)}, "dynamic-size", "dynamic_axes"),
        ({"input_shape": ("N", 1, 16, 24)}, "wrong-input-shape", "images.mean(1, keepdim=True)"),
        ({"input_shape": ("N", 3, 16)}, "wrong-input-shape", ""),
        ({"input_shape": ("N", 16, 24, 3)}, "channels-last", "model.export(DIR)"),
        ({"input_shape": ("N", 16, 24, 3)}, "channels-last", "x:0"),
        ({"output_shape": ["N", 1]}, "one-output", ""),
        ({"output_shape": ["N", 5, 1, 1]}, "wrong-output-shape", "torch.nn.Flatten()"),
        ({"output_shape": [1, 5]}, "wrong-output-shape", ""),
        ({"output_shape": ["N", 5, 16, 24]}, "other-task", ""),
        ({"output_shape": ["N", 100, 12]}, "other-task", ""),
        ({"last": "Sigmoid"}, "multi-label", ""),
        ({"last": "HardSigmoid"}, "multi-label", ""),
        *(
            ({"nodes": [*POOLED, *tail(*steps)]}, "multi-label", "")
            for steps in (
                LOGISTIC,
                [("Neg",), ("Exp",), PLUS(1), ("Div", 1, None)],
                [("Sigmoid",), TIMES(100)],
                [("Sigmoid",), ("Identity",), TIMES(0.999), PLUS(0.0005)],
                [("Sigmoid",), ("Sub", 1, None)],
                [("Tanh",), TIMES(0.5), PLUS(0.5)],
                [PLUS(3), ("Clip", None, 0, 6), ("Div", None, 6)],
                [("Clip", None, 0, 1)],
            )
        ),
        ({"nodes": [*POOLED, *tail(("Softmax",), TIMES(100))]}, "probabilities", "scaled"),
        ({"nodes": [*POOLED, *tail(("Softmax",), ("Clip", None, 1e-7, 1))]}, "probabilities", "scaled"),
        ({"nodes": [*POOLED, helper.make_node("Softmax", ["scores"], ["y"], axis=0)]}, "softmax-axis", "axis 0"),
        ({"nodes": [*POOLED, *DROPOUT]}, "random-answers", "model.eval()"),
        ({"nodes": [*DROPOUT_FIRST, *POOLED[1:], LAST]}, "random-answers", "model.eval()"),
        ({"nodes": [*BATCH_NORM, LAST]}, "random-answers", "model.eval()"),
        ({"nodes": PAIRS}, "onnx-does-not-run", "on one of them"),
        ({"nodes": IN_HALF}, "wrong-type", "FLOAT16"),
        ({"nodes": [*POOLED, *CHOICE, *ONE_HOT]}, "classes-not-logits", "OneHot"),
        ({"nodes": [*POOLED, *OVER_HALF]}, "classes-not-logits", "Greater"),
        ({"nodes": [*POOLED, *CHOICE, *FROM_TABLE]}, "classes-not-logits", "ArgMax"),
        ({"nodes": NUMBERS, "output_type": TensorProto.INT64}, "classes-not-logits", "ArgMax"),
        ({"nodes": [constant("axes", [1]), *POOLED, *SOFTMAX]}, "probabilities", ""),
        ({"nodes": [*POOLED, *MEAN_OF_SOFTMAXES]}, "probabilities", "not of one softmax"),
        *(({"nodes": [*POOLED, *ZERO, *last]}, "constant-answers", "") for last in ([IDENTITY], [SHARES], [ODDS])),
        ({"nodes": [*POOLED, *ZERO, helper.make_node("Log", ["zeros"], ["y"])]}, "answers-not-finite", ""),
        ({"nodes": SORTED}, "classes-not-logits", "TopK"),
        ({"type": TensorProto.FLOAT16}, "wrong-type", "Export the FP32 model"),
        ({"type": TensorProto.UINT8}, "wrong-type", "export.mean"),
        ({"opset": 6}, "unsupported-opset", "opset 6, supported are 7 to 21"),
        ({"opset": 22, "ir": 10}, "unsupported-opset", ""),
        ({"more_inputs": [MASK]}, "not-a-classifier", "extract_model('user.onnx'"),
        ({"nodes": [FUSED], "imports": [helper.make_opsetid(FUSED.domain, 1)]}, "unsupported-operators", "t.FusedConv"),
        *(
            ({"nodes": [helper.make_node(name, ["x", "w"], ["y"], domain=domain)]}, "already-quantized", name)
            for name, domain in (
                ("QuantizeLinear", ""),
                ("MatMulInteger", ""),
                ("QLinearGlobalAveragePool", "com.microsoft"),
                ("MatMulNBits", "com.microsoft"),
            )
        ),
        ({"nodes": MEAN_OF_ALL}, "onnx-does-not-run", "two images"),
        ({"nodes": ONE_IMAGE}, "wrong-output-shape", "a batch of 2"),
        ({"nodes": [*POOLED, *NAN_BIAS]}, "weights-not-finite", "'bias'"),
        ({"nodes": [helper.make_node("Loop", ["x"], ["y"])]}, "unsupported-graph", "control flow (['Loop'])"),
        ({"nodes": [helper.make_node("Identity", names, names[::-1]) for names in (["y", "z"], ["z", "y"])]}, *RING),
        # What fuzzing found.
        ({"damage": lambda graph: graph.node[0].ClearField("output")}, "not-onnx", "without an output"),
        ({"damage": lambda graph: graph.initializer[0].dims.append(7)}, "weights-damaged", ""),
        ({"damage": lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 103)}, "wrong-type", "103"),
        (
            {"damage": lambda graph: setattr(graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 10**6)},
            "image-too-large",
            "",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, code, said):
    source = user_file(tmp_path / "user.onnx", **changes)
    with refuses(code, says=said):
        taken_over(source, tmp_path / "fp32.onnx")
    assert not (tmp_path / "fp32.onnx").exists()


@pytest.mark.parametrize("opset", [13, 17])
def test_a_softmax_at_the_end_is_left_out(tmp_path, opset):
    source = user_file(tmp_path / "odds.onnx", opset=opset, last="Softmax")
    assert taken_over(source, tmp_path / "a.onnx").had_softmax
    assert not taken_over(user_file(tmp_path / "logits.onnx"), tmp_path / "b.onnx").had_softmax
    images = random_images(SHAPES, 3)
    first, second = (run_ort(onnx.load(tmp_path / name), images)["y"] for name in ("a.onnx", "b.onnx"))
    np.testing.assert_allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    "steps",
    [
        [PLUS(0.4), ("Div", None, 1.5)],  # of a temperature
        [("Sub", None, 0.1), TIMES([1.0, 1.1, 0.9, 1.0, 1.2])],
        [("Relu",)],
        [("Clip", None, 0, 50)],
        [("Div", None, 30), ("Tanh",), TIMES(30)],  # a soft limit
        [PLUS(0.5), ("Reciprocal",)],
        [("LogSoftmax",), ("Flatten",)],  # as they are
    ],
)
def test_logits_of_any_values_are_taken(tmp_path, steps):
    source = user_file(tmp_path / "user.onnx", nodes=[*POOLED, *tail(*steps)])
    classifier = taken_over(source, tmp_path / "fp32.onnx")
    assert not classifier.had_softmax
    assert (tmp_path / "fp32.onnx").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(("content", "code"), [(None, "onnx-missing"), (b"", "not-onnx"), (b"no model", "not-onnx")])
def test_no_file_and_no_onnx(tmp_path, content, code):
    if content is not None:
        (tmp_path / "text.onnx").write_bytes(content)
    with refuses(code):
        taken_over(tmp_path / "text.onnx", tmp_path / "taken.onnx")
