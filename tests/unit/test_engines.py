"""What of the TensorRT code needs no GPU: the probe, the choice of ONNX file and the checks of arguments."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.records import EngineEntry
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes import tensorrt
from components.common.runtimes.tensorrt import TensorRTRunner, load_engine, load_tensorrt, start, why_unavailable
from components.export import engines

SHAPES = ShapeSpec(height=8, width=8)


def fake_tensorrt(version: str, *, creation_flags: tuple[str, ...], builder_flags: tuple[str, ...]) -> SimpleNamespace:
    """The enums that tell versions apart, with members as in the version meant."""
    return SimpleNamespace(
        __version__=version,
        NetworkDefinitionCreationFlag=SimpleNamespace(**{flag: bit for bit, flag in enumerate(creation_flags)}),
        BuilderFlag=SimpleNamespace(**{flag: bit for bit, flag in enumerate(builder_flags)}),
        HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere+"),
    )


COMMON = ("TF32", "VERSION_COMPATIBLE", "REFIT")
TENSORRT_8 = fake_tensorrt(
    "8.6.0", creation_flags=("EXPLICIT_BATCH", "EXPLICIT_PRECISION"), builder_flags=("FP16", "INT8", *COMMON)
)
TENSORRT_10 = fake_tensorrt(
    "10.16.1",
    creation_flags=("EXPLICIT_BATCH", "STRONGLY_TYPED"),
    builder_flags=("FP16", "INT8", *COMMON, "STRIP_PLAN"),
)
TENSORRT_11 = fake_tensorrt("11.4.0", creation_flags=("STRONGLY_TYPED",), builder_flags=(*COMMON, "STRIP_PLAN"))


class Config:
    """Records flags; TF32 is on from the start, as in TensorRT."""

    def __init__(self, trt: SimpleNamespace) -> None:
        self.flags = {trt.BuilderFlag.TF32}

    def set_flag(self, flag: int) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: int) -> None:
        self.flags.remove(flag)


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An importable folder `tensorrt` that hides any installed one."""
    folder = tmp_path / "tensorrt"
    folder.mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("tensorrt", None)


def test_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in why_unavailable()
    with pytest.raises(RuntimeUnavailable, match="no CUDA GPU"):
        load_tensorrt()
    with pytest.raises(RuntimeUnavailable, match="no CUDA GPU"):
        TensorRTRunner(Path("missing.plan"), SHAPES)


def test_not_installed(monkeypatch, with_gpu):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    reason = why_unavailable()
    assert "not installed" in reason
    assert "pip install 'enginery[tensorrt]'" in reason


def test_installed_without_libraries(package, with_gpu):
    cause = "libnvinfer.so.10: cannot open shared object file"
    (package / "__init__.py").write_text(f"raise ImportError({cause!r})\n")
    reason = why_unavailable()
    assert cause in reason
    assert "NVIDIA's package index" in reason


def test_installed_without_its_own_dependency(package, with_gpu):
    (package / "__init__.py").write_text("import tensorrt_bindings_that_are_missing\n")
    assert "tensorrt_bindings_that_are_missing" in why_unavailable()


def test_empty_folder_of_that_name(package, with_gpu):
    assert "does not load" in why_unavailable()


def test_usable(package, with_gpu):
    (package / "__init__.py").write_text("class Builder: pass\n")
    assert why_unavailable() is None
    assert load_tensorrt().Builder


def test_there_but_the_driver_is_too_old(monkeypatch):
    def make() -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    logger = SimpleNamespace(take_errors=lambda: "CUDA initialization failure with error: 35")
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: TENSORRT_10)
    monkeypatch.setattr(tensorrt, "tensorrt_logger", lambda: logger)
    monkeypatch.setattr(tensorrt, "driver_version", lambda: "470")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    said = r"TensorRT 10\.16\.1 can't start on NVIDIA A100, driver 470: CUDA init.* error: 35; a newer driver"
    with pytest.raises(RuntimeUnavailable, match=said):
        start(make)


@pytest.fixture
def loading(monkeypatch) -> Callable[[Any], None]:
    """A machine with TensorRT 10 on an H200 whose plans load as the given engine; None for those that don't."""

    def give(engine: Any) -> None:
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
        trt = SimpleNamespace(__version__="10.16.1", Runtime=lambda logger: runtime)
        monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: trt)

    logger = SimpleNamespace(take_errors=lambda: "Magic tag does not match")
    monkeypatch.setattr(tensorrt, "tensorrt_logger", lambda: logger)
    monkeypatch.setattr(tensorrt, "driver_version", lambda: "590")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return give


@pytest.fixture
def plan(tmp_path) -> Path:
    file = tmp_path / "int8.plan"
    file.write_bytes(b"half a pl")
    return file


def entry(**changes: str) -> EngineEntry:
    here = {"tensorrt_version": "10.16.1", "gpu_name": "NVIDIA H200", "compute_capability": "9.0"}
    told = {"file": "int8.plan", "precision": "int8", "source_onnx": "int8.onnx", "driver_version": "590"}
    return EngineEntry.model_validate({**here, **told, "build_seconds": 1.0, **changes})


def test_a_plan_of_another_machine_is_not_even_tried(loading, tmp_path):
    loading("an engine")
    with pytest.raises(UserError, match=r"\(GPU NVIDIA A100 there, NVIDIA H200 here\): .*enginery engines"):
        load_engine(tmp_path / "missing.plan", entry(gpu_name="NVIDIA A100"))


@pytest.mark.parametrize(("driver", "said"), [("590", ""), ("580", r" \(driver 580 there, 590 here\)")])
def test_a_plan_that_does_not_load(loading, plan, driver, said):
    loading(None)
    with pytest.raises(UserError, match=rf"int8\.plan: Magic tag does not match\. A plan .* built with{said}: export"):
        load_engine(plan, entry(driver_version=driver))


@pytest.mark.parametrize(("driver", "is_told"), [("590", False), ("580", True), ("unknown", False)])
def test_another_driver_is_told_of(loading, plan, caplog, driver, is_told):
    loading("an engine")
    assert load_engine(plan, entry(driver_version=driver))[1] == "an engine"
    assert ("was built with another driver (driver 580 there, 590 here)" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("trt", "files"),
    [
        (TENSORRT_8, {"fp32": "fp32.onnx", "fp16": "fp32.onnx", "int8": "int8.onnx"}),
        (TENSORRT_10, {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8_fp16.onnx"}),
        (TENSORRT_11, {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8_fp16.onnx"}),
    ],
    ids=["8.6", "10", "11"],
)
def test_onnx_file(monkeypatch, trt, files):
    monkeypatch.setattr(engines, "load_tensorrt", lambda: trt)
    assert {precision: engines.onnx_file_for(precision) for precision in files} == files


@pytest.mark.parametrize(
    ("trt", "bits"), [(TENSORRT_8, 0b01), (TENSORRT_10, 0b11), (TENSORRT_11, 0b1)], ids=["8.6", "10", "11"]
)
def test_network_flags(trt, bits):
    assert engines._network_flags(trt) == bits


@pytest.mark.parametrize(
    ("trt", "precision", "options", "flags", "said"),
    [
        (TENSORRT_8, "fp32", (), set(), ()),
        (TENSORRT_8, "fp32", ("tf32",), {"TF32"}, ("TF32",)),
        (TENSORRT_8, "fp16", (), {"FP16", "TF32"}, ("FP16",)),
        (TENSORRT_8, "int8", (), {"FP16", "INT8", "TF32"}, ("FP16", "INT8")),
        (TENSORRT_10, "fp32", (), set(), ("STRONGLY_TYPED",)),
        (TENSORRT_10, "fp32", ("tf32",), {"TF32"}, ("TF32", "STRONGLY_TYPED")),
        (TENSORRT_10, "int8", (), {"TF32"}, ("STRONGLY_TYPED",)),
        (TENSORRT_11, "fp32", (), set(), ("STRONGLY_TYPED",)),
        (TENSORRT_11, "fp16", (), {"TF32"}, ("STRONGLY_TYPED",)),
    ],
)
def test_precision_flags(trt, precision, options, flags, said):
    config = Config(trt)
    assert engines._set_precision(trt, config, precision, options) == said
    assert config.flags == {getattr(trt.BuilderFlag, flag) for flag in flags}


def test_options():
    config = Config(TENSORRT_10)
    options = ("version_compatible", "hardware_compatible", "refittable", "stripped", "tf32")
    said = ("VERSION_COMPATIBLE", "AMPERE_PLUS", "REFIT", "STRIP_PLAN")
    assert engines._set_options(TENSORRT_10, config, options) == said
    assert config.hardware_compatibility_level == "ampere+"
    names = ("TF32", "VERSION_COMPATIBLE", "REFIT", "STRIP_PLAN")
    assert config.flags == {getattr(TENSORRT_10.BuilderFlag, name) for name in names}


def test_an_option_that_this_version_lacks():
    with pytest.raises(UserError, match=r"TensorRT 8\.6\.0 builds no stripped plans: take stripped out"):
        engines._set_options(TENSORRT_8, Config(TENSORRT_8), ("refittable", "stripped"))


@pytest.mark.parametrize(("trt", "refused"), [(TENSORRT_8, True), (TENSORRT_10, False), (TENSORRT_11, False)])
def test_options_are_looked_at_before_anything_is_built(monkeypatch, trt, refused):
    monkeypatch.setattr(engines, "load_tensorrt", lambda: trt)
    engines.check_options(("tf32", "version_compatible", "hardware_compatible", "refittable"))
    if not refused:
        engines.check_options(("stripped",))
        return
    with pytest.raises(UserError, match="builds no stripped plans"):
        engines.check_options(("stripped",))


class Timings:
    """A builder's config that knows one timing cache by its first word, as TensorRT does."""

    def __init__(self) -> None:
        self.given: bytes | None = None

    def create_timing_cache(self, known: bytes) -> bytes | None:
        return known if known[:7] in (b"", b"timings") else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.given = cache
        return True

    def get_timing_cache(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: b"timings, more of them")


@pytest.fixture
def no_reason(monkeypatch):
    monkeypatch.setattr(engines, "tensorrt_logger", lambda: SimpleNamespace(take_errors=lambda: "unknown magic number"))


def test_timings_of_other_builds_are_not_read(monkeypatch):
    """What a kernel took without TF32 says nothing of a build that may use it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(engines, "driver_version", lambda: "580.159.04")
    both = ("tf32", "refittable")
    orders = [("fp32", ()), ("fp32", ("tf32",)), ("fp16", ()), ("fp16", ("refittable",)), ("fp16", both)]
    names = [engines._timing_cache_name(TENSORRT_8, *order) for order in orders]
    assert names[:2] == [
        "tensorrt-8.6.0_nvidia-h200_driver-580.159.04_fp32.timing",
        "tensorrt-8.6.0_nvidia-h200_driver-580.159.04_fp32_tf32.timing",
    ]
    assert len(set(names)) == len(names)
    assert engines._timing_cache_name(TENSORRT_8, "fp16", both[::-1]) == names[-1]  # in any order


def test_timings_are_kept_for_the_next_build(tmp_path, caplog):
    file = tmp_path / "new" / "a.timing"
    for expected in (b"", b"timings, more of them"):
        config = Timings()
        engines._load_timing_cache(config, file)
        assert config.given == expected
        engines._save_timing_cache(config, file)
    assert not caplog.records


@pytest.mark.usefixtures("no_reason")
def test_damaged_timings_start_anew(tmp_path, caplog):
    (tmp_path / "a.timing").write_bytes(b"damaged")
    config = Timings()
    engines._load_timing_cache(config, tmp_path / "a.timing")
    assert config.given == b""
    assert "a.timing is not usable and starts anew: unknown magic number" in caplog.text


@pytest.mark.parametrize("place", ["a file where the folder goes", "a folder where the file goes"])
def test_timings_that_can_not_be_read_or_kept_cost_time_alone(tmp_path, caplog, place):
    """The plan was built by then, which takes minutes."""
    folder = tmp_path / "tensorrt"
    if place.startswith("a file"):
        folder.write_text("")
    else:
        (folder / "a.timing").mkdir(parents=True)
    config = Timings()
    engines._load_timing_cache(config, folder / "a.timing")
    assert config.given == b""
    engines._save_timing_cache(config, folder / "a.timing")
    assert "a.timing, so this build takes longer: " in caplog.text
    assert "a.timing, so the next build takes as long: " in caplog.text


def test_unknown_precision():
    with pytest.raises(UserError, match=r"'int4'.*fp32, fp16, int8"):
        engines.onnx_file_for("int4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"optimization_level": 6}, "optimization_level must be 0 .* got 6"),
        ({}, "there is no ONNX file"),
    ],
)
def test_arguments_are_checked_before_tensorrt_is_needed(tmp_path, change, message):
    arguments = {"precision": "fp16", "optimization_level": 3} | change
    with pytest.raises(UserError, match=message):
        engines.build_engine(
            tmp_path / "fp16.onnx",
            tmp_path / "fp16.plan",
            shapes=SHAPES,
            timing_cache_path=None,
            workspace_bytes=1 << 30,
            **arguments,
        )
