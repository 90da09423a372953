"""Checks of where runs are written and tracked."""

import contextlib
import http.client
import os
import socket
import sqlite3
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlsplit

from components.common.errors import UserError
from pipelines.diagnosis import machine
from pipelines.diagnosis.checks import Finding, missing, ok
from pipelines.state import StateDirectory

_LIMIT_S = 3.0
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_OR_LOCAL = "or unset MLFLOW_TRACKING_URI to track in a local SQLite file"


def state_path() -> Path:
    """Where the state directory is or would be."""
    return Path(os.environ.get("ENGINERY_HOME") or ".enginery").expanduser().absolute()


def state_directory() -> Finding:
    """Write a file there. What did not exist before is taken away again."""
    path = state_path()
    existed = path.exists()
    try:
        state = StateDirectory.current()
        with tempfile.TemporaryFile(dir=state.path) as file:
            file.write(b"0")
    except UserError as error:  # not makeable, or a path that KFP's local runner would change
        text, _, fix = str(error).rpartition("; ")
        return missing(text, fix)
    except OSError as error:
        return missing(f"{path} can't be written: {error.strerror}", "set ENGINERY_HOME to a writable directory")
    if not existed:
        with contextlib.suppress(OSError):
            path.rmdir()
    return ok(f"{path} is writable" if existed else f"{path} can be made")


def disk() -> Finding:
    """Free space where runs are written."""
    return machine.disk(state_path())


def tracking() -> Finding:
    """Whether MLflow's store takes a run."""
    uri = StateDirectory(path=state_path()).tracking_uri
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        return _sqlite(Path(uri.removeprefix("sqlite:///")))
    if parts.scheme in ("http", "https"):
        return server(uri)
    if parts.scheme.partition("+")[0] in _PORTS:
        return _database(uri)
    return ok(f"{_shown(uri)} (not tried)")


def _shown(uri: str) -> str:
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _sqlite(path: Path) -> Finding:
    if not path.exists():
        return ok(f"{path} will be made by the first run")
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=_LIMIT_S)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master")
            connection.rollback()
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        text = f"{path} can't be written: {error}"
        if "locked" in str(error):
            return missing(text, "wait for the run or `enginery ui` that writes to it, or end it")
        if "readonly" in str(error) or "unable to open" in str(error):
            return missing(text, f"make it and its folder writable for you: sudo chown -R $USER {path.parent}")
        return missing(text, f"move it away, and the next run makes a new one: mv {path} {path}.broken")
    return ok(f"{path} is writable")


def server(uri: str) -> Finding:
    """Whether an MLflow server answers."""
    url = f"{_shown(uri).rstrip('/')}/health"
    try:
        with urllib.request.urlopen(url, timeout=_LIMIT_S) as answer:  # noqa: S310  # http or https, as checked
            answer.read(64)
    except urllib.error.HTTPError as error:
        text = f"{_shown(uri)} answers {error.code} {error.reason}"
        if error.code == 401:
            return missing(text, "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        if error.code == 403:
            return missing(text, "name this host in the server's --allowed-hosts, and check your credentials")
        return missing(text, f"check that MLFLOW_TRACKING_URI names an MLflow server, {_OR_LOCAL}")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return missing(f"{_shown(uri)} can't be reached: {reason}", f"start the server, or check the URI, {_OR_LOCAL}")
    return ok(f"{_shown(uri)} answers")


def _database(uri: str) -> Finding:
    parts = urlsplit(uri)
    address = (parts.hostname or "localhost", parts.port or _PORTS[parts.scheme.partition("+")[0]])
    try:
        socket.create_connection(address, timeout=_LIMIT_S).close()
    except OSError as error:
        text = f"{_shown(uri)} can't be reached: {error}"
        return missing(text, f"start the database, or check host and port ({address[0]}:{address[1]}), {_OR_LOCAL}")
    return ok(f"{_shown(uri)} listens (credentials not tried)")
