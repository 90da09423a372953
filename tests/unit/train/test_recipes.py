"""Every recipe in pipelines/configs is valid and trains with the schedule that its comments claim."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from components.common.contracts.settings import resolve
from components.train.config import TrainConfig
from components.train.trainer import build_optimizer, build_schedule
from enginery.local.parameters import STEP_CONFIGS

CLUSTER = "cluster"  # for --settings: what a cluster gives the steps
CONFIGS = Path(__file__).resolve().parents[3] / "pipelines" / "configs"
STEPS_PER_EPOCH = 100


def recipe(name: str) -> TrainConfig:
    given: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    own = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key not in STEP_CONFIGS}
    return resolve(TrainConfig, "train", own, given["train"])


def rates(config: TrainConfig) -> list[float]:
    """Of each step."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config, torch.device("cpu"))
    schedule = build_schedule(optimizer, config, config.epochs * STEPS_PER_EPOCH)
    found = []
    for _ in range(config.epochs * STEPS_PER_EPOCH):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {CLUSTER}))
def test_every_recipe_is_valid(name: str) -> None:
    config = recipe(name)
    assert len(config.image_sizes) <= config.epochs
    found = rates(config)
    assert max(found) == pytest.approx(config.learning_rate * config.global_batch_size / 256, rel=0.01)
    assert found[-1] < 0.01 * max(found)


def test_reference_is_nvidias() -> None:
    config = recipe("reference")
    assert (config.momentum, config.weight_decay, config.label_smoothing) == (0.875, 1 / 32768, 0.1)
    found = rates(config)
    assert max(found) == pytest.approx(2.048)
    assert found.index(max(found)) == pytest.approx(8 * STEPS_PER_EPOCH, abs=1)


def test_fast_grows_its_images() -> None:
    sizes = recipe("fast").image_sizes
    assert sizes[0] == 128
    assert list(sizes) == sorted(sizes)
