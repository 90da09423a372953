"""Which plans of a bundle may run here: everything that ties a plan to a machine is compared before it is loaded."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.records import EngineEntry
from components.common.runtimes import selection
from components.common.runtimes import tensorrt as runner_module
from components.common.runtimes import tensorrt_library as tensorrt
from components.common.runtimes.selection import _usable_engines, serving_runner, serving_runners

HERE = {"tensorrt_version": "10.16.0", "gpu_name": "NVIDIA H200", "compute_capability": "9.0"}


@pytest.fixture
def on_h200(monkeypatch):
    """The facts of a GPU machine; nothing is loaded."""
    monkeypatch.setattr(tensorrt, "why_no_tensorrt", lambda: None)
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: SimpleNamespace(__version__=HERE["tensorrt_version"]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: HERE["gpu_name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def bundle_with(**changes):
    entry = {"file": "int8.plan", "precision": "int8", "source_onnx": "int8.onnx", "onnx_digest": "sha256:aa"}
    engine = EngineEntry(**(entry | HERE | {"driver_version": "580", "build_seconds": 1.0} | changes))
    files = {"int8.onnx": SimpleNamespace(digest="sha256:aa")}
    models = {name: f"{name}.onnx" for name in ("fp32", "fp16", "int8", "int8_fp16")}
    return SimpleNamespace(manifest=SimpleNamespace(engines=(engine,), engines_missing="", files=files, models=models))


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0 here"),
        ({"gpu_name": "NVIDIA A100"}, "GPU NVIDIA A100 there, NVIDIA H200 here"),
        ({"compute_capability": "8.0"}, "compute capability 8.0 there, 9.0 here"),
        ({"tensorrt_version": "10.2.0"}, "TensorRT 10.2.0 there, 10.16.0 here"),
        ({"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "10.16.1"}, "TensorRT 10.16.1 there, 10.16.0 here"),
        ({"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0 here"),
        ({"flags": ("AMPERE_PLUS",), "tensorrt_version": "8.6.0"}, "TensorRT 8.6.0 there, 10.16.0 here"),
        ({"onnx_digest": "sha256:bb"}, "int8.plan was built from another int8.onnx than the bundle holds"),
        (
            {"tensorrt_version": "8.6.0", "gpu_name": "NVIDIA A100"},
            "TensorRT 8.6.0 there, 10.16.0 here; GPU NVIDIA A100 there, NVIDIA H200 here",
        ),
    ],
)
def test_what_differs_is_said(changes, said):
    engines, reason = _usable_engines(bundle_with(**changes), "auto")
    assert engines == {}
    assert said in reason
    assert "enginery engines" in reason or "export again" in reason


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver_version": "590"},
        {"onnx_digest": ""},
        {"flags": ("VERSION_COMPATIBLE",), "tensorrt_version": "10.2.0"},
        {"flags": ("AMPERE_PLUS",), "gpu_name": "NVIDIA A100", "compute_capability": "8.0"},
    ],
)
def test_a_plan_that_fits_is_used(changes):
    engines, reason = _usable_engines(bundle_with(**changes), "auto")
    assert list(engines) == ["int8"]
    assert reason == ""


@pytest.mark.usefixtures("on_h200")
def test_the_rows_say_why_the_plans_do_not_run(monkeypatch):
    """The run goes on without the plans, so only the notes can say what differs."""
    asked = []
    monkeypatch.setattr(selection, "_on_openvino", lambda bundle, precision, unused: asked.append((precision, unused)))
    servings = serving_runners(bundle_with(gpu_name="NVIDIA A100"), "auto")
    said = "int8.plan was built elsewhere (GPU NVIDIA A100 there, NVIDIA H200 here)"
    assert servings[1].precision == "fp16"
    assert servings[1].note.startswith(said)
    assert [precision for precision, unused in asked if unused.startswith(said)] == ["fp32", "int8"]


@pytest.mark.usefixtures("on_h200")
def test_what_was_asked_for_needs_no_reason(monkeypatch):
    asked = []
    monkeypatch.setattr(selection, "_on_openvino", lambda bundle, precision, unused: asked.append(unused))
    servings = serving_runners(bundle_with(gpu_name="NVIDIA A100"), "openvino")
    assert asked == ["", ""]
    assert servings[1].note == "needs TensorRT on a GPU; a CPU has no FP16 arithmetic"


@pytest.mark.usefixtures("on_h200")
def test_a_precision_that_the_bundle_lacks_is_not_measured(monkeypatch):
    """So that a verdict on it is "not enough evidence", with the reason."""
    monkeypatch.setattr(selection, "_on_openvino", lambda bundle, precision, unused: precision)
    bundle = bundle_with()
    del bundle.manifest.models["int8"]
    fp32, fp16, int8 = serving_runners(bundle, "openvino")
    assert (fp32, fp16.runner) == ("fp32", None)
    assert (int8.runner, int8.file, int8.note) == (None, None, "the bundle has no INT8 model")


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        ({"mantissa_bits": 7}, "weights are rounded to 7 bits of mantissa"),
        ({"flags": ("TF32",)}, "TF32: inputs of convolutions and matrix products are rounded to 10 bits"),
    ],
)
def test_what_a_plan_rounds_is_said(monkeypatch, changes, note):
    monkeypatch.setattr(runner_module, "TensorRTRunner", lambda file, shapes, engine: None)
    bundle = bundle_with(**changes)
    bundle.file, bundle.manifest.shapes = (lambda name: name), None
    assert serving_runner(bundle, "int8", "tensorrt").note == note


@pytest.fixture
def loaded(monkeypatch):
    """What would be loaded, instead of loading it."""
    monkeypatch.setattr(selection, "_on_tensorrt", lambda bundle, engine: served_by("tensorrt", engine.file))
    monkeypatch.setattr(selection, "_on_openvino", lambda bundle, precision, unused: served_by("openvino", unused))


def served_by(runtime, note):
    return selection.Serving(precision="int8", file=None, runner=SimpleNamespace(runtime=runtime), note=note)


@pytest.mark.usefixtures("on_h200", "loaded")
def test_one_precision_is_served_by_its_plan_where_that_fits():
    for runtime in ("auto", "tensorrt"):
        found = serving_runner(bundle_with(), "int8", runtime)
        assert (found.runner.runtime, found.note) == ("tensorrt", "int8.plan")
    assert serving_runner(bundle_with(), "int8", "openvino").runner.runtime == "openvino"


@pytest.mark.usefixtures("on_h200", "loaded")
def test_one_precision_is_served_by_openvino_where_its_plan_does_not_fit():
    found = serving_runner(bundle_with(gpu_name="NVIDIA A100"), "int8", "auto")
    assert found.runner.runtime == "openvino"
    assert "GPU NVIDIA A100 there, NVIDIA H200 here" in found.note
    found = serving_runner(bundle_with(), "fp16", "auto")  # there is a plan of INT8 only
    assert (found.runner.runtime, found.note) == (
        "openvino",
        "a CPU has no FP16 arithmetic: the FP16 file runs in FP32",
    )


@pytest.mark.usefixtures("on_h200", "loaded")
def test_one_precision_that_can_not_be_served_as_asked():
    with pytest.raises(RuntimeUnavailable, match=r"tensorrt was asked for, but int8\.plan was built elsewhere"):
        serving_runner(bundle_with(gpu_name="NVIDIA A100"), "int8", "tensorrt")
    with pytest.raises(RuntimeUnavailable, match="tensorrt was asked for, but the bundle has no FP16 engine"):
        serving_runner(bundle_with(), "fp16", "tensorrt")
    bundle = bundle_with()
    bundle.path = "b"
    del bundle.manifest.models["fp16"]
    with pytest.raises(UserError, match="the bundle b has no FP16 model; it holds fp32, int8, int8_fp16"):
        serving_runner(bundle, "fp16", "auto")


def test_openvino_that_is_not_installed_is_named() -> None:
    """A GPU machine need not have it: export is imported without, and what asks for it says what to install."""
    code = "import sys; sys.modules['openvino'] = None; import components.export.selection; print('export'); "
    command = [sys.executable, "-c", code + "import components.common.runtimes.openvino"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "export\n")
    assert "RuntimeUnavailable: OpenVINO runs models on CPUs and is not installed: pip install openvino" in done.stderr
