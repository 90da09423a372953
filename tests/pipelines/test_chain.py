"""The whole chain as a person starts it: every step real, on real digits, on the CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

import enginery
from components.common.contracts.manifests import BundleManifest, DatasetManifest, VerdictManifest, load
from enginery.cli import kfp
from tests.pipelines.running import ROOT, STEPS
from tests.unit.refusals import refuses

ENGINERY = [sys.executable, "-m", "enginery.cli.main"]
SMALL = [
    *("--image-size", "32", "--num-calibration-images", "16", "--max-drop-points", "100"),
    *("--set", "export.calibration_method=max", "--set", "export.num_ranking_images=0"),
    *("--set", "export.mixed_engines=0"),
    *("--set", "gate.min_relative_score_pct=0", "--set", "gate.require_above_chance=false"),
    *("--set", "validate.benchmark_seconds=0.02"),
]
NAME = "timm/resnet10t"
REGISTERED = "timm-resnet10t"
TRAINING = [
    *("--architecture", NAME, "--epochs", "2", "--global-batch-size", "48", "--learning-rate", "0.4"),
    *("--set", "train.resize_ratio=1.0", "--set", "train.warmup_fraction=0.3"),
]


def variables(home: Path) -> dict[str, str]:
    # A GPU, if there is one, is not for these tests; and rich breaks lines where the terminal ends.
    return {**os.environ, "ENGINERY_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def call(*command: str, home: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**variables(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


@dataclass(frozen=True)
class Chain:
    """One run of a pipeline and what it left."""

    done: subprocess.CompletedProcess[str]
    summary: dict[str, Any]

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.summary["tracking_uri"])

    @property
    def parent(self) -> Run:
        return self.client.get_run(self.summary["mlflow_run_id"])

    @property
    def nested(self) -> dict[str, Run]:
        tag = f"tags.`mlflow.parentRunId` = '{self.parent.info.run_id}'"
        runs = self.client.search_runs([self.parent.info.experiment_id], tag, order_by=["attributes.start_time"])
        return {run.info.run_name: run for run in runs}

    def artifact(self, task: str, name: str) -> Path:
        (found,) = Path(self.summary["run_directory"]).glob(f"artifacts/*/{task}/{name}")
        return found

    def row(self, precision: str) -> dict[str, Any]:
        return next(row for row in self.summary["rows"] if row["precision"] == precision)

    def step(self, name: str) -> dict[str, Any]:
        return next(step for step in self.summary["steps"] if step["name"] == name)


def run_pipeline(name: str, *options: str, home: Path, cwd: Path = ROOT) -> Chain:
    summary = home.parent / f"summary-{time.monotonic_ns()}.json"
    command = [*ENGINERY, "run", str(ROOT / f"pipelines/{name}.py"), *options, "--summary", str(summary)]
    done = call(*command, home=home, cwd=cwd)
    assert summary.exists(), done.stdout + done.stderr
    return Chain(done, json.loads(summary.read_text()))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    (home := tmp_path_factory.mktemp("chain") / "home").mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    return home


@pytest.fixture(scope="module")
def chain(home: Path, few_digits: Path) -> Chain:
    """The resnet50 pipeline, with a gate that lets everything through. Started elsewhere, with a relative path."""
    return run_pipeline("resnet50", "--data", few_digits.name, *TRAINING, *SMALL, home=home, cwd=few_digits.parent)


def own_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)).eval()


@pytest.fixture(scope="module")
def failed(chain: Chain, home: Path, few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """An ONNX file of one's own on the same data, with a gate that nothing passes."""
    import torch

    folder = tmp_path_factory.mktemp("own")
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = torch.randn(3, 3, 32, 32)
        torch.onnx.export(own_model(), (images,), folder / "mine.onnx", dynamo=False, opset_version=17, **names)
    options = ["--data", str(few_digits), *SMALL, "--set", "gate.min_score_pct=100"]
    return run_pipeline("quantize", "--model", "mine.onnx", *options, home=home, cwd=folder)


# What a person sees


def test_python_reads_what_a_run_wrote(chain: Chain, tmp_path: Path) -> None:
    summary = enginery.load_summary(Path(chain.summary["run_directory"]) / "summary.json")
    assert (summary.status, summary.exit_code) == ("done", 0)
    assert "int8.onnx" in enginery.load_bundle(chain.artifact("export", "bundle")).manifest.files
    bundle = shutil.copytree(chain.artifact("export", "bundle"), tmp_path / "bundle")
    content = (bundle / "int8.onnx").read_bytes()
    (bundle / "int8.onnx").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refuses("damaged-artifact"):
        enginery.load_bundle(bundle)
    report = enginery.load_report(chain.artifact("validate", "report"))
    assert report.model.architecture == NAME
    with refuses("unreadable-record"):
        enginery.load_summary(chain.artifact("validate", "report") / "report.json")


def test_it_ends_well_and_says_what_came_out(chain: Chain) -> None:
    assert chain.done.returncode == 0, chain.done.stdout + chain.done.stderr
    text = chain.done.stdout
    for step in STEPS:
        assert re.search(rf"^ *{step} done +\d+\.\d s  \S", text, re.MULTILINE), step
    assert "480 training and 120 validation images, 10 classes, 0 rejected" in text
    int8, fp32 = chain.row("int8"), chain.row("fp32")
    assert re.search(rf"FP32 +{fp32['score_pct']:.2f} .*reference", text)
    assert re.search(rf"INT8 +{int8['score_pct']:.2f} .*pass", text)
    assert re.search(r"images/s at batch \d+, on .* \(openvino\)$", text, re.MULTILINE)
    assert "FP16 was not measured: " in text
    assert f"{REGISTERED} version 1" in text
    assert "Traceback" not in text + chain.done.stderr
    assert "@enginery" not in text + chain.done.stderr  # events are for the parent alone


def test_the_summary_holds_the_same(chain: Chain) -> None:
    summary = chain.summary
    assert (summary["status"], summary["exit_code"], summary["message"]) == ("done", 0, "")
    assert (summary["pipeline"], summary["registered"]) == ("resnet50", f"{REGISTERED}/1")
    assert summary["arguments"]["epochs"] == 2
    assert summary["arguments"]["train"] == {"resize_ratio": 1.0, "warmup_fraction": 0.3}
    assert [step["name"] for step in summary["steps"]] == STEPS
    assert {step["status"] for step in summary["steps"]} == {"done"}
    for step in summary["steps"]:
        assert 0 < step["seconds_work"] < step["seconds_total"]
        known = step["seconds_work"] + step["seconds_imports"] + step["seconds_tracking"]
        assert known <= step["seconds_total"] + 0.1
    assert sum(step["seconds_total"] for step in summary["steps"]) <= summary["seconds_total"]
    assert json.loads(Path(summary["run_directory"], "summary.json").read_text()) == summary


def test_rows_are_measured_on_the_same_images_and_fit_together(chain: Chain) -> None:
    fp32, fp16, int8 = (chain.row(precision) for precision in ("fp32", "fp16", "int8"))
    assert [row["precision"] for row in chain.summary["rows"]] == ["fp32", "fp16", "int8"]
    for row in (fp32, int8):
        assert (row["runtime"], row["num_images"]) == ("openvino", 120)
        assert 0 <= row["score_pct"] <= row["top5_pct"] <= 100
        for speed in ("p50_ms", "images_per_s"):
            assert row[speed] is None or row[speed] > 0  # None: it was unsure, on a busy machine
        assert row["throughput_batch_size"] == 16
    assert int8["delta_points"] == pytest.approx(int8["score_pct"] - fp32["score_pct"])
    assert fp32["delta_points"] == 0
    assert int8["size_bytes"] < 0.3 * fp32["size_bytes"]
    assert (fp16["runtime"], fp16["score_pct"]) == ("n/a", None)
    assert "FP16 arithmetic" in fp16["note"]
    assert (fp32["verdict"], fp16["verdict"], int8["verdict"]) == ("reference", "", "pass")
    # PyTorch and OpenVINO on the same images by the same transform: two images of 120 at most differ.
    trained = chain.nested["train"].data.metrics["val_score_pct"]
    assert fp32["score_pct"] == pytest.approx(trained, abs=1.7)


# MLflow


def test_one_parent_run_and_one_nested_run_per_step(chain: Chain) -> None:
    assert chain.parent.info.status == "FINISHED"
    assert chain.parent.data.tags["enginery.status"] == "done"
    assert chain.client.get_experiment(chain.parent.info.experiment_id).name == "resnet50"
    assert sorted(chain.nested) == sorted(STEPS)
    assert {run.info.status for run in chain.nested.values()} == {"FINISHED"}
    logged = {file.path for file in chain.client.list_artifacts(chain.parent.info.run_id)}
    assert {"summary.json", "run.log", "report.html"} <= logged


def test_accuracy_and_verdict_are_columns_of_the_list_of_runs(chain: Chain) -> None:
    tags = chain.client.get_experiment(chain.parent.info.experiment_id).tags
    columns = json.loads(json.loads(tags["mlflow.sharedViewState.enginery"])["state"])["selectedColumns"]
    # A busy machine has no speed-up.
    known = {"metrics.`int8_speedup`", *(f"metrics.`{name}`" for name in chain.parent.data.metrics)}
    assert set(columns) <= known | {f"tags.`{name}`" for name in chain.parent.data.tags}
    assert chain.parent.data.tags["enginery.verdict"] == f"INT8 {chain.row('int8')['verdict']}"
    for precision in ("fp32", "int8"):
        assert chain.parent.data.metrics[f"{precision}_score_pct"] == chain.row(precision)["score_pct"]
    assert chain.parent.data.metrics["int8_delta_points"] == chain.row("int8")["delta_points"]


def test_parameters_are_the_resolved_configuration_and_metrics_have_one_value_per_epoch(chain: Chain) -> None:
    assert chain.parent.data.params["epochs"] == "2"
    params = chain.nested["train"].data.params
    assert (params["architecture"], params["epochs"], params["resize_ratio"]) == (NAME, "2", "1.0")
    assert params["augmentation.flip_probability"] == "0.5"
    assert chain.nested["gate"].data.params["min_relative_score_pct"] == "0.0"

    run_id = chain.nested["train"].info.run_id
    for name in ("train_loss", "val_loss", "val_score_pct", "train_images_per_s"):
        history = chain.client.get_metric_history(run_id, name)
        assert [entry.step for entry in history] == [0, 1], name
    assert chain.nested["preprocess"].data.metrics["num_train_images"] == 480
    assert chain.nested["gate"].data.metrics["gate_passed"] == 1
    bundle = load(chain.artifact("export", "bundle"), BundleManifest).manifest
    share = 100 * bundle.num_quantized_layers / bundle.num_quantizable_layers
    assert chain.nested["export"].data.metrics["int8_layers_pct"] == share


# A gate that nothing passes. Its exit code: tests/unit/gate; how a run ends after a step that fails: test_trouble.py.


@pytest.mark.slow
def test_a_failed_gate_ends_with_3_after_its_verdict(failed: Chain) -> None:
    assert failed.done.returncode == 3, failed.done.stdout + failed.done.stderr
    assert (failed.summary["status"], failed.summary["exit_code"]) == ("failed", 3)
    assert "INT8 did not pass: top-1" in failed.summary["message"]
    assert "at least 100 %" in failed.summary["message"]
    verdict = load(failed.artifact("gate", "verdict"), VerdictManifest).manifest
    assert (verdict.passed, verdict.precision) == (False, "int8")
    assert {check.name: check.verdict for check in verdict.checks}["score_pct"] == "fail"
    assert (failed.row("fp32")["verdict"], failed.row("int8")["verdict"]) == ("reference", "fail")
    assert "Traceback" not in failed.done.stdout + failed.done.stderr


@pytest.mark.slow
def test_a_failed_gate_promotes_nothing_and_is_failed_in_mlflow(failed: Chain) -> None:
    assert "promote" not in {step["name"] for step in failed.summary["steps"]}
    assert failed.step("gate")["status"] == "failed"
    assert {step["status"] for step in failed.summary["steps"]} <= {"done", "reused", "failed"}
    assert failed.summary["registered"] == ""
    assert "promote" not in failed.nested
    assert [str(version.version) for version in failed.client.search_model_versions(f"name='{REGISTERED}'")] == ["1"]

    assert failed.parent.info.status == "FAILED"
    assert failed.nested["gate"].info.status == "FAILED"
    assert failed.nested["gate"].data.metrics["gate_passed"] == 0


# Ways to start it


@pytest.mark.parametrize(
    ("command", "option"),
    [([sys.executable, "pipelines/resnet50.py"], "--epochs"), (["./kfp", "run", "pipelines/quantize.py"], "--model")],
)
def test_ways_to_start(command: list[str], option: str, tmp_path: Path) -> None:
    cwd = ROOT
    if command[0] == "./kfp":  # from elsewhere
        (tmp_path / "kfp").symlink_to(ROOT / "kfp")
        command, cwd = [*command[:2], str(ROOT / command[2])], tmp_path
    # With a virtual environment active, as a person's shell has it.
    environment = {**variables(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["VIRTUAL_ENV"] = sys.prefix
    done = subprocess.run([*command, "--help"], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--version"], f"kfp {metadata.version('kfp')}"), (["run", "--help"], "Manage run resources")],
)
def test_everything_else_is_the_stock_kfp(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kfp", *arguments])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit) as left:
        kfp.main()
    assert not left.value.code
    assert expected in capsys.readouterr().out


# Models of one's own


@pytest.mark.slow  # tests/unit/export has files of one's own, test_golden.py the pipeline
def test_quantize_an_onnx_file(failed: Chain) -> None:
    import numpy as np
    import onnxruntime
    import torch

    steps = {step["name"]: step["status"] for step in failed.summary["steps"]}
    assert steps == {"preprocess": "reused", "export": "done", "validate": "done", "gate": "failed"}
    assert failed.row("int8")["num_images"] == 120
    folder = failed.artifact("export-own", "bundle")
    bundle = load(folder, BundleManifest).manifest
    assert (bundle.architecture, bundle.shapes.height, bundle.num_quantized_layers) == ("mine", 32, 3)
    images = torch.randn(3, 3, 32, 32)
    (logits,) = onnxruntime.InferenceSession(folder / "fp32.onnx").run(None, {bundle.shapes.input_name: images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, own_model()(images).numpy(), atol=1e-3)


PARTS_ALONE = """
from kfp import dsl
from pipelines import graph

@dsl.pipeline(name="parts-alone")
def parts_alone(data: str, num_parts: int = 2):
    graph.prepare_in_parts(data=data, task="classification", seed=0, num_parts=num_parts, settings={})
"""


@pytest.mark.slow  # tests/unit/preprocess/test_parts.py joins parts, test_golden.py has the fan-out
def test_a_dataset_packed_in_parts_goes_the_same_way(
    chain: Chain, home: Path, few_digits: Path, tmp_path: Path
) -> None:
    """The fan-out over parts runs here, too, and ends in the dataset that one step writes."""
    (tmp_path / "parts_alone.py").write_text(PARTS_ALONE)
    done = call(*ENGINERY, "run", str(tmp_path / "parts_alone.py"), "--data", str(few_digits), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = home.glob("runs/parts-alone-*")
    summary = json.loads((run / "summary.json").read_text())
    assert [step["name"] for step in summary["steps"]] == ["preprocess"] * 2 + ["merge"]
    assert {step["status"] for step in summary["steps"]} == {"done"}
    folders = (next(run.glob("artifacts/*/merge/dataset")), chain.artifact("preprocess", "dataset"))
    merged, whole = (load(folder, DatasetManifest).manifest.splits for folder in folders)
    assert {name: split.digest for name, split in merged.items()} == {n: split.digest for n, split in whole.items()}
    assert {step["outcome"][:10] for step in summary["steps"][:2]} == {"part 1/2: ", "part 2/2: "}
