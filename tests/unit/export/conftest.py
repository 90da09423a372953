"""A small model for the tests of export."""

import onnx
import pytest

from components.export.calibration import collect_with_onnxruntime, compute_scale
from components.export.placement import activation_tensors

from ..networks import random_images, shapes_of


@pytest.fixture(scope="session")
def resnet18(onnx_of):
    """Path, model, images and max-calibrated scales of a ResNet-18 at 64 px."""
    path = onnx_of("resnet18")
    model = onnx.load(path)
    images = random_images(shapes_of("resnet18"), 8)
    return path, model, images, max_scales(path, images)


def max_scales(path, images, **wanted):
    """Scales of a file's activations by their largest magnitudes on some images."""
    histograms = collect_with_onnxruntime(path, activation_tensors(onnx.load(path), **wanted), [images])
    return {name: compute_scale(histogram, "max") for name, histogram in histograms.items()}
