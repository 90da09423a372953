"""Accumulated batches, two processes and one large batch make the same step, up to the order of additions."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from components.common.contracts.settings import resolve
from components.common.data.loader import Batch
from components.common.process.steplog import StepLog
from components.common.tasks import load_task
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import World, find_world, process_group
from components.train.trainer import Trainer
from tests.unit.refusals import refuses

from .conftest import as_rank_0_of_two

NUM_IMAGES, GLOBAL = 64, 16
SETTINGS: dict[str, Any] = {"epochs": 2, "global_batch_size": GLOBAL, "learning_rate": 0.5, "weight_decay": 0.01}
WORLD = World(device=torch.device("cpu"))
# Sums of 16 float32 numbers in another order differ in the last bits; 8 steps of momentum don't let that grow far. A
# wrong divisor or a gradient that is lost changes the weights by a hundred times as much (see the last test).
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Images:
    """A loader of images that never change: this rank's part of each step, in batches."""

    def __init__(self, per_gpu: int, rank: int = 0, world_size: int = 1) -> None:
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(NUM_IMAGES, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 4, (NUM_IMAGES,), generator=generator)
        own = GLOBAL // world_size
        self.batches = [
            Batch(images=images[first : first + per_gpu], labels=labels[first : first + per_gpu])
            for step in range(0, NUM_IMAGES, GLOBAL)
            for first in range(step + rank * own, step + (rank + 1) * own, per_gpu)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_classes(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def state(self) -> dict[str, Any]:
        return {}


def network(rank: int) -> nn.Module:
    """Without BatchNorm, whose statistics are of the images that go through together. Rank 0's weights count."""
    torch.manual_seed(3 + rank)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def build(world: World = WORLD, **changed: Any) -> Trainer:
    config = resolve(TrainConfig, "train", SETTINGS, changed)
    plan = plan_batches(config, world.world_size, num_train_images=NUM_IMAGES, num_val_images=NUM_IMAGES)
    loaders: Any = [Images(plan.per_gpu_batch_size, world.rank, world.world_size) for _ in range(2)]
    return Trainer(
        network(world.rank), config, plan, *loaders, world=world, log=StepLog("train"), task=load_task("classification")
    )


def train(world: World = WORLD, **changed: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after 8 steps, and what was measured."""
    trainer = build(world, **changed)
    result = trainer.fit()
    return trainer.published().state_dict(), [result.train_loss, result.val_loss, result.val_score_pct]


def test_another_number_of_processes_needs_epochs_of_as_many_steps() -> None:
    trainer = build()
    trainer.fit()
    saved = trainer.capture()
    saved.state["ranks"] *= 2
    build().restore(saved)
    saved.state["num_epochs"] = 1.0  # with the 8 steps that are 2 epochs here
    with refuses("other-steps-per-epoch", "train.num_processes"):
        build().restore(saved)


@pytest.fixture(scope="module")
def at_once() -> tuple[dict[str, torch.Tensor], list[float]]:
    return train()


@pytest.mark.parametrize(
    "settings",
    [
        *({"per_gpu_batch_size": size} for size in (8, 4, 1)),
        *(pytest.param({"compile": "default", "per_gpu_batch_size": size}, marks=pytest.mark.slow) for size in (0, 8)),
    ],
)
def test_accumulated_and_compiled_steps_are_the_same(
    at_once: tuple[dict[str, torch.Tensor], list[float]], settings: dict[str, Any]
) -> None:
    weights, measured = train(**settings)
    torch.testing.assert_close(weights, at_once[0], **TOLERANCE)
    assert measured == pytest.approx(at_once[1], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_gpu_batch_size": 4, "ema_decay": 0.5},
        pytest.param({"static_graph": True}, marks=pytest.mark.slow),
        pytest.param({"compile": "default", "per_gpu_batch_size": 4}, marks=pytest.mark.slow),
        pytest.param({"compile": "default", "split_graph": True}, marks=pytest.mark.slow),
    ],
)
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Each has half of every step's images; gloo adds the gradients."""
    alone, measured = train(**{**settings, "per_gpu_batch_size": 0, "static_graph": False, "compile": "off"})
    command = [sys.executable, "-m", "tests.unit.train.test_equivalence", str(tmp_path), json.dumps(settings)]
    path = os.environ["PATH"] if "compile" in settings else ""
    with as_rank_0_of_two(monkeypatch, command, PATH=path) as other, process_group(world := find_world(), 60):
        weights, together = train(world, **settings)
        assert other.wait(300) == 0
    torch.testing.assert_close(weights, alone, **TOLERANCE)
    of_rank_1 = load_file(tmp_path / "rank-1.safetensors")
    assert all(torch.equal(weights[name], of_rank_1[name]) for name in alone)
    assert together == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_is_near(at_once: tuple[dict[str, torch.Tensor], list[float]], precision: str) -> None:
    """bf16 has 8 bits of mantissa, fp16 11 and a scaled loss; weights themselves stay float32."""
    weights, measured = train(precision=precision)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert measured[0] == pytest.approx(at_once[1][0], rel=0.02)
    torch.testing.assert_close(weights, at_once[0], rtol=0.1, atol=0.02)


def test_the_tolerance_tells_a_wrong_step(at_once: tuple[dict[str, torch.Tensor], list[float]]) -> None:
    for wrong in ({"learning_rate": 0.495}, {"momentum": 0.89}, {"weight_decay": 0.012}):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(train(**wrong)[0], at_once[0], **TOLERANCE)


if __name__ == "__main__":  # rank 1 of test_two_processes
    with process_group(world := find_world(), 60):
        weights, _ = train(world, **json.loads(sys.argv[2]))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, Path(sys.argv[1]) / f"rank-{world.rank}.safetensors")
