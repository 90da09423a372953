"""The report of a real chain on digits, two of its class names being HTML and Markdown: what it says, and how."""

import base64
import html
import io
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image

from components.common.contracts.errors import GateFailed
from components.common.contracts.manifests import Artifact, BundleManifest, CheckpointManifest, ReportManifest, load
from components.common.contracts.records import measures
from components.common.process.steplog import StepLog
from components.common.registry.tracking import step_run
from components.validate.config import ValidateConfig
from components.validate.report import gather_provenance, read_thumbnails
from components.validate.report_text import outcome
from components.validate.schema import Report, report_schema
from tests.conftest import Bundle, Dataset
from tests.steps import step
from tests.unit.registered import ROOT

HOSTILE = '<b>"x"&'
PIPES = "a|b_*c*"
TRAIN: dict[str, Any] = {
    "architecture": "timm/resnet10t",
    "image_size": 32,
    "resize_ratio": 1.0,
    "epochs": 2,
    "global_batch_size": 16,
    "learning_rate": 0.4,
    "warmup_fraction": 0.3,
    "augmentation": {"min_area": 0.8, "flip_probability": 0.0, "mixup_alpha": 0.2, "cutmix_alpha": 0.5},
}


@dataclass(frozen=True, kw_only=True)
class Chain:
    dataset: Dataset
    checkpoint: Artifact[CheckpointManifest]
    bundle: Bundle


@dataclass(frozen=True, kw_only=True)
class Written:
    path: Path
    page: str
    card: str
    report: Report

    @property
    def text(self) -> str:
        """The page's visible text, in order."""
        body = self.page[self.page.index("<body>") :]
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.fixture(scope="module")
def chain(few_digits: Path, run_preprocess: Any, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    root = tmp_path_factory.mktemp("report")
    data = root / "data"
    names = {"3": HOSTILE, "5": PIPES}
    for folder in sorted(path for path in few_digits.iterdir() if path.is_dir()):
        shutil.copytree(folder, data / names.get(folder.name, folder.name))
    dataset = run_preprocess(data, root / "dataset")
    step("train", root / "checkpoint", TRAIN, dataset=dataset.path)
    # Calibrated badly on purpose, so that INT8 differs from FP32, and with a budget that lets it.
    bad = {"num_calibration_images": 8, "calibration_method": "percentile", "calibration_percentile": 60}
    bad |= {"mixed_engines": 0, "gate": {"max_drop_points": 100, "min_relative_score_pct": 0}}
    step("export", root / "bundle", bad, model=root / "checkpoint", dataset=dataset.path)
    return Chain(
        dataset=dataset,
        checkpoint=load(root / "checkpoint", CheckpointManifest),
        bundle=load(root / "bundle", BundleManifest),
    )


def validate(chain: Chain, output: Path, log: StepLog | None = None, **settings: Any) -> Written:
    fast = {"benchmark_seconds": 0.02, "benchmark_warmup_seconds": 0, "benchmark_batch_sizes": (1, 4)}
    step("validate", output, {**fast, **settings}, log, bundle=chain.bundle.path, dataset=chain.dataset.path)
    return Written(
        path=output,
        page=(output / "report.html").read_text(encoding="utf-8"),
        card=(output / "model_card.md").read_text(encoding="utf-8"),
        report=Report.model_validate_json((output / "report.json").read_bytes()),
    )


@pytest.fixture(scope="module")
def written(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return validate(chain, tmp_path_factory.mktemp("written") / "report")


def test_the_verdict_comes_first(written: Written) -> None:
    verdict = written.report.verdict
    assert not verdict.passed
    assert "passed" not in outcome(written.report)
    assert written.text.startswith(
        f"{outcome(written.report)} classification, timm/resnet10t, 10 classes, 32 \N{MULTIPLICATION SIGN} 32 px"
    )
    assert written.card.startswith(f"# timm/resnet10t: {outcome(written.report)}\n")
    names = ["drop_points", "relative_score_pct", "above_chance", "validation_images"]
    assert [check.name for check in verdict.checks] == names
    places = [written.text.index(check.explanation) for check in verdict.checks]
    assert places == sorted(places)
    assert max(places) < written.text.index("one of 120 validation images is 0.83 points") < written.text.index("top-5")


def test_numbers_are_those_that_were_measured(written: Written) -> None:
    accuracy, benchmark, dumped = (
        json.loads((written.path / f"{name}.json").read_text()) for name in ("accuracy", "benchmark", "report")
    )
    assert (dumped["accuracy"], dumped["benchmark"]) == (accuracy, benchmark)
    for row in accuracy["rows"]:
        shown = row["note"] if row["score_pct"] is None else f"{row['precision'].upper()} {row['score_pct']:.2f} "
        assert shown in written.text
    assert (benchmark["latency_budget"], "Latency budget" in written.text) == (None, False)


def test_degraded_images_are_measured_and_judged(chain: Chain, tmp_path: Path) -> None:
    one = validate(chain, tmp_path / "report", corruptions=True, gate={"max_corrupted_drop_points": 1.0})
    fp32, int8 = (one.report.accuracy.row(name) for name in ("fp32", "int8"))
    assert [row.name for row in fp32.corrupted] == [row.name for row in int8.corrupted]
    assert len(int8.corrupted) == 15
    assert min(row.score_pct for row in fp32.corrupted) < fp32.score_pct
    for plain, row in zip(fp32.corrupted, int8.corrupted, strict=True):
        assert (plain.comparison, row.comparison.num_images) == (None, 120)
        assert row.score_pct - plain.score_pct == pytest.approx(row.comparison.delta_points)
        assert row.p_corrected >= row.comparison.mcnemar_p
    drop = max(-row.comparison.delta_points for row in int8.corrupted)
    (check,) = (entry for entry in one.report.verdict.checks if entry.name == "corrupted_drop_points")
    assert check.measured == measures(one.report.accuracy, one.report.benchmark)["int8_corrupted_drop_points"] == drop
    assert (check.verdict == "pass", "Degraded images" in one.text) == (False, True)


def test_nothing_is_fetched(written: Written) -> None:
    assert "http://" not in written.page
    assert "https://" not in written.page
    assert "//cdn" not in written.page
    assert re.findall(r"<(?:script|link|iframe|object)\b", written.page) == []
    assert "default-src 'none'" in written.page
    sources = re.findall(r'(?:src|href)="([^"]*)"', written.page)
    assert sources
    assert [source for source in sources if not source.startswith(("data:image/", "#"))] == []


def test_names_are_text_and_not_markup(written: Written) -> None:
    assert HOSTILE in written.report.model.classes
    assert "<b>" not in written.page
    assert "&lt;b&gt;" in written.page
    assert HOSTILE in written.text
    assert "<b>" not in written.card
    assert r"a\|b\_\*c\*" in written.card
    for table in re.findall(r"(?:^\|.*\n)+", written.card, flags=re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_the_published_schema_is_that_of_the_report(written: Written) -> None:
    published = json.loads((ROOT / "docs/schemas/report.schema.json").read_text())
    assert published == report_schema(), "python -m components.validate.schema > docs/schemas/report.schema.json"
    dumped = json.loads((written.path / "report.json").read_text())
    assert set(dumped) == set(published["properties"])


def test_disagreements_are_shown_with_their_images(written: Written, chain: Chain) -> None:
    predictions = np.load(written.path / "predictions.npz")
    labels, fp32, int8 = predictions["labels"], predictions["fp32"][:, 0], predictions["int8"][:, 0]
    different = np.flatnonzero(fp32 != int8)
    assert len(different) == written.report.change.num_differing > 0
    shown = written.report.disagreements
    assert len(shown) == min(24, len(different))
    assert {entry.index for entry in shown} <= set(different.tolist())
    listing = [json.loads(line) for line in (chain.dataset.path / "val.jsonl").open(encoding="utf-8")]
    classes = chain.dataset.manifest.classes
    for entry in shown:
        assert entry.path == listing[entry.index]["path"]
        assert entry.label == classes[labels[entry.index]]
        assert (entry.fp32, entry.own) == (classes[fp32[entry.index]], classes[int8[entry.index]])
    assert written.page.count("<img ") == len(shown)
    assert sorted(read_thumbnails(chain.dataset, range(len(listing)))) == list(range(len(listing)))
    # The very pixels of the source file: digits are small enough to stay exact.
    source = Path(chain.dataset.manifest.config["data"]) / shown[0].path
    data = re.search(r'<img src="data:image/png;base64,([^"]+)"', written.page)
    image = Image.open(io.BytesIO(base64.b64decode(data[1])))
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(source).convert("RGB")))


def test_thumbnails_are_upright_small_and_8_bit(tmp_path: Path, run_preprocess: Any) -> None:
    wide = Image.new("RGB", (400, 200), "red")
    exif = wide.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    for folder in ("a", "b"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for name in ("1", "2"):
            wide.save(tmp_path / "data" / folder / f"{name}.jpg", exif=exif)
            Image.fromarray(np.full((8, 8), 0x8040, np.uint16)).save(tmp_path / "data" / folder / f"{name}.png")
    dataset = run_preprocess(tmp_path / "data", tmp_path / "dataset", val_fraction=0.5, on_leak="warn")
    listing = [json.loads(line) for line in (dataset.path / "val.jsonl").open(encoding="utf-8")]
    for index, thumbnail in read_thumbnails(dataset, range(len(listing))).items():
        image = Image.open(io.BytesIO(base64.b64decode(thumbnail.partition(",")[2])))
        turned = listing[index]["path"].endswith("jpg")
        assert image.size == ((80, 160) if turned else (8, 8))
        assert turned or image.getpixel((0, 0)) == (128, 128, 128)


def test_confusion_and_classes_add_up(written: Written) -> None:
    predictions = np.load(written.path / "predictions.npz")
    labels, int8 = predictions["labels"], predictions["int8"][:, 0]
    matrix = np.array(written.report.confusion.matrix)
    assert matrix.sum() == 120
    assert 100 * np.trace(matrix) / 120 == pytest.approx(written.report.accuracy.row("int8").score_pct)
    assert all(matrix[row, column] == ((labels == row) & (int8 == column)).sum() for row, column in np.ndindex(10, 10))
    off_diagonal = sorted(matrix[~np.eye(10, dtype=bool)].tolist(), reverse=True)
    assert [pair.num_images for pair in written.report.confusion.pairs] == [n for n in off_diagonal if n][:20]
    deltas = [entry.delta_points for entry in written.report.class_changes]
    assert deltas == sorted(deltas)
    assert np.mean(deltas) == pytest.approx(written.report.change.delta_points)  # 12 images in each class


def test_training_is_told_by_epoch(written: Written, chain: Chain) -> None:
    history = chain.checkpoint.manifest.history
    first, last = history
    assert last.train_loss < first.train_loss
    assert (last.val_score_pct or 0) > 40  # chance is 10: it learns from mixed images, too
    assert history[-1].model_dump(exclude_none=True) == chain.checkpoint.manifest.metrics
    training = written.report.training
    assert (training.history, training.config) == (history, chain.checkpoint.manifest.config)
    ranked = written.report.calibration.selection.ranking  # only where some had to leave INT8
    speeds = written.report.benchmark
    is_sure = any(speeds.sure_images_per_s(row) is not None for row in speeds.rows if row.with_transfers)
    assert written.page.count("<svg") == 2 + is_sure + bool(ranked)  # candidates, training, speed, and layers


def test_provenance_leads_back(written: Written, chain: Chain) -> None:
    digests = written.report.provenance.digests
    artifacts = {"dataset": chain.dataset, "model": chain.checkpoint, "bundle": chain.bundle}
    assert {name: digests[name] for name in artifacts} == {name: entry.digest for name, entry in artifacts.items()}
    assert digests["int8.onnx"] == chain.bundle.manifest.files["int8.onnx"].digest
    for digest in digests.values():
        assert digest in written.page
        assert digest in written.card
    assert list(written.report.provenance.configs) == ["preprocess", "train", "export", "validate"]
    assert written.report.provenance.environments["train"].versions["torch"] in written.text
    assert chain.bundle.manifest.engines_missing in written.text
    assert str(Path(chain.dataset.manifest.config["data"]).parent) not in written.card + written.page  # both travel


def test_settings_of_export_are_those_that_were_used(written: Written, chain: Chain) -> None:
    configs = written.report.provenance.configs
    assert (configs["train"]["image_size"], "image_size" in configs["export"]) == (32, False)
    own = replace(chain.bundle, manifest=chain.bundle.manifest.model_copy(update={"training": None}))
    assert gather_provenance(ValidateConfig(), own, chain.dataset).configs["export"]["image_size"] == 32


def test_an_unmeasured_precision_is_a_verdict_without_comparison(chain: Chain, tmp_path: Path) -> None:
    written = validate(chain, tmp_path / "report", gate={"precision": "fp16"}, runtime="openvino")
    assert written.text.startswith("FP16: not enough evidence to pass")
    assert "FP16 was not measured here: needs TensorRT on a GPU" in written.text
    assert (written.report.change, written.report.confusion) == (None, None)
    assert "disagree" not in written.text


def test_mlflow_has_report_and_data(chain: Chain, few_digits: Path, empty_store: Path, tmp_path, monkeypatch) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}")
    client = MlflowClient()
    with step_run("preprocess") as first:
        settings = {"data": str(few_digits), "num_workers": 1}
        step("preprocess", tmp_path / "dataset", settings, StepLog("preprocess", first))
    splits = {entry.dataset.name: entry for entry in client.get_run(first.run_id).inputs.dataset_inputs}
    tags = {name: entry.tags[0].value for name, entry in splits.items()}
    assert tags == {"train": "training", "val": "validation"}
    assert json.loads(splits["train"].dataset.profile) == {"num_images": 480}
    with step_run("train") as second:
        small = {"architecture": "squeezenet1_1", "epochs": 1, "global_batch_size": 240}
        log = StepLog("train", second)
        step("train", tmp_path / "checkpoint", {**TRAIN, **small}, log, dataset=tmp_path / "dataset")
    trained_on = {entry.dataset.name: entry for entry in client.get_run(second.run_id).inputs.dataset_inputs}
    assert {name: (entry.dataset.digest, entry.tags[0].value) for name, entry in trained_on.items()} == {
        name: (entry.dataset.digest, entry.tags[0].value) for name, entry in splits.items()
    }
    pipeline = client.create_run(second.experiment_id).info.run_id
    for name in ("validate", "gate"):
        nested = client.create_run(second.experiment_id, tags={"mlflow.parentRunId": pipeline}).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", nested)
        with step_run(name) as judged:
            log = StepLog(name, judged)
            if name == "validate":
                run = judged
                validate(chain, tmp_path / "report", log, latency_budget="0.1us")
            else:
                with pytest.raises(GateFailed):
                    step("gate", tmp_path / "verdict", log=log, report=tmp_path / "report")
    table = client.get_run(pipeline).data
    manifest = load(tmp_path / "report", ReportManifest).manifest
    assert table.metrics == measures(manifest.accuracy, manifest.benchmark)
    assert {"fp32_score_pct", "int8_delta_points"} <= set(table.metrics)
    assert table.tags["enginery.verdict"] in ("INT8 fail", "INT8 not enough evidence")
    assert [entry.path for entry in client.list_artifacts(pipeline)] == ["report.html"]
    tags, numbers = client.get_run(run.run_id).data.tags, client.get_run(run.run_id).data.metrics
    # INT8 is calibrated too badly to be recommended.
    measured = manifest.benchmark
    said = "within 0.0001 ms: unsure, " if measured.latency_budget.doubt else "nothing within 0.0001 ms: nearest is "
    assert tags["enginery.latency_budget"].startswith(said)
    assert numbers["latency_budget_ms"] == 0.0001
    sure = [row for row in measured.plain_rows if row.batch_size == 4 and measured.sure_images_per_s(row)]
    assert {"p99_ms_b4", "images_per_s_b4"} & set(numbers) == ({"p99_ms_b4", "images_per_s_b4"} if sure else set())
    names = {entry.path for entry in client.list_artifacts(run.run_id)}
    assert {"report.html", "report.json", "model_card.md", "accuracy.json", "benchmark.json"} <= names
    (entry,) = client.get_run(run.run_id).inputs.dataset_inputs
    assert (entry.dataset.name, entry.tags[0].value) == ("val", "validation")
    assert json.loads(entry.dataset.profile) == {"num_images": 120}
    models = client.search_logged_models([run.experiment_id])
    found = {(model.tags["precision"], model.name, model.status.name) for model in models}
    names = {"fp32": "timm_resnet10t-fp32", "int8": "timm_resnet10t-int8"}  # nothing runs FP16 on a CPU
    assert found == {(precision, name, "READY") for precision, name in names.items()}
    for model in models:
        shown = {metric.key: metric.value for metric in model.metrics or ()}
        assert shown["score_pct"] == pytest.approx(manifest.accuracy.row(model.tags["precision"]).score_pct)
    metrics = [metric for model in models for metric in model.metrics or []]
    assert metrics
    assert {(m.dataset_name, m.dataset_digest) for m in metrics} == {("val", entry.dataset.digest)}
