"""Detectors and segmenters trained by two processes."""

from pathlib import Path

import pytest

from components.common.contracts.manifests import CheckpointManifest, load
from tests.steps import step


@pytest.mark.slow
@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_two_processes_train_as_one(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """But for BatchNorm, whose statistics are those of half a batch."""
    chain = request.getfixturevalue(f"{task}_chain")
    one = load(chain.checkpoint, CheckpointManifest).manifest
    step("train", tmp_path / "checkpoint", {**one.config, "num_processes": 2}, dataset=chain.dataset)
    two = load(tmp_path / "checkpoint", CheckpointManifest).manifest
    for expected, found in zip(one.history, two.history, strict=True):
        assert found.train_loss == pytest.approx(expected.train_loss, rel=0.1)
    assert two.history[-1].train_loss < two.history[0].train_loss
