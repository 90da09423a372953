"""The runs of a state directory: their results, whether one is still active, and the bundle that each made."""

import os
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import MANIFEST, first_problem
from enginery.local.state import MLFLOW_RUN_ID, SUMMARY, is_held
from enginery.local.summary import RunSummary

_NAME = re.compile(r"(?P<pipeline>.+)-(?P<stamp>\d{8}-\d{6})-[0-9a-f]{4}")
Model = TypeVar("Model", bound=BaseModel)
_STARTING_S = 60.0  # a run that young may not have its lock yet


@dataclass(frozen=True)
class PastRun:
    """One directory under runs/."""

    path: Path

    @property
    def name(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def pipeline(self) -> str:
        """The pipeline's name, from the id."""
        match = _NAME.fullmatch(self.name)
        return match["pipeline"] if match else self.name

    @property
    def started(self) -> float:
        """Time of its start, in seconds since the epoch."""
        match = _NAME.fullmatch(self.name)
        try:
            return datetime.strptime(match["stamp"] if match else "", "%Y%m%d-%H%M%S").timestamp()
        except ValueError:
            return self.path.stat().st_mtime

    @cached_property
    def summary(self) -> RunSummary | None:
        """The result; None when the run did not get to one, or another version wrote it."""
        try:
            return read_json(self.path / SUMMARY, RunSummary)
        except UserError:
            return None

    @cached_property
    def size_bytes(self) -> int:
        """Size of the run on disk; files with several links count once."""
        blocks: dict[tuple[int, int], int] = {}
        for directory, _, files in os.walk(self.path):
            for file in files:
                try:
                    stat = os.lstat(os.path.join(directory, file))
                except FileNotFoundError:
                    continue  # the run is going, or another gc removes it
                blocks[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        return sum(blocks.values())

    @property
    def mlflow_run_id(self) -> str:
        """The run in MLflow; "" where it got none."""
        if self.summary is not None:
            return self.summary.mlflow_run_id
        try:
            return (self.path / MLFLOW_RUN_ID).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    @property
    def reused_runs(self) -> set[str]:
        """Ids of the runs whose finished steps this one reused."""
        steps = self.summary.steps if self.summary else []
        return {step.outcome.removeprefix("reused from ") for step in steps if step.status == "reused"}

    def is_going(self, now: float) -> bool:
        """True if its process lives: it holds the lock, or the run began a moment ago and may have none yet."""
        if now - self.started < _STARTING_S and not (self.path / SUMMARY).exists():
            return True
        return is_held(self.path)

    def status(self, now: float) -> Literal["going", "done", "failed", "killed", "unreadable"]:
        """The state of the run; one without a result that is not going was killed."""
        if self.is_going(now):
            return "going"
        if self.summary is not None:
            return self.summary.status
        return "unreadable" if (self.path / SUMMARY).exists() else "killed"


def past_runs(runs: Path) -> list[PastRun]:
    """The runs under `runs`, newest first. What has not the name of a run is none of ours and not listed."""
    if not runs.is_dir():
        return []
    paths = [path for path in runs.iterdir() if _NAME.fullmatch(path.name) and not path.name.startswith(".")]
    found = [PastRun(path) for path in paths if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def read_json(file: Path, model: type[Model], kind: str = "summary") -> Model:
    """Read a file that a run wrote, such as its summary.json.

    Raises:
        UserError: there is none, or it is not one that this version reads.
    """
    try:
        return model.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}", code="unreadable-file") from None
    except ValidationError as error:
        raise UserError(
            f"{file} is not a {kind} that this version of enginery reads: {first_problem(error)}. "
            "Name a file that `enginery run` wrote, or run the pipeline again",
            code="unreadable-record",
        ) from None


def find_summary(text: str, runs: Path) -> RunSummary:
    """Find the run that a person calls RUN: an id, the start of one, `latest`, or the path of a summary.json.

    Raises:
        UserError: no such run, several that begin so, or one without a result.
    """
    path = Path(text).expanduser()
    if path.is_file() or "/" in text or text.endswith(".json"):
        return read_json(path / SUMMARY if path.is_dir() else path, RunSummary)
    everything = past_runs(runs)
    if not everything:
        text = f"there are no runs in {runs}; start one with `enginery run`, or set ENGINERY_HOME to theirs"
        raise UserError(text, code="no-runs", setting="ENGINERY_HOME")
    if text == "latest":
        finished = next((run for run in everything if (run.path / SUMMARY).exists()), None)
        if finished is None:
            text = f"none of the runs in {runs} has come to its end yet; wait for one, or run again"
            raise UserError(text, code="no-finished-run")
        return read_json(finished.path / SUMMARY, RunSummary)
    matching = [run for run in everything if run.name == text] or [r for r in everything if r.name.startswith(text)]
    if len(matching) > 1:
        message = f"{len(matching)} runs begin with {text!r}: {_names(matching)}; type more of the one you mean"
        raise UserError(message, code="ambiguous-run", setting="RUN")
    if not matching:
        raise UserError(
            f"there is no run {text!r} in {runs}; the newest are {_names(everything)}. "
            "RUN is an id of `enginery runs`, the start of one, latest, or the path of a summary.json",
            code="no-such-run",
            setting="RUN",
        )
    (run,) = matching
    if not (run.path / SUMMARY).exists():
        raise UserError(
            f"the run {run.name} has no {SUMMARY}: it is still going, or it was killed. "
            "Wait for it, or run its pipeline again; finished runs: see `enginery runs`",
            code="run-not-finished",
            setting="RUN",
        )
    return read_json(run.path / SUMMARY, RunSummary)


def _names(runs: list[PastRun]) -> str:
    shown = ", ".join(run.name for run in runs[:5])
    return shown + (", ..." if len(runs) > 5 else "")


def bundle_of_run(name: str, runs: Path) -> Path:
    """The bundle of the run that `name` means, see `find_summary`.

    Raises:
        UserError: no such run, or it has no bundle.
    """
    summary = find_summary(name, runs)
    if (found := _bundle(summary)) is None:
        raise UserError(
            f"the run {summary.run_id} ({summary.status}) has no bundle: it ended before export was done, or the "
            "bundle was removed. Name another run with --run, see `enginery runs`, or a bundle with --bundle DIR",
            code="no-bundle",
            setting="--run",
        )
    return found


def latest_bundle(runs: Path) -> Path:
    """The bundle of the newest finished run that has one.

    Raises:
        UserError: there is none.
    """
    everything = past_runs(runs)
    for run in everything:
        if run.summary is not None and (found := _bundle(run.summary)) is not None:
            return found
    start = "start one: enginery run resnet50 --data DIR, or name a bundle with --bundle DIR"
    if not everything:
        raise UserError(f"there are no runs in {runs}; {start}", code="no-runs", setting="ENGINERY_HOME")
    text = f"none of the {len(everything)} runs in {runs} has come to its end with a bundle; {start}"
    raise UserError(text, code="no-bundle", setting="--bundle")


def _bundle(summary: RunSummary) -> Path | None:
    """The bundle that a run measured; before it measured any, the newest that it made."""
    here = Path(summary.run_directory)
    folders = [here]
    for step in summary.steps:
        if step.name == "export" and step.status == "reused":
            origin = step.outcome.removeprefix("reused from ")  # a run's id, or where the artifact lies
            folders.append(here.parent / origin)
    manifests = [file for folder in folders for file in folder.glob(f"artifacts/*/*/bundle/{MANIFEST}")]
    manifests += [folder / MANIFEST for folder in folders[1:] if (folder / MANIFEST).is_file()]
    if summary.bundle_digest:
        manifests = [file for file in manifests if digest_file(file) == summary.bundle_digest]
    return max(manifests, key=lambda file: file.stat().st_mtime).parent if manifests else None
