"""Where runs, their cache and the default tracking store live, and which run is still going."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from components.common.errors import UserError

SUMMARY = "summary.json"
MLFLOW_RUN_ID = "mlflow_run_id"
_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class StateDirectory:
    """Where runs and the default tracking store live: $ENGINERY_HOME, or .enginery in the current directory."""

    path: Path

    @classmethod
    def current(cls) -> "StateDirectory":
        """Find it and make it.

        Raises:
            UserError: it can't be made, or its path can't be used.
        """
        path = Path(os.environ.get("ENGINERY_HOME") or ".enginery").expanduser().absolute()
        if "python3" in str(path):
            raise UserError(
                f"the state directory {path} has 'python3' in its path, which KFP's local runner replaces by the "
                "interpreter's; set ENGINERY_HOME to a directory without it"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"can't make the state directory {path}: {error.strerror}; set ENGINERY_HOME to a writable directory"
            ) from None
        return cls(path=path)

    @property
    def default_tracking_uri(self) -> str:
        """MLflow on SQLite."""
        return f"sqlite:///{self.path / 'mlflow.db'}"

    @property
    def runs(self) -> Path:
        """One directory per run."""
        return self.path / "runs"

    @property
    def cache_root(self) -> Path:
        """Where KFP's local cache notes which finished step answers to which key."""
        return self.path / "cache"

    def new_run(self, name: str) -> "RunDirectory":
        """A fresh directory for one run, held by this process."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = self.runs / f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"
        try:
            path.mkdir(parents=True)
            return RunDirectory.hold(path)
        except OSError as error:
            raise UserError(
                f"can't write in the state directory {self.path}: {error.strerror}; make room or make it writable, "
                "or set ENGINERY_HOME to another directory"
            ) from None

    @contextmanager
    def store_lock(self) -> Iterator[None]:
        """Held by one process at a time, while it opens the tracking store."""
        with (self.path / ".store.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def abandoned_runs(self) -> Iterator[tuple[Path, str]]:
        """Runs whose process was killed before it could say so, with their MLflow run id."""
        for path in sorted(self.runs.glob("*/")):
            if path.name.startswith("."):  # what `enginery gc` is removing
                continue
            note = path / MLFLOW_RUN_ID
            if note.exists() and not (path / SUMMARY).exists() and not is_held(path):
                yield path, note.read_text(encoding="utf-8")

    @property
    def tracking_uri(self) -> str:
        """Where MLflow tracks: $MLFLOW_TRACKING_URI, or the SQLite file here."""
        return os.environ.get("MLFLOW_TRACKING_URI") or self.default_tracking_uri


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """One run's directory. Its lock is held as long as the process lives, and no longer, however it ends."""

    path: Path
    lock: int  # file descriptor

    @classmethod
    def hold(cls, path: Path) -> "RunDirectory":
        """Take the lock of a directory that nobody else knows yet."""
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path=path, lock=lock)


def is_held(run_directory: Path) -> bool:
    """Whether a living process works in a run directory."""
    try:
        lock = os.open(run_directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
