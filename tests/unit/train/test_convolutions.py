"""Convolutions over few pixels: the same results and gradients by a matrix product."""

import pytest
import torch
from torch import nn

from components.common.runtimes.architectures import build_model
from components.train.arithmetic import speed_up_small_convolutions

LAYERS = {
    "1x1": {"kernel_size": 1},
    "1x1, every second pixel": {"kernel_size": 1, "stride": 2},
    "3x3": {"kernel_size": 3, "padding": 1, "bias": False},
    "3x3, every second pixel": {"kernel_size": 3, "padding": 1, "stride": 2},
    "1x3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "1x1, valid": {"kernel_size": 1, "stride": 2, "padding": "valid"},
    "much padding": {"kernel_size": 3, "padding": 2, "stride": 2},
    "1x1, padding alone": {"kernel_size": 1, "padding": 1, "stride": 2},
}


@pytest.mark.parametrize("side", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_results_and_gradients_are_those_of_a_convolution(layer: str, side: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(6, 8, **LAYERS[layer]).double().to(memory_format=torch.channels_last)
    images = torch.randn(5, 6, side, side, dtype=torch.float64).to(memory_format=torch.channels_last)
    expected = _result_and_gradients(convolution, images)
    speed_up_small_convolutions(convolution)
    found = _result_and_gradients(convolution, images)
    assert "Convolution" not in found[0].grad_fn.name()
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def _result_and_gradients(convolution: nn.Conv2d, images: torch.Tensor) -> list[torch.Tensor]:
    convolution.zero_grad()
    leaf = images.clone(memory_format=torch.preserve_format).requires_grad_()
    result = convolution(leaf)
    result.square().sum().backward()
    return [result, leaf.grad, *(parameter.grad for parameter in convolution.parameters())]


def test_a_1x1_with_strides_over_an_image_is_no_segmentation_fault() -> None:
    convolution = nn.Conv2d(3, 4, 1, stride=2).to(memory_format=torch.channels_last)
    speed_up_small_convolutions(convolution)
    images = torch.randn(2, 3, 128, 128).to(memory_format=torch.channels_last)
    result = convolution(images)
    assert "Convolution" not in result.grad_fn.name()
    result.sum().backward()
    torch.testing.assert_close(
        result, nn.functional.conv2d(images.contiguous(), convolution.weight, convolution.bias, stride=2)
    )


def test_other_convolutions_stay_as_they_are() -> None:
    others = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    )
    speed_up_small_convolutions(others)
    assert {type(convolution) for convolution in others} == {nn.Conv2d}


def test_a_network_keeps_its_weights_names() -> None:
    model = build_model("resnet18", 10)
    names = list(model.state_dict())
    speed_up_small_convolutions(model)
    assert list(model.state_dict()) == names
    assert "Convolution" in model.conv1(torch.randn(2, 3, 32, 32)).grad_fn.name()  # large ones stay with oneDNN
