"""Keys, and patience with servers."""

from pathlib import Path

import pytest

from tests.unit.registered import write_keys


@pytest.fixture(autouse=True)
def _requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a command sets last no longer than the test."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    return write_keys(tmp_path / "signer")
