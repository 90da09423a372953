"""Start and end of a step, the same under KFP, in a container and typed by a person."""

import atexit
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from components.common.contracts.digests import digest_file
from components.common.contracts.environment import keep_streams_apart, torchrun_rank
from components.common.contracts.errors import EXIT_INTERRUPTED, EngineryError, Preempted, UserError, shown
from components.common.contracts.manifests import FAILURE, MANIFEST, PARTIAL_OUTPUT
from components.common.contracts.settings import StepConfig, load_yaml, parse_value, resolve, show_value, type_label
from components.common.process.dataset_volume import find_dataset, write_dataset
from components.common.process.disk import explain, out_of_space
from components.common.process.lifetime import end_with_parent, process_age_s
from components.common.process.partial_output import lock_output
from components.common.process.steplog import RELAY_VARIABLE, QuietLog, RelayedRun, StepLog

if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry.tracking import StepRun

DEBUG_VARIABLE = "ENGINERY_DEBUG"  # "1": show tracebacks
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the chain: its name, config and what it reads. `components.<name>.run` holds its work.

    `run(config, log, *, output, **inputs)` writes an artifact into the directory `output` and returns one line
    that says what it made.
    """

    name: str
    config: type[StepConfig]
    inputs: Mapping[str, str]  # name of each input -> what a person should name there
    uses_registry: bool = False  # it talks to MLflow itself, also where a parent keeps the steps' runs
    writes_dataset: bool = False  # or a part of one: into the volume for them, where there is one
    is_preemptible: bool = False  # SIGTERM is no failure, at whatever moment: it ends with EXIT_PREEMPTED

    def execute(self, settings: Mapping[str, Any], *, output: str | Path, **inputs: str | Path) -> None:
        """Run the step and leave the process when it fails, with the exit code that says whose fault it was."""
        speaks = not torchrun_rank()  # of several processes that make one artifact, rank 0 alone
        log = StepLog(self.name) if speaks else QuietLog(self.name)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                preempts = self.is_preemptible and number == signal.SIGTERM
                signal.signal(number, _preempt if preempts else _interrupt)
        atexit.register(_leave_quickly)  # before any library registers: handlers run last in, first out
        end_with_parent()
        keep_streams_apart()
        folder: Path | None = Path(output)
        if not speaks or _is_occupied(Path(output)):
            folder = None  # somebody else's: nothing of ours goes in
        try:
            self._execute(log, settings, Path(output), {name: Path(path) for name, path in inputs.items()})
        except (KeyboardInterrupt, Exception) as error:  # a bug or a broken machine ends in one line, too
            stop = error.__cause__ or error  # extensions make an ImportError of a signal while they are loaded
            if isinstance(stop, Preempted):
                _ignore_signals()
                _fail(log, EngineryError(str(stop), code="preempted"), exit_code=stop.exit_code, output=folder)
            if isinstance(stop, KeyboardInterrupt):
                _fail(log, EngineryError("interrupted", code="interrupted"), exit_code=EXIT_INTERRUPTED, output=folder)
            _fail(log, _format_error(error, Path(output)), output=folder)

    def _execute(self, log: StepLog, settings: Mapping[str, Any], output: Path, inputs: dict[str, Path]) -> None:
        log.event("started", process_started=time.time() - process_age_s(), pid=os.getpid())
        config = resolve(self.config, self.name, settings)
        tracked = not torchrun_rank() and any(os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"))
        gc.disable()  # a library makes objects by the million, and none of them is garbage
        run: Callable[..., str] = import_module(f"components.{self.name}.run").run
        gc.freeze()
        gc.enable()
        imports_s = process_age_s()
        started = time.perf_counter()
        with ExitStack() as stack:
            if tracked:
                relayed = os.environ.get(RELAY_VARIABLE) == "1" and not self.uses_registry
                stack.enter_context(_tracked(log, relayed=relayed))
            log.tracking_s = time.perf_counter() - started
            log.params(config.model_dump(mode="json"))
            work_started = time.perf_counter()
            tracking_before = log.tracking_s
            if "dataset" in inputs:
                inputs["dataset"] = find_dataset(inputs["dataset"])
            if not torchrun_rank():
                lock_output(output)
            work = partial(run, config, log, **inputs)
            if self.writes_dataset:
                outcome = write_dataset(lambda folder: work(output=folder), config.model_dump(mode="json"), output)
            else:
                outcome = work(output=output)
            work_s = time.perf_counter() - work_started - (log.tracking_s - tracking_before)
            digest = ""
            if (manifest := output / MANIFEST).exists():
                digest = digest_file(manifest)
                log.artifact(manifest)
                record = json.loads(manifest.read_bytes())
                log.tags({"enginery.manifest_digest": digest})
                log.tags({f"enginery.input.{name}": value for name, value in record["inputs"].items()})
        seconds = {"imports": imports_s, "work": work_s, "tracking": log.tracking_s}
        log.event("finished", outcome=outcome, seconds=seconds, digest=digest)
        if outcome:
            print(shown(f"{self.name}: {outcome}"), file=sys.stderr, flush=True)
        _exit_codes.append(0)

    def command(self) -> click.Command:
        """Return the command line of the step, its options made from the config's fields."""
        folder: dict[str, Any] = {"required": True, "type": click.Path(path_type=Path), "metavar": "DIR"}
        options = [click.Option([f"--{name}"], help=text, **folder) for name, text in self.inputs.items()]
        options.append(click.Option(["--output"], help="Empty or new directory.", **folder))
        options.append(
            click.Option(["--config"], type=click.Path(path_type=Path), help="YAML file of the settings below.")
        )
        options.extend(config_option(name, self.config) for name in self.config.model_fields)
        text = import_module(f"components.{self.name}").__doc__ or ""
        return click.Command(
            self.name,
            params=list(options),
            callback=self._from_command_line,
            help=text.replace("\n\n", "\n\n\b\n"),  # click keeps the lines of a paragraph that starts so
        )

    def _from_command_line(self, output: Path, config: Path | None, **values: Any) -> None:
        inputs = {name: values.pop(name) for name in self.inputs}
        try:
            from_file = load_yaml(config) if config else {}
            typed = {name: parse_value(value) for name, value in values.items() if value is not None}
        except UserError as error:
            _fail(StepLog(self.name), error)
        self.execute({**from_file, **typed}, output=output, **inputs)


@contextmanager
def _tracked(log: StepLog, *, relayed: bool) -> Iterator[None]:
    """Give the step its MLflow run. One whose server is gone by now works all the same, and says so."""
    if relayed:
        log.run = cast("StepRun", RelayedRun(log))
        yield
        return
    from components.common.registry.tracking import StepRun, is_unreachable, step_run

    with ExitStack() as stack:
        try:
            log.run = stack.enter_context(step_run(log.step))
        except Exception as error:
            if not is_unreachable(error):
                raise
            log.run = StepRun.nowhere()
            log.lose_tracking()
        yield


def _format_error(error: BaseException, output: Path) -> EngineryError:
    """Return an error as one line for a person."""
    if isinstance(error, EngineryError):
        return out_of_space(error, output) or error
    unknown = EngineryError(
        f"{type(error).__name__}: {error} (set {DEBUG_VARIABLE}=1 for the traceback)", code="unexpected"
    )
    return explain(error, output) or unknown


def config_option(name: str, config: type[StepConfig]) -> click.Option:
    """Return a command-line option for one config field; the config itself converts and checks the value."""
    field = config.model_fields[name]
    default = "" if field.is_required() else f"  [default: {show_value(field.get_default(call_default_factory=True))}]"
    return click.Option(
        [f"--{name.replace('_', '-')}"],
        metavar=type_label(field).upper() if "|" not in type_label(field) else f"[{type_label(field)}]",
        help=f"{field.description}{default}",
    )


_exit_codes: list[int] = []  # one, once the step has ended


def _leave_quickly() -> None:
    """End the process without taking the interpreter apart, which costs over a second after torch and DALI.

    Triton would also print lines of its own there, below the error of a step that failed. Every other exit handler has
    run by now. `sys.last_value` is there when something failed after the step.
    """
    if _exit_codes and not hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[-1])


def _is_occupied(output: Path) -> bool:
    """True if an output directory holds something that this step did not write."""
    with suppress(OSError):  # not there, or no directory that this user may read
        return not (output / PARTIAL_OUTPUT).is_dir() and any(entry.name != FAILURE for entry in output.iterdir())
    return False


def _interrupt(signum: int, frame: object) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt


def _preempt(signum: int, frame: object) -> NoReturn:
    """While no code is at work that knows more, such as what to save."""
    _ignore_signals()
    raise Preempted("stopped by SIGTERM; the same command resumes from what was saved, if anything was")


def _ignore_signals() -> None:
    """One is enough: what it sets off must run to its end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _fail(log: StepLog, error: EngineryError, *, exit_code: int | None = None, output: Path | None = None) -> NoReturn:
    exit_code = error.exit_code if exit_code is None else exit_code
    failure = {"message": str(error), "exit_code": exit_code, "code": error.code, "setting": error.setting}
    if output is not None and error.code != "output-in-use":
        with suppress(OSError):  # no space left may be the very failure
            output.mkdir(parents=True, exist_ok=True)
            (output / FAILURE).write_text(json.dumps({"step": log.step, **failure}), encoding="utf-8")
    with suppress(KeyboardInterrupt):  # nobody listens any more
        log.event("failed", **failure)
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exc()
    code = f" [{error.code}]" if error.code not in ("", str(error)) else ""
    print(f"{log.step}: {error}{code}", file=sys.stderr, flush=True)
    _exit_codes.append(exit_code)
    if torchrun_rank() is not None:
        _leave_quickly()  # exit handlers of libraries would wait for GPU work that waits for processes that are gone
    sys.exit(exit_code)
