"""Shared by several areas: a small network that was proved and promoted by the steps, into MLflow on SQLite."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest

from components.common.contracts.errors import GateFailed
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.transforms import ShapeSpec
from components.export.onnx_export import export_onnx
from components.export.sources import check_model
from tests.conftest import Shared
from tests.steps import step

from . import sentences, shapes
from .networks import build, digits_network, shapes_of
from .registered import (
    NAME,
    checkout,
    copy_store,
    machine,
    made_once,
    promote_chain,
    registry,
    signed_once,
    three,
    trusted,
)

# Fixtures of registered models.
__all__ = ["checkout", "machine", "made_once", "registry", "signed_once", "three", "trusted"]

LENIENT = {"max_drop_points": 100.0, "min_relative_score_pct": 0.0, "require_above_chance": False}
IMPOSSIBLE = {"min_score_pct": 100.0, **LENIENT}


@pytest.fixture(autouse=True)
def _tracks_nowhere() -> Iterator[None]:
    """MLflow keeps the last store that anything in the process named, also for those who name another later."""
    yield
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="session", autouse=True)
def _quick_exports() -> Iterator[None]:
    """This process reads the models, as test_preflight.py does not; and which of equals is faster is not for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.export.run.check_apart", check_model)
        for module in ("mixed", "quantization"):
            patch.setattr(f"components.export.{module}._TURN_S", 0.02)
        yield


@dataclass(frozen=True, kw_only=True)
class Proved:
    """Artifacts of the steps on one network."""

    dataset: Artifact[DatasetManifest]
    folder: Path

    @property
    def parts(self) -> dict[str, Path]:
        """Inputs of promote."""
        return {name: self.folder / name for name in ("bundle", "report", "verdict")}


def measure(bundle: Path, dataset: Path, folder: Path, thresholds: dict[str, float]) -> None:
    """The report and the verdict on a bundle, into `folder`."""
    settings = {"benchmark_seconds": 0.02, "benchmark_warmup_seconds": 0.0, "min_iterations": 1, "gate": thresholds}
    settings |= {"benchmark_batch_sizes": [1]}
    step("validate", folder / "report", settings, bundle=bundle, dataset=dataset)
    step("gate", folder / "verdict", thresholds, report=folder / "report")


@pytest.fixture(scope="session")
def proved(digits_dataset: Artifact[DatasetManifest], shared: Shared) -> Proved:
    def build(folder: Path) -> None:
        export_onnx(digits_network(digits_dataset), folder / "digits.onnx", ShapeSpec(height=32, width=32))
        settings = {"tensorrt": "off", "resize_ratio": 1.0, "calibration_method": "max"}
        settings |= {"num_ranking_images": 0, "mixed_engines": 0}
        step("export", folder / "bundle", settings, model=folder / "digits.onnx", dataset=digits_dataset.path)
        measure(folder / "bundle", digits_dataset.path, folder, LENIENT)

    return Proved(dataset=digits_dataset, folder=shared("proved", build))


@pytest.fixture(scope="session")
def refused(proved: Proved, shared: Shared) -> Proved:
    """The same bundle with a verdict that is no pass."""

    def build(folder: Path) -> None:
        shutil.copytree(proved.folder / "bundle", folder / "bundle")
        with pytest.raises(GateFailed):
            measure(folder / "bundle", proved.dataset.path, folder, IMPOSSIBLE)

    return Proved(dataset=proved.dataset, folder=shared("refused", build))


@pytest.fixture(scope="session")
def segmentation_chain(shared: Shared) -> shapes.Chain:
    """Dataset, checkpoint, bundle and report of a network that segments."""
    return shapes.made_chain(shared, "segmentation", "fpn_small")


@pytest.fixture(scope="session")
def detection_chain(shared: Shared) -> shapes.Chain:
    """Dataset, checkpoint, bundle and report of a network that finds objects."""
    return shapes.made_chain(shared, "detection", "fcos_small")


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a new MLflow store; nothing of it outlives the test."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    mlflow.set_tracking_uri(uri)
    return uri


@pytest.fixture(scope="session")
def promoted_once(proved: Proved, empty_store: Path, shared: Shared) -> Path:
    def build(folder: Path) -> None:
        shutil.copy(empty_store, folder / "mlflow.db")
        parts = {**proved.parts, "dataset": proved.dataset.path}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", "")
            promote_chain(f"sqlite:///{folder / 'mlflow.db'}", parts, folder / "promotion", NAME)

    return shared("promoted", build)


@pytest.fixture
def promoted(promoted_once: Path, store: str, tmp_path: Path) -> str:
    """The store, with the network as version 1."""
    copy_store(promoted_once, tmp_path)
    return store


@pytest.fixture(scope="session")
def onnx_of(shared: Shared) -> Callable[[str], Path]:
    """`onnx_of("resnet18")`: path of the model's FP32 ONNX file."""

    def path_of(name: str) -> Path:
        folder = shared(f"onnx_{name}", lambda folder: export_onnx(build(name), folder / "fp32.onnx", shapes_of(name)))
        return folder / "fp32.onnx"

    return path_of


@pytest.fixture(scope="session")
def translator(shared: Shared) -> shapes.Chain:
    """Pairs of sentences to a bundle."""
    return sentences.made_translator(shared)
