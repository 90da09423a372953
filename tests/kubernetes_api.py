"""Shared by the servers that stand in for Kubernetes' API in tests."""

from pathlib import Path
from typing import Any

import yaml
from kubernetes import client


def answer(model: Any) -> Any:
    """A model of Kubernetes' client as the API's JSON."""
    return client.ApiClient().sanitize_for_serialization(model)


def write_kubeconfig(folder: Path, server: str, **of_context: str) -> Path:
    """Write a KUBECONFIG for a server. `of_context` is such as namespace."""
    context = {"cluster": "c", "user": "u", **of_context}
    whole: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return file
