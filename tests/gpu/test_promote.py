"""A version proved with TensorRT: promoted, loaded by MLflow, measured again. Fails, never skips, without a GPU."""

import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

from components.common.contracts.manifests import (
    Artifact,
    BundleManifest,
    DatasetManifest,
    PromotionManifest,
    ReportManifest,
    VerdictManifest,
    load,
)
from components.common.contracts.records import Precision
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.data.evaluation import ClassPredictions, predict
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.registry.tracking import step_run
from components.common.runtimes.tensorrt import TensorRTRunner
from components.export.config import ExportConfig
from components.export.onnx_export import export_onnx
from components.export.run import run as export
from components.gate.config import GateConfig
from components.gate.run import run as gate
from components.promote.config import PromoteConfig
from components.promote.run import run as promote
from components.validate.config import ValidateConfig
from components.validate.run import run as validate
from enginery.datasets.textures import write_textures

NAME = "textures"
RUNTIME = "tensorrt"
SIZE, NUM_VAL = 64, 128
LENIENT = {"max_drop_points": 100.0, "min_relative_score_pct": 0.0, "require_above_chance": False}
QUICK = {"benchmark_seconds": 0.05, "benchmark_warmup_seconds": 0.0, "min_iterations": 5}

Preprocess = Callable[..., Artifact[DatasetManifest]]


@dataclass(frozen=True, kw_only=True)
class Proved:
    """One bundle, and for two datasets its report and verdict."""

    bundle: Artifact[BundleManifest]
    datasets: tuple[Artifact[DatasetManifest], Artifact[DatasetManifest]]
    folder: Path

    def parts(self, index: int) -> dict[str, Path]:
        """Inputs of promote."""
        proofs = {name: self.folder / str(index) / name for name in ("report", "verdict")}
        return {"bundle": self.bundle.path, **proofs, "dataset": self.datasets[index].path}

    def precision(self, index: int) -> Precision:
        return load(self.parts(index)["verdict"], VerdictManifest).manifest.served_precision


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory, run_preprocess: Preprocess) -> Proved:
    folder = tmp_path_factory.mktemp("proved")
    datasets = []
    for seed in (0, 1):
        images = folder / str(seed) / "images"
        write_textures(images, num_train=512, num_val=NUM_VAL, seed=seed, num_workers=8)
        datasets.append(run_preprocess(images, folder / str(seed) / "dataset", num_workers=8))
    model = trained(datasets[0], folder / "textures.onnx")
    settings = {"tensorrt": "on", "optimization_level": 1, "calibration_method": "max", "num_ranking_images": 0}
    config = resolve(ExportConfig, "export", {**settings, "fallback": False, "resize_ratio": 1.0})
    export(config, StepLog("export"), model=model, dataset=datasets[0].path, output=folder / "bundle")
    proofs = Proved(bundle=load(folder / "bundle", BundleManifest), datasets=(datasets[0], datasets[1]), folder=folder)
    config = resolve(ValidateConfig, "validate", {**QUICK, "benchmark_batch_sizes": [1, 8], "gate": LENIENT})
    for index in (0, 1):
        parts = proofs.parts(index)
        inputs = {"bundle": parts["bundle"], "dataset": parts["dataset"]}
        validate(config, StepLog("validate"), **inputs, output=parts["report"])
        gate(GateConfig(**LENIENT), StepLog("gate"), report=parts["report"], output=parts["verdict"])
    return proofs


def trained(dataset: Artifact[DatasetManifest], file: Path) -> Path:
    """The ONNX file of a small network that has learned something."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 32), (32, 64))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(dataset.manifest.classes))]
    net = nn.Sequential(*stages, *head)
    loader = Loader(dataset, "train", transform_for(SIZE, resize_ratio=1.0), batch_size=512)
    batch = next(iter(loader))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(30):
        loss = nn.functional.cross_entropy(net(batch.images), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    export_onnx(net.eval(), file, ShapeSpec(height=SIZE, width=SIZE))
    return file


@pytest.fixture
def promotion(
    proved: Proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], PromotionManifest]]:
    """`promotion(index)`: register the bundle with that dataset's proof, in a new MLflow store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")

    def register(index: int) -> PromotionManifest:
        output = tmp_path / f"promotion{index}"
        with step_run("promote") as run:
            config = PromoteConfig(registered_model=NAME)
            promote(config, StepLog("promote", run), **proved.parts(index), output=output)
        return load(output, PromotionManifest).manifest

    yield register
    mlflow.set_tracking_uri(before)


def validation_images(dataset: Artifact[DatasetManifest]) -> list[bytes]:
    """The split's image files in the order of its listing."""
    images = []
    for shard in dataset.manifest.splits["val"].shards:
        with tarfile.open(dataset.path / shard) as tar:
            images += [tar.extractfile(member).read() for member in tar if not member.name.endswith(".cls")]
    return images


def test_the_champion_gives_the_validated_predictions(proved: Proved, promotion: Callable) -> None:
    assert promotion(0).champion
    model = mlflow.pyfunc.load_model(f"models:/{NAME}@champion")
    precision, bundle = proved.precision(0), proved.bundle.manifest
    selected = model._model_impl.selected
    assert (selected.runner.runtime, selected.precision) == (RUNTIME, precision)
    found = model.predict(validation_images(proved.datasets[0]), params={"top_k": 5})
    assert len(found) == NUM_VAL

    # The plan on the same pixels: the same, to the last image.
    loader = Loader(proved.datasets[0], "val", bundle.transform, batch_size=32)
    engine = next(engine for engine in bundle.engines if engine.precision == precision)
    with closing(TensorRTRunner(proved.bundle.file(engine.file), bundle.shapes, engine)) as runner:
        expected = predict({precision: runner}, loader, NUM_VAL, lambda *_: None)[precision]
    assert isinstance(expected, ClassPredictions)
    assert found["labels"].tolist() == [[bundle.classes[index] for index in row] for row in expected.top]

    # Validation decodes on the GPU, whose levels differ by rounding: all but a few labels are the same.
    recorded = np.load(proved.parts(0)["report"] / "predictions.npz")[precision][:, 0]
    same = [label == bundle.classes[index] for label, index in zip(found["label"], recorded, strict=True)]
    assert np.mean(same) >= 0.97


def test_a_champion_is_measured_again_on_other_images(proved: Proved, promotion: Callable) -> None:
    """It is the same bundle, so it has what its own report on those images says."""
    promotion(0)
    comparison = promotion(1).comparison
    assert comparison.measured_again == RUNTIME
    report = load(proved.parts(1)["report"], ReportManifest).manifest
    rows = {row.precision: row.score_pct for row in report.accuracy.rows}
    assert comparison.champion_score_pct == pytest.approx(rows[proved.precision(0)])
