"""Run a pipeline on this machine: kfp.local's SubprocessRunner, MLflow, and what a person sees."""

import contextlib
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import kfp.local
from rich.console import Console

from components.common.artifacts import write_atomically
from components.common.environment import environment
from components.common.errors import EXIT_FAILURE, UserError
from components.common.steplog import EVENTS_VARIABLE
from pipelines.parameters import PipelineFile
from pipelines.rendering import EventStream, Renderer, print_summary
from pipelines.summary import RunSummary, SummaryBuilder

EXIT_INTERRUPTED = 130


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
    def artifact_root(self) -> Path:
        """Where MLflow keeps files when its store is the SQLite file."""
        return self.path / "mlartifacts"

    def new_run(self, name: str) -> Path:
        """A fresh directory for one run."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = self.path / "runs" / f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"
        path.mkdir(parents=True)
        return path

    def tracking(self) -> tuple[str, Path | None]:
        """Tracking URI and, if the store has no server of its own, the artifact root."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri or uri == self.default_tracking_uri:
            return self.default_tracking_uri, self.artifact_root
        return uri, None


def run_locally(
    file: PipelineFile, arguments: Mapping[str, Any], *, experiment: str, console: Console, summary_path: Path | None
) -> RunSummary:
    """Run the whole pipeline, show it, record it.

    Returns:
        The summary; its exit_code is what the process should end with.

    Raises:
        UserError: the state directory or a parameter can't be used here.
        EngineryError: MLflow can't be reached.
    """
    _refuse_python3(arguments)
    state = StateDirectory.current()
    started = time.time()
    directory = state.new_run(file.name)
    uri, artifact_root = state.tracking()
    from components.common.tracking import PipelineRun  # MLflow takes seconds to import: only when something runs

    tracked = PipelineRun(uri, experiment, directory.name, source=str(file.path), artifact_root=artifact_root)
    tracked.step_run.log_params(arguments)
    builder = SummaryBuilder(time.time())
    status = _execute(file, arguments, directory, tracked.environment(), builder, console)
    failure = builder.failure
    summary = RunSummary(
        pipeline=file.name,
        run_id=directory.name,
        status=status,
        exit_code=_exit_code(status, failure),
        message=failure["message"] if failure else "",
        seconds_total=time.time() - started,
        arguments=dict(arguments),
        steps=builder.steps,
        rows=builder.rows(),
        checks=builder.checks,
        registered=builder.registered,
        run_directory=str(directory),
        tracking_uri=without_credentials(uri),
        mlflow_run_id=tracked.run_id,
        environment=environment(),
    )
    data = summary.model_dump_json(indent=1).encode()
    write_atomically(directory / "summary.json", data)
    if summary_path is not None:
        write_atomically(summary_path, data)
    tracked.step_run.log_artifact(directory / "summary.json")
    tracked.step_run.log_artifact(directory / "run.log")
    mlflow_status = {"done": "FINISHED", "failed": "FAILED", "killed": "KILLED"}[status]
    tracked.finish(mlflow_status, {"enginery.status": status, "enginery.message": summary.message})
    print_summary(console, summary)
    _print_pointers(summary, console)
    return summary


def _exit_code(status: str, failure: dict[str, Any] | None) -> int:
    if status == "done":
        return 0
    if status == "killed":
        return EXIT_INTERRUPTED
    return int(failure["exit_code"]) if failure else EXIT_FAILURE


def _refuse_python3(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if "python3" in str(value):
            raise UserError(
                f"--{name.replace('_', '-')} has 'python3' in its value ({value}), which KFP's local runner replaces "
                "by the interpreter's path; use a link or a copy under another name"
            )


def _execute(
    file: PipelineFile,
    arguments: Mapping[str, Any],
    directory: Path,
    variables: Mapping[str, str],
    builder: SummaryBuilder,
    console: Console,
) -> Literal["done", "failed", "killed"]:
    """Run the steps with their output in run.log."""
    with (directory / "run.log").open("w", encoding="utf-8", buffering=1) as log, Renderer(console) as renderer:

        def on_event(event: dict[str, Any]) -> None:
            builder.handle(event)
            renderer.handle(event)

        stream = EventStream(log, on_event)
        with _environment(variables), contextlib.redirect_stdout(stream), contextlib.redirect_stderr(log):
            kfp.local.init(
                kfp.local.SubprocessRunner(use_venv=False),
                pipeline_root=str(directory / "artifacts"),
                workspace_root=str(directory / "workspace"),
            )
            try:
                file.pipeline(**arguments)
                return "done"
            except KeyboardInterrupt:
                return "killed"
            except Exception as error:  # KFP says only that a task failed; what failed came as an event
                logging.getLogger(__name__).debug("pipeline failed", exc_info=True)
                log.write(f"{type(error).__name__}: {error}\n")
                if builder.failure is None:
                    tail = "the step said nothing; see the log"
                    builder.failure = {"message": f"{error} ({tail})", "exit_code": EXIT_FAILURE}
                return "failed"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the steps, put back afterwards."""
    root = str(Path(__file__).resolve().parents[1])
    ours = {
        **variables,
        EVENTS_VARIABLE: "1",
        "PYTHONUNBUFFERED": "1",  # KFP passes a step's lines on as they come only then
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _print_pointers(summary: RunSummary, console: Console) -> None:
    """Where to look next."""
    if summary.status == "killed":
        console.print("\n[yellow]interrupted[/]; nothing was promoted")
    elif summary.status == "failed" and not summary.steps:
        console.print(f"\n[red]failed[/]: {summary.message}", highlight=False)
    console.print()
    if summary.registered:
        name, version = summary.registered.split("/")
        console.print(f"registered  {name} version {version}", highlight=False)
    console.print(f"files       {_relative(summary.run_directory)}", highlight=False, soft_wrap=True)
    console.print(f"tracking    {summary.tracking_uri}  (look at it: enginery ui)", highlight=False, soft_wrap=True)
    console.print(f"time        {summary.seconds_total:.0f} s", highlight=False)


def without_credentials(uri: str) -> str:
    """A URI without user and password, for files and screens."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def _relative(path: str) -> str:
    with contextlib.suppress(ValueError):
        return shlex.quote(str(Path(path).relative_to(Path.cwd())))
    return shlex.quote(path)


def new_console() -> Console:
    """Where people read: standard output, also while steps' output is redirected."""
    return Console(file=sys.stdout)
