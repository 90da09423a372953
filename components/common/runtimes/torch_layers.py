"""ONNX operators with windows, weights, statistics or scales, as PyTorch functions. See `torch_operators`."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from components.common.contracts.errors import EngineryError

AutoPad = Literal["NOTSET"]


# --- weighted layers and normalization


def conv(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    /,
    *,
    kernel_shape: list[int] | None = None,  # the weights have it
    strides: list[int] | None = None,
    pads: list[int] | None = None,
    dilations: list[int] | None = None,
    group: int = 1,
    auto_pad: AutoPad = "NOTSET",
) -> Tensor:
    """Convolution of any number of axes."""
    num_axes = x.dim() - 2
    ones, zeros = [1] * num_axes, [0] * num_axes
    begin, end = (pads[:num_axes], pads[num_axes:]) if pads else (zeros, zeros)
    if list(begin) != list(end):
        x, begin = functional.pad(x, pad_arguments(begin, end)), zeros
    return torch.convolution(x, weights, bias, strides or ones, begin, dilations or ones, False, zeros, group)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803  # ONNX's name
    transB: int = 0,  # noqa: N803
) -> Tensor:
    """Matrix product and sum: alpha * a @ b + beta * c."""
    a, b = a.t() if transA else a, b.t() if transB else b
    return alpha * (a @ b) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,  # of training
    training_mode: Literal[0] = 0,
) -> Tensor:
    """Normalization with the statistics of training."""
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: Literal[1] = 1,
) -> Tensor:
    """Normalization over all axes from `axis` on."""
    shape = x.shape[axis:]
    return functional.layer_norm(x, shape, scale.expand(shape), None if bias is None else bias.expand(shape), epsilon)


def lrn(x: Tensor, /, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """Normalization over neighbouring channels."""
    # Not functional.local_response_norm: an even size puts its odd channel on the other side.
    # squares: [B, 1, C + size - 1, H, W], zeros around the channels
    squares = functional.pad(x.square().unsqueeze(1), (0, 0, 0, 0, (size - 1) // 2, size // 2))
    mean = functional.avg_pool3d(squares, (size, 1, 1), stride=1).squeeze(1)  # [B, C, H, W]
    return x / (bias + alpha * mean) ** beta


# --- pooling


def max_pool(
    x: Tensor,
    /,
    *,
    kernel_shape: list[int],
    strides: list[int] | None = None,
    pads: list[int] | None = None,
    dilations: list[int] | None = None,
    ceil_mode: int = 0,
    auto_pad: AutoPad = "NOTSET",
    storage_order: Literal[0] = 0,
) -> Tensor:
    """Maximum of windows."""
    strides, dilations = strides or [1, 1], dilations or [1, 1]
    begin, end = _pool_pads(x, kernel_shape, pads)
    if _pads_natively(begin, end, kernel_shape):
        return functional.max_pool2d(x, kernel_shape, strides, begin, dilations, bool(ceil_mode))
    if ceil_mode:
        extra = _ceil_pads(x, kernel_shape, strides, begin, end, dilations)
        end = [a + b for a, b in zip(end, extra, strict=True)]
    padded = functional.pad(x, pad_arguments(begin, end), value=-math.inf)
    return functional.max_pool2d(padded, kernel_shape, strides, 0, dilations)


def average_pool(
    x: Tensor,
    /,
    *,
    kernel_shape: list[int],
    strides: list[int] | None = None,
    pads: list[int] | None = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: AutoPad = "NOTSET",
) -> Tensor:
    """Mean of windows."""
    strides = strides or [1, 1]
    begin, end = _pool_pads(x, kernel_shape, pads)
    if _pads_natively(begin, end, kernel_shape):
        return functional.avg_pool2d(x, kernel_shape, strides, begin, bool(ceil_mode), bool(count_include_pad))
    extra = _ceil_pads(x, kernel_shape, strides, begin, end, [1, 1]) if ceil_mode else [0, 0]
    # Sum over the window, and how many of its elements count: those of the image, and of the padding if included.
    counted = torch.ones_like(x[:1, :1])
    sums = []
    for values, value in ((x, 0.0), (counted, float(bool(count_include_pad)))):
        padded = functional.pad(values, pad_arguments(begin, end), value=value)
        padded = functional.pad(padded, pad_arguments([0, 0], extra))
        sums.append(functional.avg_pool2d(padded, kernel_shape, strides, divisor_override=1))
    return sums[0] / sums[1]


def _pool_pads(x: Tensor, kernel: list[int], pads: list[int] | None) -> tuple[list[int], list[int]]:
    """Padding before and after, for height and width."""
    if x.dim() != 4 or len(kernel) != 2:
        raise EngineryError(f"PyTorch runner: pooling takes [B, C, H, W], got a tensor of shape {list(x.shape)}")
    return (list(pads[:2]), list(pads[2:])) if pads else ([0, 0], [0, 0])


def _pads_natively(begin: list[int], end: list[int], kernel: list[int]) -> bool:
    """Whether torch's pooling takes this padding: the same on both sides, at most half the kernel."""
    return begin == end and all(2 * pad <= size for pad, size in zip(begin, kernel, strict=True))


def _ceil_pads(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    begin: list[int],
    end: list[int],
    dilations: list[int],
) -> list[int]:
    """Padding to add behind `end` so that plain pooling gives the windows of ceil_mode: all that start in the image."""
    extra = []
    for axis, size in enumerate(x.shape[2:]):
        extent = dilations[axis] * (kernel[axis] - 1) + 1
        padded = size + begin[axis] + end[axis]
        num_windows = -(-(padded - extent) // strides[axis]) + 1
        if (num_windows - 1) * strides[axis] >= size + begin[axis]:
            num_windows -= 1
        extra.append(max((num_windows - 1) * strides[axis] + extent - padded, 0))
    return extra


def pad_arguments(begin: list[int], end: list[int]) -> list[int]:
    """Pads in the order of functional.pad: from the last axis to the first, before and after."""
    return [pad for pair in reversed(list(zip(begin, end, strict=True))) for pad in pair]


def global_average_pool(x: Tensor, /) -> Tensor:
    """Mean of each channel."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reduction over axes that are an attribute or, from opset 18 on, an input; over all if there are none."""

    def operator(
        x: Tensor,
        axes_input: Tensor | None = None,
        /,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: Literal[0] = 0,
    ) -> Tensor:
        chosen = axes if axes_input is None else axes_input.tolist()
        return function(x, dim=tuple(chosen or range(x.dim())), keepdim=bool(keepdims))

    return operator


# --- quantization


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, /, *, axis: int = 1) -> Tensor:
    """What QuantizeLinear and DequantizeLinear make of `x`, bit for bit, without the integers in between.

    Not torch.fake_quantize_per_tensor_affine, which multiplies by the reciprocal of the scale: a value halfway
    between two codes can then fall to the other one.

    Args:
        x: any shape, float32 or float16.
        scale: real value of code 1, of the type of `x`: one, or [x.shape[axis]]. On the device of `x`: there, CUDA
            would divide by a number of the CPU as a product with its reciprocal.
        zero_point: codes of zero, shaped as `scale`; its type is that of the codes (None: uint8).
        axis: of the channels, if there is more than one scale.

    Returns:
        The shape and type of `x`.
    """
    codes = _codes(x, scale, zero_point, axis)
    if zero_point is not None and bool(zero_point.any()):
        codes -= _along(zero_point, x, axis).to(codes)
    return codes.to(scale.dtype).mul_(_along(scale, x, axis))


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    /,
    *,
    axis: int = 1,
    saturate: Literal[1] = 1,
    block_size: Literal[0] = 0,
) -> Tensor:
    """Integer codes of `x`, see `fake_quantize`."""
    return _codes(x, scale, zero_point, axis).to(torch.uint8 if zero_point is None else zero_point.dtype)


def dequantize_linear(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    /,
    *,
    axis: int = 1,
    block_size: Literal[0] = 0,
) -> Tensor:
    """Real values of integer codes."""
    values = codes.float()  # also for float16: one rounding at the end
    if zero_point is not None:
        values = values - _along(zero_point, codes, axis).to(values)
    return (values * _along(scale, codes, axis).float()).to(scale.dtype)


def _codes(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Integers as float32: round half to even(x / scale) + zero point, saturated."""
    limits = torch.iinfo(torch.uint8 if zero_point is None else zero_point.dtype)
    codes = (x.float() / _along(scale, x, axis).float()).round_()  # a quotient in float16 would be rounded twice
    if zero_point is not None and bool(zero_point.any()):
        codes += _along(zero_point, x, axis).to(codes)
    return codes.clamp_(limits.min, limits.max)


def _along(parameter: Tensor, x: Tensor, axis: int) -> Tensor:
    """Scales or zero points in the shape that broadcasts over `x`."""
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if index == axis % x.dim() else 1 for index in range(x.dim())])
