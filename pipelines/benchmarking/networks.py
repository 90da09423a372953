"""A network with random weights as the ONNX files of a bundle. Kernels take as long with any."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch

from components.common.models import build_model
from components.common.onnx_files import read_onnx
from components.common.shapes import ShapeSpec
from components.export.calibration import CalibrationMethod, Histogram, compute_scale
from components.export.collection import collect_with_onnxruntime, collect_with_torch
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import insert_qdq

NUM_CLASSES = 1000
_NUM_CALIBRATION_IMAGES = 8


def write_network(architecture: str, shapes: ShapeSpec, folder: Path) -> list[str]:
    """Write fp32.onnx, fp16.onnx, int8.onnx and int8_fp16.onnx of a network with 1,000 classes.

    Args:
        architecture: A torchvision classifier, or timm/NAME.
        shapes: Image size and batches.
        folder: Where the files go; made if it is not there.

    Returns:
        Names of the graph's convolutions.

    Raises:
        UserError: there is no such network.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(architecture, NUM_CLASSES).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            # A fresh residual block ends in a factor of zero, and a convolution of zeros is nothing to measure.
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    export_onnx(model, folder / "fp32.onnx", shapes)
    fp32 = with_names(read_onnx(folder / "fp32.onnx"))
    histograms = _histograms(fp32, folder / "fp32.onnx", shapes)
    scales = {tensor: compute_scale(values, CalibrationMethod.MAX) for tensor, values in histograms.items()}
    fp16 = to_fp16(fp32)
    onnx.save(fp16, folder / "fp16.onnx")
    onnx.save(insert_qdq(fp32, scales), folder / "int8.onnx")
    onnx.save(insert_qdq(raise_opset(fp16), scales), folder / "int8_fp16.onnx")
    return [node.name for node in fp32.graph.node if node.op_type == "Conv"]


def _histograms(fp32: onnx.ModelProto, file: Path, shapes: ShapeSpec) -> dict[str, Histogram]:
    tensors = activation_tensors(fp32)
    if torch.cuda.is_available():
        batches = (torch.from_numpy(batch).cuda() for batch in _batches(shapes))
        return collect_with_torch(fp32, tensors, batches, torch.device("cuda"))
    return collect_with_onnxruntime(file, tensors, _batches(shapes))


def _batches(shapes: ShapeSpec) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(_NUM_CALIBRATION_IMAGES):
        yield rng.standard_normal(shapes.input_shape(1), dtype=np.float32)
