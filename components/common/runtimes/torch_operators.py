"""ONNX operators as PyTorch functions: one small function each, and the table that names them.

A function's signature is its contract, and `why_unsupported` checks nodes against it when a graph is loaded, so that
nothing is silently ignored. Positional parameters are the node's inputs (None where an optional one is absent).
Keyword parameters are its attributes with ONNX's defaults; `Literal` lists the only values that are supported.

Floating-point tensors are on the graph's device, integers and booleans that were given as constants or computed from
shapes on the CPU, where reading them as Python numbers waits for no GPU.

Semantics: https://onnx.ai/onnx/operators, opset 13 to 21.
"""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from components.common.contracts.errors import EngineryError

AutoPad = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]
Function = Callable[..., Tensor | Sequence[Tensor]]


def as_tensor(proto: TensorProto) -> Tensor:
    """A constant of the graph, on the CPU.

    Raises:
        EngineryError: PyTorch has no such type.
    """
    try:
        return torch.from_numpy(np.array(numpy_helper.to_array(proto)))
    except TypeError as error:
        name = TensorProto.DataType.Name(proto.data_type)
        raise EngineryError(
            f"PyTorch runner: constants of type {name} ('{proto.name}') are not supported", code="unsupported-operators"
        ) from error


def why_unsupported(node: NodeProto, num_outputs: int) -> str | None:
    """The part of `node` that is not supported, such as "Hardmax" or "Conv with auto_pad=SAME_UPPER"; None if all is.

    Args:
        node: any node.
        num_outputs: how many of its outputs must be given: up to the last one that is read.
    """
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type}"
    function = OPERATORS.get(node.op_type)
    if function is None:
        return str(node.op_type)
    allowed, max_inputs = _contract(function)
    for name, value in _attributes(node).items():
        if name not in allowed or (allowed[name] and value not in allowed[name]):
            return f"{node.op_type} with {name}={'...' if isinstance(value, Tensor) else value}"
    if len(node.input) > max_inputs:
        return f"{node.op_type} with {len(node.input)} inputs"
    if num_outputs > 1 and node.op_type not in ("Split", "TopK"):
        return f"{node.op_type} with {num_outputs} outputs"
    return None


def bind(node: NodeProto) -> functools.partial[Any]:
    """The function of a supported node: takes its inputs, returns its output, or its outputs in a sequence."""
    attributes = _attributes(node)
    if node.op_type == "Split":
        attributes.setdefault("num_outputs", len(node.output))
    return functools.partial(OPERATORS[node.op_type], **attributes)


@functools.cache
def _contract(function: Function) -> tuple[dict[str, tuple[Any, ...]], float]:
    """Attributes that a function takes, each with its only values (empty: any), and how many inputs at most."""
    parameters = inspect.signature(function).parameters.values()
    hints = typing.get_type_hints(function)
    attributes = {
        parameter.name: typing.get_args(hint) if typing.get_origin(hint := hints.get(parameter.name)) is Literal else ()
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    variadic = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return attributes, math.inf if variadic else len(parameters) - len(attributes)


def _attributes(node: NodeProto) -> dict[str, Any]:
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    for name, value in values.items():
        if isinstance(value, bytes):
            values[name] = value.decode()
        elif isinstance(value, TensorProto):
            values[name] = as_tensor(value)
    return values


def _together(*tensors: Tensor) -> list[Tensor]:
    """The tensors on one device. Numbers computed from shapes are on the CPU, whatever the graph's device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return list(tensors) if device is None else [tensor.to(device) for tensor in tensors]


# --- elementwise


def _unary(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda x, /: function(x)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda a, b, /: function(*_together(a, b))


def _folding(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda *tensors: functools.reduce(function, _together(*tensors))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    # Not torch's own rounding of integers, which goes to floats.
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _gelu(x: Tensor, /, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


def _dropout(
    x: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None, /, *, seed: int = 0
) -> Tensor:
    if training_mode is not None and bool(training_mode):
        raise EngineryError("PyTorch runner: Dropout in training mode is not supported", code="unsupported-operators")
    return x  # ratio and seed matter in training only


def _cast(
    x: Tensor,
    /,
    *,
    to: Literal[1, 2, 3, 5, 6, 7, 9, 10, 11],  # all but strings and what NumPy lacks, such as bfloat16
    saturate: Literal[1] = 1,
) -> Tensor:
    return x.to(torch.from_numpy(np.empty(0, helper.tensor_dtype_to_np_dtype(to))).dtype)


# --- shapes


def _reshape(x: Tensor, shape: Tensor, /, *, allowzero: int = 0) -> Tensor:
    sizes = shape.tolist()
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(sizes)])


def _unsqueeze(x: Tensor, axes: Tensor, /) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _split(x: Tensor, sizes: Tensor | None = None, /, *, axis: int = 0, num_outputs: int) -> Sequence[Tensor]:
    if sizes is None:
        return torch.split(x, -(-x.shape[axis] // num_outputs), axis)
    return torch.split(x, sizes.tolist(), axis)


def _slice(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None, /
) -> Tensor:
    chosen = range(starts.numel()) if axes is None else axes.tolist()
    strides = [1] * starts.numel() if steps is None else steps.tolist()
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        window = range(x.shape[axis])[start:end:step]  # ONNX clamps as Python does, for negative steps too
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(window.start, window.stop, step),)]
        else:
            x = x.index_select(axis, torch.tensor(window, dtype=torch.int64, device=x.device))
    return x


def _gather(x: Tensor, indices: Tensor, /, *, axis: int = 0) -> Tensor:
    if indices.dim() == 0:
        return x.select(axis, int(indices))
    flat = (indices.reshape(-1) % x.shape[axis]).to(x.device)  # negative ones count from the end
    return x.index_select(axis, flat).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis % x.dim() + 1 :])


def _constant(
    *,
    value: Tensor | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
) -> Tensor:
    given = [entry for entry in (value, value_int, value_ints, value_float, value_floats) if entry is not None]
    return given[0] if isinstance(given[0], Tensor) else torch.tensor(given[0])


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, /, *, reduction: Literal["none"] = "none") -> Tensor:
    return x.index_put(tuple(indices.to(x.device).unbind(-1)), updates.to(x.device))


def _cumsum(x: Tensor, axis: Tensor, /, *, exclusive: Literal[0] = 0, reverse: Literal[0] = 0) -> Tensor:
    return x.cumsum(int(axis))


def _pad(
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
    /,
    *,
    mode: Literal["constant", "reflect", "edge"] = "constant",
) -> Tensor:
    begin, end = [0] * x.dim(), [0] * x.dim()
    chosen = range(x.dim()) if axes is None else axes.tolist()
    for index, axis in enumerate(chosen):
        begin[axis], end[axis] = int(pads[index]), int(pads[index + len(chosen)])
    if mode == "constant":
        return functional.pad(x, pad_arguments(begin, end), value=0.0 if value is None else value.item())
    # These modes of functional.pad take height and width alone.
    if any((*begin[:-2], *end[:-2])):
        raise EngineryError(
            f"PyTorch runner: Pad with mode={mode} is supported on the last two axes only", code="unsupported-operators"
        )
    arguments = pad_arguments(begin[-2:], end[-2:])
    return functional.pad(x, arguments, mode="replicate" if mode == "edge" else "reflect")


def resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    /,
    *,
    coordinate_transformation_mode: Literal[
        "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"
    ] = "half_pixel",
    mode: Literal["nearest", "linear", "cubic"] = "nearest",
    nearest_mode: Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"] = "round_prefer_floor",
    antialias: Literal[0] = 0,
    keep_aspect_ratio_policy: Literal["stretch"] = "stretch",
    exclude_outside: Literal[0] = 0,
    cubic_coeff_a: float = -0.75,
    extrapolation_value: float = 0.0,
) -> Tensor:
    """Resize every axis to `sizes`, or by `scales` where these are given instead."""
    for axis in range(x.dim()):
        before = x.shape[axis]
        if sizes is not None and sizes.numel():
            after = int(sizes[axis])
            scale = float(np.float32(after) / np.float32(before))
        else:
            assert scales is not None  # ONNX asks for one of both
            scale = float(scales[axis])
            after = math.floor(before * scale)
        if (before, scale) == (after, 1):
            continue
        places = torch.arange(after, dtype=torch.float32)
        if coordinate_transformation_mode == "align_corners":
            places *= (before - 1) / max(after - 1, 1)
        elif coordinate_transformation_mode == "asymmetric":
            places /= scale
        else:
            places = (places + 0.5) / scale - 0.5
            if coordinate_transformation_mode == "pytorch_half_pixel" and after == 1:
                places *= 0
        if mode == "nearest":
            rounded = {
                "floor": places.floor(),
                "ceil": places.ceil(),
                "round_prefer_ceil": (places + 0.5).floor(),
                "round_prefer_floor": (places - 0.5).ceil(),
            }[nearest_mode]
            x = x.index_select(axis, rounded.long().clamp(0, before - 1).to(x.device))
            continue
        if mode == "cubic":
            x = _cubic(x, axis, places, cubic_coeff_a)
            continue
        places = places.clamp(0, before - 1)
        low = places.floor()
        share = (places - low).to(x.device, x.dtype).reshape([-1] + [1] * (x.dim() - 1 - axis))
        first = low.long().to(x.device)
        second = (first + 1).clamp(max=before - 1)
        x = torch.lerp(x.index_select(axis, first), x.index_select(axis, second), share)
    return x


def _cubic(x: Tensor, axis: int, places: Tensor, a: float) -> Tensor:
    """Values of `x` between its elements along an axis, of the four around each place (Keys, 1981)."""
    low = places.floor()
    parts = []
    for tap in range(-1, 3):
        far = (places - low - tap).abs()
        weight = torch.where(far <= 1, ((a + 2) * far - (a + 3)) * far**2 + 1, ((far - 5) * far + 8) * a * far - 4 * a)
        element = (low.long() + tap).clamp(0, x.shape[axis] - 1).to(x.device)
        shape = [-1] + [1] * (x.dim() - 1 - axis)
        parts.append(x.index_select(axis, element) * weight.to(x.device, x.dtype).reshape(shape))
    return torch.stack(parts).sum(0)


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
    if auto_pad != "NOTSET":
        pads = _auto_pads(x, list(weights.shape[2:]), strides or ones, dilations or ones, auto_pad)
    begin, end = (pads[:num_axes], pads[num_axes:]) if pads else (zeros, zeros)
    if list(begin) != list(end):
        x, begin = functional.pad(x, pad_arguments(begin, end)), zeros
    return torch.convolution(x, weights, bias, strides or ones, begin, dilations or ones, False, zeros, group)


def _auto_pads(x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], auto_pad: AutoPad) -> list[int]:
    """Pads with which a window starts at every stride of the image, the odd one behind or before it; none for VALID."""
    begin, end = [0] * len(kernel), [0] * len(kernel)
    if auto_pad != "VALID":
        for axis, size in enumerate(x.shape[2:]):
            extent = dilations[axis] * (kernel[axis] - 1) + 1
            total = max((-(-size // strides[axis]) - 1) * strides[axis] + extent - size, 0)
            begin[axis] = (total + (auto_pad == "SAME_LOWER")) // 2
            end[axis] = total - begin[axis]
    return begin + end


def conv_transpose(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    /,
    *,
    kernel_shape: list[int] | None = None,  # the weights have it
    strides: list[int] | None = None,
    pads: list[int] | None = None,
    output_padding: list[int] | None = None,
    dilations: list[int] | None = None,
    group: int = 1,
    auto_pad: Literal["NOTSET"] = "NOTSET",
) -> Tensor:
    """Transposed convolution of any number of axes."""
    num_axes = x.dim() - 2
    ones, zeros = [1] * num_axes, [0] * num_axes
    extra, padded = output_padding or zeros, pads or zeros * 2
    full = torch.convolution(x, weights, bias, strides or ones, zeros, dilations or ones, True, extra, group)
    return functional.pad(full, pad_arguments([-n for n in padded[:num_axes]], [-n for n in padded[num_axes:]]))


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
    begin, end = _pool_pads(x, kernel_shape, strides, dilations, pads, auto_pad)
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
    begin, end = _pool_pads(x, kernel_shape, strides, [1, 1], pads, auto_pad)
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


def _pool_pads(
    x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int] | None, auto_pad: AutoPad
) -> tuple[list[int], list[int]]:
    """Padding before and after, for height and width."""
    if x.dim() != 4 or len(kernel) != 2:
        message = f"PyTorch runner: pooling takes [B, C, H, W], got a tensor of shape {list(x.shape)}"
        raise EngineryError(message, code="unsupported-operators")
    if auto_pad != "NOTSET":
        pads = _auto_pads(x, kernel, strides, dilations, auto_pad)
    return (list(pads[:2]), list(pads[2:])) if pads else ([0, 0], [0, 0])


def _pads_natively(begin: list[int], end: list[int], kernel: list[int]) -> bool:
    """True if torch's pooling takes this padding: the same on both sides, at most half the kernel."""
    return begin == end and all(2 * pad <= size for pad, size in zip(begin, kernel, strict=True))


def _ceil_pads(
    x: Tensor, kernel: list[int], strides: list[int], begin: list[int], end: list[int], dilations: list[int]
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
    """The result of QuantizeLinear and DequantizeLinear on `x`, bit for bit, without the integers in between.

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
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, /, *, axis: int = 1, block_size: Literal[0] = 0
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


OPERATORS: dict[str, Function] = {
    "Abs": _unary(torch.abs),
    "Add": _binary(torch.add),
    "AveragePool": average_pool,
    "BatchNormalization": batch_normalization,
    "Cast": _cast,
    "Ceil": _unary(torch.ceil),
    "Clip": lambda x, low=None, high=None, /: x if low is None and high is None else torch.clamp(x, low, high),
    "Concat": lambda *tensors, axis: torch.cat(_together(*tensors), axis),
    "Constant": _constant,
    "ConstantOfShape": lambda shape, /, *, value=None: (torch.zeros(1) if value is None else value).expand(
        shape.tolist()
    ),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Cos": _unary(torch.cos),
    "CumSum": _cumsum,
    "DequantizeLinear": dequantize_linear,
    "Div": _binary(_divide),
    "Dropout": _dropout,
    "Einsum": lambda *tensors, equation: torch.einsum(equation, _together(*tensors)),
    "Elu": lambda x, /, *, alpha=1.0: functional.elu(x, alpha),
    "Equal": _binary(torch.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": lambda x, shape, /: x.expand(np.broadcast_shapes(tuple(x.shape), tuple(shape.tolist()))),
    "Flatten": lambda x, /, *, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "Gather": _gather,
    "GatherElements": lambda x, places, /, *, axis=0: x.gather(axis, places % x.shape[axis]),
    "Gelu": _gelu,
    "Gemm": gemm,
    "GlobalAveragePool": lambda x, /: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "HardSigmoid": lambda x, /, *, alpha=0.2, beta=0.5: (x * alpha + beta).clamp_(0.0, 1.0),
    "HardSwish": _unary(functional.hardswish),
    "Identity": _unary(lambda x: x),
    "InstanceNormalization": lambda x, scale, bias, /, *, epsilon=1e-5: functional.instance_norm(
        x, weight=scale, bias=bias, eps=epsilon
    ),
    "LRN": lrn,
    "LayerNormalization": layer_normalization,
    "LeakyRelu": lambda x, /, *, alpha=0.01: functional.leaky_relu(x, alpha),
    "LogSoftmax": lambda x, /, *, axis=-1: torch.log_softmax(x, axis),
    "MatMul": _binary(torch.matmul),
    "Max": _folding(torch.maximum),
    "MaxPool": max_pool,
    "Min": _folding(torch.minimum),
    "Mod": lambda a, b, /, *, fmod=0: (torch.fmod if fmod else torch.remainder)(*_together(a, b)),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Pad": _pad,
    "Pow": _binary(lambda a, b: torch.pow(a, b).to(a.dtype)),
    "QuantizeLinear": quantize_linear,
    "Range": lambda start, end, step, /: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceL2": reduce(functools.partial(torch.linalg.vector_norm, ord=2)),
    "ReduceMax": reduce(torch.amax),
    "ReduceMean": reduce(torch.mean),
    "ReduceSum": reduce(torch.sum),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Resize": resize,
    "ScatterND": _scatter_nd,
    "Shape": lambda x, /, *, start=0, end=None: torch.tensor(x.shape[start:end]),  # on the CPU
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Slice": _slice,
    "Softmax": lambda x, /, *, axis=-1: torch.softmax(x, axis),
    "Softplus": _unary(functional.softplus),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": lambda x, axes=None, /: x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist())),
    "Sub": _binary(torch.sub),
    "Tanh": _unary(torch.tanh),
    "Tile": lambda x, repeats, /: x.tile(repeats.tolist()),
    "TopK": lambda x, k, /, *, axis=-1, largest=1, sorted=1: x.topk(int(k), axis, bool(largest)),
    "Transpose": lambda x, /, *, perm=None: x.permute(perm or list(reversed(range(x.dim())))),
    "Unsqueeze": _unsqueeze,
    "Where": lambda condition, a, b, /: torch.where(*_together(condition, a, b)),
}
