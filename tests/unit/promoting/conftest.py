"""A registry of its own for each test, real MLflow on SQLite."""

import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.registry import Registry


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments(max_results=1)
    return file


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
