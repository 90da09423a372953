"""Weights of fewer bits, for arithmetic that draws less power.

What a multiplier draws depends on the bits that it is given. A GPU whose board is at its power limit lowers its clock
until the power fits, so weights with zeros at the end of their mantissas can make the same kernels faster.
"""

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from components.common.records import FP16_MANTISSA_BITS
from components.export.placement import Graph

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
    graph = Graph(model.graph)
    rounded = 0
    for name in sorted({graph.scale_source(read) for node in _multiplying(model) for read in node.input[:2]}):
        tensor = _constant(graph, name)
        if tensor is not None and tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(_rounded(values, bits), tensor.name))
            rounded += 1
    return rounded


def scaled_convolutions(model: onnx.ModelProto) -> int:
    """How many convolutions a BatchNormalization of their own follows.

    TensorRT may multiply it into their weights, which have all bits then. PyTorch's exporter has done so in eval mode.
    """
    graph = Graph(model.graph)
    scaling = [node for node in graph.nodes if node.op_type == "BatchNormalization"]
    found = [graph.convolution_into(node.input[0]) for node in scaling]
    return len({node.output[0] for node in found if node is not None})


def _multiplying(model: onnx.ModelProto) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type in _MULTIPLYING]


def _constant(graph: Graph, name: str) -> TensorProto | None:
    """The constant that a name stands for, within the model."""
    if name in graph.initializers:
        return graph.initializers[name]
    node = graph.producer.get(name)
    if node is None or node.op_type != "Constant":
        return None
    return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)


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
