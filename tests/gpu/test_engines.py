"""Engines of a small network in all precisions, against torch. Fails, never skips, without a GPU or TensorRT."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from components.common.contracts.errors import UserError
from components.common.contracts.records import EngineEntry
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import ClassPredictions, predict, predict_in_parts
from components.common.data.loader import Batch
from components.common.runtimes.architectures import build_model
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.tensorrt import (
    TensorRTRunner,
    load_engine,
    load_tensorrt,
    tensorrt_logger,
    why_unavailable,
)
from components.common.tasks.detection.candidates import keep_candidates
from components.export.calibration import collect_with_onnxruntime, compute_scale
from components.export.engines import build_engine, onnx_file_for
from components.export.inspection import inspect_engine
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors
from components.export.precision import raise_opset, round_weights, to_fp16
from components.export.qdq import insert_qdq
from components.validate.run import gpus_alike
from tests.unit.onnx_outputs import check_candidates
from tests.unit.refusals import refuses

SHAPES = ShapeSpec(height=32, width=32, min_batch=1, opt_batch=4, max_batch=8)
PRECISIONS = ("fp32", "fp16", "int8")
# Largest difference of a logit from torch in FP32, relative to the largest logit.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1}
TIMES = {"warmup_s": 0.05, "duration_s": 0.2, "min_iterations": 10}


class Network(nn.Module):
    """Convolutions with a residual addition, pooling and a linear layer: all that Q/DQ placement has to deal with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)  # [B, 32, 16, 16]
        return self.head(torch.relu(self.block(features) + features))


@pytest.fixture(scope="session", autouse=True)
def _tensorrt() -> None:
    reason = why_unavailable()
    assert reason is None, reason


@pytest.fixture(scope="session")
def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="session")
def bundle(network, tmp_path_factory) -> Path:
    """The four ONNX files."""
    folder = tmp_path_factory.mktemp("bundle")
    export_onnx(network, folder / "fp32.onnx", SHAPES)
    fp32 = onnx.load(folder / "fp32.onnx")
    batches = [images(8, seed) for seed in range(4)]
    histograms = collect_with_onnxruntime(folder / "fp32.onnx", activation_tensors(fp32), batches)
    scales = {name: compute_scale(histogram, "max") for name, histogram in histograms.items()}
    onnx.save(to_fp16(fp32), folder / "fp16.onnx")
    onnx.save(insert_qdq(fp32, scales), folder / "int8.onnx")
    onnx.save(insert_qdq(to_fp16(raise_opset(fp32)), scales), folder / "int8_fp16.onnx")
    return folder


@pytest.fixture(scope="session")
def built(bundle) -> dict[str, EngineEntry]:
    """A plan per precision in the bundle's folder."""
    return {precision: build(bundle, precision) for precision in PRECISIONS}


@pytest.fixture(params=PRECISIONS)
def runner(request, bundle, built):
    runner = TensorRTRunner(bundle / f"{request.param}.plan", SHAPES)
    yield runner
    runner.close()


def build(bundle: Path, precision: str, **changes) -> EngineEntry:
    options = {"plan_path": bundle / f"{precision}.plan", "timing_cache_path": bundle / "timing", **changes}
    return build_engine(bundle / onnx_file_for(precision), precision=precision, shapes=SHAPES, **options)


def images(batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPES.input_shape(batch), dtype=np.float32)


CONVOLUTIONS = ["/stem/stem.0/Conv", "/block/block.0/Conv", "/block/block.2/Conv"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", [1, 3, 8, 21])  # 21 = 8 + 8 + 5
def test_logits_are_those_of_torch(network, bundle, built, precision, batch):
    inputs = images(batch, seed=100 + batch)
    with torch.inference_mode():
        expected = network(torch.from_numpy(inputs)).numpy()
    runner = TensorRTRunner(bundle / f"{precision}.plan", SHAPES)
    logits = runner.infer(inputs)
    runner.close()
    assert logits.shape == (batch, 10)
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= TOLERANCE[precision] * np.abs(expected).max()


@pytest.mark.parametrize("architecture", ["detection/fcos_small", "segmentation/fpn_small"])
def test_outputs_may_have_more_axes_than_those_of_a_classifier(architecture, tmp_path):
    torch.manual_seed(0)
    network, shapes = build_model(architecture, 3).eval(), ShapeSpec(height=64, width=64, opt_batch=4, max_batch=8)
    export_onnx(network, tmp_path / "fp32.onnx", shapes)
    build_engine(tmp_path / "fp32.onnx", precision="fp32", shapes=shapes, plan_path=tmp_path / "fp32.plan")
    inputs = np.random.default_rng(0).standard_normal(shapes.input_shape(11), dtype=np.float32)
    with torch.inference_mode():
        expected = network(torch.from_numpy(inputs)).numpy()
    runner = TensorRTRunner(tmp_path / "fp32.plan", shapes)
    for _ in range(3):  # the second and third time as a CUDA graph
        np.testing.assert_allclose(runner.infer(inputs), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    runner.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_detector_returns_its_surest_anchors_in_their_order(precision, tmp_path):
    torch.manual_seed(0)
    network, shapes = (
        build_model("detection/fcos_small", 3).eval(),
        ShapeSpec(height=288, width=288, opt_batch=4, max_batch=8),
    )
    export_onnx(network, tmp_path / "whole.onnx", shapes)
    whole = onnx.load(tmp_path / "whole.onnx")
    for name, model in (("fp32", whole), ("fp16", to_fp16(whole))):
        onnx.save(keep_candidates(model), tmp_path / f"{name}.onnx")
    file, plan = tmp_path / onnx_file_for(precision), tmp_path / "model.plan"
    build_engine(file, precision=precision, shapes=shapes, plan_path=plan)
    inputs = np.random.default_rng(0).standard_normal(shapes.input_shape(11), dtype=np.float32)
    with torch.inference_mode():
        every = network(torch.from_numpy(inputs)).numpy()
    runner = TensorRTRunner(plan, shapes)
    for _ in range(3):  # the second and third time as a CUDA graph
        check_candidates(runner.infer(inputs), every, 1e-3 if precision == "fp32" else 0.05)
    runner.close()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 8, 21])
def test_images_on_the_gpu_give_the_same_logits(runner, batch, memory_format):
    inputs = images(batch, seed=batch)
    expected = runner.infer(inputs)
    on_gpu = torch.from_numpy(inputs).cuda().to(memory_format=memory_format)
    for _ in range(3):  # the second and third time as a CUDA graph
        np.testing.assert_array_equal(runner.infer(on_gpu), expected)


def test_images_are_waited_for(runner):
    """They may still be computed on the current stream when `infer` is called."""
    inputs = torch.from_numpy(images(8)).cuda()
    expected = runner.infer(inputs.clone())
    with torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 64
        late = inputs + 0 * busy.nan_to_num(0, 0, 0).sum()
        np.testing.assert_array_equal(runner.infer(late), expected)


def test_parts_on_several_gpus_are_the_whole(bundle, built):
    """Each GPU alike takes a part; with one GPU, two runners share it."""
    gpus = gpus_alike()
    labels = torch.arange(8) % 10
    batches = [Batch(images=torch.from_numpy(images(8, seed)).cuda(), labels=labels) for seed in range(12)]
    whole = TensorRTRunner(bundle / "int8.plan", SHAPES)
    expected = predict({"int8": whole}, batches, 96, lambda done, total: None)["int8"]
    whole.close()
    parts = []
    for part in range(max(2, len(gpus))):
        gpu = gpus[part % len(gpus)]
        with torch.cuda.device(gpu):
            mine = [Batch(images=batch.images.to(gpu), labels=labels) for batch in batches[part :: max(2, len(gpus))]]
            parts.append(({"int8": TensorRTRunner(bundle / "int8.plan", SHAPES)}, mine))
    found = predict_in_parts(parts, 96, lambda done, total: None)["int8"]
    order = [index for part in range(len(parts)) for index in range(part, 12, len(parts))]
    rows = np.concatenate([np.arange(8 * index, 8 * index + 8) for index in order])
    assert isinstance(found, ClassPredictions)
    assert isinstance(expected, ClassPredictions)
    np.testing.assert_array_equal(found.top, expected.top[rows])
    assert found.ece_pct == pytest.approx(expected.ece_pct)
    for runners, _ in parts:
        runners["int8"].close()


def test_int8_is_quantized(bundle, built):
    """The INT8 engine differs from FP16: its quantization was not optimized away."""
    answers = []
    for precision in ("fp16", "int8"):
        runner = TensorRTRunner(bundle / f"{precision}.plan", SHAPES)
        answers.append(runner.infer(images(8)))
        runner.close()
    assert np.abs(answers[0] - answers[1]).max() > 1e-4


def test_fp16_with_weights_of_fewer_bits(bundle, built, tmp_path):
    """The plan computes with the rounded weights, and the ONNX file keeps its own."""
    entry = build(bundle, "fp16", plan_path=tmp_path / "fp16.plan", mantissa_bits=3)
    assert (entry.mantissa_bits, built["fp16"].mantissa_bits) == (3, None)
    model = onnx.load(bundle / "fp32.onnx")
    assert round_weights(model, 3) == 4
    onnx.save(model, tmp_path / "rounded.onnx")
    runner = TensorRTRunner(tmp_path / "fp16.plan", SHAPES)
    answer = runner.infer(images(8))
    runner.close()
    files = (bundle / "fp32.onnx", tmp_path / "rounded.onnx")
    as_it_was, rounded = (OnnxRuntimeRunner(file, SHAPES).infer(images(8)) for file in files)
    assert np.abs(answer - rounded).max() < 0.2 * np.abs(as_it_was - rounded).max()


def test_info(bundle, built):
    trt = load_tensorrt()
    for precision, info in built.items():
        assert info.precision == precision
        assert info.source_onnx == onnx_file_for(precision)
        assert info.tensorrt_version.startswith(trt.__version__)
        assert info.tensorrt_version.count(".") == 3  # with the build, which the module of 8.6 leaves out
        assert info.gpu_name == torch.cuda.get_device_name()
        assert info.compute_capability == "{}.{}".format(*torch.cuda.get_device_capability())
        assert info.file == f"{precision}.plan"
        assert info.build_seconds > 0


def test_timing_cache_is_reused(bundle, built):
    (cache,) = (bundle / "timing").glob("*fp16*")
    before = cache.stat().st_size
    again = build(bundle, "fp16")
    if not cache.exists() and load_tensorrt().__version__ == "8.6.0":
        pytest.xfail("TensorRT 8.6.0 refuses what it wrote: Myelin error from unknown graph")
    assert before > 0
    assert cache.stat().st_size >= before
    assert again.build_seconds < built["fp16"].build_seconds


def test_damaged_timing_cache_starts_again(bundle, built, tmp_path):
    (cache,) = (bundle / "timing").glob("*fp32*")
    damaged = tmp_path / cache.name
    damaged.write_bytes(b"not a timing cache")
    build(bundle, "fp32", timing_cache_path=tmp_path)
    assert not damaged.exists() or damaged.read_bytes() != b"not a timing cache"
    build(bundle, "fp32", timing_cache_path=tmp_path)
    assert damaged.stat().st_size > 100


@pytest.mark.parametrize("with_transfers", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_measure(runner, batch, with_transfers):
    timing = runner.measure(batch, **TIMES, with_transfers=with_transfers)
    assert timing.batch_size == batch
    assert len(timing.latencies_ms) >= TIMES["min_iterations"]
    assert timing.wall_s >= TIMES["duration_s"]
    assert (timing.latencies_ms > 0).all()
    assert timing.images_per_s > 0


def test_measured_computation_is_a_cuda_graph(runner):
    runner.measure(4, **TIMES)
    (stream,) = runner._streams
    assert stream._ahead.graphs[4] is not None
    assert stream._behind.graphs[4] is not None


def test_runner_answers_the_same_after_measuring(runner):
    inputs = images(5)
    before = runner.infer(inputs)
    runner.measure(8, **TIMES)
    np.testing.assert_array_equal(runner.infer(inputs), before)


def test_answers_are_the_same_with_and_without_graph(runner):
    """The second batch of a size in a row is captured, and other sizes in between do not disturb its graph."""
    sizes = [4, 4, 7, 7, 4, 4, 8, 1, 1, 4]
    answers = [runner.infer(images(size, seed=size)) for size in sizes]
    assert set(runner._streams[0]._behind.graphs) >= {1, 4, 7}
    for size, answer in zip(sizes, answers, strict=True):
        np.testing.assert_array_equal(answer, answers[sizes.index(size)])


@pytest.mark.parametrize("num_streams", [2, 4])
def test_several_contexts(runner, num_streams):
    """All contexts share the one profile, each with its own graphs, and don't disturb each other."""
    before = runner.infer(images(5))
    timing = runner.measure(8, **TIMES, num_streams=num_streams)
    assert len(runner._streams) == num_streams
    assert all(stream._ahead.graphs[8] is not None for stream in runner._streams)
    assert len(timing.latencies_ms) >= TIMES["min_iterations"]
    buffer_sets = [(stream, buffers) for stream in runner._streams for buffers in (stream._ahead, stream._behind)]
    held = [
        (stream, buffers.host_in[:8].float().clone(), buffers.device_out[:8].float().cpu())
        for stream, buffers in buffer_sets
    ]
    for stream, inputs, together in held:  # what they computed side by side, from what each held
        np.testing.assert_array_equal(stream.infer(inputs.clone()), together.numpy())
    np.testing.assert_array_equal(runner.infer(images(5)), before)


def test_int8_is_that_of_the_qdq_graph(bundle, built):
    """The engine computes what ONNX Runtime simulates from the same Q/DQ graph."""
    engine, reference = TensorRTRunner(bundle / "int8.plan", SHAPES), OnnxRuntimeRunner(bundle / "int8.onnx", SHAPES)
    answers, expected = (runner.infer(images(8, seed=7)) for runner in (engine, reference))
    engine.close()
    # One code of INT8 is 1/127 of a tensor's range; FP16 in between may round to the neighbouring one.
    assert np.abs(answers - expected).max() <= 0.02 * np.abs(expected).max()
    assert (answers.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", {"FP32"}), ("fp16", {"FP16", "FP32", "TF32"}), ("int8", {"INT8"})]
)
def test_inspector(bundle, built, precision, allowed):
    layers = inspect_engine(bundle / f"{precision}.plan", built[precision], SHAPES, CONVOLUTIONS)
    assert sum(layers.convolutions.values()) == 3
    assert set(layers.convolutions) <= allowed  # FP16 is a permission: where FP32 is as fast, 8.6 may take it
    assert set(layers.exceptions.values()) == set(layers.convolutions) - {precision.upper()}
    rows = json.loads((bundle / layers.file).read_text())
    assert len(rows) == layers.num_layers
    assert layers.num_reformats == sum(row["kind"] == "Reformat" for row in rows)
    fused = next(row for row in rows if "/Add" in row["nodes"])
    assert {"/block/block.2/Conv", "/Relu"} <= set(fused["nodes"])


def test_refittable(bundle, tmp_path):
    entry = build(bundle, "int8", plan_path=tmp_path / "int8.plan", options=("refittable",))
    assert "REFIT" in entry.flags
    _, engine = load_engine(tmp_path / "int8.plan", entry)
    assert engine.refittable


def test_hardware_compatible(bundle, built, tmp_path):
    entry = build(bundle, "int8", plan_path=tmp_path / "int8.plan", options=("hardware_compatible",))
    elsewhere = entry.model_copy(update={"gpu_name": "NVIDIA A100", "compute_capability": "8.0"})
    runner = TensorRTRunner(tmp_path / "int8.plan", SHAPES, elsewhere)  # such a plan may come from another GPU
    plain = TensorRTRunner(bundle / "int8.plan", SHAPES, built["int8"])
    answers, expected = (each.infer(images(8)) for each in (runner, plain))
    assert np.abs(answers - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu_name": "NVIDIA A100", "compute_capability": "8.0"}, "GPU NVIDIA A100 there, .* capability 8.0 there"),
        ({"tensorrt_version": "9.9.9"}, "TensorRT 9.9.9 there"),
    ],
)
def test_plan_of_another_machine(bundle, built, changes, said):
    with pytest.raises(UserError, match=said):
        TensorRTRunner(bundle / "int8.plan", SHAPES, built["int8"].model_copy(update=changes))


def test_two_runners_of_one_plan(bundle, built):
    first, second = (TensorRTRunner(bundle / "fp16.plan", SHAPES) for _ in range(2))
    np.testing.assert_array_equal(first.infer(images(3)), second.infer(images(3)))
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (lambda runner: runner.measure(9, **TIMES), "wrong-batches"),
        (lambda runner: runner.infer(np.zeros((2, 3, 16, 16), np.float32)), "wrong-image-shape"),
    ],
)
def test_other_batches_and_shapes_are_refused(runner, use, code):
    with refuses(code):
        use(runner)


def test_closed_runner(bundle, built):
    runner = TensorRTRunner(bundle / "fp32.plan", SHAPES)
    runner.close()
    for use in (lambda: runner.infer(images(1)), lambda: runner.measure(1, **TIMES)):
        with refuses("runner-closed"):
            use()
    runner.close()  # a second time does no harm


@pytest.mark.parametrize("share", [None, 0, 0.1, 0.5, 0.99])
def test_damaged_and_truncated_plans(bundle, built, tmp_path, share):
    plan = (bundle / "int8.plan").read_bytes()
    # None: TensorRT keeps its magic number and version in the first bytes.
    (tmp_path / "other.plan").write_bytes(bytes(64) + plan[64:] if share is None else plan[: int(share * len(plan))])
    with refuses("plan-unreadable"):
        TensorRTRunner(tmp_path / "other.plan", SHAPES)


def test_plan_for_smaller_batches(bundle, built):
    with refuses("wrong-batches"):
        TensorRTRunner(bundle / "fp32.plan", SHAPES.model_copy(update={"max_batch": 64}))


def test_a_network_that_tensorrt_can_not_parse(bundle, tmp_path):
    model = onnx.load(bundle / "fp32.onnx")
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "bad.onnx")
    with refuses("onnx-not-parsed", says="bad.onnx"):
        build_engine(tmp_path / "bad.onnx", tmp_path / "bad.plan", precision="fp32", shapes=SHAPES)
    assert not (tmp_path / "bad.plan").exists()


def test_logger_is_one_per_process():
    assert tensorrt_logger() is tensorrt_logger()
