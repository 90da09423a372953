"""train on real digits: it learns, its checkpoint is whole, and what goes wrong is said."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.train.config import TrainConfig
from components.train.run import run
from components.train.trainer import build_optimizer, build_schedule

SETTINGS: dict[str, Any] = {
    "architecture": "timm/resnet10t",
    "image_size": 32,
    "resize_ratio": 1.0,
    "epochs": 2,
    "global_batch_size": 16,
    "learning_rate": 0.4,
    "warmup_fraction": 0.3,
    "augmentation": {"min_area": 0.8, "max_aspect_ratio": 1.1, "flip_probability": 0.0},
}


class Recorder(StepLog):
    """A log that keeps the metrics."""

    def __init__(self) -> None:
        super().__init__("train")
        self.epochs: list[dict[str, float]] = []

    def metrics(self, values: dict[str, float], *, position: int = 0) -> None:
        assert position == len(self.epochs)
        self.epochs.append(values)


Train = Callable[..., tuple[Artifact[CheckpointManifest], list[dict[str, float]], str]]


@pytest.fixture(scope="module")
def train(digits_dataset: Artifact[DatasetManifest], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(**settings)`: checkpoint, metrics of each epoch, and the closing line."""

    def trained(**settings: Any) -> tuple[Artifact[CheckpointManifest], list[dict[str, float]], str]:
        output = tmp_path_factory.mktemp("train") / "checkpoint"
        config = resolve(TrainConfig, "train", SETTINGS, settings)
        log = Recorder()
        outcome = run(config, log, dataset=digits_dataset.path, output=output)
        return load(output, CheckpointManifest, verify=(".safetensors",)), log.epochs, outcome

    return trained


@pytest.fixture(scope="module")
def trained(train: Train) -> tuple[Artifact[CheckpointManifest], list[dict[str, float]], str]:
    return train()


def test_it_learns(trained: tuple[Artifact[CheckpointManifest], list[dict[str, float]], str]) -> None:
    _, epochs, outcome = trained
    losses = [epoch["train_loss"] for epoch in epochs]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert losses[0] < 1.3 * math.log(10)  # a model that knows nothing loses ln 10
    assert losses[1] < 0.6 * math.log(10)
    assert epochs[1]["val_top1_pct"] > 50
    assert f"timm/resnet10t at {epochs[1]['val_top1_pct']:.2f} % top-1 after 2 epochs" in outcome


def test_the_manifest_says_what_was_trained(
    trained: tuple[Artifact[CheckpointManifest], list[dict[str, float]], str],
    digits_dataset: Artifact[DatasetManifest],
) -> None:
    checkpoint, epochs, _ = trained
    record = checkpoint.manifest
    assert record.architecture == "timm/resnet10t"
    assert record.classes == tuple("0123456789")
    assert record.inputs == {"dataset": digits_dataset.digest}
    assert (record.transform.resize_size, record.transform.crop_size) == (32, 32)
    assert record.metrics == epochs[-1]
    assert record.config["learning_rate"] == 0.4
    assert set(record.files) == {"weights.safetensors", "mllog.txt"}


def test_the_weights_load_strictly_and_give_the_reported_accuracy(
    trained: tuple[Artifact[CheckpointManifest], list[dict[str, float]], str],
    digits_dataset: Artifact[DatasetManifest],
) -> None:
    checkpoint, _, _ = trained
    model = build_model("timm/resnet10t", 10)
    model.load_state_dict(load_file(checkpoint.file("weights.safetensors")), strict=True)
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in Loader(digits_dataset, "val", checkpoint.manifest.transform, batch_size=64):
            correct += int((model(batch.images).argmax(dim=1) == batch.labels).sum())
    assert 100 * correct / 120 == pytest.approx(checkpoint.manifest.metrics["val_top1_pct"], abs=0.9)  # one image


def test_one_seed_gives_one_model(train: Train) -> None:
    options = {"epochs": 1, "global_batch_size": 96, "architecture": "squeezenet1_1", "augmentation": {"min_area": 0.3}}
    first, second, other = (train(**options, seed=seed)[0] for seed in (1, 1, 2))
    name = "weights.safetensors"
    assert first.manifest.files[name].digest == second.manifest.files[name].digest
    assert first.manifest.files[name].digest != other.manifest.files[name].digest


def test_normalization_by_the_data_set(train: Train, digits_dataset: Artifact[DatasetManifest]) -> None:
    checkpoint, _, _ = train(epochs=1, global_batch_size=240, architecture="squeezenet1_1", normalization="dataset")
    assert checkpoint.manifest.transform.mean == digits_dataset.manifest.statistics.mean
    assert checkpoint.manifest.transform.std == digits_dataset.manifest.statistics.std


def test_a_model_that_only_training_mode_can_use_is_refused(train: Train) -> None:
    # MNASNet's BatchNorm follows so slowly that at this rate its evaluation overflows while training does not.
    with pytest.raises(EngineryError, match=r"its loss on validation images is (nan|inf), though that of training was"):
        train(architecture="mnasnet0_5", epochs=1)


def test_a_batch_larger_than_the_split(train: Train) -> None:
    with pytest.raises(UserError, match=r"global_batch_size is 481, more than the 480 .*set global_batch_size to 480"):
        train(global_batch_size=481)


def test_verify_finds_a_changed_shard(digits_dataset: Artifact[DatasetManifest], tmp_path: Path) -> None:
    copy = shutil.copytree(digits_dataset.path, tmp_path / "dataset")
    shard = sorted(copy.glob("train-*.tar"))[0]
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    config = resolve(TrainConfig, "train", {"verify": True})
    with pytest.raises(EngineryError, match=rf"{shard.name} was changed after it was sealed"):
        run(config, StepLog("train"), dataset=copy, output=tmp_path / "checkpoint")


def test_an_unknown_architecture_suggests(train: Train) -> None:
    with pytest.raises(UserError, match=r"no model 'resnet51'; did you mean .*resnet50.*timm/NAME"):
        train(architecture="resnet51")
    with pytest.raises(UserError, match=r"no model 'zzz'; such as resnet50"):
        train(architecture="zzz")
    with pytest.raises(UserError, match="timm has no model 'resnet51x'"):
        train(architecture="timm/resnet51x")


def test_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no finished dataset"):
        run(resolve(TrainConfig, "train", SETTINGS), Recorder(), dataset=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    config = resolve(TrainConfig, "train", SETTINGS, {"global_batch_size": 512, "warmup_fraction": 0.1})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = build_optimizer(model, config, torch.device("cpu"))
    schedule = build_schedule(optimizer, config, num_steps=100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(0.8)  # 0.4 per 256 images
    assert rates[:10] == pytest.approx([0.08 * (step + 1) for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_biases_and_batchnorm_are_not_decayed() -> None:
    config = resolve(TrainConfig, "train", SETTINGS, {"weight_decay": 0.01})
    model = build_model("resnet18", 10)
    decayed, plain = build_optimizer(model, config, torch.device("cpu")).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2, 4}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
