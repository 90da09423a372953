"""An ONNX file that has the weights read from another file, wherever in it that is said."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes import onnx_files
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.torch import TorchRunner
from components.export.engines import _content, _Order
from components.export.onnx_export import read_user_onnx
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses
from tests.unit.registered import SIDE, constant_model

SECRET = "secret.bin"  # in the working directory


def foreign(dims: tuple[int, ...] = (2,), location: str = SECRET, *, hidden: bool = False) -> TensorProto:
    """A tensor in another file. `hidden`: it does not say so, and has a location all the same."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    tensor.external_data.add(key="location", value=location)
    if not hidden:
        tensor.data_location = TensorProto.EXTERNAL
    return tensor


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=tensor)


def sparse(model: onnx.ModelProto) -> None:
    indices = numpy_helper.from_array(np.array([0, 1]), "at")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(foreign(), indices, [2]))


def in_subgraph(model: onnx.ModelProto) -> None:
    inner = helper.make_graph([constant(foreign())], "inner", [], [])
    model.graph.node.insert(0, helper.make_node("If", ["c"], ["w"], then_branch=inner, else_branch=inner))


def in_function(model: onnx.ModelProto) -> None:
    opset = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "F", [], ["w"], [constant(foreign())], opset))


def in_list(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.append(AttributeProto(name="value", type=AttributeProto.TENSORS, tensors=[foreign()]))
    model.graph.node.insert(0, node)


WAYS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "initializer": lambda model: model.graph.initializer.append(foreign()),
    "without a word": lambda model: model.graph.initializer.append(foreign(hidden=True)),
    "Constant": lambda model: model.graph.node.insert(0, constant(foreign())),
    "Constant, absolute": lambda model: model.graph.node.insert(0, constant(foreign(location="/etc/hostname"))),
    "Constant, above": lambda model: model.graph.node.insert(0, constant(foreign(location=f"../{SECRET}"))),
    "sparse initializer": sparse,
    "subgraph": in_subgraph,
    "function": in_function,
    "list of tensors": in_list,
}


@pytest.fixture(params=WAYS)
def attack(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A classifier whose bias is in the working directory, which is another one than the file's."""
    (tmp_path / "work").mkdir()
    (tmp_path / "model").mkdir()
    for folder in ("work", "model", "."):
        (tmp_path / folder / SECRET).write_bytes(np.array([41, 42], np.float32).tobytes())
    monkeypatch.chdir(tmp_path / "work")
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["a"]),
        helper.make_node("Flatten", ["a"], ["b"]),
        helper.make_node("Slice", ["b", "zero", "two", "one"], ["c2"]),
        helper.make_node("Add", ["c2", "w"], ["y"]),
    ]
    numbers = {name: np.array([value]) for value, name in enumerate(("zero", "one", "two"))}
    model = onnx_model(nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 2]}, numbers)
    WAYS[request.param](model)
    file = tmp_path / "model" / "fp32.onnx"
    file.write_bytes(model.SerializeToString())
    return file


@pytest.mark.parametrize(
    "read",
    [
        read_onnx,
        read_user_onnx,
        lambda file: OnnxRuntimeRunner(file, SHAPES),
        lambda file: OpenVINORunner(file, SHAPES),
        lambda file: TorchRunner(file, SHAPES),
        lambda file: _content(_Order(file, "fp32", SHAPES, None, 3, 1 << 20, frozenset(), 10)),
    ],
    ids=["onnx", "export", "onnxruntime", "openvino", "torch", "tensorrt"],
)
def test_weights_in_other_files_are_refused(attack: Path, read: Callable[[Path], object]) -> None:
    with refuses("external-data"):
        read(attack)


SHAPES = ShapeSpec(height=8, width=8, input_name="x", output_name="y")


@pytest.mark.parametrize("name", [b"logits", b"images", b"last", b"test"])
def test_names_that_are_no_text(tmp_path: Path, name: bytes) -> None:
    content = constant_model(0, 2)
    assert name in content
    (tmp_path / "model.onnx").write_bytes(content.replace(name, b"\xd7" * len(name)))
    for read in (read_onnx, read_user_onnx):
        with refuses("not-onnx"):
            read(tmp_path / "model.onnx")


@pytest.mark.parametrize("node", [("Constant", [], []), ("Identity", [], ["x"]), ("Relu", ["images"], [])])
def test_nodes_that_are_not_whole(tmp_path: Path, node: tuple[str, list[str], list[str]]) -> None:
    model = onnx.load_from_string(constant_model(0, 2))
    model.graph.node.append(helper.make_node(*node, value=numpy_helper.from_array(np.zeros(1))))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with refuses("not-onnx"):
        read_user_onnx(tmp_path / "model.onnx")


def test_a_file_swapped_between_check_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, parse = tmp_path / "int8.onnx", onnx_files.parse_onnx
    file.write_bytes(constant_model(1, 2))

    def late(content: bytes, path: Path) -> onnx.ModelProto:
        file.write_bytes(constant_model(0, 2))
        return parse(content, path)

    monkeypatch.setattr(onnx_files, "parse_onnx", late)
    runner = OpenVINORunner(file, ShapeSpec(height=SIDE, width=SIDE))
    assert runner.infer(np.zeros((1, 3, SIDE, SIDE), np.float32)).tolist() == [[0.0, 1.0]]


def test_what_is_larger_than_protobuf_allows_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "MAXIMUM_PROTOBUF", 100)
    (tmp_path / "large.onnx").write_bytes(bytes(101))
    with refuses("not-onnx"):
        read_onnx(tmp_path / "large.onnx")
