"""Inputs of TensorRT's builder, and what a bundle keeps. A fake stands for TensorRT.

tests/gpu builds real engines, and tests/unit/test_tensorrt_api.py holds the names against the real bindings.
"""

import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import helper, numpy_helper
from pydantic import ValidationError

from benchmarks import engines as engines_benchmark
from benchmarks import mantissa
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec
from components.export import engines
from components.export.config import ExportConfig
from tests.unit.refusals import refuses

from ..networks import onnx_model

SHAPES = ShapeSpec(height=4, width=4)
FAILS_TO_MERGE = "graphOptimizer.cpp::chooseHigherPrecision::1 Error (kFLOAT || kHALF)"


def fake_tensorrt(version: str, creation_flags: tuple[str, ...], *builder_flags: str) -> SimpleNamespace:
    """The enums that tell versions apart, with members as in the version meant."""
    members = (*builder_flags, "TF32", "VERSION_COMPATIBLE", "REFIT")
    return SimpleNamespace(
        __version__=version,
        NetworkDefinitionCreationFlag=SimpleNamespace(**{flag: bit for bit, flag in enumerate(creation_flags)}),
        BuilderFlag=SimpleNamespace(**{flag: bit for bit, flag in enumerate(members)}),
        HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere+"),
    )


TENSORRT_8 = fake_tensorrt("8.6.0", ("EXPLICIT_BATCH", "EXPLICIT_PRECISION"), "FP16", "INT8")
TENSORRT_10 = fake_tensorrt("10.16.1", ("EXPLICIT_BATCH", "STRONGLY_TYPED"), "FP16", "INT8", "STRIP_PLAN")
TENSORRT_11 = fake_tensorrt("11.4.0", ("STRONGLY_TYPED",), "STRIP_PLAN")


def config_of(trt: SimpleNamespace) -> SimpleNamespace:
    """Records flags; TF32 is on from the start, as in TensorRT."""
    flags = {trt.BuilderFlag.TF32}
    return SimpleNamespace(flags=flags, set_flag=flags.add, clear_flag=flags.remove)


@pytest.mark.parametrize(
    ("trt", "files", "bits"),
    [
        (TENSORRT_8, {"fp32": "fp32.onnx", "fp16": "fp32.onnx", "int8": "int8.onnx"}, 0b01),
        (TENSORRT_10, {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8_fp16.onnx"}, 0b11),
        (TENSORRT_11, {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8_fp16.onnx"}, 0b1),
    ],
    ids=["8.6", "10", "11"],
)
def test_what_each_version_reads_and_how(monkeypatch, trt, files, bits):
    monkeypatch.setattr(engines, "load_tensorrt", lambda: trt)
    assert {precision: engines.onnx_file_for(precision) for precision in files} == files
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
    config = config_of(trt)
    assert engines._set_precision(trt, config, precision, options) == said
    assert config.flags == {getattr(trt.BuilderFlag, flag) for flag in flags}


def test_options():
    config = config_of(TENSORRT_10)
    options = ("version_compatible", "hardware_compatible", "refittable", "stripped", "tf32")
    said = ("VERSION_COMPATIBLE", "AMPERE_PLUS", "REFIT", "STRIP_PLAN")
    assert engines._set_options(TENSORRT_10, config, options) == said
    assert config.hardware_compatibility_level == "ampere+"
    names = ("TF32", "VERSION_COMPATIBLE", "REFIT", "STRIP_PLAN")
    assert config.flags == {getattr(TENSORRT_10.BuilderFlag, name) for name in names}


@pytest.mark.parametrize(("trt", "is_refused"), [(TENSORRT_8, True), (TENSORRT_10, False), (TENSORRT_11, False)])
def test_options_are_looked_at_before_anything_is_built(monkeypatch, trt, is_refused):
    monkeypatch.setattr(engines, "load_tensorrt", lambda: trt)
    engines.check_options(("tf32", "version_compatible", "hardware_compatible", "refittable"))
    if not is_refused:
        engines.check_options(("stripped",))
        return
    with refuses("option-unsupported", "engine_options"):
        engines.check_options(("refittable", "stripped"))


def test_a_missing_file_is_said_before_tensorrt_is_needed(tmp_path):
    with refuses("onnx-missing"):
        engines.build_engine(tmp_path / "a.onnx", tmp_path / "a.plan", precision="fp16", shapes=SHAPES)


@pytest.mark.parametrize("command", [engines_benchmark.main, mantissa.main])
def test_benchmarks_refuse_levels_that_tensorrt_lacks(command):
    done = CliRunner().invoke(command, ["--optimization-level", "6"])
    assert (done.exit_code, "6 is not in the range 0<=x<=5" in done.output) == (2, True)


class Timings:
    """A builder's config that knows one timing cache by its first word, as TensorRT does."""

    given: bytes | None = None

    def create_timing_cache(self, known: bytes) -> bytes | None:
        return known if known[:7] in (b"", b"timings") else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.given = cache
        return True

    def get_timing_cache(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: b"timings, more of them")


def test_timings_of_other_builds_are_not_read(monkeypatch):
    """The time of a kernel without TF32 says nothing of a build that may use it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(engines, "driver_version", lambda: "580.159.04")
    both = ("tf32", "refittable")
    orders = [("fp32", ()), ("fp32", ("tf32",)), ("fp16", ()), ("fp16", ("refittable",)), ("fp16", both)]
    names = [engines._timing_cache_name(TENSORRT_8, *order, convolution(1.0)) for order in orders]
    assert re.fullmatch(r"tensorrt-8\.6\.0_nvidia-h200_driver-580\.159\.04_[0-9a-f]{16}_fp32_tf32\.timing", names[1])
    assert len(set(names)) == len(names)
    assert engines._timing_cache_name(TENSORRT_8, "fp16", both[::-1], convolution(1.0)) == names[-1]  # in any order
    assert engines._timing_cache_name(TENSORRT_8, "fp16", both, convolution(2.0)) == names[-1]  # trained again
    assert engines._timing_cache_name(TENSORRT_8, "fp16", both, convolution(1.0, width=5)) not in names
    placed = convolution(1.0)
    placed.graph.node.append(helper.make_node("QuantizeLinear", ["x"], ["y"]))
    assert engines._timing_cache_name(TENSORRT_8, "fp16", both, placed) not in names  # other layers in INT8


def convolution(value: float, width: int = 4) -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.full((width, 3, 1, 1), value, np.float32), "weights")
    return helper.make_model(helper.make_graph([], "one", [], [], [weights]))


@pytest.mark.parametrize(
    ("found", "first", "warnings"),
    [
        ("nothing", b"", []),
        ("damaged", b"", ["a.timing is not usable and starts again: unknown magic"]),
        # The plan was built by then, which takes minutes.
        ("folder", b"", ["a.timing, so this build takes longer: ", "a.timing, so the next build takes as long: "]),
        ("blocked", b"", ["a.timing, so this build takes longer: ", "a.timing, so the next build takes as long: "]),
    ],
)
def test_timings_are_kept_for_the_next_build_or_cost_time_alone(monkeypatch, tmp_path, caplog, found, first, warnings):
    monkeypatch.setattr(engines, "tensorrt_logger", lambda: SimpleNamespace(take_errors=lambda: "unknown magic"))
    file = tmp_path / "new" / "a.timing"
    if found == "damaged":
        file.parent.mkdir()
        file.write_bytes(b"damaged")
    elif found == "folder":
        file.mkdir(parents=True)
    elif found == "blocked":
        file.parent.write_text("")
    config = Timings()
    engines._load_timing_cache(config, file)
    assert config.given == first
    engines._save_timing_cache(config, file)
    assert len(caplog.records) == len(warnings)
    assert all(warning in caplog.text for warning in warnings)
    if file.is_file():
        again = Timings()
        engines._load_timing_cache(again, file)
        assert again.given == b"timings, more of them"


def network(folder, num_convs, weight=1.0):
    """1x1 convolutions that read the same tensor."""
    nodes = [helper.make_node("Conv", ["x", f"w{number}"], [f"y{number}"]) for number in range(num_convs)]
    weights = {f"w{number}": np.full((8, 8, 1, 1), weight, np.float32) for number in range(num_convs)}
    written = {f"y{number}": None for number in range(num_convs)}
    file = folder / "int8.onnx"
    onnx.save(onnx_model(nodes, {"x": [1, 8, 4, 4]}, written, weights), file)
    return file


@pytest.fixture
def build(monkeypatch):
    """`build(file, errors)`: what was built, try by try, and the plan. A try ends with the next of `errors`.

    Then `not_run` plans make no execution context.
    """

    def built(file, errors=(), precision="int8", mantissa_bits=10, not_run=0, **options):
        tried: list[bytes] = []
        opened: list[object] = []

        def open_context(plan_path, entry):
            opened.append(plan_path.read_bytes())
            if len(opened) <= not_run:
                raise EngineryError("no context", code="no-execution-context")

        def try_to_build(trt, order, model):
            tried.append(model)
            return (None if len(tried) <= len(errors) else b"plan"), ("FLAG",)

        take_errors = iter(["what an earlier build left", *errors])
        logger = SimpleNamespace(take_errors=lambda: next(take_errors, ""))
        monkeypatch.setattr(engines, "tensorrt_logger", lambda: logger)
        monkeypatch.setattr(engines, "_try_to_build", try_to_build)
        monkeypatch.setattr(engines, "load_tensorrt", lambda: SimpleNamespace(__version__="8.6.0"))
        monkeypatch.setattr(engines, "driver_version", lambda: "580")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(engines.tensorrt, "open_context", open_context)
        options |= {"precision": precision, "shapes": SHAPES, "mantissa_bits": mantissa_bits}
        try:
            return tried, engines.build_engine(file, file.with_suffix(".plan"), **options)
        except EngineryError as error:
            return tried, error

    return built


def test_convolutions_that_are_not_merged_are_built_apart(build, tmp_path):
    file = network(tmp_path, num_convs=2)
    before = file.read_bytes()
    tried, entry = build(file, [FAILS_TO_MERGE])
    assert (entry.flags, entry.mantissa_bits, file.with_suffix(".plan").read_bytes()) == (("FLAG",), None, b"plan")
    assert tried[0] == before == file.read_bytes()
    again = onnx.load_model_from_string(tried[1])
    assert [list(attribute.ints) for attribute in again.graph.node[1].attribute] == [[2, 2]]


@pytest.mark.parametrize(
    ("num_convs", "errors", "num_tries"),
    [
        (2, [FAILS_TO_MERGE, "out of memory"], 2),
        (2, ["out of memory"], 1),  # another error is not helped by it
        (1, [FAILS_TO_MERGE], 1),  # nothing to keep apart
    ],
)
def test_the_last_error_is_said(build, tmp_path, num_convs, errors, num_tries):
    tried, error = build(network(tmp_path, num_convs), errors)
    assert (len(tried), error.code) == (num_tries, "build-failed")
    assert str(error).endswith(f"int8.onnx as int8: {errors[-1]}")
    assert not (tmp_path / "int8.plan").exists()


@pytest.mark.parametrize(("asked", "other"), [(3, 2), (1, 3)])
def test_a_plan_that_can_not_run_is_built_at_another_level(build, tmp_path, asked, other):
    file = network(tmp_path, num_convs=2)
    tried, entry = build(file, not_run=1, optimization_level=asked)
    assert (len(tried), entry.optimization_level) == (2, other)
    assert entry.failed_forms == (f"optimization level {asked}: no context",)
    tried, error = build(file, not_run=2, optimization_level=asked)
    assert (len(tried), error.code) == (2, "build-failed")
    assert str(error).endswith(f"level {asked}: no context; optimization level {other}: no context")
    assert not file.with_suffix(".plan").exists()


@pytest.mark.parametrize(("precision", "expected"), [("fp32", 1.3), ("fp16", 1.25), ("int8", 1.3)])
def test_weights_of_fp16_are_rounded_for_tensorrt_alone(build, tmp_path, precision, expected):
    file = network(tmp_path, num_convs=2, weight=1.3)
    before = file.read_bytes()
    tried, entry = build(file, [FAILS_TO_MERGE], precision, mantissa_bits=2)
    assert entry.mantissa_bits == (2 if expected == 1.25 else None)
    for content in tried:
        weights = [numpy_helper.to_array(tensor) for tensor in onnx.load_from_string(content).graph.initializer]
        assert [float(array.flat[0]) for array in weights] == [pytest.approx(expected)] * 2
    assert file.read_bytes() == before


def test_what_undoes_the_rounding_is_said(build, tmp_path, caplog):
    file = network(tmp_path, num_convs=0)
    tried, entry = build(file, (), "fp16", mantissa_bits=2)
    assert (tried, entry.mantissa_bits) == ([file.read_bytes()], None)
    assert "int8.onnx has no constant weights that could be rounded" in caplog.text
    caplog.clear()
    model = onnx.load(network(tmp_path, num_convs=2))
    build(file, (), "fp16", mantissa_bits=2)
    assert not caplog.records
    for name, read in {"a": "y0", "b": "a"}.items():  # both of the same one
        model.graph.node.append(helper.make_node("BatchNormalization", [read, *"smvv"], [name]))
    del model.graph.output[0]  # y0: what others read, too, is not merged
    onnx.save(model, file)
    build(file, (), "fp16", mantissa_bits=2)
    assert "that a BatchNormalization follows: 1. TensorRT may multiply it" in caplog.text


@pytest.mark.parametrize("batches", [(4, 2, 8), (1, 16, 8), (16, 16, 8)])
def test_batches_out_of_order(batches):
    names = ("min_batch", "opt_batch", "max_batch")
    with pytest.raises(ValidationError, match="min_batch <= opt_batch <= max_batch"):
        ShapeSpec(height=4, width=4, **dict(zip(names, batches, strict=True)))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"max_batch": 16}, ""),  # the default of opt_batch gives way
        ({"opt_batch": 128}, ""),
        ({"opt_batch": 16, "max_batch": 16}, ""),
        ({"opt_batch": 64, "max_batch": 16}, "max_batch"),
        ({"opt_batch": 200}, "max_batch"),
        ({"engine_options": ("stripped",), "fp16_mantissa_bits": 7}, "fp16_mantissa_bits"),  # weights are in the ONNX
        ({"engine_options": ("stripped",)}, ""),
        ({"engine_options": ("refittable",), "fp16_mantissa_bits": 7}, ""),
    ],
)
def test_settings_that_go_together(given, refused):
    if refused:
        with pytest.raises(UserError, match=rf"export\.{refused}: got "):
            resolve(ExportConfig, "export", given)
    else:
        config = resolve(ExportConfig, "export", given)
        assert ExportConfig.model_validate(config.model_dump()) == config
