"""One registered version and the files behind it, for reading."""

import json
import logging
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
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # it logs errors with tracebacks, beside raising them
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = _find(client, reference, uri)
    version = Version(
        name=found.name,
        number=str(found.version),
        aliases=_aliases(client, found),
        forced=json.loads(found.tags[FORCED_TAG]) if FORCED_TAG in found.tags else None,
        registry=without_credentials(uri),
    )
    root = client.get_model_version_download_uri(found.name, str(found.version))
    with TemporaryDirectory(prefix="enginery-") as folder:
        yield version, {part: _fetched(f"{root}/{part}", Path(folder), uri) for part in parts}


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
            raise EngineryError(f"MLflow at {without_credentials(uri)} can't be asked: {error}") from error
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
