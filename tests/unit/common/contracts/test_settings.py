"""Settings: what is refused, the setting at fault, and what a message allows instead."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from components.common.contracts.errors import UserError
from components.common.contracts.settings import load_yaml, parse_value, resolve
from components.export.config import ExportConfig
from components.preprocess.config import PreprocessConfig
from components.train.config import TrainConfig
from tests.unit.refusals import refuses

CONFIGS: dict[str, type[BaseModel]] = {"preprocess": PreprocessConfig, "train": TrainConfig, "export": ExportConfig}


@pytest.mark.parametrize(
    ("step", "values", "setting", "allowed"),
    [
        ("train", {"weigth_decay": 1}, "train.weigth_decay", "did you mean train.weight_decay?"),
        ("train", {"train.epochs": 1}, "train.train.epochs", "the settings of train already: write epochs"),
        ("train", {"train": {"epochs": 1}}, "train.train", "the settings of train alone"),
        ("train", {"zzz": 1}, "train.zzz", "valid keys: architecture, image_size"),
        ("train", {"epochs": "many"}, "train.epochs", "got 'many', must be a valid integer"),
        ("train", {"epochs": "1.5"}, "train.epochs", "got '1.5', must be a valid integer"),
        ("train", {"epochs": True}, "train.epochs", "can't be true or false"),
        ("train", {"image_sizes": [64, False]}, "train.image_sizes", "can't be true or false"),
        ("train", {"augmentation": {"min_area": True}}, "train.augmentation.min_area", "can't be true or false"),
        ("train", {"epochs": 5.5}, "train.epochs", "got a number with a fractional part (default 90). Passes over"),
        ("train", {"global_batch_size": "-8"}, "train.global_batch_size", "'-8', must be greater than or equal to 2"),
        ("train", {"learning_rate": "nan"}, "train.learning_rate", "must be a finite number"),
        ("train", {"learning_rate": "inf"}, "train.learning_rate", "must be a finite number"),
        ("train", {"seed": 2**63}, "train.seed", "must be less than or equal to"),
        ("train", {"bucket_mb": 1e18}, "train.bucket_mb", "must be less than or equal to"),
        ("train", {"image_size": "7"}, "train.image_size", "greater than or equal to 32 (default 224). Side of"),
        ("train", {"verify": "maybe"}, "train.verify", "got 'maybe', must be a valid boolean"),
        ("train", {"augmentation": {"min_aera": 0.5}}, "train.augmentation.min_aera", "train.augmentation.min_area?"),
        ("train", {"augmentation": {"min_area": 2}}, "train.augmentation.min_area", "2, must be less than or equal to"),
        ("train", {"augmentation.min_area": 1}, "train.augmentation.min_area", "{min_area: VALUE}'"),
        ("train", {"augmentation": "1"}, "train.augmentation", "got '1', must be a valid dictionary"),
        ("export", {"calibration_method": "magic"}, "export.calibration_method", "'magic', must be 'auto', 'max', "),
        ("export", {"mean": "3"}, "export.mean", "got '3', must be a list, written as [A, B] (default [0.485,"),
        ("export", {"mean": [123.7, 0, 0]}, "export.mean[0]", "(of 0..255: / 255)"),
        ("export", {"std": [1, 0, 1]}, "export.std[1]", "got 0, must be greater than 0"),
        ("export", {"std": [1, 1]}, "export.std[2]", "export.std[2] is required: Own model: std per RGB channel"),
        ("export", {"gate": {"precision": "int4"}}, "export.gate.precision", "got 'int4', must be 'fp16' or 'int8'"),
        ("preprocess", {}, "preprocess.data", "preprocess.data is required: "),
        ("preprocess", {"data": ""}, "preprocess.data", ""),
        ("preprocess", {"data": "https://me:pw@host/images.tar"}, "preprocess.data", "credentials come from the"),
    ],
)
def test_what_is_refused_and_what_is_allowed(step: str, values: dict[str, Any], setting: str, allowed: str) -> None:
    with refuses("invalid-setting", setting, says=allowed):
        resolve(CONFIGS[step], step, values)


def test_all_problems_come_at_once_and_later_layers_win() -> None:
    with pytest.raises(UserError) as refused:
        resolve(TrainConfig, "train", {"momentum": 2, "weigth_decay": 1}, {"epochs": 0})
    assert len(str(refused.value).splitlines()) == 3
    # KFP hands integers over as floats.
    config = resolve(TrainConfig, "train", {"epochs": 3, "seed": 0.0}, {"epochs": 5.0})
    assert (config.epochs, type(config.epochs), config.seed) == (5, int, 0)


# Written out, 10 GB.
ALIASES = "a0: &a0 x\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(10))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a\n", "invalid-yaml"),
        ("a: [\n", "invalid-yaml"),
        ("a: " + 1500 * "[", "invalid-yaml"),
        ("? [a]\n: 3\n", "invalid-yaml"),
        ("a: 2026-13-45\n", "invalid-yaml"),
        ("train: {epochs: 3}\nseed: 1\ntrain: {momentum: 0.5}\n", "invalid-yaml"),
        ("train: {epochs: 3, epochs: 4}\n", "invalid-yaml"),
        (b"\xff\xfe\x00", "invalid-yaml"),
        (ALIASES, "invalid-yaml"),
        ("a: &a [*a]\n", "invalid-yaml"),
        (None, "no-config-file"),
    ],
)
def test_files_that_hold_no_settings(text: str | bytes | None, code: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refuses(code):
        load_yaml(file)


def test_merged_settings_are_no_key_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: &t {epochs: 3, seed: 1}\nexport: {<<: *t, epochs: 4}\n")
    assert load_yaml(tmp_path / "a.yaml")["export"] == {"epochs": 4, "seed": 1}


def test_typed_values() -> None:
    assert [parse_value(text) for text in ("5", "", "[1, 2]", "{a: b}")] == ["5", "", [1, 2], {"a": "b"}]
    for text in ("{a", "{a: 1, a: 2}", "[2026-13-45]"):
        with refuses("invalid-yaml"):
            parse_value(text)
