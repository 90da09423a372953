"""export, validate and gate on CPUs that one does not have: the quickstart's checkpoint, oneDNN limited to less."""

import json
from pathlib import Path

import pytest

from components.common.contracts.digests import digest_bytes
from components.common.contracts.instruction_sets import SATURATING, VARIABLE, available
from components.common.contracts.manifests import BundleManifest, ReportManifest, VerdictManifest, load
from components.common.runtimes.selection import fit_model
from tests.processes import ROOT, run_python

# The quickstart itself ran with the widest.
LIMITS = [name for name in available()[1:] if name != "SSE41"] or ["SSE41"]


@pytest.fixture(scope="module")
def quickstart() -> tuple[Path, Path]:
    """The checkpoint and the dataset of the last `make quickstart`, whatever else was trained since."""
    summary = ROOT / ".enginery/quickstart.json"
    assert summary.exists(), "there is no checkpoint of the digits: run `make quickstart` first"
    manifests = (ROOT / ".enginery/runs").glob("*/artifacts/*/*/*/manifest.json")
    found = {digest_bytes(file.read_bytes()): file.parent for file in manifests}
    bundle = found.get(json.loads(summary.read_text())["bundle_digest"])
    assert bundle, "the artifacts of the last `make quickstart` are gone: run it again"
    inputs = load(bundle, BundleManifest).manifest.inputs
    return found[inputs["model"]], found[inputs["dataset"]]


def step(name: str, limit: str, **options: object) -> str:
    words = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    done = run_python("-m", f"components.{name}", *words, **{VARIABLE: limit, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.parametrize("limit", LIMITS)
def test_the_digits_pass_their_gate(quickstart: tuple[Path, Path], tmp_path: Path, limit: str) -> None:
    (checkpoint, dataset), bundle, report = quickstart, tmp_path / "bundle", tmp_path / "report"
    gate = "{max_drop_points: 1.0}"
    step(
        "export", limit, model=checkpoint, dataset=dataset, output=bundle,
        num_calibration_images=256, gate=gate,
    )  # fmt: skip
    record = load(bundle, BundleManifest).manifest
    trials = record.calibration.cpu_trials
    assert {trial.instruction_set for trial in trials} == {limit}
    assert {trial.weight_bits for trial in trials} == ({7, 8} if limit in SATURATING else {8})
    step("validate", limit, bundle=bundle, dataset=dataset, output=report, benchmark_seconds=0.1, gate=gate)
    row = load(report, ReportManifest).manifest.accuracy.row("int8")
    assert row.instruction_set == limit
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, limit)
        assert row.file == fit_model(record.cpu_models).file
    step("gate", limit, report=report, output=tmp_path / "verdict", max_drop_points=1.0)
    assert load(tmp_path / "verdict", VerdictManifest).manifest.passed
