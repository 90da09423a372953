"""ResNets with kernels of our own: the results of torch's, by Triton's interpreter on the CPU."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from components.common.runtimes.architectures import build_model
from components.train.fused_norm import PooledBatchNorm2d, fuse_norms
from components.train.speed import flops_per_image


def networks(block: type[BasicBlock | Bottleneck]) -> tuple[ResNet, ResNet]:
    """A small network with scales and shifts of all signs, and the same one with the kernels."""
    torch.manual_seed(0)
    model = ResNet(block, [2, 1, 1, 1], num_classes=5).to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5)
    fused = copy.deepcopy(model)
    assert fuse_norms(fused)
    return model, fused


def train_step(model: nn.Module, images: torch.Tensor) -> None:
    nn.functional.cross_entropy(model.train()(images), torch.arange(len(images))).backward()


def assert_gradients(model: nn.Module, fused: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-3 * float(one.grad.abs().max()), rtol=0, msg=name)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_gradients_and_statistics_are_those_of_torch(block: type[BasicBlock | Bottleneck]) -> None:
    model, fused = networks(block)
    assert flops_per_image(fused, (3, 64, 64)) == flops_per_image(model, (3, 64, 64))
    images = torch.randn(3, 3, 37, 50)  # odd sides and even ones
    for network in (model, fused):
        train_step(network, images)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert_gradients(model, fused)
    for (name, one), other in zip(model.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=name)
    torch.testing.assert_close(fused.eval()(images), model.eval()(images), rtol=1e-3, atol=1e-4)


def test_gradients_reach_every_layer_when_compiled_in_fp32() -> None:
    model, fused = networks(BasicBlock)
    images = torch.randn(3, 3, 37, 50)
    train_step(model, images)
    fused.train()
    forward = torch.compile(lambda: nn.functional.cross_entropy(fused(images), torch.arange(3)), backend="aot_eager")
    forward().backward()
    assert_gradients(model, fused)


@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (3, 64, 9, 7), (1, 128, 1, 5)])
def test_pooling_has_torchs_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(shape[1])
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    fused = copy.deepcopy(norm)
    fused.__class__ = PooledBatchNorm2d
    images = 2 * torch.randn(shape) + 5
    leaves = [images.clone().requires_grad_() for _ in range(2)]
    results = [nn.functional.max_pool2d(norm(leaves[0]).relu(), 3, 2, 1), fused(leaves[1])]
    towards = torch.randn_like(results[0])
    for result in results:
        result.backward(towards)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fused.weight.grad, norm.weight.grad, rtol=1e-3, atol=1e-4)


def test_what_is_not_a_number_stays_so() -> None:
    _, fused = networks(BasicBlock)
    images = torch.randn(2, 3, 32, 32)
    images[0, 0, 16, 16] = torch.nan
    assert fused.train()(images).isnan().all()


def test_frozen_statistics_are_kept() -> None:
    model, fused = networks(BasicBlock)
    images = torch.randn(2, 3, 32, 32)
    for network in (model, fused):
        network.train()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    torch.testing.assert_close(fused(images), model(images))


@pytest.mark.parametrize("architecture", ["mobilenet_v2", "googlenet", "vit_b_16", "timm/resnet18"])
def test_other_networks_stay_as_they_are(architecture: str) -> None:
    with torch.device("meta"):
        model = build_model(architecture, 10)
    types = [type(module) for module in model.modules()]
    assert not fuse_norms(model)
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d, lambda width: nn.BatchNorm2d(width, momentum=None)])
def test_resnets_with_other_norms_stay_as_they_are(norm: type[nn.Module]) -> None:
    model = ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=norm)
    fuse_norms(model)
    assert type(model.layer1[0]) is BasicBlock
