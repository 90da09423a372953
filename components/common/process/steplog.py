"""The output of a running step: events for the parent, lines for a person, metrics for MLflow.

A local run passes a step's output on line by line, so an event is one line: a prefix and a JSON object. The parent
(`enginery run`) renders the events and files everything else in the step's log. Without a parent, a person reads.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import to_jsonable_python

from components.common.contracts.errors import shown

if TYPE_CHECKING:
    from components.common.contracts.records import AccuracyRow, BenchmarkRow
    from components.common.registry.tracking import StepRun

EVENT_PREFIX = "@enginery "
EVENTS_VARIABLE = "ENGINERY_EVENTS"  # set to "1" by a parent that renders events
RELAY_VARIABLE = "ENGINERY_RELAY"  # set to "1" by a parent that also keeps the steps' runs in MLflow

_HEARTBEAT_INTERVAL_S = 60.0
_EVENT_INTERVAL_S = 0.2
_LINE_INTERVAL_S = 5.0


def progress_text(phase: str, done: int, total: int, unit: str = "", detail: str = "") -> str:
    """One line such as "calibrating 32/256 images"; a phase of one piece has no count."""
    count = f" {done:,}/{total:,} {unit}".rstrip() if total > 1 else ""
    return f"{phase}{count}" + (f", {detail}" if detail else "")


class LinePace:
    """The times of a phase's lines: `interval_s` after each other or, where longer, that share of the phase's time.

    The end of a phase is always due where a line of it was printed, so that its counter reaches the end.
    """

    def __init__(self, interval_s: float, share: float = 0.0) -> None:
        self._interval_s, self._share = interval_s, share
        self._phase = ""
        self._began = self._last = -math.inf
        self._is_shown = False

    def is_due(self, phase: str, done: int, total: int) -> bool:
        """True if the line is to be printed; it then counts as printed."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._began, self._is_shown = phase, now, False
        ends = self._is_shown and done >= total
        if not ends and now - self._last < max(self._interval_s, self._share * (now - self._began)):
            return False
        self._last, self._is_shown = now, done < total
        return True


class StepLog:
    """The log of one running step."""

    def __init__(self, step: str, run: "StepRun | None" = None) -> None:
        """`run` is the step's MLflow run, or None where nothing is tracked."""
        self.step = step
        self.run = run
        self.tracking_s = 0.0  # time spent talking to MLflow, reported apart from the step's work
        self.tracking_lost = False  # the server is gone: the step continues, and MLflow hears no more of it
        self._events = os.environ.get(EVENTS_VARIABLE) == "1"
        self._last_progress = 0.0
        self._last_phase = ""
        self._pace = LinePace(_LINE_INTERVAL_S)

    def event(self, event: str, **fields: Any) -> None:
        """Tell the parent something. Nothing is printed where there is no parent."""
        if self._events:
            line = json.dumps({"event": event, "step": self.step, "time": time.time(), **fields})
            try:
                print(EVENT_PREFIX + line, flush=True)
            except BrokenPipeError:  # the run that listened was interrupted or is gone
                self._events = False
                raise KeyboardInterrupt from None

    def note(self, text: str) -> None:
        """One line a person should see."""
        self._say("note", text)

    def warning(self, text: str) -> None:
        """One line a person must see: something is missing or doubtful, and the step continues."""
        self._say("warning", text)

    def _say(self, kind: str, text: str) -> None:
        self.event(kind, text=text)
        if not self._events:
            print(shown(f"{self.step}: {text}"), file=sys.stderr, flush=True)

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """Show how far a phase is: ("training", 1200, 8622, "epoch 2/6, loss 0.81", unit="steps"). Rate-limited."""
        if not self._events:
            if self._pace.is_due(phase, done, total):
                text = progress_text(phase, done, total, unit, detail)
                print(shown(f"{self.step}: {text}"), file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        if phase == self._last_phase and now - self._last_progress < _EVENT_INTERVAL_S and done < total:
            return
        self._last_phase, self._last_progress = phase, now
        self.event("progress", phase=phase, done=done, total=total, unit=unit, detail=detail)

    @contextmanager
    def heartbeat(self, phase: str, done: int, total: int, detail: str) -> Iterator[None]:
        """Show, each minute, for how long the body has been at work, which tells nothing itself. See `progress`."""
        began, has_ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not has_ended.wait(_HEARTBEAT_INTERVAL_S):
                minutes = round((time.monotonic() - began) / 60)
                self.progress(phase, done, total, f"{detail}, for {minutes} min so far")

        self.progress(phase, done, total, detail)
        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def metrics(self, values: dict[str, float], *, position: int = 0) -> None:
        """Log metrics to MLflow; `position` is the epoch, or whatever the x axis of the metric is."""
        self._track("log_metrics", values, position)

    def live(self, values: dict[str, float], *, position: int) -> None:
        """Log metrics of this moment to MLflow. Nobody waits for it: those that it has no time for are left out."""
        self._track("log_live", values, position)

    def params(self, values: dict[str, Any]) -> None:
        """Log parameters to MLflow, nested mappings flattened with dots."""
        self._track("log_params", values)

    def tags(self, values: dict[str, str]) -> None:
        """Set tags of the step's MLflow run."""
        self._track("set_tags", values)

    def artifact(self, path: Path, directory: str = "") -> None:
        """Upload a file or a directory to the step's MLflow run."""
        self._track("log_artifact", path, directory)

    def result(
        self, *, metrics: Mapping[str, float] = {}, tags: Mapping[str, str] = {}, artifacts: Sequence[Path] = ()
    ) -> None:
        """Log a part of the pipeline's result, for a pipeline's run in MLflow that nobody else would tell."""
        self._track("log_result", metrics, tags, artifacts)

    def dataset(self, name: str, digest: str, num_images: int, context: Literal["training", "validation"]) -> None:
        """Log a split as an input of the step's MLflow run."""
        self._track("log_dataset", name, digest, num_images, context)

    def model(
        self, accuracy: "AccuracyRow", benchmark: list["BenchmarkRow"], tags: dict[str, str], *, dataset_digest: str
    ) -> None:
        """Log one precision as a LoggedModel with what was measured on the validation split."""
        self._track("log_model", accuracy, benchmark, tags, dataset_digest=dataset_digest)

    def lose_tracking(self) -> None:
        """The tracking server is gone. Say so once; what would go there is skipped from now on."""
        self.tracking_lost = True
        where = self.run.uri if self.run is not None else "its URI"
        self.warning(
            f"MLflow at {where} can't be reached any more: the step continues, and what it finds from here on is "
            "in its artifact only"
        )

    def _track(self, call: str, *arguments: Any, **options: Any) -> None:
        """Ask the run for something. A server that fails in the middle costs a warning, not the step's work."""
        if self.run is None or self.tracking_lost:
            return
        started = time.perf_counter()
        try:
            getattr(self.run, call)(*arguments, **options)
        except Exception as error:
            if not self.run.is_unreachable(error):
                raise
            self.lose_tracking()
        finally:
            self.tracking_s += time.perf_counter() - started


class RelayedRun:
    """A step's run in MLflow that the parent keeps, since loading MLflow takes each process seconds.

    The parent gets each call of `tracking.StepRun`'s methods as an event, and makes it.
    """

    uri = "the run's parent"
    run_id = ""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.set_tags({})  # the run begins, though there is nothing to say of it yet

    def is_unreachable(self, error: Exception) -> bool:
        """True if the server is what failed: it is the parent that talks to it."""
        return False

    def log_result(self, *of_pipeline: Any) -> None:
        """Nothing: the parent's run is the pipeline's."""

    def __getattr__(self, call: str) -> Callable[..., None]:
        def relay(*arguments: Any, **options: Any) -> None:
            self._log.event("track", call=call, arguments=to_jsonable_python([*arguments, *options.values()]))

        return relay


class QuietLog(StepLog):
    """A log of processes that work beside one that speaks for all: says nothing, tracks nothing."""

    def event(self, event: str, **fields: Any) -> None:
        """Nothing."""

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """Nothing."""

    def _say(self, kind: str, text: str) -> None:
        pass
