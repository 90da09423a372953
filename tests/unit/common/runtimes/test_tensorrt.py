"""Reasons why TensorRT can't be used, and loading of plans. What it says is given; tests/gpu runs it."""

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from components.common.contracts.errors import RuntimeUnavailable
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes import tensorrt
from tests.unit.measurements import engine_entry
from tests.unit.refusals import refuses

SHAPES = ShapeSpec(height=4, width=4)
HERE = {"tensorrt_version": "10.16.1", "driver_version": "590"}


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (None, "not installed: run `pip install 'enginery[tensorrt]'"),
        ("raise ImportError('libnvinfer.so.10: cannot open')", "(libnvinfer.so.10: cannot open): the package is a"),
        ("import tensorrt_bindings_that_are_missing", "tensorrt_bindings_that_are_missing"),
        ("", "does not load (the package has no Builder)"),
        ("class Builder: pass", None),
    ],
)
def test_why_tensorrt_can_not_be_used(monkeypatch, tmp_path, package, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    if package is None:
        monkeypatch.setitem(sys.modules, "tensorrt", None)
    else:
        (tmp_path / "tensorrt").mkdir()
        if package:
            (tmp_path / "tensorrt" / "__init__.py").write_text(package)
        monkeypatch.syspath_prepend(str(tmp_path))
    reason = tensorrt.why_unavailable()
    sys.modules.pop("tensorrt", None)
    assert reason is None if said is None else said in reason


@pytest.mark.parametrize("use", [tensorrt.load_tensorrt, lambda: tensorrt.TensorRTRunner(Path("x.plan"), SHAPES)])
def test_without_a_gpu_nothing_is_loaded(monkeypatch, use):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("tensorrt-unavailable"):
        use()


@pytest.fixture
def loading(monkeypatch):
    """A machine with TensorRT 10 on an H200 whose plans load as the given engine; None for those that don't."""

    def give(engine):
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
        trt = SimpleNamespace(__version__="10.16.1", Runtime=lambda logger: runtime)
        monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: trt)

    monkeypatch.setattr(tensorrt, "tensorrt_logger", lambda: SimpleNamespace(take_errors=lambda: "Magic tag"))
    monkeypatch.setattr(tensorrt, "driver_version", lambda: "590")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return give


def test_there_but_the_driver_is_too_old(loading):
    def make():
        raise TypeError("pybind11::init(): factory function returned nullptr")

    loading(None)
    with pytest.raises(RuntimeUnavailable, match="on NVIDIA H200, driver 590: Magic tag; a newer driver") as error:
        tensorrt.start(make)
    assert error.value.code == "tensorrt-does-not-start"


@pytest.mark.parametrize(
    ("engine", "changes", "code", "said"),
    [
        ("an engine", {"gpu_name": "NVIDIA A100"}, "plan-built-elsewhere", ""),
        (None, {}, "plan-unreadable", "it was built with: export again"),
        (None, {"driver_version": "580"}, "plan-unreadable", "(driver 580 there, 590 here): export again"),
    ],
)
def test_a_plan_that_does_not_load(loading, tmp_path, engine, changes, code, said):
    loading(engine)
    (tmp_path / "int8.plan").write_bytes(b"half a pl")
    with refuses(code, says=said):
        tensorrt.load_engine(tmp_path / "int8.plan", engine_entry(**{**HERE, **changes}))


@pytest.mark.parametrize(
    ("module", "plan", "version"),
    [
        ("8.6.0", b"ftrt" + bytes(20) + bytes((8, 6, 0, 12)), "8.6.0.12"),
        ("11.2.1.2", b"ftrt" + bytes(20) + bytes((11, 2, 1, 2)), "11.2.1.2"),
        ("8.6.1", b"ftrt" + bytes(20) + bytes((8, 6, 0, 12)), "8.6.1"),
        ("8.6.0", b"ftrt\1" + bytes(19) + bytes((8, 6, 0, 12)), "8.6.0"),  # of a format that is not known
        ("8.6.0", b"a plan", "8.6.0"),
    ],
)
def test_the_version_that_a_plan_needs_is_named_to_the_build(module, plan, version):
    assert tensorrt.version_of_builder(SimpleNamespace(__version__=module), plan) == version


@pytest.mark.parametrize(("driver", "is_said"), [("590", False), ("580", True), ("unknown", False)])
def test_a_plan_loads_with_another_driver(loading, tmp_path, caplog, driver, is_said):
    loading("an engine")
    (tmp_path / "int8.plan").write_bytes(b"a plan")
    plan = engine_entry(**{**HERE, "driver_version": driver})
    assert tensorrt.load_engine(tmp_path / "int8.plan", plan)[1] == "an engine"
    assert ("was built with another driver (driver 580 there, 590 here)" in caplog.text) == is_said


def test_closing_gives_memory_back_to_the_gpu_for_the_next_build(monkeypatch):
    class Stream:
        """Of a runner, whose contexts' memory torch keeps until its cache is emptied."""

    runner, stream, left = tensorrt.TensorRTRunner.__new__(tensorrt.TensorRTRunner), Stream(), []
    runner._cuda, runner._streams, runner._engine, runner._runtime = torch.device("cuda", 0), [stream], object(), None
    kept = weakref.ref(stream)
    del stream
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(kept()))
    runner.close()
    assert left == [None]
