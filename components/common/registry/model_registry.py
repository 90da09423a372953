"""The model registry of an MLflow store: versions, aliases, and the files that lie behind them.

Nothing here decides anything: audit_log.py changes aliases, by its log.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar
from urllib.parse import urlparse

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.file_utils import local_file_uri_to_path

from components.common.contracts.errors import EngineryError, UserError
from components.common.process.disk import explain
from components.common.registry.store import database_is_gone, is_new, sqlite_file, without_credentials
from components.common.registry.tracking import (
    DOWNLOAD_LIMITS,
    OF_SERVERS,
    REQUEST_LIMITS,
    check_store,
    is_unreachable,
    leads_elsewhere,
    request_limits,
    underlying,
)
from components.common.registry.trust import read_statements, statement_names

Part = Literal["bundle", "report", "verdict"]
Result = TypeVar("Result")

DIRECTORY = "model"  # of the promote run's artifacts, where a version's files are
PARTS: tuple[Part, ...] = ("bundle", "report", "verdict")  # folders below a version's source
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
_NUMBER = re.compile(r"[0-9]{1,9}")  # of a version
_USUAL_NAME = re.compile(r"[\w. -]+")
_PATIENCE_S = 30.0  # with a database that is busy
_OF_DISK = re.compile("readonly database|disk is full|disk I/O error")  # SQLite's words, which no waiting changes
_MAX_RESULTS = 200
_MAX_ENTRIES = 10_000  # of a version's bundle, report or verdict
_SPARED_BYTES = 1 << 30  # of the disk that they are brought to
_OF_ANY_HOST = (*OF_SERVERS, "ftp", "sftp", "hdfs", "viewfs", "r2", "b2", "runs", "models")


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """One version of a registered model."""

    name: str
    number: str
    aliases: tuple[str, ...]
    created: float  # seconds since the epoch
    run_id: str
    source: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and number, for a person."""
        return f"{self.name} version {self.number}"


def patiently(call: Callable[[], Result]) -> Result:
    """Return the result of a request, repeated while a busy database refuses it: such a transaction was undone."""
    deadline = time.monotonic() + _PATIENCE_S
    pause_s = 0.05
    while True:
        try:
            return call()
        except MlflowException as error:
            busy = error.error_code == "TEMPORARILY_UNAVAILABLE" and not str(error).startswith("API request to ")
            lasting = database_is_gone(error) or _OF_DISK.search(str(error))
            if not busy or lasting or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def is_missing(error: MlflowException) -> bool:
    """True if MLflow does not have what was asked for."""
    return error.error_code in _MISSING


class Registry:
    """The registry of one store."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client

    @classmethod
    def open(cls, uri: str) -> "Registry":
        """The registry at a tracking URI, for a command.

        Raises:
            EngineryError: it can't be reached.
            UserError: there is none yet.
        """
        if is_new(uri):
            raise UserError(
                f"there is no MLflow store at {uri} yet: nothing was ever registered there. Register a model with "
                "`enginery run`, or set MLFLOW_TRACKING_URI (or ENGINERY_HOME) to where it was",
                code="no-store",
                setting="MLFLOW_TRACKING_URI",
            )
        for name, value in REQUEST_LIMITS.items():
            os.environ.setdefault(name, value)
        mlflow.set_tracking_uri(uri)
        check_store(uri)
        return cls(MlflowClient(tracking_uri=uri, registry_uri=uri))

    @property
    def uri(self) -> str:
        """Address of the store, for a person."""
        return without_credentials(str(self.client.tracking_uri))

    @contextmanager
    def reached(self, undone: str) -> Iterator[None]:
        """Tell in one message when the server goes away, or what the disk refuses; `undone` says what was not done."""
        try:
            yield
        except Exception as error:
            if is_unreachable(error):
                raise self.lost(undone) from error
            database = sqlite_file(self.uri)  # a server has a disk of its own
            if database and not isinstance(error, EngineryError) and (known := explain(error, database)):
                raise known from error
            raise

    def lost(self, undone: str) -> EngineryError:
        """The error of a server that went away."""
        return EngineryError(
            f"{undone}: MLflow at {self.uri} can't be reached any more. Start the server, "
            "then run the same command again (finished steps are kept)",
            code="store-lost",
        )

    def names(self) -> list[str]:
        """All registered models."""
        search = partial(self.client.search_registered_models, max_results=_MAX_RESULTS)
        return sorted(model.name for model in _pages(search))

    def aliases(self, name: str) -> dict[str, str]:
        """Version by alias; {} for a model that is not there."""
        self._check_odd_name(name)
        try:
            model = patiently(lambda: self.client.get_registered_model(name))
        except MlflowException as error:
            if is_missing(error):
                return {}
            raise
        return {alias: str(number) for alias, number in model.aliases.items()}

    def versions(self, name: str) -> list[RegisteredVersion]:
        """The versions of a model, newest first.

        Raises:
            UserError: there is no such model.
        """
        self._check_odd_name(name)
        pages = _pages(partial(self.client.search_model_versions, _named(name), max_results=_MAX_RESULTS))
        found = [entry for entry in pages if entry.name == name]
        if not found:
            self._check_name(name)
        by_number = self._by_number(name)  # MLflow's search leaves the aliases out
        versions = [_version(entry, by_number.get(str(entry.version), ())) for entry in found]
        return sorted(versions, key=lambda version: int(version.number), reverse=True)

    def run_ids(self, name: str) -> dict[str, str]:
        """The runs that the versions of a model came from, by number; none where there is no such model."""
        try:
            return {version.number: version.run_id for version in self.versions(name)}
        except UserError:
            return {}

    def _by_number(self, name: str) -> dict[str, tuple[str, ...]]:
        numbers: dict[str, tuple[str, ...]] = {}
        for alias, number in sorted(self.aliases(name).items()):
            numbers[number] = (*numbers.get(number, ()), alias)
        return numbers

    def version(self, name: str, number: str) -> RegisteredVersion:
        """One version.

        Raises:
            UserError: there is no such model or version, or it was deleted.
        """
        self._check_odd_name(name)
        if not _NUMBER.fullmatch(number):
            message = f"a version is a number, such as 3; got {number!r}. See `enginery models {name}`"
            raise UserError(message, code="invalid-version")
        number = str(int(number))  # 03 is 3, and an alias shows 3
        try:
            found = patiently(lambda: self.client.get_model_version(name, number))
        except MlflowException as error:
            if not is_missing(error):
                raise
            numbers = [version.number for version in self.versions(name)]
            there = f"there are {', '.join(numbers[:10])}" if numbers else "it has no versions any more"
            message = f"{name} has no version {number}, or it was deleted; {there}. See `enginery models {name}`"
            raise UserError(message, code="no-version") from None
        return _version(found, self._by_number(name).get(number, ()))

    def by_alias(self, name: str, alias: str) -> RegisteredVersion:
        """The version that an alias points to.

        Raises:
            UserError: there is no such model or alias.
        """
        aliases = self.aliases(name)
        if alias not in aliases:
            self._check_name(name)
            there = ", ".join(f"@{known} (version {number})" for known, number in sorted(aliases.items()))
            raise UserError(
                f"{name} has no alias {alias}; it has {there or 'none'}. "
                f"Set it: enginery promote {name} VERSION --to {alias} --why TEXT",
                code="no-alias",
            )
        return self.version(name, aliases[alias])

    def _check_odd_name(self, name: str) -> None:
        """MLflow answers to a name that it would not take, or can't search for, with its own grammar."""
        if not _USUAL_NAME.fullmatch(name):
            self._check_name(name)

    def _check_name(self, name: str) -> None:
        known = self.names()
        if name not in known:
            there = f"there are {', '.join(known[:10])}" if known else "nothing is registered there yet"
            message = f"there is no registered model {name!r} in MLflow at {self.uri}; {there}. See `enginery models`"
            raise UserError(message, code="no-model")

    def create_version(self, name: str, run_id: str, tags: Mapping[str, str], *, model_id: str | None = None) -> str:
        """Register what a run uploaded as a version without any alias; the model, too, where it is new.

        Args:
            name: of the model.
            run_id: of the run that uploaded it.
            tags: of the version. The same run and tags give one version, so that a repeated request adds none.
            model_id: of the LoggedModel that holds the files; None for DIRECTORY among the run's artifacts.

        Returns:
            The version's number.
        """
        try:
            patiently(lambda: self.client.create_registered_model(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model_id}" if model_id else f"{self.client.get_run(run_id).info.artifact_uri}/{DIRECTORY}"

        def create() -> str:
            for known in self.client.search_model_versions(f"run_id = '{run_id}'"):
                if known.name == name and tags.items() <= dict(known.tags).items():
                    return str(known.version)
            made = self.client.create_model_version(name, source, run_id=run_id, tags=dict(tags), model_id=model_id)
            return str(made.version)

        number = patiently(create)
        if model_id:  # the UI leads from the model to the version by this tag
            link = {"mlflow.modelVersions": json.dumps([{"name": name, "version": number}])}
            patiently(lambda: self.client.set_logged_model_tags(model_id, link))
        return number

    def set_alias(self, name: str, alias: str, number: str | None) -> None:
        """Point an alias to a version, or remove it. Only audit_log.py may: the log must know."""
        if number is None:
            patiently(lambda: self.client.delete_registered_model_alias(name, alias))
            return
        point = partial(self.client.set_registered_model_alias, name, alias, number)
        try:
            patiently(point)
        except MlflowException as error:
            if error.error_code != "BAD_REQUEST":
                raise
            patiently(point)  # another process added the alias after MLflow had found none; now MLflow changes it

    @contextmanager
    def files(self, version: RegisteredVersion, part: Part, file: str = "") -> Iterator[Path]:
        """The folder of a version's bundle, report or verdict, or one file of it, as long as the context lasts.

        Files on this machine are read where they are.

        Raises:
            EngineryError: they are gone.
        """
        with TemporaryDirectory(prefix="enginery-") as folder:
            with _downloading(f"the {part} of {version.label}"):
                root = self._root(version)
                uri = "/".join(filter(None, (root, part, file)))
                if urlparse(uri).scheme in ("", "file"):
                    path = local_file_uri_to_path(uri)
                else:
                    at = {"tracking_uri": str(self.client.tracking_uri)}
                    _check_room(f"{root}/{part}", file, Path(folder), **at)
                    path = mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder, **at)
            yield Path(path)

    def statements(self, version: RegisteredVersion) -> dict[str, bytes]:
        """The signed statements that lie with a version, by file name. Who may write there may have put them there.

        Raises:
            EngineryError: they can't be read.
        """
        at = {"tracking_uri": str(self.client.tracking_uri)}
        what = f"what is signed of {version.label}"
        with TemporaryDirectory(prefix="enginery-") as folder, _downloading(what):
            root = self._root(version)
            if urlparse(root).scheme in ("", "file"):
                return read_statements(Path(local_file_uri_to_path(root)))
            for name in statement_names(list_files(root, **at)):
                mlflow.artifacts.download_artifacts(artifact_uri=f"{root}/{name}", dst_path=folder, **at)
            return read_statements(Path(folder))

    def _root(self, version: RegisteredVersion) -> str:
        """The URI of a version's files, which whoever registers a version chooses."""
        uri = str(self.client.tracking_uri)
        named = patiently(lambda: self.client.get_model_version_download_uri(version.name, version.number))
        root = underlying(named, uri)
        if leads_elsewhere(root, uri, _OF_ANY_HOST):
            raise EngineryError(
                f"the files of {version.label} lie at {without_credentials(root)}, which is not of MLflow at "
                f"{self.uri}, so nothing is asked of it. Have that server serve its store (mlflow server "
                "--serve-artifacts --artifacts-destination ...), or keep files in s3://, gs://, abfss:// or a folder, "
                "and register the model again; if both are one server, set MLFLOW_TRACKING_URI to that address",
                code="other-server",
                setting="MLFLOW_TRACKING_URI",
            )
        return root

    def add_statement(self, version: RegisteredVersion, file: str, statement: bytes) -> None:
        """Put a signed statement beside a version's files, in the place of an earlier one of that name."""
        with TemporaryDirectory(prefix="enginery-") as folder:
            Path(folder, file).write_bytes(statement)
            uri = str(self.client.tracking_uri)
            with request_limits(DOWNLOAD_LIMITS):  # a redirect would take the token along, as in `_downloading`
                get_artifact_repository(self._root(version), uri, uri).log_artifacts(folder)


@contextmanager
def _downloading(what: str) -> Iterator[None]:
    """Follow no redirect, which would take the tracking server's token along, and say what can't be read."""
    try:
        with request_limits(DOWNLOAD_LIMITS):
            yield
    except EngineryError:
        raise
    except Exception as error:  # each store's client has its own
        if is_unreachable(error) and not isinstance(error, ValueError):  # an answer that is no JSON is both
            raise
        check_client(what, error)
        message = f"{what} can't be read from the registry's store: {error}. Put its files back, or delete the version"
        raise EngineryError(message, code="files-missing") from error


def check_client(what: str, error: Exception) -> None:
    """Refuse where a store of files can't be asked, as MLflow's client of it is not installed.

    Raises:
        EngineryError: so it is.
    """
    if isinstance(error, ModuleNotFoundError):
        raise EngineryError(
            f"{what} can't be read: MLflow's client of that store is not installed ({error}). Install it: boto3 for "
            "s3://, google-cloud-storage for gs://, azure-storage-file-datalake and azure-identity for abfss://",
            code="no-store-client",
        ) from error


def _check_room(uri: str, file: str, folder: Path, tracking_uri: str) -> None:
    """Refuse what a disk has no room for, by the sizes that the store tells, before any of it is brought.

    Args:
        uri: of a folder.
        file: the only one of it that is wanted; empty for all, at any depth.
        folder: on the disk.
        tracking_uri: of the server that may stand before the store.
    """
    left, num_entries, num_bytes = [uri], 0, 0
    while left:
        place = left.pop()
        for entry in mlflow.artifacts.list_artifacts(artifact_uri=place, tracking_uri=tracking_uri):
            name = Path(entry.path).name
            if file not in ("", name):
                continue
            if entry.is_dir:
                left.append(f"{place}/{name}")
            num_entries += 1
            num_bytes += int(entry.file_size or 0)
        free = shutil.disk_usage(folder).free - _SPARED_BYTES
        if num_entries > _MAX_ENTRIES or num_bytes > free:
            raise EngineryError(
                f"{without_credentials(uri)} has {num_entries:,} files and folders of {num_bytes:,} bytes or more, and "
                f"at most {_MAX_ENTRIES:,} of {max(free, 0):,} are brought here",
                code="no-space",
            )


def list_files(uri: str, tracking_uri: str | None = None) -> dict[str, int]:
    """Sizes of the files right below any URI that MLflow has a client for, by name, as the store tells them.

    `tracking_uri` is of the server that may stand before the store; None for the process's own.

    Raises:
        Exception: whatever that client raises.
    """
    found = mlflow.artifacts.list_artifacts(artifact_uri=uri, tracking_uri=tracking_uri)
    return {Path(entry.path).name: int(entry.file_size or 0) for entry in found if not entry.is_dir}


def download(uri: str, file: Path) -> None:
    """Bring one file from any URI that MLflow has a client for (s3://, gs://, mlflow-artifacts:/ and others).

    Raises:
        Exception: whatever that client raises.
    """
    with TemporaryDirectory(dir=file.parent) as folder:
        Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder)).rename(file)


def _pages(search: Callable[..., Iterable[Any]]) -> Iterator[Any]:
    """All that a search of MLflow finds, page by page."""
    token = None
    while True:
        page: Any = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _named(name: str) -> str:
    """MLflow's filter of one model's versions; of all versions for a name that it has no way to quote."""
    quote = next((quote for quote in "'\"" if quote not in name), "")
    return quote and f"name = {quote}{name}{quote}"


def _version(found: ModelVersion, aliases: tuple[str, ...]) -> RegisteredVersion:
    return RegisteredVersion(
        name=found.name,
        number=str(found.version),
        aliases=aliases,
        created=found.creation_timestamp / 1000,
        run_id=found.run_id or "",
        source=found.source or "",
        tags=dict(found.tags),
    )


def aliased_versions(uri: str) -> Iterator[tuple[str, str, list[str]]]:
    """Every alias of a store's registry: (label for a person, "name/version", ids and names of the runs behind it)."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    for model in _pages(client.search_registered_models):
        for alias, number in model.aliases.items():
            run_id = client.get_model_version(model.name, str(number)).run_id
            label = f"{model.name}@{alias} (version {number})"
            yield label, f"{model.name}/{number}", _run_and_parents(client, run_id)


def known_runs(uri: str, run_ids: Collection[str]) -> set[str]:
    """Return those of the runs that a store has."""
    if not run_ids:
        return set()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    return {run_id for run_id in run_ids if _run_and_parents(client, run_id)}


def _run_and_parents(client: MlflowClient, run_id: str | None) -> list[str]:
    """Ids and names of a run and of the runs it is nested in. A run deleted for good has none."""
    names: list[str] = []
    while run_id and run_id not in names[::2]:  # whoever edits runs can nest one in itself
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            break
        names += [run_id, str(run.info.run_name)]
        run_id = run.data.tags.get("mlflow.parentRunId")
    return names
