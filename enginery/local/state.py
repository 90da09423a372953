"""The folder of runs, their cache and the default tracking store, and the locks of the runs that are going."""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from components.common.contracts.errors import EngineryError, UserError
from components.common.process.disk import no_space
from components.common.registry.store import without_credentials

SUMMARY = "summary.json"
CACHE = "cache"  # in a run's directory: KFP's local cache of that run, and a note for each step that finished in it
MLFLOW_RUN_ID = "mlflow_run_id"
LOCK = ".lock"  # in a run's directory, held as long as a process works there
_OPEN = ".mlflow-open"  # there while MLflow may show the run as running; holds where it is tracked
_RESERVE = ".reserve"
_RESERVE_BYTES = 1 << 20  # for the summary and a SQLite transaction with its journal


def state_path() -> Path:
    """The state directory, whether it exists or not."""
    return Path(os.environ.get("ENGINERY_HOME") or ".enginery").expanduser().absolute()


@dataclass(frozen=True, kw_only=True)
class StateDirectory:
    """The folder of runs and the default tracking store: $ENGINERY_HOME, or .enginery in the current directory."""

    path: Path

    @classmethod
    def current(cls) -> "StateDirectory":
        """Find it and make it.

        Raises:
            UserError: it can't be made, or its path can't be used.
        """
        path = state_path()
        if "python3" in str(path):
            raise UserError(
                f"the state directory {path} has 'python3' in its path, which KFP's local runner replaces by the "
                "interpreter's; set ENGINERY_HOME to a directory without it",
                code="state-directory-unusable",
                setting="ENGINERY_HOME",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(path, error) from None
        return cls(path=path)

    @property
    def default_tracking_uri(self) -> str:
        """MLflow on SQLite."""
        return f"sqlite:///{self.path / 'mlflow.db'}"

    @property
    def runs(self) -> Path:
        """One directory per run."""
        return self.path / "runs"

    def new_run(self, name: str) -> "RunDirectory":
        """A fresh directory for one run, held by this process."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = self.runs / f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"
        try:
            path.mkdir(parents=True)
            held = RunDirectory.hold(path)
            held.reserve()
            (path / _OPEN).write_text(without_credentials(self.tracking_uri), encoding="utf-8")
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _unusable(self.path, error) from None
        return held

    @contextmanager
    def store_lock(self) -> Iterator[None]:
        """Held by one process at a time, while it opens the tracking store. A server needs none."""
        if not self.tracking_uri.startswith("sqlite:"):
            yield
            return
        try:
            file = (self.path / ".store.lock").open("w")
        except OSError as error:
            raise _unusable(self.path, error) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def abandoned_runs(self) -> Iterator["RunDirectory"]:
        """Runs whose process ended before it closed them in MLflow, tracked where this process tracks."""
        here = without_credentials(self.tracking_uri)
        for path in sorted(self.runs.glob("*/")):
            if path.name.startswith("."):  # what `enginery gc` is removing
                continue
            with contextlib.suppress(OSError):  # removed, or closed by another run, in between
                if (path / _OPEN).read_text(encoding="utf-8") == here and not is_held(path):
                    yield RunDirectory(path=path)

    @property
    def tracking_uri(self) -> str:
        """The tracking store of MLflow: $MLFLOW_TRACKING_URI, or the SQLite file here."""
        return os.environ.get("MLFLOW_TRACKING_URI") or self.default_tracking_uri


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """One run's directory. Its lock is held as long as the process lives, and no longer, however it ends."""

    path: Path
    lock: int | None = None  # file descriptor; None of a run whose process is gone

    @classmethod
    def hold(cls, path: Path) -> "RunDirectory":
        """Take the lock of a directory that nobody else knows yet."""
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path=path, lock=lock)

    def reserve(self) -> None:
        """Keep some room, so that a run which fills the disk can still be recorded."""
        file = os.open(self.path / _RESERVE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(file, 0, _RESERVE_BYTES)
        finally:
            os.close(file)

    def release_reserve(self) -> None:
        """Give the room back, when the run is about to be recorded."""
        with contextlib.suppress(OSError):
            (self.path / _RESERVE).unlink()

    def closed(self) -> None:
        """MLflow knows how the run ended, or never knew the run. Another process may have closed it first."""
        with contextlib.suppress(OSError):
            (self.path / _OPEN).unlink()

    def discard(self) -> None:
        """Remove a run that could not begin."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def is_held(run_directory: Path) -> bool:
    """True if a living process works in a run directory."""
    try:
        lock = os.open(run_directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _unusable(path: Path, error: OSError) -> EngineryError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(path)
    return UserError(
        f"can't write in the state directory {path}: {error.strerror}; make it writable, "
        "or set ENGINERY_HOME to a writable directory",
        code="state-directory-unusable",
        setting="ENGINERY_HOME",
    )
