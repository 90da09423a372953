"""Small models for the tests of export, written as ONNX once per session."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torchvision

from components.common.contracts.transforms import ShapeSpec
from components.export.calibration import CalibrationMethod, collect_with_onnxruntime, compute_scale
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors
from tests.conftest import Shared

# Image size in pixels, where 64 won't do: adaptive pooling of alexnet and vgg can be exported at 224 only.
SIZES = {"alexnet": 224, "vgg19": 224}


def build(name: str) -> torch.nn.Module:
    """A torchvision model with random weights and, where the original's is huge, a narrow classifier."""
    torch.manual_seed(0)
    options = {"googlenet": {"aux_logits": False, "init_weights": False}, "vgg19": {"init_weights": False}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The wide classifiers of alexnet and vgg are replaced before any memory is touched.
        with torch.device("meta" if name in SIZES else "cpu"):
            model = torchvision.models.get_model(name, weights=None, num_classes=10, **options.get(name, {}))
    if name in SIZES:
        model.classifier = torch.nn.Sequential(
            torch.nn.Dropout(),
            torch.nn.Linear(model.classifier[1 if name == "alexnet" else 0].in_features, 32),
            torch.nn.ReLU(),
            torch.nn.Dropout(),
            torch.nn.Linear(32, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 10),
        )
        model = model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.reset_parameters()
    return model.eval()


def shapes_of(name: str) -> ShapeSpec:
    size = SIZES.get(name, 64)
    return ShapeSpec(height=size, width=size)


def random_images(shapes: ShapeSpec, batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shapes.input_shape(batch), dtype=np.float32)


@pytest.fixture(scope="session")
def onnx_of(shared: Shared) -> Callable[[str], Path]:
    """`onnx_of("resnet18")`: path of the model's FP32 ONNX file."""

    def path_of(name: str) -> Path:
        folder = shared(f"onnx_{name}", lambda folder: export_onnx(build(name), folder / "fp32.onnx", shapes_of(name)))
        return folder / "fp32.onnx"

    return path_of


@pytest.fixture(scope="session")
def resnet18(onnx_of):
    """Path, model, images and max-calibrated scales of a ResNet-18 at 64 px."""
    path = onnx_of("resnet18")
    model = onnx.load(path)
    images = random_images(shapes_of("resnet18"), 8)
    histograms = collect_with_onnxruntime(path, activation_tensors(model), [images])
    scales = {name: compute_scale(histogram, CalibrationMethod.MAX) for name, histogram in histograms.items()}
    return path, model, images, scales
