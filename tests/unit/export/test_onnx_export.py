"""The FP32 file: what torch exports, and what a user brings."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.transforms import ShapeSpec
from components.export.onnx_export import (
    check_against_torch,
    export_onnx,
    normalize_user_onnx,
)

from ..onnx_outputs import run_ort
from .conftest import build, random_images, shapes_of

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


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


class TestExport:
    def test_resnet18(self, resnet18, tmp_path):
        path, model, images, _ = resnet18
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
        assert model.ir_version == 8
        onnx.checker.check_model(model, full_check=True)
        dims = model.graph.input[0].type.tensor_type.shape.dim
        assert [axis.dim_param or axis.dim_value for axis in dims] == ["batch", 3, 64, 64]
        dims = model.graph.output[0].type.tensor_type.shape.dim
        assert [axis.dim_param or axis.dim_value for axis in dims] == ["batch", 10]
        assert "GlobalAveragePool" in {node.op_type for node in model.graph.node}
        assert "Identity" not in {node.op_type for node in model.graph.node}
        assert check_against_torch(build("resnet18"), path, shapes_of("resnet18"), images) < 1e-4
        assert normalize_user_onnx(path, tmp_path / "taken.onnx").num_classes == 10

    def test_names_and_size_come_from_the_shape_spec(self, net, tmp_path):
        shapes = ShapeSpec(input_name="pixels", output_name="scores", height=16, width=24)
        export_onnx(net, tmp_path / "a.onnx", shapes)
        classifier = normalize_user_onnx(tmp_path / "a.onnx", tmp_path / "taken.onnx")
        assert classifier.shapes == shapes
        assert classifier.num_classes == 5
        assert check_against_torch(net, tmp_path / "a.onnx", shapes, random_images(shapes, 3)) < 1e-4
        assert [file.name for file in sorted(tmp_path.iterdir())] == ["a.onnx", "taken.onnx"]

    def test_modules_keep_their_modes(self, net, tmp_path):
        net.train()
        net.norm.eval()  # frozen batch norm
        before = {name: value.clone() for name, value in net.state_dict().items()}
        export_onnx(net, tmp_path / "a.onnx", SHAPES)
        check_against_torch(net, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 2))
        assert [net.training, net.conv.training, net.norm.training] == [True, True, False]
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_only_the_known_warning_is_hidden(self, net, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            export_onnx(net, tmp_path / "a.onnx", SHAPES)

    def test_model_that_torch_cannot_export(self, tmp_path):
        class Inverse(Net):
            def forward(self, images):
                return torch.linalg.inv(images[:, 0, :5, :5])[:, 0]

        with pytest.raises(EngineryError, match="can't write Inverse as ONNX opset 17 at 16 x 24 pixels"):
            export_onnx(Inverse(), tmp_path / "a.onnx", SHAPES)
        assert not (tmp_path / "a.onnx").exists()

    def test_output_that_is_no_classification(self, tmp_path):
        with pytest.raises(EngineryError, match=r"output rank \[4\] \(expected \[2\]\)"):
            export_onnx(torch.nn.Conv2d(3, 8, 3), tmp_path / "a.onnx", SHAPES)


class TestCheckAgainstTorch:
    def test_other_weights(self, net, tmp_path):
        export_onnx(net, tmp_path / "a.onnx", SHAPES)
        torch.nn.init.normal_(net.fc.weight)
        with pytest.raises(EngineryError, match="differ from torch by"):
            check_against_torch(net, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 2))

    def test_python_state_in_forward(self, tmp_path):
        torch.manual_seed(0)
        model = Forgetful()
        export_onnx(model, tmp_path / "a.onnx", SHAPES)
        with pytest.raises(EngineryError, match="Does the forward pass depend on Python values"):
            check_against_torch(model, tmp_path / "a.onnx", SHAPES, random_images(SHAPES, 2))

    def test_nan(self, net, tmp_path):
        export_onnx(net, tmp_path / "a.onnx", SHAPES)
        with pytest.raises(EngineryError, match="differ from torch by inf"):
            check_against_torch(net, tmp_path / "a.onnx", SHAPES, np.full(SHAPES.input_shape(2), np.nan, np.float32))

    def test_images_of_another_size(self, net, tmp_path):
        export_onnx(net, tmp_path / "a.onnx", SHAPES)
        with pytest.raises(EngineryError, match=r"shape \[2, 3, 8, 8\], expected \[B, 3, 16, 24\]"):
            check_against_torch(net, tmp_path / "a.onnx", SHAPES, np.zeros((2, 3, 8, 8), np.float32))


def user_file(path, input_shape=("N", 3, 16, 24), opset=17, ir=8, **changes):
    """Writes the classifier mean(x) @ w: opset 17 style by default, with anything about it changed."""
    weights = numpy_helper.from_array(np.arange(15, dtype=np.float32).reshape(3, 5) / 15, "w")
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["y"]),
    ]
    if "last" in changes:  # an activation, and a reshape behind it
        nodes[-1] = helper.make_node("Gemm", ["flat", "w"], ["scores"])
        nodes += [helper.make_node(changes["last"], ["scores"], ["odds"]), helper.make_node("Flatten", ["odds"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", changes.get("type", TensorProto.FLOAT), input_shape)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, changes.get("output_shape", [input_shape[0], 5]))
    graph = helper.make_graph(
        changes.get("nodes", nodes), "user", inputs + changes.get("more_inputs", []), [output], [weights]
    )
    imports = [helper.make_opsetid("", opset), *changes.get("imports", [])]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=ir), path)
    return path


class TestUserFiles:
    def test_a_fitting_file_is_copied(self, tmp_path):
        source = user_file(tmp_path / "user.onnx")
        classifier = normalize_user_onnx(source, tmp_path / "fp32.onnx")
        assert (tmp_path / "fp32.onnx").read_bytes() == source.read_bytes()
        assert classifier.num_classes == 5
        assert (classifier.shapes.input_name, classifier.shapes.output_name) == ("x", "y")
        assert classifier.shapes.input_shape(4) == (4, 3, 16, 24)

    @pytest.mark.parametrize("opset", [13, 15, 18, 19, 21])
    def test_other_opsets_are_converted(self, tmp_path, opset):
        source = user_file(tmp_path / "user.onnx", opset=opset, ir=8 if opset < 19 else 10)
        normalize_user_onnx(source, tmp_path / "fp32.onnx")
        model = onnx.load(tmp_path / "fp32.onnx")
        assert (model.opset_import[0].version, model.ir_version) == (17, 8)

    @pytest.mark.parametrize("opset", [13, 18])
    def test_torch_exports_of_other_opsets(self, net, tmp_path, opset):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net,
                (torch.zeros(SHAPES.input_shape(2)),),
                tmp_path / "user.onnx",
                dynamo=False,
                opset_version=opset,
                input_names=["images"],
                output_names=["logits"],
                dynamic_axes={"images": {0: "n"}, "logits": {0: "n"}},
            )
        classifier = normalize_user_onnx(tmp_path / "user.onnx", tmp_path / "fp32.onnx")
        assert classifier.shapes == SHAPES
        assert check_against_torch(net, tmp_path / "fp32.onnx", SHAPES, random_images(SHAPES, 2)) < 1e-4

    def test_newer_ir_and_initializers_among_the_inputs(self, tmp_path):
        weights = helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 5])
        source = user_file(tmp_path / "user.onnx", ir=10, more_inputs=[weights])
        normalize_user_onnx(source, tmp_path / "fp32.onnx")
        model = onnx.load(tmp_path / "fp32.onnx")
        assert model.ir_version == 8
        assert [value.name for value in model.graph.input] == ["x"]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"input_shape": (1, 3, 16, 24)}, r"fixed batch 1 \(shape \[1, 3, 16, 24\]\).*dynamic_axes"),
            ({"input_shape": ("N", 3, "H", "W")}, r"shape \['N', 3, 'H', 'W'\], expected a fixed height"),
            ({"input_shape": ("N", 1, 16, 24)}, r"shape \['N', 1, 16, 24\], expected \[N, 3, H, W\]"),
            ({"input_shape": ("N", 3, 16)}, r"expected \[N, 3, H, W\]"),
            (
                {"input_shape": ("N", 16, 24, 3)},
                r"\['N', 16, 24, 3\], channels last, as tf2onnx and Keras .*--inputs-as-nchw INPUT .*x:0",
            ),
            ({"output_shape": ["N", 1]}, r"output 'y' has shape \['N', 1\], one number for each image"),
            ({"last": "Sigmoid"}, r"ends in a sigmoid.*without the sigmoid"),
            (
                {
                    "nodes": [
                        helper.make_node("GlobalAveragePool", ["x"], ["g"]),
                        helper.make_node("Flatten", ["g"], ["m"]),
                        helper.make_node("MatMul", ["m", "w"], ["scores"]),
                        helper.make_node("Neg", ["scores"], ["negative"]),
                        helper.make_node("Exp", ["negative"], ["odds"]),
                        helper.make_node("Softplus", ["odds"], ["more"]),
                        helper.make_node("Div", ["odds", "more"], ["share"]),
                        helper.make_node("Div", ["share", "more"], ["y"]),
                    ]
                },
                r"ends in a sigmoid or the like",
            ),
            ({"last": "HardSigmoid"}, r"ends in a sigmoid"),
            ({"type": TensorProto.FLOAT16}, "type FLOAT16, expected FLOAT"),
            ({"output_shape": ["N", 5, 1, 1]}, r"output 'y' has shape \['N', 5, 1, 1\]"),
            ({"output_shape": [1, 5]}, r"output 'y' has shape \[1, 5\]"),
            ({"opset": 11}, "opset 11, supported are 13 to 21"),
            ({"opset": 22, "ir": 10}, "opset 22, supported are 13 to 21"),
            (
                {"more_inputs": [helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N"])]},
                r"inputs \['x', 'mask'\].*expected one image input",
            ),
            (
                {
                    "nodes": [helper.make_node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft")],
                    "imports": [helper.make_opsetid("com.microsoft", 1)],
                },
                "uses the operators com.microsoft.FusedConv, which are not ONNX's own",
            ),
            (
                {"nodes": [helper.make_node("QuantizeLinear", ["x", "w"], ["y"])]},
                "already quantized",
            ),
            (
                {
                    "nodes": [
                        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0, 2, 3], keepdims=0),
                        helper.make_node("Unsqueeze", ["m", "axis"], ["u"]),
                        helper.make_node("Gemm", ["u", "w"], ["y"]),
                    ]
                },
                "can't run it on two images",
            ),
            (
                {
                    "nodes": [
                        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
                        helper.make_node("Flatten", ["pooled"], ["flat"]),
                        helper.make_node("Gemm", ["flat", "w"], ["scores"]),
                        helper.make_node(
                            "Constant", [], ["bias"], value=numpy_helper.from_array(np.full(5, np.nan, np.float32))
                        ),
                        helper.make_node("Add", ["scores", "bias"], ["y"]),
                    ]
                },
                "the weights 'bias' hold NaN or infinity",
            ),
        ],
    )
    def test_what_does_not_fit_is_named(self, tmp_path, changes, message):
        source = user_file(tmp_path / "user.onnx", **changes)
        with pytest.raises(UserError, match=message):
            normalize_user_onnx(source, tmp_path / "fp32.onnx")
        assert not (tmp_path / "fp32.onnx").exists()

    @pytest.mark.parametrize("opset", [13, 17])
    def test_a_softmax_at_the_end_is_left_out(self, tmp_path, opset):
        classifier = normalize_user_onnx(
            user_file(tmp_path / "odds.onnx", opset=opset, last="Softmax"), tmp_path / "a.onnx"
        )
        assert classifier.had_softmax
        plain = normalize_user_onnx(user_file(tmp_path / "logits.onnx"), tmp_path / "b.onnx")
        assert not plain.had_softmax
        images = random_images(SHAPES, 3)
        first, second = (run_ort(onnx.load(tmp_path / name), images)["y"] for name in ("a.onnx", "b.onnx"))
        np.testing.assert_allclose(first, second, atol=1e-6)

    def test_a_log_softmax_gives_logits_as_it_is(self, tmp_path):
        source = user_file(tmp_path / "user.onnx", last="LogSoftmax")
        assert not normalize_user_onnx(source, tmp_path / "fp32.onnx").had_softmax
        assert (tmp_path / "fp32.onnx").read_bytes() == source.read_bytes()

    def test_probabilities_of_other_operators_are_refused(self, tmp_path):
        nodes = [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w"], ["scores"]),
            helper.make_node("Exp", ["scores"], ["odds"]),
            helper.make_node("ReduceSum", ["odds", "axes"], ["sum"]),
            helper.make_node("Div", ["odds", "sum"], ["y"]),
        ]
        axes = helper.make_node("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([1]), "axes"))
        source = user_file(tmp_path / "user.onnx", nodes=[axes, *nodes])
        with pytest.raises(UserError, match="its outputs are probabilities, and not of one softmax at its end"):
            normalize_user_onnx(source, tmp_path / "fp32.onnx")

    def test_batch_that_is_dynamic_in_name_only(self, tmp_path):
        constant = numpy_helper.from_array(np.array([1, -1]), "shape")
        nodes = [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Constant", [], ["shape"], value=constant),
            helper.make_node("Reshape", ["pooled", "shape"], ["flat"]),
            helper.make_node("Slice", ["flat", "zero", "three", "one"], ["three_values"]),
            helper.make_node("Gemm", ["three_values", "w"], ["y"]),
        ]
        nodes[3:3] = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array([value]), name))
            for name, value in (("zero", 0), ("three", 3), ("one", 1))
        ]
        source = user_file(tmp_path / "user.onnx", nodes=nodes)
        with pytest.raises(UserError, match="two images"):
            normalize_user_onnx(source, tmp_path / "fp32.onnx")

    def test_external_data(self, tmp_path):
        user_file(tmp_path / "single.onnx")
        model = onnx.load(tmp_path / "single.onnx")
        onnx.save(model, tmp_path / "user.onnx", save_as_external_data=True, size_threshold=0)
        with pytest.raises(UserError, match="external data files"):
            normalize_user_onnx(tmp_path / "user.onnx", tmp_path / "fp32.onnx")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda graph: graph.initializer[0].dims.append(7), "the weights '.*' are damaged"),
            (lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 103), "has type 103, expected FLOAT"),
            (
                lambda graph: setattr(graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 10**6),
                "supported are sides of at most 8,192",
            ),
        ],
    )
    def test_what_fuzzing_found(self, tmp_path, damage, message):
        model = onnx.load(user_file(tmp_path / "user.onnx"))
        damage(model.graph)
        onnx.save(model, tmp_path / "user.onnx")
        with pytest.raises(UserError, match=message):
            normalize_user_onnx(tmp_path / "user.onnx", tmp_path / "fp32.onnx")

    def test_no_file_and_no_onnx(self, tmp_path):
        with pytest.raises(UserError, match="no such file"):
            normalize_user_onnx(tmp_path / "none.onnx", tmp_path / "taken.onnx")
        (tmp_path / "text.onnx").write_text("not a model")
        with pytest.raises(UserError, match="not an ONNX file"):
            normalize_user_onnx(tmp_path / "text.onnx", tmp_path / "taken.onnx")
