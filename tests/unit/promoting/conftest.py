"""A registry of its own for each test, real MLflow on SQLite."""

import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.registry.model_registry import Registry
from tests.conftest import Shared

from .chains import make_and_promote


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tracking URI, with $ENGINERY_HOME beside it."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def registry(uri: str) -> Registry:
    return Registry(MlflowClient(tracking_uri=uri, registry_uri=uri))


@pytest.fixture(scope="session")
def made_once(empty_store: Path, shared: Shared) -> Path:
    """A store with champions 1 and 3 of m, and 2, which is worse."""

    def build(folder: Path) -> None:
        shutil.copy(empty_store, folder / "mlflow.db")
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", uri)
            for name in ("a-050", "b-040", "c-060"):
                make_and_promote(uri, folder, name)

    return shared("made_once", build) / "mlflow.db"


@pytest.fixture
def three(made_once: Path, uri: str) -> str:
    """A copy of that store; the files that it knows are the same."""
    shutil.copy(made_once, uri.removeprefix("sqlite:///"))
    return uri
