"""Following a run on a KFP server: its state, its steps' states and logs, and the exit code that it comes to."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import kfp_server_api  # type: ignore[import-untyped]
import urllib3

from components.common.errors import EXIT_FAILURE, EXIT_GATE_FAILED, EXIT_INTERRUPTED, EngineryError, UserError
from pipelines.cluster.pods import PodLogs
from pipelines.cluster.server import Server
from pipelines.console import echo

_ENDED = {"SUCCEEDED": 0, "SKIPPED": 0, "FAILED": EXIT_FAILURE, "CANCELED": EXIT_FAILURE}
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.5, 15.0
_MAX_LOST_POLLS = 20  # in a row, before the server counts as gone
# What Argo has beside the steps, where a run does not say which its steps are.
_NO_STEPS = ("root", "executor", "iteration")


@dataclass
class Following:
    """One run."""

    server: Server
    client: Any
    run_id: str
    logs: PodLogs | None = None
    namespace: str = ""  # as the user named it
    _state: str = ""
    _steps: dict[str, str] = field(default_factory=dict)  # what was told of each

    def to_the_end(self) -> int:
        """Poll until the run ends. Returns the exit code. Ctrl-C stops the watching, not the run."""
        # KFP's wait_for_run_completion never ends for a cancelled run and gives up at the first lost connection.
        pause_s, lost = _SHORTEST_POLL_S, 0
        try:
            while True:
                try:
                    run = self.client.get_run(self.run_id)
                    lost = 0
                except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError) as error:
                    lost += 1
                    is_final = getattr(error, "status", 503) in (401, 403, 404)
                    if lost >= _MAX_LOST_POLLS or is_final:
                        raise self._lost(error) from None
                else:
                    if self._tell(run):
                        return self._end(run)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
        except SystemExit:  # which pipelines.cli makes of Ctrl-C
            echo(f"\nno longer watching; {self._way_back()}")
            return EXIT_INTERRUPTED

    def _way_back(self) -> str:
        where = f"--endpoint {self.server.endpoint}" + (f" --namespace {self.namespace}" if self.namespace else "")
        return f"run {self.run_id} goes on. To come back: enginery watch {self.run_id} {where}"

    def _lost(self, error: Exception) -> EngineryError:
        """What to say of a server that has answered before, or did not know the run."""
        try:
            with self.server.explained():
                raise error
        except EngineryError as told:
            if getattr(error, "status", 0) == 404:
                return told
            text = f"{told}. It can't be watched any longer; {self._way_back()}"
            return (UserError if getattr(error, "status", 0) in (401, 403) else EngineryError)(text)

    def _tell(self, run: Any) -> bool:
        """Say what is new. Returns whether the run has ended."""
        state = str(run.state or "PENDING").upper()
        steps = dict(states_of(run))
        for step, told in steps.items():
            if self._steps.get(step) != told:
                echo(f"step        {step:<16} {told}")
        self._steps.update(steps)
        if state != self._state:
            echo(f"state       {state.lower()}")
            self._state = state
        if self.logs is not None:
            self.logs.look(set(steps_of(run)) or None)
        return state in _ENDED

    def _end(self, run: Any) -> int:
        if self.logs is not None:
            self.logs.finish()
        failed = [step for step, told in self._steps.items() if told.startswith("failed")]
        if run.error is not None and run.error.message:
            echo(f"reason      {run.error.message}")
        if self._state == "FAILED" and failed:
            echo(f"failed      {', '.join(failed)}; its log: {self.server.link(self.run_id)}")
        if self._state == "FAILED" and failed == ["gate"]:
            return EXIT_GATE_FAILED  # nothing else fails a run for quality
        return _ENDED[self._state]


def steps_of(run: Any) -> list[str]:
    """The names of a run's steps, in the order of its pipeline; empty where the server does not send that."""
    spec = run.pipeline_spec if isinstance(run.pipeline_spec, dict) else {}
    spec = spec.get("pipeline_spec", spec)
    components = spec.get("components") or {}
    names: list[str] = []

    def visit(dag: dict[str, Any]) -> None:
        tasks = dag.get("tasks") or {}
        needed = {name: task.get("dependentTasks") or () for name, task in tasks.items()}
        for name in TopologicalSorter(needed).static_order():
            task = tasks[name]
            component = components.get((task.get("componentRef") or {}).get("name"), {})
            if "dag" in component:
                visit(component["dag"])
            else:
                names.append(name)

    visit((spec.get("root") or {}).get("dag") or {})
    return names


def states_of(run: Any) -> Iterator[tuple[str, str]]:
    """What to say of each step: "running", or of one that runs several times "running, 3 of 8 succeeded"."""
    details = (run.run_details.task_details if run.run_details else None) or []
    known = steps_of(run)
    found: dict[str, list[str]] = {}
    for detail in details:
        name = str(detail.display_name or "")
        is_step = name in known if known else name and not name.startswith(_NO_STEPS) and not name.endswith("-driver")
        if is_step and detail.state:
            found.setdefault(name, []).append(str(detail.state).upper())
    for name in sorted(found, key=lambda name: known.index(name) if name in known else 0):
        yield name, _of_several(found[name])


def _of_several(states: list[str]) -> str:
    counts = Counter(states)
    for state in ("FAILED", "RUNNING", "PENDING", "CANCELED"):
        if counts[state] and len(states) > 1:
            return f"{state.lower()}, {counts['SUCCEEDED']} of {len(states)} succeeded"
    return states[0].lower()
