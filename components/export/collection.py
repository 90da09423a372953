"""Activations of the FP32 model over the calibration images, as histograms: on a GPU by PyTorch, else ONNX Runtime."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

from components.common.errors import EngineryError
from components.common.onnx_files import read_onnx
from components.common.runners.torch import TorchGraph
from components.export.calibration import Histogram

# Images per run of ONNX Runtime, whatever the batch. All intermediate tensors of a run are held at once: 90 MB for
# ResNet-50 at 224 px, which the allocator reuses; with 8 images it returns them to the system, at half the speed.
_IMAGES_PER_RUN = 2
_NO_IMAGES = "calibration: no images. Give at least one batch; 512 images are usual."


def collect_with_torch(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    batches: Iterable[torch.Tensor],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Histogram]:
    """Runs the FP32 graph with PyTorch over the calibration images and returns the histogram of each tensor.

    Args:
        model: FP32 graph with one image input.
        tensors: names from `placement.activation_tensors`.
        batches: [B, C, H, W] float32, normalized as for the model. Read once, one at a time.
        device: what the graph runs on.
        progress: called with the number of images seen so far, after every batch.

    Raises:
        UnsupportedOperators: PyTorch has no counterpart for an operator of the graph.
        EngineryError: the graph has no such tensor, there are no batches, or a tensor is not finite.
    """
    _check_known(model, tensors, "the model")
    graph = TorchGraph(model, device)
    histograms = {name: Histogram(name) for name in tensors}
    num_images = 0
    for images in batches:
        _, values = graph.run(images, keep=tensors)
        for name, histogram in histograms.items():
            histogram.add_tensor(values[name])
        num_images += len(images)
        if progress is not None:
            progress(num_images)
    if num_images == 0:
        raise EngineryError(_NO_IMAGES)
    return histograms


def collect_with_onnxruntime(
    fp32_path: Path,
    tensors: Sequence[str],
    batches: Iterable[np.ndarray],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Histogram]:
    """Runs the FP32 model over the calibration images and returns the histogram of each tensor.

    Args:
        fp32_path: ONNX file with one image input.
        tensors: names from `placement.activation_tensors`.
        batches: [B, C, H, W] float32 arrays, normalized as for the model. Read once, one at a time.
        progress: called with the number of images seen so far, after every two.

    Raises:
        EngineryError: the file has no such tensor, there are no batches, or a tensor is not finite.
    """
    model = read_onnx(fp32_path)
    input_name = model.graph.input[0].name
    _check_known(model, tensors, str(fp32_path))
    outputs = [name for name in tensors if name != input_name]
    present = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in outputs
        if name not in present
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    del model

    histograms = {name: Histogram(name) for name in tensors}
    num_images = 0
    for batch in batches:
        for start in range(0, len(batch), _IMAGES_PER_RUN):
            images = np.ascontiguousarray(batch[start : start + _IMAGES_PER_RUN], dtype=np.float32)  # [b, C, H, W]
            if input_name in histograms:
                histograms[input_name].add(images)
            for name, values in zip(outputs, session.run(outputs, {input_name: images}), strict=True):
                histograms[name].add(values)
            num_images += len(images)
            if progress is not None:
                progress(num_images)
    if num_images == 0:
        raise EngineryError(_NO_IMAGES)
    return histograms


def _check_known(model: onnx.ModelProto, tensors: Sequence[str], source: str) -> None:
    known = {name for node in model.graph.node for name in node.output} | {model.graph.input[0].name}
    if missing := [name for name in tensors if name not in known]:
        raise EngineryError(f"calibration: {source} has no tensor named {missing[:3]}. Was it exported anew since?")
