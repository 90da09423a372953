"""Weights of fewer bits, for arithmetic that draws less power.

What a multiplier draws depends on the bits that it is given. A GPU whose board is at its power limit lowers its clock
until the power fits, so weights with zeros at the end of their mantissas make the same kernels faster there.
"""

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from components.export.config import FP16_MANTISSA_BITS

_MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # whose second input is the weights


def round_weights(model: onnx.ModelProto, bits: int) -> int:
    """Round the weights of convolutions and matrix products, in place, to float16 with fewer bits of mantissa.

    Ties go to the even neighbour. Biases stay, and so do numbers that float16 can't hold or that rounding would make
    infinite. Weights keep the type that they have in the graph.

    Args:
        model: With its weights loaded.
        bits: Explicit bits of the mantissa that stay, 0 to 10.

    Returns:
        How many tensors of weights were rounded.
    """
    weights = {node.input[1] for node in model.graph.node if node.op_type in _MULTIPLYING}
    rounded = 0
    for tensor in model.graph.initializer:
        if tensor.name in weights and tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(_rounded(values, bits), tensor.name))
            rounded += 1
    return rounded


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """The numbers nearest to `values` that float16 with `bits` explicit bits of mantissa holds, in their own type."""
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
