"""The runtime that runs a bundle here: what ties a plan to a machine is compared before the plan is loaded."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from components.common.contracts.errors import RuntimeUnavailable
from components.common.contracts.records import PRECISIONS
from components.common.runtimes import RUNTIMES, RuntimeOption, onnxruntime, openvino, tensorrt
from components.common.runtimes.runner import OpenModel
from components.common.runtimes.selection import select_runtime, select_runtimes
from tests.unit.measurements import engine_entry
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses

HERE = {"tensorrt_version": "10.16.0.72", "gpu_name": "NVIDIA H200", "compute_capability": "9.0"}
NO_FP16 = "needs TensorRT on a GPU; a CPU has no FP16 arithmetic"
ELSEWHERE = "int8.plan was built elsewhere (GPU NVIDIA A100 there, NVIDIA H200 here)"


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    """The facts of a GPU machine; models are named instead of loaded."""
    monkeypatch.setattr(tensorrt, "why_unavailable", lambda: None)
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: SimpleNamespace(__version__=HERE["tensorrt_version"]))
    monkeypatch.setattr(tensorrt, "TensorRTRunner", lambda file, shapes, entry: SimpleNamespace(runtime="tensorrt"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: HERE["gpu_name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module, name in ((openvino, "openvino"), (onnxruntime, "onnxruntime")):
        opened = OpenModel(file=Path("model.onnx"), runner=SimpleNamespace(runtime=name))
        monkeypatch.setattr(module, "open_model", lambda bundle, precision, opened=opened: opened)


def bundle_with(**changes):
    """A bundle with an INT8 plan that was built here, but for `changes`."""
    engine = engine_entry(**{"onnx_digest": "sha256:aa", **HERE, **changes})
    manifest = SimpleNamespace(
        engines=(engine,),
        engines_missing="",
        files={"int8.onnx": SimpleNamespace(digest="sha256:aa")},
        models={name: f"{name}.onnx" for name in ("fp32", "fp16", "int8", "int8_fp16")},
        image_shapes=None,
    )
    return SimpleNamespace(path="b", manifest=manifest, file=Path)


def runtimes_of(bundle, option):
    return [found.runner and found.runner.runtime for found in select_runtimes(bundle, option)]


def test_a_runtime_is_an_entry_and_a_module():
    assert {"auto", "tensorrt", "openvino", "onnxruntime"} <= set(get_args(RuntimeOption))
    for runtime in RUNTIMES.values():
        if runtime.can_be_chosen:
            assert callable(runtime.module.open_model)
        if runtime.runs_plans:
            assert callable(runtime.module.why_unavailable)
            assert callable(runtime.module.plan_mismatches)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0.72 here"),
        ({"tensorrt_version": "10.16.0.73"}, "TensorRT 10.16.0.73 there, 10.16.0.72 here"),
        ({"gpu_name": "NVIDIA A100"}, "GPU NVIDIA A100 there, NVIDIA H200 here"),
        ({"compute_capability": "8.0"}, "compute capability 8.0 there, 9.0 here"),
        ({"tensorrt_version": "10.2.0"}, "TensorRT 10.2.0 there, 10.16.0.72 here"),
        ({"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "10.16.1"}, "TensorRT 10.16.1 there, 10.16.0.72 here"),
        ({"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0.72 here"),
        ({"flags": ("AMPERE_PLUS",), "tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0.72 here"),
        ({"onnx_digest": "sha256:bb"}, "int8.plan was built from another int8.onnx than the bundle holds"),
        (
            {"tensorrt_version": "8.6.0", "gpu_name": "NVIDIA A100"},
            "TensorRT 8.6.0 there, 10.16.0.72 here; GPU NVIDIA A100 there, NVIDIA H200 here",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_not_used_and_the_rows_say_why(changes, said):
    """The run goes on without the plans, so only the notes can say what differs."""
    bundle = bundle_with(**changes)
    assert runtimes_of(bundle, "auto") == ["openvino", None, "openvino"]
    for found in select_runtimes(bundle, "auto"):
        assert said in found.note
        assert "enginery engines" in found.note or "export again" in found.note
    assert select_runtime(bundle, "int8", "auto").runner.runtime == "openvino"
    with pytest.raises(RuntimeUnavailable) as error:
        select_runtime(bundle, "int8", "tensorrt")
    assert (error.value.code, said in str(error.value)) == ("plans-unusable", True)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        ({"driver_version": "590"}, ""),
        ({"onnx_digest": ""}, ""),
        ({"tensorrt_version": "10.16.0"}, ""),  # of a bundle that does not name the build
        ({"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "10.2.0"}, ""),
        ({"flags": ("AMPERE_PLUS",), "gpu_name": "NVIDIA A100", "compute_capability": "8.0"}, ""),
        ({"mantissa_bits": 7}, "weights are rounded to 7 bits of mantissa"),
        ({"flags": ("TF32",)}, "TF32: inputs of convolutions and matrix products are rounded to 10 bits"),
    ],
)
def test_a_plan_that_fits_is_used_and_what_it_rounds_is_said(changes, note):
    for option in ("auto", "tensorrt"):
        fp32, fp16, int8 = select_runtimes(bundle_with(**changes), option)
        assert (fp32.note, fp16.note) == ("its engine was not built",) * 2
        assert (int8.runner.runtime, int8.file, int8.note) == ("tensorrt", Path("int8.plan"), note)
        assert select_runtime(bundle_with(**changes), "int8", option) == int8


def test_what_was_asked_for_needs_no_reason():
    bundle = bundle_with(gpu_name="NVIDIA A100")
    assert runtimes_of(bundle, "openvino") == ["openvino", None, "openvino"]
    assert [found.note for found in select_runtimes(bundle, "openvino")] == ["", NO_FP16, ""]
    assert runtimes_of(bundle, "onnxruntime") == ["onnxruntime"] * 3


def test_a_bundle_without_plans_runs_on_a_cpu():
    bundle = bundle_with()
    bundle.manifest.engines, bundle.manifest.engines_missing = (), "no GPU"
    assert [found.note for found in select_runtimes(bundle, "auto")] == ["", NO_FP16, ""]
    with refuses("plans-unusable"):
        select_runtimes(bundle, "tensorrt")


def test_a_precision_that_the_bundle_lacks_is_not_measured():
    """So that a verdict on it is "not enough evidence", with the reason."""
    bundle = bundle_with()
    del bundle.manifest.models["int8"]
    assert runtimes_of(bundle, "openvino") == ["openvino", None, None]
    assert select_runtimes(bundle, "openvino")[2].note == "the bundle has no INT8 model"
    with refuses("precision-missing"):
        select_runtime(bundle, "int8", "openvino")


def test_an_int8_file_that_fits_no_cpu_leaves_fp32(monkeypatch):
    def refuse(bundle, precision):
        if precision == "int8":
            raise RuntimeUnavailable("unfit", code="no-int8-file-for-this-cpu")
        return OpenModel(file=Path("fp32.onnx"), runner=SimpleNamespace(runtime="openvino"))

    monkeypatch.setattr(openvino, "open_model", refuse)
    assert runtimes_of(bundle_with(), "openvino") == ["openvino", None, None]
    assert select_runtimes(bundle_with(), "openvino")[2].note == "unfit"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_precision_without_its_plan_runs_on_the_cpu(precision):
    bundle = bundle_with()  # there is a plan of INT8 only
    if precision != "int8":
        with refuses("engine-missing"):
            select_runtime(bundle, precision, "tensorrt")
    found = select_runtime(bundle, precision, "auto")
    assert found.runner.runtime == {"int8": "tensorrt"}.get(precision, "openvino")
    fp16 = "a CPU has no FP16 arithmetic: the FP16 file runs in FP32"
    assert found.note == (fp16 if precision == "fp16" else "")


def test_another_arithmetic_can_be_refused():
    bundle = bundle_with(gpu_name="NVIDIA A100")
    assert select_runtime(bundle, "int8", "auto", same_arithmetic=True).note.endswith(
        f"{ELSEWHERE}; build plans for this machine with `enginery engines`"
    )
    with refuses("arithmetic-missing", says=ELSEWHERE):
        select_runtime(bundle, "fp16", "auto", same_arithmetic=True)


def test_openvino_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine need not have it: export is imported without, and what asks for it says what to install."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("components", "openvino")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openvino", None)
    importlib.import_module("components.export.selection")
    with pytest.raises(Exception, match="OpenVINO runs models on CPUs and is not installed: pip install op") as caught:
        importlib.import_module("components.common.runtimes.openvino")
    assert type(caught.value).__name__ == "RuntimeUnavailable"


def test_a_file_that_openvino_can_not_compile_is_refused_with_its_reason(tmp_path):
    node = helper.make_node("Det", ["images"], ["logits"])
    onnx.save(onnx_model([node], {"images": ["N", 3, 8, 8]}, {"logits": ["N", 3]}), tmp_path / "int8.onnx")
    with refuses("openvino-refused") as error:
        openvino.compile_file(tmp_path / "int8.onnx", {})
    assert "No conversion rule found for operations: Det-17" in str(error.value)


def test_onnx_runtime_computes_q_dq_in_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In integers the sums of the numerical reference would saturate on CPUs without VNNI."""

    def q_dq(name: str) -> list[onnx.NodeProto]:
        read = helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}.q"])
        return [read, helper.make_node("DequantizeLinear", [f"{name}.q", "scale", "zero"], [f"{name}.dq"])]

    weight = helper.make_node("DequantizeLinear", ["weight", "scale", "signed"], ["weight.dq"])
    nodes = [*q_dq("images"), weight, helper.make_node("Conv", ["images.dq", "weight.dq"], ["conv"]), *q_dq("conv")]
    constants = {"weight": np.ones((4, 3, 1, 1), np.int8), "scale": np.array(0.1, np.float32)}
    constants |= {"zero": np.array(0, np.uint8), "signed": np.array(0, np.int8)}
    sizes = {"images": ["N", 3, 8, 8]}, {"conv.dq": ["N", 4, 8, 8]}
    model = onnx_model(nodes, *sizes, constants)
    made = onnxruntime.onnxruntime.SessionOptions

    def that_write() -> object:
        options = made()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return options

    monkeypatch.setattr(onnxruntime.onnxruntime, "SessionOptions", that_write)
    onnxruntime.new_session(model.SerializeToString())
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("Conv") == 1
