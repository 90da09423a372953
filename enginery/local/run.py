"""`enginery run`: a pipeline on this machine by kfp.local's SubprocessRunner, stopped by Ctrl-C or SIGTERM."""

import contextlib
import json
import os
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import click
import kfp.local
from rich.console import Console
from rich.markup import escape

from components.common.contracts.environment import environment
from components.common.contracts.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError
from components.common.contracts.manifests import FAILURE, MANIFEST, DatasetManifest, load_manifest
from components.common.process.disk import full
from components.common.process.lifetime import PARENT_VARIABLE, adopt_orphans, end_children, end_orphans_of
from components.common.process.partial_output import EARLIER_VARIABLE
from components.common.process.step import DEBUG_VARIABLE
from components.common.process.steplog import EVENTS_VARIABLE, RELAY_VARIABLE
from components.export.config import CACHE_VARIABLE
from enginery.formats import echo, new_console
from enginery.local.caching import CachedStep, StepCache, offer
from enginery.local.containers import Containers, check_images
from enginery.local.parameters import STEP_ORDER, PipelineFile
from enginery.local.preflight import check_inputs, check_memory, check_validation
from enginery.local.record import RUN_LOG, RunRecord, as_error
from enginery.local.rendering import EventStream, Renderer, RunLog, print_summary
from enginery.local.state import CACHE, StateDirectory
from enginery.local.summary import RunSummary, SummaryBuilder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Holds SIGINT, SIGTERM and SIGHUP while a run is open, so that none ends it before its records are closed.

    Inside `raising()` the first signal raises KeyboardInterrupt. Elsewhere it is noted until the next `raising()`.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        """`on_second` is called by every further signal, wherever the program is."""
        self.num_signals = 0
        self._on_second = on_second
        self._raises = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # An interrupted run is the end of its process, which one more Ctrl-C must not turn into another.
            signal.signal(number, signal.SIG_IGN if self.num_signals else handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let an interrupt end things at any line."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise KeyboardInterrupt after a signal whose exception was lost, as in a destructor or a callback."""
        if self.num_signals:
            self._raises = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        if self.num_signals > 1:
            self._on_second()
        elif self._raises:
            self._raises = False  # one is enough: what it sets off must run to its end
            raise KeyboardInterrupt


_GRACE_S = 10.0  # for steps to end by themselves after an interrupt

Status = Literal["done", "failed", "killed"]


def run_locally(
    file: PipelineFile,
    arguments: Mapping[str, Any],
    *,
    experiment: str = "",
    summary_path: Path | None = None,
    reuse: bool = True,
    in_containers: bool = False,
) -> RunSummary:
    """Check the inputs, run the whole pipeline, show it, record it.

    Args:
        file: the pipeline.
        arguments: its resolved arguments.
        experiment: name of the MLflow experiment; empty for the pipeline's.
        summary_path: where to write the summary as JSON, too.
        reuse: reuse finished steps whose inputs, settings, code and machine are the same.
        in_containers: run each step in its image. Nothing is reused there: what an image holds is in no key.

    Returns:
        The summary; its exit_code is what the process should end with.

    Raises:
        UserError: data, model, a parameter or the state directory can't be used here, or memory can't suffice.
        EngineryError: MLflow can't be reached, or the model is damaged.
        SystemExit: interrupted before there was a run.
    """
    _refuse_python3(arguments)
    if summary_path is not None and not summary_path.absolute().parent.is_dir():
        text = f"--summary {summary_path}: the folder {summary_path.absolute().parent} does not exist; make it"
        raise UserError(text, code="no-folder", setting="--summary")
    if summary_path is not None and summary_path.is_dir():
        text = f"--summary {summary_path} is a folder; name a file in it, such as {summary_path / 'summary.json'}"
        raise UserError(text, code="is-folder", setting="--summary")
    unchecked = check_inputs(arguments, in_containers=in_containers)
    for kind, note in (("note", unchecked), ("warning", check_memory(arguments))):
        if note:
            click.secho(f"{kind}: ", fg="yellow" if kind == "warning" else None, nl=False, err=True)
            echo(note, err=True)
    console = new_console()
    if in_containers:
        check_images(file, lambda text: console.print(text, style="dim"))
    state = StateDirectory.current()
    started = time.time()
    with Interrupts(on_second=end_children) as interrupts:
        try:
            record = RunRecord.open(state, file, arguments, experiment or file.name, console, interrupts.raising)
        except KeyboardInterrupt:
            console.print("\n[yellow]interrupted[/] before the first step")
            raise SystemExit(EXIT_INTERRUPTED) from None
        cache = StepCache(file=file, arguments=arguments, runs=state.runs)
        chain = _Chain(file=file, arguments=arguments, state=state, record=record, console=console, cache=cache)
        if in_containers:
            chain.containers = Containers(run_directory=record.directory, state=state, arguments=arguments)
        try:
            status = chain.run(interrupts, reuse=reuse and not in_containers)
        except OSError:  # of the terminal: nobody reads any more
            status = "failed"
        record.held.release_reserve()
        summary = record.close(chain.summary(status, time.time() - started), chain.builder.headline(), summary_path)
        print_summary(console, summary)
        _print_pointers(summary, console)
        for problem in record.problems:
            console.print(f"[yellow]warning:[/] {escape(problem)}")
    return summary


@dataclass(kw_only=True)
class _Chain:
    """The steps of one run, as they go."""

    file: PipelineFile
    arguments: Mapping[str, Any]
    state: StateDirectory
    record: RunRecord
    console: Console
    cache: StepCache
    containers: Containers | None = None  # None: each step is a process here
    reused: list[CachedStep] = field(default_factory=list)
    builder: SummaryBuilder = field(default_factory=lambda: SummaryBuilder(time.time()))

    def run(self, interrupts: Interrupts, *, reuse: bool) -> Status:
        """Run the steps with their output in run.log. However that ends, no process is left."""
        adopt_orphans()
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(RunLog(self.record.directory / RUN_LOG))
            renderer = stack.enter_context(Renderer(self.console))

            def on_event(event: dict[str, Any]) -> None:
                self.builder.handle(event)
                renderer.handle(event)

            def on_step_event(event: dict[str, Any]) -> None:
                interrupts.check()
                if event["event"] in ("track", "finished", "failed"):
                    self.record.log(f"what {event['step']} found, in MLflow", lambda run: run.relay(event))
                if event["event"] == "track":
                    return
                # The run in MLflow may have opened since the start. The step behind preprocess does not ask for it.
                if event["event"] == "finished" and event["step"] != "preprocess":
                    os.environ.update(self.record.tracked.environment())
                if event["event"] == "started" and self.containers is None:
                    end_orphans_of(event["pid"])
                elif event["event"] == "finished" and event["digest"]:
                    self.cache.confirm(event["step"], event["digest"], self.record.directory / CACHE)
                on_event(event)
                if event["event"] == "finished" and event["step"] == "preprocess":
                    self._check_validation()

            try:
                with interrupts.raising():
                    self._run_steps(EventStream(log, on_step_event), log, renderer, reuse=reuse)
                return "failed" if self.containers and self.builder.failure else "done"
            except KeyboardInterrupt:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    self.console.print("stopping the running step (again: at once)", style="dim")
                grace_s = _GRACE_S if interrupts.num_signals < 2 else 0.0
                if self.containers:
                    self.containers.stop(int(grace_s))
                end_children(grace_s)
                return "killed"
            except Exception as error:  # KFP says only that a task failed; what failed came as an event
                end_children()  # such as the workers of a step that was killed
                if interrupts.num_signals:  # its exception was lost on the way, and the step ended of the same signal
                    return "killed"
                log.write(f"{type(error).__name__}: {error}\n")
                if self.builder.failure is None:
                    on_event(self._failure(error))
                return "failed"

    def _run_steps(self, stream: EventStream, log: RunLog, renderer: Renderer, *, reuse: bool) -> None:
        self.cache.enable(reuse)
        self.reused = self.cache.finished()
        for cached in self.reused:
            renderer.show_reused(cached.step, cached.run_id)
        cache = self.state.path / "export-cache"
        variables = {CACHE_VARIABLE: str(cache), "MLFLOW_TRACKING_URI": self.state.tracking_uri}
        # A server may go away, which the steps are prepared for; a file is this process's as well as theirs.
        if self.containers is None and self.record.uri.startswith("sqlite:"):
            variables[RELAY_VARIABLE] = "1"
        if RELAY_VARIABLE not in variables or self.reused or self.record.opening.done():
            variables |= self.record.tracked.environment()
        if own := os.environ.get(CACHE_VARIABLE):
            variables[CACHE_VARIABLE] = own
        variables[EARLIER_VARIABLE] = json.dumps([str(path) for path in self.cache.partial_outputs()])
        cache_root = offer(self.reused, self.record.directory)
        self.cache.note_begun(cache_root)
        with contextlib.ExitStack() as stack:
            if self.containers is None:  # KFP makes a temporary folder for each step and leaves it
                # A step that was killed may still write there.
                folder = tempfile.TemporaryDirectory(prefix="enginery-", ignore_cleanup_errors=True)
                variables["TMPDIR"] = stack.enter_context(folder)
                compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # kept: a later run is faster
                variables.setdefault(
                    "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
                )
            stack.enter_context(_environment(variables))
            stack.enter_context(contextlib.redirect_stdout(stream))
            stack.enter_context(contextlib.redirect_stderr(log))
            here = kfp.local.SubprocessRunner(use_venv=False)
            kfp.local.init(
                self.containers.runner(variables) if self.containers else here,
                pipeline_root=str(self.record.directory / "artifacts"),
                workspace_root=str(self.record.directory / "workspace"),
                enable_caching=True,
                cache_root=str(cache_root),
            )
            self.file.pipeline(**self.arguments)
            if self.containers:
                self.containers.check_manifests(self.file)

    def _check_validation(self) -> None:
        """Refuse a dataset that can't give the proof that the gate asks for, which could not be counted before."""
        for file in self.record.directory.glob(f"artifacts/*/preprocess/*/{MANIFEST}"):
            splits = load_manifest(file, DatasetManifest).manifest.splits
            val = splits["val"]
            most = max(val.class_counts, default=0)  # sentences have no classes
            check_validation(self.arguments, splits["train"].num_images, num_val=val.num_images, num_of_class=most)

    def _failure(self, error: Exception) -> dict[str, Any]:
        """The failure of a step whose event did not arrive: what it wrote beside its output, or what is likely."""
        directory = self.record.directory
        event = {"event": "failed", "step": self.builder.running or "start", "time": time.time()}
        found = sorted(directory.glob(f"artifacts/**/{FAILURE}"), key=lambda path: path.stat().st_mtime)
        with contextlib.suppress(IndexError, OSError, ValueError):  # none, or cut short by what it tells of
            return {**json.loads(found[-1].read_text(encoding="utf-8")), **event}
        cause = full(directory)
        of_kfp = isinstance(error, RuntimeError) and "finished with status" in str(error)
        if cause is None and not of_kfp:
            cause = as_error(error, directory)
            if os.environ.get(DEBUG_VARIABLE) == "1":
                traceback.print_exception(error)
        if cause is not None:
            return {**event, "message": str(cause), "exit_code": cause.exit_code, "code": cause.code}
        message = (
            "ended without a word, so it was killed, most often because memory ran out. Try a smaller "
            f"--global-batch-size or --image-size; {directory / RUN_LOG} holds its output"
        )
        return {**event, "message": message, "exit_code": EXIT_FAILURE}

    def summary(self, status: Status, seconds: float) -> RunSummary:
        """The result, with the steps that KFP served from its cache, which sent no events."""
        builder, failure = self.builder, self.builder.failure
        known = {step.name for step in builder.steps}
        for cached in self.reused:
            if cached.step not in known:
                builder.add_reused(cached)
        builder.steps.sort(key=lambda step: STEP_ORDER.index(step.name) if step.name in STEP_ORDER else -1)
        return builder.summary(
            pipeline=self.file.name,
            run_id=self.record.directory.name,
            status=status,
            exit_code=_exit_code(status, failure),
            message=failure["message"] if failure else "",
            seconds_total=seconds,
            arguments=dict(self.arguments),
            run_directory=str(self.record.directory),
            tracking_uri=self.record.uri,
            mlflow_run_id=self.record.tracked.run_id,
            environment=environment(),
        )


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
                "by the interpreter's path; use a link or a copy under another name",
                code="python3-in-value",
                setting=f"--{name.replace('_', '-')}",
            )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the steps, put back afterwards."""
    root = str(Path(__file__).resolve().parents[2])
    before = dict(os.environ)
    os.environ |= {
        **variables,
        EVENTS_VARIABLE: "1",
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",  # KFP passes a step's lines on as they come only then
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _print_pointers(summary: RunSummary, console: Console) -> None:
    """Print where the report, the files and the tracking are."""
    if summary.status == "killed":
        console.print("\n[yellow]interrupted[/]; nothing was promoted")
    console.print()
    if summary.registered:
        name, version = summary.registered.split("/")
        alias = "champion" if summary.champion else "candidate"
        console.print(f"registered  {name} version {version}, {alias}")
    if summary.report:
        console.print(f"report      {_relative(summary.report)}")
    console.print(f"files       {_relative(summary.run_directory)}")
    console.print(f"tracking    {summary.tracking_uri}  (look at it: enginery ui)")
    console.print(f"time        {summary.seconds_total:.0f} s")


def _relative(path: str) -> str:
    with contextlib.suppress(ValueError):
        return shlex.quote(str(Path(path).relative_to(Path.cwd())))
    return shlex.quote(path)
