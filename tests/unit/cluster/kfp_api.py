"""A server that speaks KFP's API.

Every answer is built from the models that are generated from KFP's OpenAPI, and every request is checked against them.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import kfp_server_api as kfp

from tests.serving import Served

RUN_ID = "0f5c4a1e-run"
SCHEDULE_ID = "77aa-schedule"
# Text in OpenAPI; KFP's own client sends numbers, which protobuf's JSON allows for them.
_INT64 = ("max_concurrency", "interval_second")


def answer(model: Any) -> Any:
    """A model of KFP's API as JSON."""
    return kfp.ApiClient().sanitize_for_serialization(model)


def check(data: Any, kind: str, where: str = "body") -> None:
    """True if JSON is what KFP's OpenAPI says of a type: names of fields, and their types, all the way down."""
    if data is None:
        return
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(data, list), where
        for number, entry in enumerate(data):
            check(entry, match[1], f"{where}[{number}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        assert isinstance(data, dict), where
        for name, entry in data.items():
            check(entry, match[1], f"{where}.{name}")
    elif where.endswith(_INT64):
        assert str(data).isdecimal(), (where, data)
    elif kind in ("str", "int", "bool", "float"):
        assert isinstance(data, {"str": str, "int": int, "bool": bool, "float": (int, float)}[kind]), (where, data)
    elif kind == "object":
        return
    elif kind == "datetime":
        datetime.fromisoformat(data)
    else:
        model = getattr(kfp, kind)
        if not model.openapi_types:  # one of several words
            assert data in model.allowable_values, (where, data)
            return
        assert isinstance(data, dict), where
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        assert set(data) <= set(names), f"{where} of {kind} has no {set(data) - set(names)}"
        for name, entry in data.items():
            check(entry, model.openapi_types[names[name]], f"{where}.{name}")


def experiment(name: str) -> Any:
    return kfp.V2beta1Experiment(experiment_id=f"id-of-{name}", display_name=name)


def task(name: str, state: str) -> Any:
    """A step as KFP's API server tells of an Argo node: no pod name and no id."""
    now = datetime(2026, 11, 22, tzinfo=UTC)
    children = [kfp.PipelineTaskDetailChildTask(pod_name="resnet50-x7k2p-1234")]
    return kfp.V2beta1PipelineTaskDetail(
        run_id=RUN_ID, display_name=name, state=state, create_time=now, start_time=now, child_tasks=children
    )


@dataclass
class Cluster(Served):
    """Requests to the server, and the answers it is to give."""

    experiments: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=lambda: ["SUCCEEDED"])  # of the run, one per question
    tasks: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])  # of the steps, one list per question
    error: str = ""  # of the run
    refuse_run: str = ""  # why no run is created
    lose: int = 0  # questions about the run that get no answer
    schedules: list[Any] = field(default_factory=list)
    spec: Any = None  # of the run
    runs: list[Any] = field(default_factory=list)  # that are listed

    def body_of(self, method: str, path: str) -> Any:
        (body,) = [entry[2] for entry in self.requests if entry[:2] == (method, path)]
        return body

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        path = path.removeprefix("/apis/v2beta1")
        if path == "/healthz":
            return 200, answer(kfp.V2beta1GetHealthzResponse(multi_user=False))
        if path == "/experiments" and method == "GET":
            found = [experiment(name) for name in self.experiments]
            return 200, answer(kfp.V2beta1ListExperimentsResponse(experiments=found))
        if path == "/experiments" and method == "POST":
            check(body, "V2beta1Experiment")
            self.experiments.append(body["display_name"])
            return 200, answer(experiment(body["display_name"]))
        if path == "/runs" and method == "POST":
            check(body, "V2beta1Run")
            if self.refuse_run:
                return 400, self._refusal(3, self.refuse_run)
            self.spec = body["pipeline_spec"]
            return 200, answer(kfp.V2beta1Run(run_id=RUN_ID, display_name=body["display_name"]))
        if path == "/runs" and method == "GET":
            return 200, answer(kfp.V2beta1ListRunsResponse(runs=self.runs))
        if path == f"/runs/{RUN_ID}":
            return self._run()
        if path == "/recurringruns" and method == "GET":
            return 200, answer(kfp.V2beta1ListRecurringRunsResponse(recurring_runs=self.schedules))
        if path == "/recurringruns" and method == "POST":
            check(body, "V2beta1RecurringRun")
            made = kfp.V2beta1RecurringRun(recurring_run_id=SCHEDULE_ID, display_name=body["display_name"])
            self.schedules.append(made)
            return 200, answer(made)
        return 404, self._refusal(5, f"no {path}")

    @staticmethod
    def _refusal(code: int, message: str) -> Any:
        return answer(kfp.GoogleRpcStatus(code=code, message=message))

    def _run(self) -> tuple[int, Any]:
        if self.lose > 0:
            self.lose -= 1
            return 503, self._refusal(14, "starting")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        tasks = self.tasks.pop(0) if len(self.tasks) > 1 else self.tasks[0]
        error = kfp.GoogleRpcStatus(code=9, message=self.error) if self.error and state == "FAILED" else None
        details = kfp.V2beta1RunDetails(task_details=[task(*entry) for entry in tasks])
        run = kfp.V2beta1Run(run_id=RUN_ID, state=state, error=error, run_details=details, pipeline_spec=self.spec)
        return 200, answer(run)
