"""train on real digits: it learns, its checkpoint is whole, and what goes wrong is refused."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.common.contracts.manifests import CheckpointManifest, load
from components.common.contracts.records import Split
from components.common.data.loader import Loader
from components.common.runtimes.architectures import build_model
from components.train.checkpointing import WEIGHTS
from components.train.run import run
from components.train.training import warn_of_chance_level, warn_of_waiting
from tests.conftest import Dataset
from tests.unit.refusals import refuses

from .conftest import Log, Train, config


def test_it_learns_and_the_checkpoint_has_what_was_reported(digits_dataset: Dataset, tmp_path: Path) -> None:
    log, settings = Log(), config(architecture="timm/resnet10t", epochs=2, warmup_fraction=0.3)
    outcome = run(settings, log, dataset=digits_dataset.path, output=tmp_path / "out")
    checkpoint = load(tmp_path / "out", CheckpointManifest, verify=(".safetensors",))
    record = checkpoint.manifest
    losses = [epoch["train_loss"] for epoch in log.epochs]
    assert len(losses) == 2
    assert losses[0] < 1.3 * math.log(10)  # a model that knows nothing loses ln 10
    assert losses[1] < 0.6 * math.log(10)
    assert log.epochs[1]["val_score_pct"] > 50
    assert f"timm/resnet10t at {log.epochs[1]['val_score_pct']:.2f} % top-1 after epoch 2" in outcome
    assert (record.architecture, record.classes) == ("timm/resnet10t", tuple("0123456789"))
    assert record.inputs == {"dataset": digits_dataset.digest}
    assert (record.transform.resize_size, record.transform.crop_size) == (32, 32)
    assert record.metrics == log.epochs[-1]
    assert record.config["learning_rate"] == 0.4
    assert set(record.files) == {"weights.safetensors", "mllog.txt"}
    model = build_model("timm/resnet10t", 10)
    model.load_state_dict(load_file(checkpoint.file(WEIGHTS)), strict=True)
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in Loader(digits_dataset, "val", record.transform, batch_size=64):
            correct += int((model(batch.images).argmax(dim=1) == batch.labels).sum())
    assert 100 * correct / 120 == pytest.approx(record.metrics["val_score_pct"], abs=0.9)  # one image


def test_one_seed_gives_one_model(train: Train, tiny_dataset: Dataset) -> None:
    options: dict[str, Any] = {"epochs": 1, "global_batch_size": 48, "normalization": "dataset", "deterministic": False}
    found = [train(output=str(number), seed=seed, **options) for number, seed in enumerate((1, 1, 2))]
    first, second, other = (checkpoint.manifest.files[WEIGHTS].digest for checkpoint in found)
    assert first == second != other
    assert found[0].manifest.transform.mean == tiny_dataset.manifest.statistics.mean
    assert found[0].manifest.transform.std == tiny_dataset.manifest.statistics.std


def test_a_model_that_only_training_mode_can_use_is_refused(digits_dataset: Dataset, tmp_path: Path) -> None:
    # MNASNet's BatchNorm follows so slowly that at this rate its evaluation overflows while training does not.
    settings = config(architecture="mnasnet0_5", epochs=1, warmup_fraction=0.3)
    with refuses("validation-loss-not-finite"):
        run(settings, Log(), dataset=digits_dataset.path, output=tmp_path / "out")


def test_a_changed_shard_or_no_dataset_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_dataset.path, tmp_path / "dataset")
    shard = sorted(copy.glob("train-*.tar"))[0]
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    with refuses("damaged-artifact"):
        run(config(verify=True), Log(), dataset=copy, output=tmp_path / "out")
    with refuses("no-manifest"):
        run(config(), Log(), dataset=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("resnet51", "did you mean resnet50"),
        ("zzz", "such as resnet50"),
        ("retinanet_resnet50_fpn", "did you mean detection/retinanet_resnet50_fpn"),
        ("timm/resnet51x", "timm has no model"),
    ],
)
def test_an_unknown_architecture_suggests(train: Train, tmp_path: Path, architecture: str, hint: str) -> None:
    with refuses("unknown-architecture", says=hint):
        train(architecture=architecture)
    assert not list((tmp_path / "out").glob("*/*/step-*"))


@pytest.mark.parametrize(
    ("architecture", "counts", "score_pct", "said"),
    [
        ("resnet18", (50, 50), 50.0, "50.00 % top-1, and naming the most frequent class each time has 50.00 %"),
        ("resnet18", (50, 50), 58.0, "58.00 % top-1"),  # a coin is as good in 7 % of all cases
        ("resnet18", (50, 50), 59.0, ""),
        ("resnet18", (900, 100), 90.0, "90.00 % top-1"),  # the most frequent class each time
        ("resnet18", (100,), 100.0, ""),  # one class can't be missed
        ("detection/fcos_small", (900, 100), 20.0, ""),
        ("detection/fcos_small", (900, 100), 0.5, "0.50 % mAP. Lower"),
    ],
)
def test_the_chance_level(architecture: str, counts: tuple[int, ...], score_pct: float, said: str) -> None:
    log = Log()
    split = Split(num_images=sum(counts), shards=(), class_counts=counts, digest="")
    warn_of_chance_level(log, config(architecture=architecture), split, score_pct)
    text = "".join(log.said)
    assert ("learned nothing" in text) == bool(said)
    assert said in text


def test_a_gpu_that_waits_for_images_is_warned_of() -> None:
    log = Log()
    for share, decode_on in ((0.2, "gpu"), (15.4, "gpu"), (15.4, "cpu")):
        warn_of_waiting(log, config(decode_on=decode_on), share)
    assert [re.findall(r"15 %|decode_on=\w+", text) for text in log.said] == [
        ["15 %", "decode_on=cpu"],
        ["15 %", "decode_on=gpu"],
    ]


def test_warnings_of_a_run(train: Train) -> None:
    log = Log()
    checkpoint = train(log, learning_rate=1e-9, epochs=1, image_sizes=[24, 32, 32], profile_steps=2)
    assert checkpoint.manifest.profile is None
    sizes, profile, learned = log.said
    assert "lists 3 epochs' sizes, and train.epochs is 1: training ends with images of 24 px and never sees 32" in sizes
    assert profile.startswith("train.profile_steps: no step was recorded: the first 8")
    assert "Lower train.learning_rate, which is 1e-09, to 2.5e-10, raise train.epochs, which is 1" in learned
