"""Forms of layers of which torch.compile makes fewer or faster kernels. What they compute stays the same."""

import torch
from torch import nn
from torch.nn import functional


class FusibleReLU(nn.ReLU):
    """nn.ReLU whose backward pass tells from its input, not from its output, where the gradient goes.

    The output has to be kept for the next convolution anyway, so torch.compile reads it again in both kernels of the
    BatchNorm before it. Its input follows from what those kernels read in any case.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """NaN stays NaN, as in nn.ReLU."""
        if not torch.compiler.is_compiling():
            return super().forward(x)
        return torch.where(x <= 0, 0, x)


class FusibleMaxPool2d(nn.MaxPool2d):
    """A 3 x 3 nn.MaxPool2d with stride 2 as maxima along one axis and then along the other.

    torch.compile's gradient of the pooling in one piece looks at four windows for each pixel, and computes more than
    it reads. Where several pixels of a window are largest, they share the gradient, which nn.MaxPool2d gives to one.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, C, H, W] with even H and W."""
        if not torch.compiler.is_compiling() or x.shape[2] % 2 or x.shape[3] % 2:
            return super().forward(x)
        return _largest_of_three(_largest_of_three(x, 2), 3)

    @classmethod
    def can_replace(cls, layer: nn.MaxPool2d) -> bool:
        """Whether it is the one that this is made for."""
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return sizes == (3, 2, 1, 1) and not layer.ceil_mode and not layer.return_indices


def _largest_of_three(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of every second position along a dimension of even length and its two neighbours."""
    even, odd = x.unflatten(dim, (-1, 2)).unbind(dim + 1)  # type: ignore[no-untyped-call]
    rest = odd.narrow(dim, 0, odd.shape[dim] - 1)
    padding = (0, 0, 1, 0) if dim == 2 else (1, 0)  # one in front
    before = functional.pad(rest, padding, value=float("-inf"))
    return torch.maximum(torch.maximum(before, even), odd)


def make_fusible(model: nn.Module) -> None:
    """Replace the layers that have another form here. Parameters, buffers and their names stay."""
    for name, layer in model.named_children():
        if type(layer) is nn.ReLU:
            setattr(model, name, FusibleReLU(inplace=layer.inplace))
        elif type(layer) is nn.MaxPool2d and FusibleMaxPool2d.can_replace(layer):
            setattr(model, name, FusibleMaxPool2d(3, 2, 1))
        else:
            make_fusible(layer)
