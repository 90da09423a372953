"""`enginery engines` up to where the first step would start: what is missing is said before anything runs."""

import importlib
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from components.common.contracts.environment import Gpu
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import BundleManifest, CheckpointManifest, seal
from components.common.contracts.records import CalibrationEntry
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import ShapeSpec, transform_for
from enginery.cli.commands import cli
from tests.unit.refusals import refuses

command = importlib.import_module("enginery.cli.engines")
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 << 30, driver="580")
FIELDS = {"architecture": "resnet18", "classes": ("a", "b"), "transform": transform_for(32, resize_ratio=1.0)}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "fp32.onnx").write_bytes(b"a model")
    seal(
        folder,
        BundleManifest,
        inputs={},
        config=StepConfig(),
        shapes=ShapeSpec(height=32, width=32),
        models={"fp32": "fp32.onnx"},
        engines=(),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
        **FIELDS,
    )
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of every pipeline that would have run."""
    runs: list[list[str]] = []

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def pipeline(arguments: tuple[str, ...]) -> None:
        runs.append(list(arguments))

    monkeypatch.setattr(command, "command_for", lambda file: pipeline)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return runs


def engines(*arguments: str | Path) -> None:
    result = CliRunner().invoke(cli, ["engines", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("missing", "is no finished bundle: it has no manifest.json"),
        ("checkpoint", "is a checkpoint, and a bundle is needed here"),
        ("bundle", "fp32.onnx"),
    ],
)
def test_what_is_no_bundle(tmp_path: Path, bundle: Path, started: list[list[str]], folder: str, said: str) -> None:
    (tmp_path / "checkpoint").mkdir()
    seal(tmp_path / "checkpoint", CheckpointManifest, inputs={}, config=StepConfig(), metrics={}, **FIELDS)
    (bundle / "fp32.onnx").unlink()
    with pytest.raises(EngineryError) as error:
        engines(tmp_path / folder, "--data", tmp_path)
    assert said in str(error.value)
    assert not started


def test_the_bundle_comes_first(bundle: Path, started: list[list[str]]) -> None:
    result = CliRunner().invoke(cli, ["engines", "--data", str(bundle), str(bundle)])
    assert result.exit_code == 2
    assert "BUNDLE comes first, before --data" in result.output
    assert not started


def test_without_tensorrt(bundle: Path, started: list[list[str]]) -> None:
    with refuses("tensorrt-unavailable"):
        engines(bundle, "--data", bundle)
    assert not started


def test_in_containers_tensorrt_is_the_images(
    bundle: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine itself needs a GPU and Docker, and neither TensorRT nor PyTorch."""
    monkeypatch.setattr(command, "gpus", lambda: (GPU,))
    engines(bundle, "--data", bundle, "--in-containers")
    assert started == [["--model", str(bundle), "--data", str(bundle), "--in-containers"]]
    monkeypatch.setattr(command, "gpus", lambda: ())
    with refuses("no-gpu"):
        engines(bundle, "--data", bundle, "--in-containers")
