"""Pretrained weights from files and checkpoints, a new head, and a backbone that stays as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.train.batches import check_sizes, plan_batches
from components.train.checkpointing import WEIGHTS
from components.train.config import TrainConfig
from components.train.fine_tuning import head_names, starting_model
from components.train.run import run


class Log(StepLog):
    def __init__(self) -> None:
        super().__init__("train")
        self.said: list[str] = []

    def _say(self, kind: str, text: str) -> None:
        self.said.append(text)


Start = Callable[..., tuple[torch.nn.Module, list[str]]]


@pytest.fixture
def start(settings: dict[str, Any]) -> Start:
    def begin(num_classes: int, **changed: Any) -> tuple[torch.nn.Module, list[str]]:
        log = Log()
        return starting_model(resolve(TrainConfig, "train", settings, changed), num_classes, log), log.said

    return begin


def test_the_head_is_what_follows_the_number_of_classes() -> None:
    assert head_names("resnet18") == {"fc.weight", "fc.bias"}
    assert head_names("squeezenet1_1") == {"classifier.1.weight", "classifier.1.bias"}
    assert head_names("timm/resnet10t") == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_weights_from_a_file(start: Start, tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    given = build_model("resnet18", 7).state_dict()
    if name.endswith("pth"):
        torch.save({"state_dict": {f"module.{key}": value for key, value in given.items()}}, tmp_path / name)
    else:
        save_file(given, tmp_path / name)
    same, said = start(7, pretrained=str(tmp_path / name))
    assert said == []
    assert all(torch.equal(value, given[key]) for key, value in same.state_dict().items())
    other, said = start(10, pretrained=str(tmp_path / name))
    assert said == ["the pretrained weights are for other classes: fc.bias, fc.weight start fresh"]
    assert torch.equal(other.state_dict()["layer4.1.conv2.weight"], given["layer4.1.conv2.weight"])
    assert other.state_dict()["fc.weight"].shape == (10, 512)


def test_a_frozen_backbone_keeps_weights_and_statistics(
    tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    small = {"architecture": "shufflenet_v2_x0_5", "epochs": 1, "global_batch_size": 48}
    run(resolve(TrainConfig, "train", settings, small), Log(), dataset=tiny_dataset.path, output=first)
    frozen = {**small, "pretrained": str(first), "freeze_backbone": True, "ema_decay": 0.5}
    run(resolve(TrainConfig, "train", settings, frozen), Log(), dataset=tiny_dataset.path, output=second)
    before, after = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("settings_", "told"),
    [
        ({"freeze_backbone": True}, "keeps all layers but the last as they are, and they are random: name weights"),
        ({"pretrained": "/nowhere/w.pth"}, "there is no weights file /nowhere/w.pth"),
        ({"pretrained": "some/folder"}, "which is neither a weights file .* nor a Checkpoint directory"),
        ({"pretrained": "IMAGENET_22K"}, "no weights 'IMAGENET_22K' of resnet18; it has IMAGENET1K_V1, default"),
    ],
)
def test_what_can_not_be_begun_with(start: Start, settings_: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        start(10, **settings_)


def test_a_checkpoint_of_another_architecture(
    start: Start, tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path
) -> None:
    small = {"epochs": 1, "architecture": "squeezenet1_1"}
    run(resolve(TrainConfig, "train", settings, small), Log(), dataset=tiny_dataset.path, output=tmp_path / "out")
    with pytest.raises(
        UserError, match=r"a Checkpoint of squeezenet1_1, and train\.architecture is resnet18; name one"
    ):
        start(10, pretrained=str(tmp_path / "out"))


def test_what_torchvisions_training_script_saves(start: Start, tmp_path: Path) -> None:
    given = build_model("resnet18", 10).state_dict()
    torch.save({"model": given, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "w.pth")
    same, said = start(10, pretrained=str(tmp_path / "w.pth"))
    assert said == []
    assert all(torch.equal(value, given[key]) for key, value in same.state_dict().items())


def test_files_that_hold_something_else(start: Start, tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("hello")
    torch.save(build_model("resnet18", 2), tmp_path / "model.pth")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    for name, told in {
        "text.pth": "text.pth: torch.save did not write it, or it is damaged",
        "model.pth": "holds more than weights",
        "x.safetensors": "don't fit",
    }.items():
        with pytest.raises(UserError, match=told):
            start(10, pretrained=str(tmp_path / name))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"image_sizes": [16, 32]}, r"can't take images of 16 px \(train\.image_sizes\): .*Output size is too small"),
        (
            {"architecture": "vit_b_16"},
            r"vit_b_16 can't take images of 32 px \(train\.image_size\): Wrong image height",
        ),
        (
            {"architecture": "resnet18", "per_gpu_batch_size": 1},
            r"with one image of 32 px at a time, because of its BatchNorm: .*Set train\.per_gpu_batch_size, or glob",
        ),
    ],
)
def test_sizes_that_a_model_can_not_take(settings: dict[str, Any], changed: dict[str, Any], told: str) -> None:
    config = resolve(TrainConfig, "train", settings, {"architecture": "squeezenet1_1"}, changed)
    plan = plan_batches(config, 1, num_train_images=100, num_val_images=10)
    with pytest.raises(UserError, match=told):
        check_sizes(build_model(config.architecture, 10), config, plan)


def test_checking_sizes_changes_nothing(settings: dict[str, Any]) -> None:
    config = resolve(TrainConfig, "train", settings, {"architecture": "resnet18", "image_sizes": [16, 32]})
    model = build_model("resnet18", 10)
    weights, before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    check_sizes(model, config, plan_batches(config, 1, num_train_images=100, num_val_images=10))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
