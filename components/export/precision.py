"""Precision as a property of the graph: typed FP16, and the newer opset that FP16 Q/DQ needs."""

from graphlib import TopologicalSorter

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper, version_converter
from onnxruntime.transformers import float16

from components.common.errors import EngineryError
from components.export.placement import model_opset, replace_nodes

FP16_MAX = 65504.0
FP16_QDQ_OPSET = 19  # first opset whose QuantizeLinear takes float16 tensors and scales


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a typed FP16 copy: float16 weights and activations, FP32 graph inputs and outputs with Casts between.

    Numbers too small for float16 become its smallest ones. Activations beyond `FP16_MAX` can't be seen in the graph:
    compare the FP16 file's accuracy with FP32, or look at `Histogram.max_abs` of the calibration.

    Raises:
        EngineryError: a weight is too large for float16 or not finite, or the result is not a valid model.
    """
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= FP16_MAX:
            raise EngineryError(
                f"FP16: initializer '{tensor.name}' holds {largest:g}, beyond float16's largest number {FP16_MAX:g}. "
                "No FP16 file can be made of it: train with weight decay, or rescale this layer and the next."
            )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    converted = float16.convert_float_to_float16(copy, keep_io_types=True)
    _sort_topologically(converted.graph)
    _check(converted, "FP16")
    return converted


def raise_opset(model: onnx.ModelProto, opset: int = FP16_QDQ_OPSET) -> onnx.ModelProto:
    """Returns a copy of `model` at `opset` (never lower than it has), with the IR version that the opset needs.

    Raises:
        EngineryError: ONNX has no conversion for an operator of the model, or the result is not a valid model.
    """
    try:
        raised = version_converter.convert_version(model, max(opset, model_opset(model)))
    except (RuntimeError, version_converter.ConvertError) as error:
        raise EngineryError(
            f"opset {opset}: ONNX can't convert this model from {model_opset(model)}: {error}"
        ) from error
    raised.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(raised.opset_import))
    _check(raised, f"opset {opset}")
    return raised


def _sort_topologically(graph: onnx.GraphProto) -> None:
    """Puts producers before consumers: the converter appends its Casts at the end, which ONNX forbids."""
    nodes = list(graph.node)
    producer = {name: index for index, node in enumerate(nodes) for name in node.output}
    needs = {index: [producer[name] for name in node.input if name in producer] for index, node in enumerate(nodes)}
    replace_nodes(graph, [nodes[index] for index in TopologicalSorter(needs).static_order()])


def _check(model: onnx.ModelProto, what: str) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineryError(f"{what}: the converted model is not valid ONNX: {error}") from error
