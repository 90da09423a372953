"""Learning rates and decay; every recipe in pipelines/configs is valid and has the schedule that its comments claim."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from components.common.contracts.settings import resolve
from components.common.runtimes.architectures import build_model
from components.train.config import TrainConfig
from components.train.trainer import build_optimizer, build_schedule
from enginery.local.parameters import STEP_CONFIGS

from .conftest import config

CLUSTER = "cluster"  # for --settings: what a cluster gives the steps
CONFIGS = Path(__file__).resolve().parents[3] / "pipelines" / "configs"
STEPS_PER_EPOCH = 100


def recipe(name: str) -> TrainConfig:
    given: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    own = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key not in STEP_CONFIGS}
    return resolve(TrainConfig, "train", own, given["train"])


def rates(config: TrainConfig, num_steps: int) -> list[float]:
    """Learning rates of the steps."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config, torch.device("cpu"))
    schedule = build_schedule(optimizer, config, num_steps)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    found = rates(config(global_batch_size=512, warmup_fraction=0.1), 100)
    assert max(found) == pytest.approx(0.8)  # 0.4 per 256 images
    assert found[:10] == pytest.approx([0.08 * (step + 1) for step in range(10)])
    assert found[10:] == sorted(found[10:], reverse=True)
    assert 0 < found[-1] < 0.001


@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {CLUSTER}))
def test_every_recipe_is_valid(name: str) -> None:
    config = recipe(name)
    assert len(config.image_sizes) <= config.epochs
    found = rates(config, config.epochs * STEPS_PER_EPOCH)
    peak = config.learning_rate * config.global_batch_size / 256
    assert max(found) == pytest.approx(peak, rel=0.01)
    assert found[-1] < 0.01 * max(found)
    if name == "reference":  # NVIDIA's
        assert (config.momentum, config.weight_decay, config.label_smoothing) == (0.875, 1 / 32768, 0.1)
        assert peak == pytest.approx(2.048)
        assert found.index(max(found)) == pytest.approx(8 * STEPS_PER_EPOCH, abs=1)
    if name == "fast":
        assert config.image_sizes[0] == 128
        assert list(config.image_sizes) == sorted(config.image_sizes)


def test_biases_and_batchnorm_are_not_decayed() -> None:
    model = build_model("resnet18", 10)
    decayed, plain = build_optimizer(model, config(weight_decay=0.01), torch.device("cpu")).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2, 4}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_a_skipped_first_step_leaves_no_trace() -> None:
    """GradScaler skips a step whose gradients overflow; torch's fused SGD then keeps what its memory held."""
    layer = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(layer, config(momentum=0.9), torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu")
    before = layer.weight.detach().clone()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for value in (torch.inf, 1.0):
            scaler.scale(value * layer.weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    assert layer.weight.isfinite().all()
    assert (layer.weight < before).all()
