"""Integrity through the steps themselves: what each refuses to read, by name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, BundleManifest, CheckpointManifest, DatasetManifest, seal
from components.common.contracts.records import CalibrationEntry
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.export.config import ExportConfig
from components.export.sources import check_model
from components.train.config import TrainConfig
from components.validate.config import ValidateConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = transform_for(32, resize_ratio=1.0)


def refusal(step: str, settings: StepConfig, **folders: Path) -> tuple[int, str]:
    """Exit code and message of a step that refuses to run."""
    with pytest.raises(EngineryError) as caught:
        import_module(f"components.{step}.run").run(settings, StepLog(step), **folders)
    return caught.value.exit_code, str(caught.value)


def gate(*arguments: str | Path, **variables: str) -> tuple[int, str]:
    """Exit code and what `python -m components.gate` says."""
    done = subprocess.run(
        [sys.executable, "-m", "components.gate", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stderr


def bundle(path: Path, dataset: Artifact[DatasetManifest]) -> Path:
    """A sealed bundle whose models are no models: it is refused before they are opened."""
    path.mkdir()
    for name in ("fp32.onnx", "int8.onnx", "int8.plan"):
        (path / name).write_bytes(name.encode())
    seal(
        path,
        BundleManifest,
        inputs={},
        config=ExportConfig(),
        architecture="resnet18",
        classes=dataset.manifest.classes,
        transform=SPEC,
        shapes=ShapeSpec(height=32, width=32),
        models={"fp32": "fp32.onnx", "int8": "int8.onnx"},
        engines=(),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
    )
    return path


@pytest.mark.parametrize("name", ["fp32.onnx", "int8.onnx", "int8.plan"])
def test_a_swapped_model_of_the_same_size_is_refused(
    tmp_path: Path, digits_dataset: Artifact[DatasetManifest], name: str
) -> None:
    models = bundle(tmp_path / "bundle", digits_dataset)
    (models / name).write_bytes(name.upper().encode())
    folders = {"bundle": models, "dataset": digits_dataset.path, "output": tmp_path / "report"}
    code, text = refusal("validate", ValidateConfig(), **folders)
    assert code == 1
    assert f"{models / name} was changed after it was sealed" in text
    assert "write it again with `python -m components.export`" in text


def test_swapped_weights_are_refused(tmp_path: Path, digits_dataset: Artifact[DatasetManifest]) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(b"weights")
    classes = digits_dataset.manifest.classes
    fields = {"architecture": "resnet18", "classes": classes, "transform": SPEC, "metrics": {}}
    seal(checkpoint, CheckpointManifest, inputs={}, config=TrainConfig(), **fields)
    weights.write_bytes(b"Weights")
    folders = {"model": checkpoint, "dataset": digits_dataset.path, "output": tmp_path / "bundle"}
    code, text = refusal("export", ExportConfig(), **folders)
    assert code == 1
    assert f"{weights} was changed after it was sealed" in text
    assert "write it again with `python -m components.train`" in text
    with pytest.raises(EngineryError, match=f"^{re.escape(text)}$"):  # the same before anything is packed
        check_model(checkpoint, "", classes, 32)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (
            lambda text: text.replace('"num_rejected":0', '"num_rejected":5'),
            1,
            "was edited after it was sealed: its content does not fit its seal",
        ),
        (
            lambda text: text.replace('"schema_version":2', '"schema_version":7'),
            2,
            "has schema_version 7, and this enginery reads 1 to 2: a newer enginery wrote it. Update enginery",
        ),
        (
            lambda text: text.replace('"kind":"dataset"', '"kind":"bundle"'),
            2,
            "is a bundle, and a dataset is needed here; name the output of `python -m components.preprocess`",
        ),
        (lambda text: text[:100], 1, "is not a valid dataset manifest"),
    ],
)
def test_a_manifest_that_is_not_what_was_sealed(
    tmp_path: Path, digits_dataset: Artifact[DatasetManifest], change: Callable[[str], str], code: int, message: str
) -> None:
    copy = tmp_path / "dataset"
    copy.mkdir()
    for file in digits_dataset.path.iterdir():
        (copy / file.name).hardlink_to(file)
    original = digits_dataset.file("manifest.json").read_text(encoding="utf-8")
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(change(original), encoding="utf-8")
    assert change(original) != original
    found, text = refusal("train", TrainConfig(), dataset=copy, output=tmp_path / "checkpoint")
    assert found == code
    assert f"{copy}" in text
    assert message in text


def test_a_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    arguments = ("--report", tmp_path / "absent", "--output", tmp_path / "verdict")
    code, text = gate(*arguments)
    assert (code, text.count("\n"), "Traceback" in text) == (2, 1, False)
    code, text = gate(*arguments, ENGINERY_DEBUG="1")
    assert (code, "Traceback" in text) == (2, True)
    command = [sys.executable, "-m", "enginery.cli.main", "--debug", "run", "absent.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "Traceback" in done.stderr) == (2, True)
    assert "there is no pipeline file absent.py" in done.stderr
