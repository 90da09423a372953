"""One registered version and the files behind it, for reading."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlparse
from urllib.request import url2pathname

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from components.common.errors import EngineryError, UserError
from components.common.store import without_credentials
from components.common.tracking import is_unreachable

_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # MLflow's: minutes
FORCED_TAG = "enginery.forced"  # of a version: JSON of who, when and why the gate was overruled
_REFERENCE = re.compile(r"(models:/)?(?P<name>[\w.-]+)(@(?P<alias>[\w-]+)|/(?P<number>\d+))")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of a registered model."""

    name: str
    number: str
    aliases: tuple[str, ...]
    forced: Mapping[str, str] | None  # who, when and why; None for nobody
    registry: str  # for a person


@contextmanager
def opened_version(uri: str, reference: str, parts: tuple[str, ...]) -> Iterator[tuple[Version, dict[str, Path]]]:
    """A version and folders of its files, as long as the context lasts. Files on this machine are read in place.

    Args:
        uri: of the registry.
        reference: NAME@ALIAS or NAME/VERSION, also with models:/ before it.
        parts: names of the folders.

    Raises:
        UserError: there is no such version.
        EngineryError: its files can't be read.
    """
    for library in ("mlflow", "urllib3"):  # they log errors with tracebacks and every retry, beside raising them
        logging.getLogger(library).setLevel(logging.CRITICAL)
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    file = Path(uri.removeprefix("sqlite:///").split("?")[0])
    if uri.startswith("sqlite:///") and not file.exists():  # MLflow would make one
        raise UserError(
            f"there is no MLflow store at {uri}: nothing was registered there. Set MLFLOW_TRACKING_URI or "
            "ENGINERY_HOME to where it was"
        )
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    with _reached(uri):
        found = _find(client, reference, uri)
        version = _describe(client, found, uri)
        root = client.get_model_version_download_uri(found.name, str(found.version))
    with TemporaryDirectory(prefix="enginery-") as folder:
        yield version, {part: _fetched(f"{root}/{part}", Path(folder), uri) for part in parts}


@contextmanager
def _reached(uri: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_unreachable(error):
            raise
        system = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))  # deep in a chain
        reason = system[1] if system else str(error)
        raise EngineryError(
            f"MLflow at {without_credentials(uri)} can't be reached: {reason}. Start the server, or set "
            "MLFLOW_TRACKING_URI to where the model is registered"
        ) from error


def _describe(client: MlflowClient, found: ModelVersion, uri: str) -> Version:
    return Version(
        name=found.name,
        number=str(found.version),
        aliases=_aliases(client, found),
        forced=json.loads(found.tags[FORCED_TAG]) if FORCED_TAG in found.tags else None,
        registry=without_credentials(uri),
    )


def _find(client: MlflowClient, reference: str, uri: str) -> ModelVersion:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise UserError(f"{reference!r} names no version; write NAME@ALIAS, such as classifier@champion, or NAME/3")
    try:
        if match["alias"]:
            return client.get_model_version_by_alias(match["name"], match["alias"])
        return client.get_model_version(match["name"], match["number"])
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_PARAMETER_VALUE"):
            raise
    known = sorted(model.name for model in client.search_registered_models(max_results=100))
    models = f"it has {', '.join(known)}" if known else "it has no models"
    if match["name"] in known:
        aliases = client.get_registered_model(match["name"]).aliases
        there = ", ".join(f"@{alias} (version {number})" for alias, number in sorted(aliases.items())) or "no aliases"
        models = f"{match['name']} has {there}"
    raise UserError(f"there is no {reference} in the registry {without_credentials(uri)}; {models}")


def _aliases(client: MlflowClient, found: ModelVersion) -> tuple[str, ...]:
    every = client.get_registered_model(found.name).aliases
    return tuple(sorted(alias for alias, number in every.items() if str(number) == str(found.version)))


def _fetched(uri: str, folder: Path, tracking_uri: str) -> Path:
    if urlparse(uri).scheme in ("", "file"):
        return Path(url2pathname(urlparse(uri).path))
    try:
        return Path(
            mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=tracking_uri)
        )
    except Exception as error:  # of MLflow, an HTTP client or a store's own library
        raise EngineryError(
            f"{uri} can't be downloaded: {error}. Put its files back, or name another version"
        ) from error
