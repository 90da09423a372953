"""Outputs of a model in ONNX Runtime and in the PyTorch runner, and comparisons of outputs, for several tests."""

from copy import deepcopy

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from components.common.runtimes.torch import TorchGraph
from components.common.tasks.detection.boxes import MAX_CANDIDATES


def run_ort(model, images, every_tensor=False):
    """All outputs by name, as the file says: without optimizations, which would move Q/DQ nodes."""
    if every_tensor:
        inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        types = {value.name: value.type.tensor_type.elem_type for value in inferred}
        copy = deepcopy(model)
        present = {value.name for value in model.graph.output}
        for name in (name for node in model.graph.node for name in node.output if name not in present):
            copy.graph.output.append(helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None))
        model = copy
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: images})
    return dict(zip([value.name for value in session.get_outputs()], outputs, strict=True))


def run_torch(model, images):
    return TorchGraph(model).run(torch.from_numpy(images))[0].numpy()


def relative(actual, expected):
    """Largest difference over the largest expected magnitude."""
    assert actual.shape == expected.shape
    expected = expected.astype(np.float64)
    return float(np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))


def check_candidates(found: np.ndarray, every: np.ndarray, tolerance: float) -> None:
    """Compare what a file returns with all anchors, which differ in their corners: [B, ..., 8 + classes] each."""
    assert found.shape == (len(every), MAX_CANDIDATES, every.shape[2])
    for own, others in zip(found, every, strict=True):
        places = {tuple(corners): place for place, corners in enumerate(others[:, :4].tolist())}
        rows = [places[tuple(corners)] for corners in own[:, :4].tolist()]
        assert rows == sorted(set(rows))
        np.testing.assert_allclose(own, others[rows], rtol=0, atol=tolerance)
        largest = others[:, 8:].max(axis=1)
        assert largest[rows].min() >= np.sort(largest)[-MAX_CANDIDATES] - 2 * tolerance
