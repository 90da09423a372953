"""Run a pipeline on this machine: kfp.local's SubprocessRunner, MLflow, and what a person sees."""

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import kfp.local
import psutil
from rich.console import Console

from components.common.artifacts import FAILURE, write_atomically
from components.common.environment import environment
from components.common.errors import EXIT_FAILURE, UserError
from components.common.lifetime import PARENT_VARIABLE
from components.common.steplog import EVENTS_VARIABLE
from pipelines.caching import enable, finished_steps, step_keys
from pipelines.parameters import STEP_CONFIGS, PipelineFile
from pipelines.rendering import EventStream, Renderer, print_summary
from pipelines.state import MLFLOW_RUN_ID, SUMMARY, StateDirectory
from pipelines.summary import RunSummary, SummaryBuilder

if TYPE_CHECKING:
    from components.common.tracking import PipelineRun

EXIT_INTERRUPTED = 130

_GRACE_S = 10.0  # for steps to end by themselves after an interrupt


def run_locally(
    file: PipelineFile,
    arguments: Mapping[str, Any],
    *,
    experiment: str,
    console: Console,
    summary_path: Path | None,
    reuse: bool = True,
) -> RunSummary:
    """Run the whole pipeline, show it, record it.

    Args:
        file: the pipeline.
        arguments: its resolved arguments.
        experiment: name of the MLflow experiment.
        console: where a person reads.
        summary_path: where to write the summary as JSON, too.
        reuse: take over finished steps whose inputs, settings, code and machine are the same.

    Returns:
        The summary; its exit_code is what the process should end with.

    Raises:
        UserError: the state directory or a parameter can't be used here.
        EngineryError: MLflow can't be reached.
    """
    _refuse_python3(arguments)
    state = StateDirectory.current()
    started = time.time()
    held = state.new_run(file.name)
    directory = held.path
    uri = state.tracking_uri
    from components.common.tracking import PipelineRun  # MLflow takes seconds to import: only when something runs

    with state.store_lock():  # several processes that create one SQLite store damage it
        tracked = PipelineRun(uri, experiment, directory.name, source=str(file.path))
    (directory / MLFLOW_RUN_ID).write_text(tracked.run_id, encoding="utf-8")
    for path, run_id in state.abandoned_runs():
        tracked.close(run_id)
        (path / MLFLOW_RUN_ID).unlink(missing_ok=True)  # another run may be doing the same
    tracked.step_run.log_params(arguments)
    builder = SummaryBuilder(time.time())
    keys = step_keys(file, arguments) if reuse else {}
    enable(file, keys)
    with _terminable():
        status = _execute(file, arguments, keys, state, directory, tracked.environment(), builder, console)
    _take_over(file, keys, state, builder)
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
        **builder.digests(),
        registered=builder.registered,
        report=builder.report,
        run_directory=str(directory),
        tracking_uri=without_credentials(uri),
        mlflow_run_id=tracked.run_id,
        environment=environment(),
    )
    _record(summary, tracked, directory, summary_path)
    print_summary(console, summary)
    _print_pointers(summary, console)
    return summary


def _record(summary: RunSummary, tracked: "PipelineRun", directory: Path, summary_path: Path | None) -> None:
    """Write the summary and end the MLflow run."""
    data = summary.model_dump_json(indent=1).encode()
    write_atomically(directory / SUMMARY, data)
    tracked.step_run.log_artifact(directory / SUMMARY)
    tracked.step_run.log_artifact(directory / "run.log")
    mlflow_status = {"done": "FINISHED", "failed": "FAILED", "killed": "KILLED"}[summary.status]
    tracked.finish(mlflow_status, {"enginery.status": summary.status, "enginery.message": summary.message})
    if summary_path is not None:
        write_atomically(summary_path, data)


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


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop_steps() -> None:
    """End what still runs below this process: politely first, so that steps can mark their MLflow runs."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=_GRACE_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _take_over(file: PipelineFile, keys: Mapping[str, str], state: StateDirectory, builder: SummaryBuilder) -> None:
    """Fill in what steps that KFP served from its cache would have told."""
    told = {step.name for step in builder.steps}
    for cached in finished_steps(file, keys, state.cache_root, state.runs):
        if cached.step not in told:
            builder.take_over(cached)
    builder.steps.sort(key=lambda step: list(STEP_CONFIGS).index(step.name))


def _silent_end(step: str, directory: Path) -> dict[str, Any]:
    """The failure of a step whose event did not arrive: what it wrote beside its output, or what is likely."""
    event = {"event": "failed", "step": step or "start", "time": time.time()}
    found = sorted(directory.glob(f"artifacts/**/{FAILURE}"), key=lambda path: path.stat().st_mtime)
    if found:
        return {**json.loads(found[-1].read_text(encoding="utf-8")), **event}
    message = (
        "ended without a word, so it was killed, most often because memory ran out. Try a smaller --global-batch-size "
        f"or --image-size; {directory / 'run.log'} holds its output"
    )
    return {**event, "message": message, "exit_code": EXIT_FAILURE}


def _execute(
    file: PipelineFile,
    arguments: Mapping[str, Any],
    keys: Mapping[str, str],
    state: StateDirectory,
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
        for cached in finished_steps(file, keys, state.cache_root, state.runs):
            renderer.show_reused(cached.step, cached.run_id)
        with _environment(variables), contextlib.redirect_stdout(stream), contextlib.redirect_stderr(log):
            kfp.local.init(
                kfp.local.SubprocessRunner(use_venv=False),
                pipeline_root=str(directory / "artifacts"),
                workspace_root=str(directory / "workspace"),
                enable_caching=True,
                cache_root=str(state.cache_root),
            )
            try:
                file.pipeline(**arguments)
                return "done"
            except KeyboardInterrupt:
                _stop_steps()
                return "killed"
            except Exception as error:  # KFP says only that a task failed; what failed came as an event
                logging.getLogger(__name__).debug("pipeline failed", exc_info=True)
                log.write(f"{type(error).__name__}: {error}\n")
                if builder.failure is None:
                    on_event(_silent_end(builder.running, directory))
                return "failed"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the steps, put back afterwards."""
    root = str(Path(__file__).resolve().parents[1])
    ours = {
        **variables,
        EVENTS_VARIABLE: "1",
        PARENT_VARIABLE: str(os.getpid()),
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
    console.print()
    if summary.registered:
        name, version = summary.registered.split("/")
        console.print(f"registered  {name} version {version}", highlight=False)
    if summary.report:
        console.print(f"report      {_relative(summary.report)}", highlight=False, soft_wrap=True)
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
