"""`enginery gc`: the old runs that a rule removes, those that stay whatever a rule says, and the removal of one."""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.common.contracts.errors import EngineryError, UserError
from components.common.registry.store import is_new, without_credentials
from enginery.formats import seconds_in
from enginery.local.runs import PastRun
from enginery.local.state import CACHE, LOCK, StateDirectory

_TRASH = ".trash-"
_BYTES = {"": 1, "B": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A run goes when any of the rules says so; None: that rule says nothing."""

    older_than_s: float | None = None
    keep: int | None = None
    max_size_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.older_than_s is None and self.keep is None and self.max_size_bytes is None:
            text = "gc needs a rule: --older-than 30d, --keep 10 or --max-size 50GB, or several of them"
            raise UserError(text, code="no-rule")
        if self.keep is not None and self.keep < 0:
            raise UserError(f"--keep must be 0 or more runs; got {self.keep}", code="invalid-rule", setting="--keep")


@dataclass(frozen=True)
class InUse:
    """Runs that aliases of registered models point to."""

    runs: dict[str, str] = field(default_factory=dict)  # MLflow run's id and name -> "model@alias (version 3)"
    versions: dict[str, str] = field(default_factory=dict)  # "model/3" -> the same
    stores: frozenset[str] = frozenset()  # that were asked, without credentials: one that is gone was not
    known: frozenset[str] = frozenset()  # MLflow ids of runs that name another store, and are in one that was asked

    def reason(self, run: PastRun) -> str:
        """Return the reason to keep a run; "" where there is none."""
        summary = run.summary
        registered = summary.registered if summary else ""
        found = self.runs.get(run.mlflow_run_id) or self.runs.get(run.name) or self.versions.get(registered)
        if found:
            return f"{found} points to it"
        asked = summary is None or summary.tracking_uri in self.stores or run.mlflow_run_id in self.known
        if summary and registered and not asked:
            there = f"{registered} is registered in {summary.tracking_uri}"
            return f"{there}; set MLFLOW_TRACKING_URI to where that store is now"
        return ""


@dataclass(frozen=True)
class RemovalPlan:
    """Runs to remove and to keep."""

    remove: list[tuple[PastRun, str]]  # with the rule that says so
    keep: list[tuple[PastRun, str]]  # a rule says remove, and this is why not
    total_bytes: int  # all runs together, before

    @property
    def freed_bytes(self) -> int:
        """Space that the removal frees."""
        return sum(run.size_bytes for run, _ in self.remove)


def parse_age(text: str) -> float:
    """Seconds in "30d", "12h", "2w" or "90min".

    Raises:
        UserError: it is none of these.
    """
    seconds = seconds_in(text)
    if seconds is None:
        message = f"--older-than takes a number and a unit (min, h, d, w), such as 30d, 12h or 90min; got {text!r}"
        raise UserError(message, code="invalid-rule", setting="--older-than")
    return seconds


def parse_size(text: str) -> int:
    """Bytes in "50GB", "500MB", "1TiB" or "0".

    Raises:
        UserError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    if match is None or (not match[2] and match[1] != "0" and not text.strip().upper().endswith("B")):
        message = f"--max-size takes a number and a unit (MB, GB, TB, or MiB, GiB, TiB), such as 50GB; got {text!r}"
        raise UserError(message, code="invalid-rule", setting="--max-size")
    return int(float(match[1]) * _BYTES[match[2]])


def in_use(state: StateDirectory, past: Sequence[PastRun] = ()) -> InUse:
    """Ask MLflow what its aliases point to: the store in use, the state directory's own, and other files of `past`.

    Raises:
        EngineryError: a store can't be asked; then nothing may be removed.
    """
    files = [run.summary.tracking_uri for run in past if run.summary and run.summary.registered]
    uris = [state.tracking_uri, state.default_tracking_uri, *(uri for uri in files if uri.startswith("sqlite:///"))]
    uris = [uri for uri in dict.fromkeys(uris) if not is_new(uri)]  # asking MLflow would make it
    stores = frozenset(map(without_credentials, uris))
    if not uris:
        return InUse()
    # Two retries of ten seconds: a person waits. MLflow's own defaults take many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from components.common.registry.model_registry import aliased_versions, known_runs  # MLflow takes seconds to import

    runs: dict[str, str] = {}
    versions: dict[str, str] = {}
    # The state directory may have been moved, and its database with it.
    elsewhere = {run.mlflow_run_id for run in past if run.summary and run.summary.tracking_uri not in stores}
    known: set[str] = set()
    for uri in uris:
        try:
            for label, version, names in aliased_versions(uri):
                versions[version] = label
                runs.update(dict.fromkeys(names, label))
            known.update(known_runs(uri, elsewhere - {""}))
        except Exception as error:  # MLflow raises its own, SQLAlchemy's and requests' exceptions
            raise EngineryError(
                f"MLflow at {without_credentials(uri)} can't be asked which runs its aliases point to, so nothing is "
                f"removed: {str(error).splitlines()[0]}. Start the server, or set MLFLOW_TRACKING_URI to where it is",
                code="tracking-unreachable",
                setting="MLFLOW_TRACKING_URI",
            ) from error
    return InUse(runs, versions, stores, frozenset(known))


def plan(runs: Sequence[PastRun], rules: Rules, needed: InUse, now: float) -> RemovalPlan:
    """Decide. `runs` are newest first."""
    marked: dict[str, str] = {}
    for position, run in enumerate(runs):
        age_s = now - run.started
        if rules.older_than_s is not None and age_s > rules.older_than_s:
            marked[run.name] = f"{age_s / 86400:.0f} days old" if age_s >= 2 * 86400 else f"{age_s / 3600:.0f} h old"
        elif rules.keep is not None and position >= rules.keep:
            marked[run.name] = f"beyond the newest {rules.keep}"
    held = _why_kept(runs, needed, now)
    total_bytes = sum(run.size_bytes for run in runs)
    if rules.max_size_bytes is not None:
        left_bytes = sum(run.size_bytes for run in runs if run.name not in marked or held[run.name])
        for run in reversed(runs):
            if left_bytes <= rules.max_size_bytes:
                break
            if run.name not in marked:
                marked[run.name] = "oldest beyond the size"
                left_bytes -= 0 if held[run.name] else run.size_bytes
    going = [run for run in reversed(runs) if run.name in marked]
    return RemovalPlan(
        remove=[(run, marked[run.name]) for run in going if not held[run.name]],
        keep=[(run, held[run.name]) for run in going if held[run.name]],
        total_bytes=total_bytes,
    )


def _why_kept(runs: Sequence[PastRun], needed: InUse, now: float) -> dict[str, str]:
    """Reasons for each run to stay whatever a rule says; "" where nothing holds it."""
    held = {run.name: "it is still going" if run.is_going(now) else needed.reason(run) for run in runs}
    for run in runs:
        if held[run.name]:
            for name in run.reused_runs & held.keys():
                held[name] = held[name] or f"{run.name} reused its steps, and {held[run.name]}"
    if any(run.is_going(now) for run in runs):
        for run in runs:
            if not held[run.name] and any(run.path.glob(f"{CACHE}/*.digest")):
                held[run.name] = "a run is going, and may read the steps that this one finished"
    return held


def leftovers(runs: Path) -> list[Path]:
    """Hidden directories that a killed gc left behind."""
    return sorted(path for path in runs.glob(f"{_TRASH}*") if path.is_dir() and not path.is_symlink())


def remove(run: PastRun, on_kept: Callable[[PastRun, str], None]) -> bool:
    """Remove one run: renamed first, so that no one sees half of it.

    The lock is taken for as long as it has its name, so a run that began to use it since the plan keeps it.

    Returns:
        True if it went; else `on_kept` was called with the reason.

    Raises:
        EngineryError: it may not be removed by this user.
    """
    trash = run.path.with_name(f"{_TRASH}{run.name}-{os.getpid()}")
    try:
        handle = os.open(run.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run.path.rename(trash)
        finally:
            os.close(handle)
    except BlockingIOError:
        on_kept(run, "it is in use")
        return False
    except FileNotFoundError:
        on_kept(run, "it is gone already")
        return False
    except OSError as error:
        raise _not_allowed(run.path, error) from None
    delete(trash)
    return True


def delete(path: Path) -> None:
    """Delete a directory that has its hidden name already; another gc may be at it, too.

    Raises:
        EngineryError: something in it may not be deleted by this user.
    """
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another gc was faster at one file
        except OSError as error:
            raise _not_allowed(path, error) from None


def _not_allowed(path: Path, error: OSError) -> EngineryError:
    return EngineryError(
        f"can't remove {error.filename or path}: {error.strerror}. Steps run in containers as root leave root's files: "
        "remove them as that user, or change their owner; then run gc again, which removes what is left",
        code="not-removable",
    )
