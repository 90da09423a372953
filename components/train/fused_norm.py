"""BatchNorm with what follows it in ResNets, on NVIDIA GPUs: ReLU, the addition of the shortcut, the first pooling.

Training ResNet-50 is bound by memory, and half of its time is BatchNorm. torch.compile's kernels read more than they
have to (decision 55): the output of a ReLU for its mask, though the sign of its input says the same; the gradient of a
block's output, again from its parts, wherever it is used; and of the first pooling every window for every pixel. So
the sums over a batch, and the pooling, are kernels of our own here, in Triton; torch.compile makes the rest.

Each kernel of a sum leaves one row per program, [programs, C], for torch to add up. All of them are deterministic.
"""

# Kernels have no types, torchvision none either, and autograd's functions take what they are given.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import custom_op
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

IS_ON = True  # for benchmarks
# Of a process's batch: calling 108 operators of our own takes the host longer than the GPU needs for a small one.
MIN_PIXELS = 1024 * 224 * 224
_PLAIN, _RELU, _SHORTCUT, _POOLED = 0, 1, 2, 3  # what lets a gradient through to the BatchNorm
_NUM_PROGRAMS = 2112  # of a sum: 16 for each of an H200's multiprocessors
_TILE = 4096  # values that a program of a sum has at a time
_POOLED_ROWS = 16  # pixels of the result that a program of the pooling has at a time
_POOLED_CHANNELS = (64, 128)


@triton.jit
def _batch_norm_statistics_kernel(
    x_ptr, mean_ptr, squares_ptr, num_rows, chunk, C: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # x: [num_rows, C]; of a chunk of its rows the mean, and the sum of squared differences from it
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * chunk
    count = tl.minimum(num_rows - first, chunk).to(tl.int32)
    x_ptr += first * C
    shift = tl.load(x_ptr + channels).to(tl.float32)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        rows = (start + tl.arange(0, ROWS))[:, None]
        x = tl.load(x_ptr + rows * C + channels[None, :], rows < count, 0.0).to(tl.float32)
        x = tl.where(rows < count, x - shift, 0.0)
        sums += x
        squares += x * x
    total = tl.sum(sums, 0)[None, :]
    at = (tl.program_id(0) * C + channels)[None, :]
    tl.store(mean_ptr + at, shift + total / count)
    tl.store(squares_ptr + at, tl.sum(squares, 0)[None, :] - total * total / count)


@triton.jit
def _batch_norm_gradient_sums_kernel(
    first_ptr, second_ptr, gate_ptr, x_ptr, scale_ptr, shift_ptr, mean_ptr, out_ptr, sums_ptr, dots_ptr, num_rows,
    chunk, C: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr, HAS_SECOND: tl.constexpr,
):  # fmt: skip
    """Sum, over a chunk of rows, the gradient that is let through, and gradient * (x - mean)."""
    channels = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    first = tl.program_id(0).to(tl.int64) * chunk
    count = tl.minimum(num_rows - first, chunk).to(tl.int32)
    first_ptr, second_ptr, gate_ptr = first_ptr + first * C, second_ptr + first * C, gate_ptr + first * C
    x_ptr, out_ptr = x_ptr + first * C, out_ptr + first * C
    mean, scale, shift = tl.load(mean_ptr + channels), tl.load(scale_ptr + channels), tl.load(shift_ptr + channels)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        rows = (start + tl.arange(0, ROWS))[:, None]
        inside, at = rows < count, rows * C + channels
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        grad = tl.load(first_ptr + at, inside, 0.0).to(tl.float32)
        if HAS_SECOND:
            grad += tl.load(second_ptr + at, inside, 0.0).to(tl.float32)
        if MODE == 1:
            grad = tl.where(x * scale + shift > 0, grad, 0.0)
        if MODE == 2:
            grad = tl.where(tl.load(gate_ptr + at, inside, 0.0) > 0, grad, 0.0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, grad, inside)
            grad = grad.to(tl.float32)
        if MODE == 3:
            is_open = tl.load(gate_ptr + at, inside, 9) < 9
            grad = tl.where(is_open, grad, 0.0)
        sums += grad
        dots += tl.where(inside, grad * (x - mean), 0.0)
    at = tl.program_id(0) * C + channels
    tl.store(sums_ptr + at, tl.sum(sums, 0)[None, :])
    tl.store(dots_ptr + at, tl.sum(dots, 0)[None, :])


@triton.jit
def _batch_norm_pool_kernel(
    x_ptr, scale_ptr, shift_ptr, y_ptr, raw_ptr, place_ptr, num_rows, H, W, OH, OW, C: tl.constexpr, ROWS: tl.constexpr
):
    """x: [N, H, W, C] to y, raw and place: [N, OH, OW, C].

    The largest value after the affine map is the largest one before it, or the smallest where the scale is negative.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, C)[None, :]
    inside = rows < num_rows
    column, line, image = rows % OW, rows // OW % OH, rows // OW // OH
    scale = tl.load(scale_ptr + channels)
    sign = tl.where(scale < 0, -1.0, 1.0)
    best = tl.full((ROWS, C), float("-inf"), tl.float32)
    place = tl.zeros((ROWS, C), tl.int32)
    for k in tl.static_range(9):
        h, w = 2 * line + (k // 3 - 1), 2 * column + (k % 3 - 1)
        seen = (inside & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
        x = tl.load(x_ptr + ((image * H + h) * W + w)[:, None] * C + channels, seen, 0.0).to(tl.float32)
        x = tl.where(seen, x * sign, float("-inf"))
        place = tl.where(x > best, k, place)
        best = tl.where(x > best, x, best)
    raw = best * sign
    y = (raw * scale + tl.load(shift_ptr + channels)).to(y_ptr.dtype.element_ty)
    at, inside = rows[:, None] * C + channels, inside[:, None]
    tl.store(y_ptr + at, tl.where(y < 0, 0.0, y), inside)  # a NaN stays one
    tl.store(raw_ptr + at, raw, inside)
    tl.store(place_ptr + at, tl.where(y > 0, place, 9), inside)


@triton.jit
def _store_gradient(x_ptr, out_ptr, at, inside, grad, scale, mean, constant, slope):
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + at, scale * (grad - constant - (x - mean) * slope), inside)


@triton.jit
def _batch_norm_pool_backward_kernel(
    grad_ptr, place_ptr, x_ptr, scale_ptr, mean_ptr, constant_ptr, slope_ptr, out_ptr, num_rows, H, W, OH, OW,
    C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each pixel of the result writes the 2x2 pixels that begin at its window's centre: four windows see them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, C)[None, :]
    column, line, image = rows % OW, rows // OW % OH, rows // OW // OH
    inside = rows < num_rows
    right, down = inside & (column + 1 < OW), inside & (line + 1 < OH)
    here, right, down, both = inside[:, None], right[:, None], down[:, None], (right & down)[:, None]
    at = rows[:, None] * C + channels
    below = at + OW * C
    g, p = tl.load(grad_ptr + at, here, 0.0).to(tl.float32), tl.load(place_ptr + at, here, 9)
    g_r, p_r = tl.load(grad_ptr + at + C, right, 0.0).to(tl.float32), tl.load(place_ptr + at + C, right, 9)
    g_d, p_d = tl.load(grad_ptr + below, down, 0.0).to(tl.float32), tl.load(place_ptr + below, down, 9)
    g_b, p_b = tl.load(grad_ptr + below + C, both, 0.0).to(tl.float32), tl.load(place_ptr + below + C, both, 9)
    scale, mean = tl.load(scale_ptr + channels), tl.load(mean_ptr + channels)
    constant, slope = tl.load(constant_ptr + channels), tl.load(slope_ptr + channels)
    h, w = 2 * line, 2 * column
    has_right, has_down = (w + 1 < W)[:, None], (h + 1 < H)[:, None]
    pixel = ((image * H + h) * W + w)[:, None] * C + channels
    grad = tl.where(p == 4, g, 0.0)
    _store_gradient(x_ptr, out_ptr, pixel, here, grad, scale, mean, constant, slope)
    grad = tl.where(p == 5, g, 0.0) + tl.where(p_r == 3, g_r, 0.0)
    _store_gradient(x_ptr, out_ptr, pixel + C, here & has_right, grad, scale, mean, constant, slope)
    pixel += W * C
    grad = tl.where(p == 7, g, 0.0) + tl.where(p_d == 1, g_d, 0.0)
    _store_gradient(x_ptr, out_ptr, pixel, here & has_down, grad, scale, mean, constant, slope)
    grad = tl.where(p == 8, g, 0.0) + tl.where(p_r == 6, g_r, 0.0)
    grad += tl.where(p_d == 2, g_d, 0.0) + tl.where(p_b == 0, g_b, 0.0)
    _store_gradient(x_ptr, out_ptr, pixel + C, here & has_right & has_down, grad, scale, mean, constant, slope)


def _num_rows(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def _tiles(x: Tensor) -> tuple[int, int, int, int]:
    """Plan a sum over the rows of [B, C, H, W]: columns and rows of a tile, rows of a chunk, number of chunks."""
    columns = 128 if x.shape[1] % 128 == 0 else 64
    rows = _TILE // columns
    wanted = max(1, _NUM_PROGRAMS * columns // x.shape[1])
    chunk = triton.cdiv(triton.cdiv(_num_rows(x), wanted), rows) * rows
    return columns, rows, chunk, triton.cdiv(_num_rows(x), chunk)


def _partial_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (_tiles(x)[3], x.shape[1])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _images_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@custom_op("enginery::batch_statistics", mutates_args=())
def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _images_last(x)
    means, squares = _partial_sums(x)
    columns, rows, chunk, number = _tiles(x)
    _batch_norm_statistics_kernel[(number, x.shape[1] // columns)](
        x, means, squares, _num_rows(x), chunk, C=x.shape[1], COLUMNS=columns, ROWS=rows, num_warps=8
    )  # fmt: skip
    return means, squares


_statistics.register_fake(_partial_sums)


@custom_op("enginery::batch_norm_gradient_sums", mutates_args=())
def _gradient_sums(
    first: Tensor,
    second: Tensor,
    gate: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    mode: int,
    has_second: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    first, gate, x = map(_images_last, (first, gate, x))
    second = _images_last(second) if has_second else first
    out = torch.empty_like(x if mode == _SHORTCUT else mean)
    sums, dots = _partial_sums(x)
    columns, rows, chunk, number = _tiles(x)
    _batch_norm_gradient_sums_kernel[(number, x.shape[1] // columns)](
        first, second, gate, x, scale, shift, mean, out, sums, dots, _num_rows(x), chunk, C=x.shape[1],
        COLUMNS=columns, ROWS=rows, MODE=mode, HAS_SECOND=has_second, num_warps=8,
    )  # fmt: skip
    return out, sums, dots


@_gradient_sums.register_fake
def _(first, second, gate, x, scale, shift, mean, mode, has_second):
    out = torch.empty_like(x, memory_format=torch.channels_last) if mode == _SHORTCUT else torch.empty_like(mean)
    return out, *_partial_sums(x)


def _empty_pooled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return y, torch.empty_like(y), torch.empty_like(y, dtype=torch.int8)


@custom_op("enginery::affine_relu_pool", mutates_args=())
def _pool(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the x of each of its values, and where in its window of 3x3 that was; 9 where ReLU gave 0."""
    x = _images_last(x)
    y, raw, place = _empty_pooled(x)
    _batch_norm_pool_kernel[(triton.cdiv(_num_rows(y), _POOLED_ROWS),)](
        x, scale, shift, y, raw, place, _num_rows(y), *x.shape[2:], *y.shape[2:], C=x.shape[1], ROWS=_POOLED_ROWS
    )  # fmt: skip
    return y, raw, place


_pool.register_fake(lambda x, scale, shift: _empty_pooled(x))


@custom_op("enginery::affine_relu_pool_backward", mutates_args=())
def _pool_backward(
    grad: Tensor, place: Tensor, x: Tensor, scale: Tensor, mean: Tensor, constant: Tensor, slope: Tensor
) -> Tensor:
    grad, place, x = map(_images_last, (grad, place, x))
    out = torch.empty_like(x)
    _batch_norm_pool_backward_kernel[(triton.cdiv(_num_rows(grad), _POOLED_ROWS),)](
        grad, place, x, scale, mean, constant, slope, out, _num_rows(grad), *x.shape[2:], *grad.shape[2:],
        C=x.shape[1], ROWS=_POOLED_ROWS,
    )  # fmt: skip
    return out


@_pool_backward.register_fake
def _(grad, place, x, scale, mean, constant, slope):
    return torch.empty_like(x, memory_format=torch.channels_last)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of [B, C, H, W] over all but its channels, [C] in float32."""
    means, squares = _statistics(x)
    number, chunk = _num_rows(x), _tiles(x)[2]
    counts = (number - chunk * torch.arange(len(means), device=x.device)).clamp(max=chunk)[:, None].float()
    mean = (means * counts).sum(0) / number
    return mean, (squares + counts * (means - mean).square()).sum(0) / number


def _per_channel(value: Tensor) -> Tensor:
    return value[:, None, None]


class _Normalize(torch.autograd.Function):
    """x * scale + shift, the shortcut added to it, ReLU, as the mode says. With a shortcut the result comes twice.

    The two are equal, and so have a gradient each, which the kernel adds: one from the next block's first convolution
    and one from its shortcut.
    """

    @staticmethod
    def forward(ctx: Any, x, shortcut, weight, bias, mean, inverse, mode):
        scale = weight * inverse
        shift = bias - mean * scale
        y = x * _per_channel(scale) + _per_channel(shift)
        if mode == _SHORTCUT:
            y = y + shortcut
        y = y if mode == _PLAIN else y.relu()
        # A `to` that changes nothing would cut the gradient off when torch.compile traces it (seen in torch 2.11).
        y = y if y.dtype == x.dtype else y.to(x.dtype)
        ctx.mode = mode
        ctx.save_for_backward(x, y if mode == _SHORTCUT else x, weight, mean, inverse, shift)
        return (y, y.clone()) if mode == _SHORTCUT else y

    @staticmethod
    def backward(ctx: Any, first, second=None):
        x, gate, weight, mean, inverse, shift = ctx.saved_tensors
        scale, has_second = weight * inverse, second is not None
        first = _images_last(first)  # here torch.compile's kernels do it: the average's gradient is the same everywhere
        given = (first, second if has_second else first, gate, x, scale, shift, mean)
        grad, sums, dots = torch.ops.enginery.batch_norm_gradient_sums(*given, ctx.mode, has_second)
        total, dot = sums.sum(0), dots.sum(0)
        if ctx.mode == _PLAIN:
            grad = first
        elif ctx.mode == _RELU:
            grad = torch.where(x * _per_channel(scale) + _per_channel(shift) > 0, first, 0)
        constant, slope = total / _num_rows(x), dot * inverse.square() / _num_rows(x)
        difference = (x - _per_channel(mean)) * _per_channel(slope)
        grad_x = (_per_channel(scale) * (grad - _per_channel(constant) - difference)).to(x.dtype)
        return grad_x, grad if ctx.mode == _SHORTCUT else None, dot * inverse, total, None, None, None


class _NormalizeAndPool(torch.autograd.Function):
    """x * scale + shift, ReLU, and max pooling of 3x3 with stride 2 and padding 1."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, mean, inverse):
        scale = weight * inverse
        y, raw, place = torch.ops.enginery.affine_relu_pool(x, scale, bias - mean * scale)
        ctx.save_for_backward(x, raw, place, weight, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        x, raw, place, weight, mean, inverse = ctx.saved_tensors
        scale, number = weight * inverse, _num_rows(x)
        given = (grad, grad, place, raw, scale, scale, mean)
        _, sums, dots = torch.ops.enginery.batch_norm_gradient_sums(*given, _POOLED, False)
        total, dot = sums.sum(0), dots.sum(0)
        constant, slope = total / number, dot * inverse.square() / number
        grad_x = torch.ops.enginery.affine_relu_pool_backward(grad, place, x, scale, mean, constant, slope)
        return grad_x, dot * inverse, total, None, None


def _observe(norm: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch's mean and one over its standard deviation, after the running statistics have taken them in."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    with torch.no_grad():
        mean, variance = batch_statistics(x.detach())
        number = _num_rows(x)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (number / max(1, number - 1)), norm.momentum)
        norm.num_batches_tracked.add_(1)
        return mean, torch.rsqrt(variance + norm.eps)


class PooledBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d, same weights and statistics, with the ReLU and the pooling that follow the first one."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C, ceil(H / 2), ceil(W / 2)]."""
        if not self.training:
            return nn.functional.max_pool2d(super().forward(input).relu(), 3, 2, 1)
        return _NormalizeAndPool.apply(input, self.weight, self.bias, *_observe(self, input))


def _forward_block(block: Any, x: Any) -> Any:
    """Forward of a block in training; between two blocks their values come twice, see _Normalize."""
    x, shortcut = x if isinstance(x, tuple) else (x, x)
    layers = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        layers.append((block.conv3, block.bn3))
    *inner, (last, last_norm) = layers
    for convolution, norm in inner:
        x = convolution(x)
        x = _Normalize.apply(x, None, norm.weight, norm.bias, *_observe(norm, x), _RELU)
    x = last(x)
    if block.downsample is not None:
        convolution, norm = block.downsample
        shortcut = convolution(shortcut)
        given = (norm.weight, norm.bias, *_observe(norm, shortcut))
        shortcut = _Normalize.apply(shortcut, None, *given, _PLAIN)
    given = (last_norm.weight, last_norm.bias, *_observe(last_norm, x))
    return _Normalize.apply(x, shortcut, *given, _SHORTCUT)


class FusedBasicBlock(BasicBlock):
    """A BasicBlock, same weights and results, with the kernels of this module in training."""

    def forward(self, x: Any) -> Any:
        """See _forward_block."""
        return _forward_block(self, x) if self.bn1.training else super().forward(x)


class FusedBottleneck(Bottleneck):
    """A Bottleneck, same weights and results, with the kernels of this module in training."""

    def forward(self, x: Any) -> Any:
        """See _forward_block."""
        return _forward_block(self, x) if self.bn1.training else super().forward(x)


class FourChannelConv2d(nn.Conv2d):
    """A Conv2d of three channels that adds a channel of zeros itself: cuDNN would, in each of its passes."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, C, H, W] of the convolution."""
        if input.is_meta:  # there operations are counted, and zeros are none
            return super().forward(input)
        input, weight = (nn.functional.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (input, self.weight))
        return self._conv_forward(input, weight, self.bias)


class _FirstOfPair(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0] if isinstance(x, tuple) else x


_FUSED: dict[type, type] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck}


def fuse_norms(model: Any) -> bool:
    """Let one of torchvision's ResNets train with the kernels of this module; return whether it is one.

    Names of weights and what they mean stay the same. It then trains on NVIDIA GPUs, through torch.compile.
    """
    norms = [module for name, module in model.named_modules() if name.endswith(("bn1", "bn2", "bn3", "downsample.1"))]
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    if not (
        IS_ON
        and type(model) is ResNet
        and all(type(block) in _FUSED for block in blocks)
        and all(
            type(norm) is nn.BatchNorm2d
            and norm.affine
            and norm.track_running_stats
            and norm.momentum is not None
            and norm.num_features % 64 == 0
            for norm in norms
        )
        and model.bn1.num_features in _POOLED_CHANNELS
        and model.conv1.in_channels == 3
    ):
        return False
    model.conv1.__class__ = FourChannelConv2d
    model.bn1.__class__ = PooledBatchNorm2d
    model.relu, model.maxpool = nn.Identity(), nn.Identity()
    for block in blocks:
        block.__class__ = _FUSED[type(block)]
    model.avgpool = nn.Sequential(_FirstOfPair(), model.avgpool)
    return True
