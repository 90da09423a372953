"""Kernels of ResNets' norms on a GPU: as exact as torch's own, eager and compiled. Fails without a GPU."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from components.train.fused_norm import fuse_norms


def gradients(model: nn.Module, images: torch.Tensor, dtype: torch.dtype, *, compiled: bool = False) -> torch.Tensor:
    """All gradients of a step and the statistics after it, in one vector."""

    def objective() -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype not in (torch.float32, torch.float64)):
            logits = model(images)
        return nn.functional.cross_entropy(logits.float(), torch.arange(len(images), device="cuda") % 5)

    model.train().zero_grad()
    (torch.compile(objective) if compiled else objective)().backward()
    found = [parameter.grad for parameter in model.parameters()]
    found += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return torch.cat([tensor.detach().double().flatten() for tensor in found if tensor is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_gradients_are_as_exact_as_torchs(block: type[BasicBlock | Bottleneck], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    model = ResNet(block, [1, 1, 1, 1], num_classes=5).cuda().to(memory_format=torch.channels_last)
    fused, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert fuse_norms(fused)
    compiled = copy.deepcopy(fused)
    images = torch.randn(256, 3, 97, 118, device="cuda").to(memory_format=torch.channels_last)
    expected = gradients(exact, images.double(), torch.float64)
    errors = [
        float((gradients(network, images, dtype, compiled=network is compiled) - expected).norm() / expected.norm())
        for network in (model, fused, compiled)
    ]
    assert errors[0] < 0.3
    assert max(errors[1:]) < 1.5 * errors[0] + 1e-5
