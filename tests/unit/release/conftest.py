"""Patience with servers."""

import pytest


@pytest.fixture(autouse=True)
def _requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a command sets last no longer than the test."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
