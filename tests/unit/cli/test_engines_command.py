"""`enginery engines` up to where the first step would start: what is missing is said before anything runs."""

import importlib
from pathlib import Path

import click
import pytest
import torch

from components.common.contracts.environment import Gpu
from tests.unit.registered import enginery, make_chain, refuses

command = importlib.import_module("enginery.cli.engines")
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 << 30, driver="580")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_chain(tmp_path, 50)["bundle"]


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


def test_what_is_refused(tmp_path: Path, bundle: Path, started: list[list[str]]) -> None:
    with refuses("tensorrt-unavailable"):
        enginery("engines", bundle, "--data", bundle)
    (bundle / "int8.onnx").unlink()
    for folder, code in (("missing", "no-manifest"), ("dataset", "other-kind"), ("bundle", "damaged-artifact")):
        with refuses(code):
            enginery("engines", tmp_path / folder, "--data", tmp_path)
    result = enginery("engines", "--data", bundle, bundle)
    assert result.exit_code == 2
    assert "BUNDLE comes first, before --data" in result.output
    assert not started


def test_in_containers_tensorrt_is_the_images(bundle: Path, started: list[list[str]], monkeypatch) -> None:
    """The machine itself needs a GPU and Docker, and neither TensorRT nor PyTorch."""
    monkeypatch.setattr(command, "gpus", lambda: (GPU,))
    enginery("engines", bundle, "--data", bundle, "--in-containers")
    assert started == [["--model", str(bundle), "--data", str(bundle), "--in-containers"]]
    monkeypatch.setattr(command, "gpus", lambda: ())
    with refuses("no-gpu"):
        enginery("engines", bundle, "--data", bundle, "--in-containers")
