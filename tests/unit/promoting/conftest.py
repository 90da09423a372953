"""A registry of its own for each test, real MLflow on SQLite."""

import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.registry import Registry

from .chains import make_and_promote


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


@pytest.fixture(scope="session")
def made_once(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with champions 1 and 3 of m, and 2, which is worse."""
    folder = tmp_path_factory.mktemp("three")
    file = folder / "mlflow.db"
    shutil.copy(empty_store, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
        for name in ("a-050", "b-040", "c-060"):
            make_and_promote(f"sqlite:///{file}", folder, name)
    return file


@pytest.fixture
def three(made_once: Path, uri: str) -> str:
    """A copy of that store; the files that it knows are the same."""
    shutil.copy(made_once, uri.removeprefix("sqlite:///"))
    return uri
