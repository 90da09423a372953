"""Layers in a form that torch.compile makes more of: the same values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from components.common.models import build_model
from components.train.fusing import FusibleMaxPool2d, FusibleReLU, make_fusible

NAN = float("nan")
Layer = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def as_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def value_and_gradient(layer: Layer, x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = layer(x)
    return value, torch.autograd.grad(value, x, upstream)[0]


def test_relu() -> None:
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 3.0, float("inf"), NAN])
    upstream = torch.arange(1.0, 8.0)
    torch.testing.assert_close(
        value_and_gradient(FusibleReLU(), x, upstream),
        value_and_gradient(nn.ReLU(), x, upstream),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("size", [(8, 6), (2, 2), (7, 9)])
def test_max_pooling(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size).to(memory_format=torch.channels_last)
    upstream = torch.randn(2, 3, *((side + 1) // 2 for side in size))
    value, gradient = value_and_gradient(FusibleMaxPool2d(3, 2, 1), x, upstream)
    expected_value, expected_gradient = value_and_gradient(nn.MaxPool2d(3, 2, 1), x, upstream)
    assert torch.equal(value, expected_value)
    torch.testing.assert_close(gradient, expected_gradient)


def test_max_pooling_keeps_nan_and_shares_among_equals() -> None:
    x = torch.tensor([[[[1.0, 1.0], [NAN, 0.0]]]])
    assert FusibleMaxPool2d(3, 2, 1)(x).isnan().all()
    _, gradient = value_and_gradient(FusibleMaxPool2d(3, 2, 1), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2))
    assert float(gradient.sum()) == 4


def test_a_model_keeps_its_parameters() -> None:
    model = build_model("resnet18", 10)
    names = list(model.state_dict())
    make_fusible(model)
    assert list(model.state_dict()) == names
    kinds = {type(layer) for layer in model.modules()}
    assert {FusibleReLU, FusibleMaxPool2d} <= kinds
    assert not {nn.ReLU, nn.MaxPool2d} & kinds


def test_other_layers_stay() -> None:
    model = nn.Sequential(nn.ReLU6(), nn.MaxPool2d(2), nn.Sequential(nn.MaxPool2d(3, 2, 1, ceil_mode=True)))
    make_fusible(model)
    assert [type(layer) for layer in model.modules()][1:] == [nn.ReLU6, nn.MaxPool2d, nn.Sequential, nn.MaxPool2d]
