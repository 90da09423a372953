"""Pretrained weights from files and checkpoints, a new head, and a backbone that stays as it is."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.common.runtimes.architectures import build_model, load_weights, read_weights
from components.train.batches import check_sizes, plan_batches
from components.train.checkpointing import WEIGHTS
from components.train.fine_tuning import head_names, starting_model
from tests.unit.refusals import refuses

from .conftest import Log, Train, config


def start(num_classes: int, **changed: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights that training begins with, and the notes on them."""
    log = Log()
    return starting_model(config(**changed), num_classes, log).state_dict(), log.said


@pytest.mark.parametrize(
    ("architecture", "head"), [("resnet18", "fc"), ("squeezenet1_1", "classifier.1"), ("timm/resnet10t", "fc")]
)
def test_the_head_is_what_follows_the_number_of_classes(architecture: str, head: str) -> None:
    assert head_names(architecture) == {f"{head}.weight", f"{head}.bias"}


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "safetensors": save_file,
    "parallel": lambda given, path: torch.save({"state_dict": {f"module.{k}": v for k, v in given.items()}}, path),
    "torchvision's script": lambda given, path: torch.save({"model": given, "optimizer": {"state": {}}}, path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_from_a_file(tmp_path: Path, writer: str) -> None:
    torch.manual_seed(1)
    given = build_model("resnet18", 7).state_dict()
    path = tmp_path / ("w.safetensors" if writer == "safetensors" else "w.pth")
    WRITERS[writer](given, path)
    same, said = start(7, pretrained=str(path))
    assert said == []
    assert all(torch.equal(value, given[key]) for key, value in same.items())
    other, said = start(10, pretrained=str(path))
    assert said == ["the pretrained weights are for other classes: fc.bias, fc.weight start fresh"]
    assert torch.equal(other["layer4.1.conv2.weight"], given["layer4.1.conv2.weight"])
    assert other["fc.weight"].shape == (10, 512)


def test_a_frozen_backbone_keeps_weights_and_statistics(train: Train, tmp_path: Path) -> None:
    small = {"architecture": "shufflenet_v2_x0_5", "epochs": 1, "global_batch_size": 48}
    first = train(output="first", **small)
    frozen = {**small, "pretrained": str(first.path), "freeze_backbone": True, "ema_decay": 0.5}
    second = train(output="second", **frozen)
    before, after = load_file(first.file(WEIGHTS)), load_file(second.file(WEIGHTS))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}
    with refuses("weights-of-another-architecture", "train.pretrained"):
        start(10, pretrained=str(first.path))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"freeze_backbone": True}, "no-pretrained-weights"),
        ({"pretrained": "some/folder"}, "no-weights"),
        ({"pretrained": "IMAGENET_22K"}, "no-weights"),
    ],
)
def test_what_can_not_be_begun_with(changed: dict[str, Any], code: str) -> None:
    with refuses(code, "train.pretrained"):
        start(10, **changed)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("text.pth", "not-weights"),
        ("model.pth", "weights-hold-code"),
        ("x.safetensors", "weights-do-not-fit"),
        ("missing.pth", "weights-missing"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "text.pth").write_text("hello")
    torch.save(build_model("resnet18", 2), tmp_path / "model.pth")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with refuses(code) as caught:
        start(10, pretrained=str(tmp_path / name))
    if code == "weights-do-not-fit":  # of 61 weights that are missing
        assert '" ...; Unexpected key(s) in state_dict: "x"; name the architecture' in str(caught.value)


@pytest.mark.parametrize(("name", "code"), [("packed.pth", "weights-packed"), ("wide.pth", "weights-do-not-fit")])
def test_weights_of_few_bytes_that_claim_any_size(tmp_path: Path, name: str, code: str) -> None:
    torch.save({"fc.bias": torch.zeros(1).expand(1 << 50)}, tmp_path / "wide.pth")
    torch.save({"fc.bias": torch.zeros(1 << 20)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    with refuses(code):
        load_weights(build_model("squeezenet1_1", 2), read_weights(tmp_path / name), name)


VGG, RESNET = {"architecture": "vgg11_bn"}, {"architecture": "resnet18"}


@pytest.mark.parametrize(
    ("changed", "code", "setting", "reason"),
    [
        ({"image_sizes": [16, 32]}, "image-size-refused", "train.image_sizes", "16 px"),
        ({**VGG, "image_size": 128, "image_sizes": [224]}, "size-not-exportable", "image_size", "such as 224"),
        ({"architecture": "vit_b_16"}, "image-size-refused", "train.image_size", "32 px"),
        ({**RESNET, "per_gpu_batch_size": 1}, "batch-too-small", "train.per_gpu_batch_size", "32 px"),
    ],
)
def test_sizes_that_a_model_can_not_take(changed: dict[str, Any], code: str, setting: str, reason: str) -> None:
    wanted = config(**{"architecture": "squeezenet1_1", **changed})
    plan = plan_batches(wanted, 1, num_train_images=100, num_val_images=10)
    with refuses(code, setting) as caught:
        check_sizes(build_model(wanted.architecture, 10), wanted, plan)
    assert reason in str(caught.value)


@pytest.mark.parametrize("architecture", ["resnet18", "alexnet"])
def test_checking_sizes_changes_nothing(architecture: str) -> None:
    wanted = config(architecture=architecture, image_size=224)
    model = build_model(architecture, 10)
    weights, before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    check_sizes(model, wanted, plan_batches(wanted, 1, num_train_images=100, num_val_images=10))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
