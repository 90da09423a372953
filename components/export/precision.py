"""Precision as a property of the graph: typed FP16, the opset that FP16 Q/DQ needs, fewer mantissa bits."""

from collections.abc import Collection
from copy import deepcopy
from graphlib import TopologicalSorter

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper, version_converter
from onnxruntime.transformers import float16

from components.common.contracts.errors import EngineryError
from components.common.contracts.records import FP16_MANTISSA_BITS
from components.export.placement import GraphIndex, attribute, model_opset, replace_nodes

FP16_MAX = 65504.0
FP16_QDQ_OPSET = 19  # first opset whose QuantizeLinear takes float16 tensors and scales


def to_fp16(model: onnx.ModelProto, fp16: Collection[str] = ()) -> onnx.ModelProto:
    """Returns a typed FP16 copy: float16 weights and activations, FP32 graph inputs and outputs with Casts between.

    Inputs and outputs that `fp16` names are float16, too. Numbers too small for float16 become its smallest ones,
    infinite ones stay. Activations beyond `FP16_MAX` can't be seen in the graph: compare the FP16 file's accuracy with
    FP32, or look at `Histogram.max_abs` of the calibration.

    Raises:
        EngineryError: a weight is too large for float16 or not finite, or the result is not a valid model.
    """
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if not values.shape and np.isinf(values):  # what is padded for a MaxPool
            continue
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= FP16_MAX:
            raise EngineryError(
                f"FP16: initializer '{tensor.name}' holds {largest:g}, beyond float16's largest number {FP16_MAX:g}. "
                "No FP16 file can be made of it: train with weight decay, or rescale this layer and the next.",
                code="weights-exceed-fp16",
            )
    kept = [value.name for value in (*model.graph.input, *model.graph.output) if value.name not in fp16]
    converted = float16.convert_float_to_float16(deepcopy(model), keep_io_types=kept)
    # Puts producers before consumers: the converter appends its Casts at the end, which ONNX forbids
    nodes = list(converted.graph.node)
    producer = {name: index for index, node in enumerate(nodes) for name in node.output}
    needs = {index: [producer[name] for name in node.input if name in producer] for index, node in enumerate(nodes)}
    replace_nodes(converted.graph, [nodes[index] for index in TopologicalSorter(needs).static_order()])
    _check(converted, "FP16")
    return converted


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of `model` at `FP16_QDQ_OPSET` (never lower than it has), with the IR version that this needs.

    Raises:
        EngineryError: ONNX has no conversion for an operator of the model, or the result is not a valid model.
    """
    try:
        raised = version_converter.convert_version(model, max(FP16_QDQ_OPSET, model_opset(model)))
    except (RuntimeError, version_converter.ConvertError) as error:
        raise EngineryError(
            f"opset {FP16_QDQ_OPSET}: ONNX can't convert this model from {model_opset(model)}: {error}",
            code="conversion-failed",
        ) from error
    raised.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(raised.opset_import))
    _check(raised, f"opset {FP16_QDQ_OPSET}")
    return raised


def _check(model: onnx.ModelProto, what: str) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineryError(
            f"{what}: the converted model is not valid ONNX: {error}", code="conversion-failed"
        ) from error


_MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def round_weights(model: onnx.ModelProto, bits: int) -> int:
    """Round the weights of convolutions and matrix products, in place, to float16 with fewer bits of mantissa.

    Weights are constants that are multiplied, whether stored or a Constant node, as they are or transposed and the
    like. Ties go to the even neighbour. Numbers that are subnormal, which float16 is below 2**-14, have fewer bits and
    lose as many: below 2**-(15 + bits) nothing is left of them. Biases stay, and so do numbers that float16 can't hold
    or that rounding would make infinite. Weights keep the type that they have in the graph.

    Args:
        model: With its weights loaded.
        bits: Explicit bits of the mantissa that stay, 0 to 10.

    Returns:
        How many tensors of weights were rounded.
    """
    graph = GraphIndex(model.graph)
    rounded = 0
    products = [node for node in graph.nodes if node.op_type in _MULTIPLYING]
    for name in sorted({graph.scale_source(read) for node in products for read in node.input[:2]}):
        tensor = _constant(graph, name)
        if tensor is not None and tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(_rounded(values, bits), tensor.name))
            rounded += 1
    return rounded


def scaled_convolutions(model: onnx.ModelProto) -> int:
    """Count the convolutions that a BatchNormalization of their own follows.

    TensorRT may multiply it into their weights, which have all bits then. PyTorch's exporter has done so in eval mode.
    """
    graph = GraphIndex(model.graph)
    scaling = [node for node in graph.nodes if node.op_type == "BatchNormalization"]
    found = [graph.convolution_into(node.input[0]) for node in scaling]
    return len({node.output[0] for node in found if node is not None})


def _constant(graph: GraphIndex, name: str) -> TensorProto | None:
    """The constant that a name stands for, within the model."""
    if name in graph.initializers:
        return graph.initializers[name]
    return attribute(graph.producer[name], "value", None) if graph.is_constant(name) else None


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """The numbers that float16 with `bits` explicit bits of mantissa holds nearest to `values`, in their own type.

    They become float16 first, as in the FP16 graph: plans of both then have the same weights.
    """
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float16)
    pattern = nearest.view(np.uint16)
    dropped = FP16_MANTISSA_BITS - bits
    if dropped > 0:
        # Half of the last bit that stays, less one where that bit is even: a tie then stays, all above it carries over.
        half = np.uint16((1 << (dropped - 1)) - 1) + ((pattern >> dropped) & np.uint16(1))
        pattern = (pattern + half) & np.uint16(0xFFFF << dropped & 0xFFFF)
    result = pattern.view(np.float16)
    return np.where(np.isfinite(nearest) & np.isfinite(result), result.astype(values.dtype), values)
