"""The record of a run: its directory, its run in MLflow, its summary. Opened before the first step, always closed."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

from rich.console import Console

from components.common.contracts.errors import EXIT_FAILURE, EngineryError
from components.common.contracts.manifests import write_atomically
from components.common.process.disk import explain
from components.common.registry.store import is_new, without_credentials
from enginery.local.parameters import PipelineFile
from enginery.local.state import MLFLOW_RUN_ID, SUMMARY, RunDirectory, StateDirectory
from enginery.local.summary import RunSummary

if TYPE_CHECKING:
    from components.common.registry.tracking import PipelineRun

RUN_LOG = "run.log"
MLFLOW_STATUS = {"done": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_PATIENCE_S = 3.0
_ROOM_BYTES = 1 << 26  # for a new database, many times over


@dataclass(kw_only=True)
class RunRecord:
    """The directory of a run and its run in MLflow, both open."""

    held: RunDirectory
    uri: str  # without credentials
    opening: "Future[PipelineRun]"
    worker: ThreadPoolExecutor  # of one thread, so that MLflow gets everything in turn
    problems: list[str] = field(default_factory=list)  # what could not be recorded

    @property
    def tracked(self) -> "PipelineRun":
        """The run in MLflow; waits until it is open."""
        return self.opening.result()

    @classmethod
    def open(
        cls,
        state: StateDirectory,
        file: PipelineFile,
        arguments: Mapping[str, Any],
        experiment: str,
        console: Console,
        raising: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "RunRecord":
        """Make both, and end in MLflow what earlier runs could not.

        A new SQLite file takes seconds, in which the first step can begin: it opens in a thread.

        Args:
            state: where the run's directory goes.
            file: the pipeline.
            arguments: its resolved arguments.
            experiment: name of the MLflow experiment.
            console: where a person reads.
            raising: a context in which an interrupt ends the wait for MLflow.

        Raises:
            EngineryError: MLflow or the state directory can't be used. Nothing is left behind.
            KeyboardInterrupt: as `raising` does. Nothing is left behind then, too.
        """
        held = state.new_run(file.name)
        uri = without_credentials(state.tracking_uri)

        def open_run() -> "PipelineRun":
            from components.common.registry.tracking import PipelineRun  # takes seconds: only when something runs

            with state.store_lock():
                return PipelineRun(
                    state.tracking_uri,
                    experiment,
                    held.path.name,
                    source=str(file.path),
                    params=arguments,
                    place=state.path,
                )

        worker = ThreadPoolExecutor(1)
        is_sure = state.tracking_uri == state.default_tracking_uri and disk_usage(state.path).free > _ROOM_BYTES
        if is_sure and is_new(state.tracking_uri):
            opening = worker.submit(open_run)
        else:
            try:
                with _waiting_note(console, uri):
                    import components.common.registry.tracking  # noqa: F401  # an interrupt could get lost in it

                    opening = Future()
                    with raising():
                        opening.set_result(open_run())
            except BaseException:
                held.discard()
                raise
        record = cls(held=held, uri=uri, opening=opening, worker=worker)
        file_of_id = held.path / MLFLOW_RUN_ID
        record.log("the run's id in MLflow", lambda run: write_atomically(file_of_id, run.run_id.encode()))
        for abandoned in state.abandoned_runs():
            record.log(f"the end of {abandoned.path.name} in MLflow", partial(_close_abandoned, abandoned))
        return record

    def log(self, subject: str, act: "Callable[[PipelineRun], object]") -> None:
        """Log to MLflow, in the order of the calls, without waiting for it; a failure is noted."""

        def noted() -> None:
            with self.noting(subject):
                act(self.tracked)

        self.worker.submit(noted)

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.held.path

    def close(self, summary: RunSummary, headline: dict[str, float], copy: Path | None) -> RunSummary:
        """Write the summary, and a copy where one is wanted, then close the run in MLflow.

        Returns:
            The summary; that of a run whose summary could not be written is no success.
        """
        for file in filter(None, (self.directory / SUMMARY, copy)):
            num_problems = len(self.problems)
            with self.noting(str(file)):
                write_atomically(file, summary.model_dump_json(indent=1).encode())
            if len(self.problems) > num_problems and summary.status == "done":
                failure = {"status": "failed", "exit_code": EXIT_FAILURE, "message": self.problems[-1]}
                summary = summary.model_copy(update=failure)
        message = summary.message or ("interrupted" if summary.status == "killed" else "")
        tags = {"enginery.status": summary.status, "enginery.message": message[:5000]}
        if summary.verdict:
            tags["enginery.verdict"] = summary.verdict
        found = [
            self.directory / SUMMARY,
            self.directory / RUN_LOG,
            *([Path(summary.report)] if summary.report else []),
        ]
        artifacts = [path for path in found if path.exists()]
        self.worker.shutdown()
        with self.noting("the run's end in MLflow"):
            self.tracked.finish(MLFLOW_STATUS[summary.status], tags, headline, artifacts)
            self.held.closed()
        return summary

    @contextmanager
    def noting(self, subject: str) -> Iterator[None]:
        """Note that something can't be recorded, and let the rest be recorded."""
        try:
            yield
        except Exception as error:
            reason = explain(error, self.directory) or error
            self.problems.append(f"{subject} could not be recorded: {reason}")


def _close_abandoned(run: RunDirectory, tracked: "PipelineRun") -> None:
    """End a run in MLflow that could not do so itself."""
    try:
        summary = json.loads((run.path / SUMMARY).read_bytes())
        status, message = MLFLOW_STATUS[summary["status"]], str(summary["message"])
    except (OSError, ValueError, LookupError):
        status, message = "KILLED", "the run was killed"
    tracked.close_abandoned(run.path.name, status, message)
    run.release_reserve()
    run.closed()


@contextmanager
def _waiting_note(console: Console, uri: str) -> Iterator[None]:
    """Say what a start waits for that takes long."""
    note = threading.Timer(_PATIENCE_S, console.print, (f"waiting for MLflow at {uri}",))
    note.daemon = True
    note.start()
    try:
        yield
    finally:
        note.cancel()


def as_error(error: Exception, directory: Path) -> EngineryError:
    """An error of this process as one line for a person."""
    known = error if isinstance(error, EngineryError) else explain(error, directory)
    text = f"{type(error).__name__}: {error} (enginery --debug shows the traceback)"
    return known or EngineryError(text, code="unexpected")
