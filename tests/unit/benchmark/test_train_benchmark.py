"""benchmarks/train.py on a CPU: every part, resuming, and cells that fail or take too long."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import train
from benchmarks.results import Results
from benchmarks.train_cell import Cell

TINY = ["--device", "cpu", "--architecture", "resnet18", "--image-size", "32", "--batch-sizes", "8", "--seconds", "0.5"]
TINY += ["--turns", "1", "--machine", "here", "--num-images", "64", "--reference-batch-size", "8"]


def run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    places = ["--work", str(folder / "work"), "--results", str(folder)]
    outcome = CliRunner().invoke(train.main, [*TINY, *places, *options], catch_exceptions=False)
    assert outcome.exit_code == 0
    return json.loads((folder / "here" / "train_resnet18.json").read_text()), outcome.output


@pytest.mark.slow
def test_all_parts(tmp_path: Path) -> None:
    options = ["--variants", "off,off+nonsense=1", "--precisions", "bf16", "--ddp", "25:0:1"]
    result, said = run(tmp_path, *options, "--parts", "synthetic,shards,torchvision,scaling")
    measures = result["measures"]
    assert measures["train_synthetic_images_per_s"] > 0
    assert measures["train_jpeg_over_synthetic"] > 0
    assert 0 < measures["train_data_wait_share"] < 1
    assert measures["train_over_reference_script"] > 0
    assert measures["train_scaling_x2"] > 0
    failed = [cell for cell in result["runs"] if "failed" in cell]
    assert [cell["label"] for cell in failed] == ["synthetic_bf16_off+nonsense=1_b8"]
    again, said = run(tmp_path, *options, "--parts", "shards,scaling")
    assert again["measures"] == measures
    assert "images/s (" not in said  # nothing was measured again


def test_a_cell_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    cell = Cell(kind="synthetic", architecture="resnet18", image_size=32, batch_size=8, variant="off", seconds=60)
    assert train.run_cell(cell, "cpu", 0.5, tmp_path) == {"failed": "not done within 0 s"}


def test_another_device_or_torch_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    same = {"commit": train.current_commit(), "torch": train.torch.__version__, "device": "CPU"}
    runs = [
        {"label": "same", **same},
        {"label": "device", **same, "device": "NVIDIA H100"},
        {"label": "torch", **same, "torch": "0.1"},
    ]
    (tmp_path / "here" / "train_x.json").write_text(json.dumps({"runs": runs}))
    places = {"name": "train_x", "results": Results("here", tmp_path), "work": tmp_path}
    session = train.Session(**places, device="cpu", cell_s=1, ends=0)
    session.reuse()
    assert list(session.cells) == ["same"]
