"""The PyTorch runner on a GPU: the same answers, histograms and ranking as on the CPU."""

import numpy as np
import onnx
import pytest
import torch
import torchvision

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.torch import TorchRunner
from components.common.tasks.predictions import class_divergence
from components.export.calibration import collect_with_onnxruntime, collect_with_torch, compute_scale
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors
from components.export.qdq import Arithmetic, insert_qdq
from components.export.selection import Ranking

SHAPES = ShapeSpec(height=64, width=64)
NETWORKS = ("resnet18", "mobilenet_v2", "efficientnet_b0")


@pytest.fixture(scope="module", params=NETWORKS)
def files(request, tmp_path_factory):
    """FP32 and INT8 files of an untrained network, the scales, and images."""
    assert torch.cuda.is_available(), "these tests need a GPU"
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = torchvision.models.get_model(request.param, weights=None, num_classes=10)
    images = np.random.default_rng(0).standard_normal(SHAPES.input_shape(16), dtype=np.float32)
    _settle(model, torch.from_numpy(images))
    export_onnx(model.eval(), folder / "fp32.onnx", SHAPES)
    proto = onnx.load(folder / "fp32.onnx")
    histograms = collect_with_onnxruntime(folder / "fp32.onnx", activation_tensors(proto), [images])
    scales = {name: compute_scale(entry, "max") for name, entry in histograms.items()}
    onnx.save(insert_qdq(proto, scales), folder / "int8.onnx")
    return folder, histograms, scales, images


def _settle(model: torch.nn.Module, images: torch.Tensor) -> None:
    """Batch statistics and logits of a size that training would give: without them signals fade out."""
    with torch.no_grad():
        for _ in range(30):
            model(images)
        head = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
        head.weight *= 3.0 / model.eval()(images).std()


def test_fp32_and_int8_answer_as_onnx_runtime(files):
    folder, _, _, images = files
    for name, tolerance in (("fp32.onnx", 1e-4), ("int8.onnx", 0.08)):
        actual = TorchRunner(folder / name, SHAPES, "cuda").infer(images)
        expected = OnnxRuntimeRunner(folder / name, SHAPES).infer(images)
        assert np.abs(actual - expected).max() / np.abs(expected).max() < tolerance, name


def test_histograms_are_those_of_the_cpu(files):
    folder, expected, _, images = files
    proto = onnx.load(folder / "fp32.onnx")
    batches = [torch.from_numpy(images[:9]).cuda(), torch.from_numpy(images[9:]).cuda()]
    actual = collect_with_torch(proto, activation_tensors(proto), batches, torch.device("cuda"))
    assert list(actual) == list(expected)
    for name, histogram in actual.items():
        assert histogram.num_values == expected[name].num_values
        assert histogram.max_abs == pytest.approx(expected[name].max_abs, rel=1e-3)
        moved = np.abs(histogram.counts - expected[name].counts).sum() / 2
        assert moved < 0.02 * histogram.num_values, name  # sums differ in the last bits


def test_ranking_is_that_of_the_cpu(files):
    folder, _, scales, images = files
    proto = onnx.load(folder / "fp32.onnx")
    costs = []
    for device in ("cpu", "cuda"):

        def logits(model: onnx.ModelProto, device: str = device) -> np.ndarray:
            onnx.save(model, folder / "ranked.onnx")
            return TorchRunner(folder / "ranked.onnx", SHAPES, device).infer(images[:8])

        ranking = Ranking(
            proto,
            scales,
            Arithmetic(),
            logits,
            divergence=class_divergence,
            deadline=float("inf"),
            progress=lambda done, total: None,
        )
        assert sorted(node for nodes in ranking for node in nodes) == sorted(ranking.operators)
        costs.append(ranking.costs)
    correlation = np.corrcoef([[cost[nodes] for nodes in costs[0]] for cost in costs])[0, 1]
    assert correlation > 0.95
