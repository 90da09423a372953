"""What TensorRT is given to build, and when again. It is replaced by what it says; tests/gpu builds real engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import Precision
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec
from components.export import engines
from components.export.config import ExportConfig

FAILS_TO_MERGE = "graphOptimizer.cpp::chooseHigherPrecision::1 Error (kFLOAT || kHALF)"


def network(folder: Path, num_siblings: int, weight: float = 1.0) -> Path:
    """1x1 convolutions that read the same tensor."""
    nodes = [helper.make_node("Conv", ["x", f"w{number}"], [f"y{number}"]) for number in range(num_siblings)]
    weights = [numpy_helper.from_array(np.full((8, 8, 1, 1), weight, np.float32), f"w{number}") for number in range(8)]
    read = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 4, 4])
    written = [helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None) for number in range(num_siblings)]
    graph = helper.make_graph(nodes, "siblings", [read], written, weights[:num_siblings])
    file = folder / "int8.onnx"
    onnx.save(helper.make_model(graph), file)
    return file


def build(
    monkeypatch: pytest.MonkeyPatch, file: Path, errors: list[str], mantissa_bits: int = 10
) -> tuple[list[bytes], Any]:
    """What was built, try by try, and the plan. A try ends with the next of `errors`, the one after them in a plan."""
    tried: list[bytes] = []

    def try_to_build(trt: Any, order: Any, model: bytes) -> tuple[Any, tuple[str, ...]]:
        tried.append(model)
        return (None if len(tried) <= len(errors) else b"plan"), ("INT8",)

    take_errors = iter(["what an earlier build left", *errors])
    logger = SimpleNamespace(take_errors=lambda: next(take_errors))
    monkeypatch.setattr(engines, "tensorrt_logger", lambda: logger)
    monkeypatch.setattr(engines, "_try_to_build", try_to_build)
    order = engines._Order(file, "int8", ShapeSpec(height=4, width=4), None, 3, 1 << 20, frozenset(), mantissa_bits)
    try:
        return tried, engines._plan(SimpleNamespace(__version__="8.6.0"), order)
    except EngineryError as error:
        return tried, error


def test_siblings_that_are_not_merged_are_built_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = network(tmp_path, num_siblings=2)
    before = file.read_bytes()
    tried, built = build(monkeypatch, file, [FAILS_TO_MERGE])
    assert built == (b"plan", ("INT8",), None)
    assert tried[0] == before == file.read_bytes()
    again = onnx.load_model_from_string(tried[1])
    assert [list(entry.ints) for entry in again.graph.node[1].attribute] == [[2, 2]]


@pytest.mark.parametrize(
    ("num_siblings", "errors", "num_tries"),
    [
        (2, [FAILS_TO_MERGE, "out of memory"], 2),
        (2, ["out of memory"], 1),  # another error is not helped by it
        (1, [FAILS_TO_MERGE], 1),  # nothing to keep apart
    ],
)
def test_the_last_error_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_siblings: int, errors: list[str], num_tries: int
) -> None:
    tried, error = build(monkeypatch, network(tmp_path, num_siblings), errors)
    assert len(tried) == num_tries
    assert isinstance(error, EngineryError)
    assert str(error).endswith(f"int8.onnx as int8: {errors[-1]}")


def weights_of(content: bytes) -> list[float]:
    return [
        float(numpy_helper.to_array(weights).flat[0]) for weights in onnx.load_from_string(content).graph.initializer
    ]


def test_weights_are_rounded_for_tensorrt_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in the second try."""
    file = network(tmp_path, num_siblings=2, weight=1.3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tried, (_, _, kept_bits) = build(monkeypatch, file, [FAILS_TO_MERGE], mantissa_bits=2)
    assert kept_bits == 2
    assert [weights_of(content) for content in tried] == [[1.25, 1.25]] * 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("precision", "rounded"), [("fp32", False), ("fp16", True), ("int8", False)])
def test_fp16_alone_is_rounded(
    precision: Precision, rounded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the manifest says so."""
    tried: list[bytes] = []

    def try_to_build(trt: object, order: object, model: bytes) -> tuple[bytes, tuple[str, ...]]:
        tried.append(model)
        return b"plan", ("FLAG",)

    for name, value in {"device_capability": (9, 0), "device_name": "NVIDIA H200"}.items():
        monkeypatch.setattr(torch.cuda, f"get_{name}", lambda value=value: value)
    monkeypatch.setattr(engines, "load_tensorrt", lambda: SimpleNamespace(__version__="8.6.0"))
    monkeypatch.setattr(engines, "driver_version", lambda: "580")
    monkeypatch.setattr(engines, "tensorrt_logger", lambda: SimpleNamespace(take_errors=lambda: ""))
    monkeypatch.setattr(engines, "_try_to_build", try_to_build)
    entry = engines.build_engine(
        network(tmp_path, num_siblings=1, weight=1.3),
        tmp_path / f"{precision}.plan",
        precision=precision,
        shapes=ShapeSpec(height=4, width=4),
        timing_cache_path=None,
        optimization_level=3,
        workspace_bytes=1 << 20,
        mantissa_bits=2,
    )
    assert entry.mantissa_bits == (2 if rounded else None)
    assert (b"\x00\x00\xa0\x3f" in tried[0]) == rounded  # 1.25 as float32


def test_a_plan_without_rounded_weights_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = network(tmp_path, num_siblings=0)
    tried, (_, _, kept_bits) = build(monkeypatch, file, [], mantissa_bits=2)
    assert (tried, kept_bits) == ([file.read_bytes()], None)
    assert "int8.onnx has no constant weights that could be rounded" in caplog.text


def test_scales_that_undo_the_rounding_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = network(tmp_path, num_siblings=2)
    build(monkeypatch, file, [], mantissa_bits=2)
    assert not caplog.records
    model = onnx.load(file)
    for name, read in {"a": "y0", "b": "a"}.items():  # both of the same one
        model.graph.node.append(helper.make_node("BatchNormalization", [read, *"smvv"], [name]))
    del model.graph.output[0]  # y0: what others read, too, is not merged
    onnx.save(model, file)
    build(monkeypatch, file, [], mantissa_bits=2)
    assert "that a BatchNormalization follows: 1. TensorRT may multiply it" in caplog.text


@pytest.mark.parametrize(
    ("batches", "told"),
    [((4, 2, 8), "got 4, 2, 8"), ((1, 16, 8), "got 1, 16, 8"), ((16, 16, 8), "got 16, 16, 8")],
)
def test_batches_in_order(batches: tuple[int, int, int], told: str) -> None:
    names = ("min_batch", "opt_batch", "max_batch")
    with pytest.raises(ValidationError, match=f"min_batch <= opt_batch <= max_batch, {told}"):
        ShapeSpec(height=4, width=4, **dict(zip(names, batches, strict=True)))


@pytest.mark.parametrize("given", [{"opt_batch": 64, "max_batch": 16}, {"opt_batch": 200}])
def test_kernels_tuned_for_a_batch_that_no_plan_takes(given: dict[str, int]) -> None:
    largest = given.get("max_batch", 128)
    with pytest.raises(UserError, match=rf"export\.max_batch: got {largest}, .* set export\.opt_batch to {largest} or"):
        resolve(ExportConfig, "export", given)


@pytest.mark.parametrize("given", [{"max_batch": 16}, {"opt_batch": 128}, {"opt_batch": 16, "max_batch": 16}])
def test_batches_that_go_together(given: dict[str, int]) -> None:
    """The default of opt_batch gives way."""
    config = resolve(ExportConfig, "export", given)
    assert ExportConfig.model_validate(config.model_dump()) == config
