"""Follow a run on a KFP server: its state, the states and logs of its steps, and the exit code it comes to."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import kfp_server_api  # type: ignore[import-untyped]
import urllib3
from kubernetes import client
from kubernetes.config import ConfigException

from components.common.contracts.errors import (
    EXIT_FAILURE,
    EXIT_GATE_FAILED,
    EXIT_INTERRUPTED,
    EngineryError,
    UserError,
)
from components.train.train_job import kubernetes_api, trouble_of
from enginery.cluster.server import KFP_NAMESPACE, KfpServer
from enginery.formats import echo

RUN_LABEL = "pipeline/runid"
_NODE_ANNOTATION = "workflows.argoproj.io/node-name"
_CONTAINER = "main"
# What Argo's emissary and KFP's launcher and executor write around a step's own lines, unless it is a warning or worse.
# Two of the launcher's lines begin a JSON text that ends with a brace at the start of a line.
_MACHINERY = re.compile(
    r"time=\S+ level=(DEBUG|INFO) .* argo=true( |$)|I\d{4} [\d:.]+ +\d+ \S+\.go:\d+\] |\[KFP Executor [^]]+ INFO\]: "
)
_BEGINS_JSON = re.compile(r"(: Got executor_input:|ExecutorOutput: \{)$")
_REQUEST_S = 10  # whole seconds, as in server.py
_RECONNECT_S = 1.0
_TIDYING_S = 5.0  # for the last lines of pods, once the run has ended


def core_api() -> Any:
    """Kubernetes' core API, which is asked twice where the first answer is lost."""
    return client.CoreV1Api(kubernetes_api(urllib3.Retry(1, backoff_factor=0.5)))


class PodLogs:
    """The logs of one run's pods, line by line, each behind its step's name."""

    def __init__(self, namespace: str, run_id: str, connect: Callable[[], Any] = core_api) -> None:
        """Nothing is asked yet. A cluster that can't be asked costs one line, not the watching."""
        self._namespace = namespace
        self._run_id = run_id
        self._connect = connect
        self._api: Any = None
        self._is_lost = False
        self._threads: dict[str, threading.Thread] = {}
        self._troubles: dict[str, str] = {}  # of each pod, as it was printed
        self._ended = threading.Event()

    def read_new_pods(self, steps: set[str] | None) -> None:
        """Begin to read what new pods print, and say why one does not begin or was ended, be it one of KFP's own.

        Args:
            steps: names of the steps whose lines are wanted; None for all pods that are no drivers.
        """
        if self._is_lost:
            return
        try:
            self._api = self._api or self._connect()
            selector = f"{RUN_LABEL}={self._run_id}"
            pods = self._api.list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=_REQUEST_S
            ).items
        except (ConfigException, client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            self._is_lost = True
            reason = f"{getattr(error, 'status', '')} {getattr(error, 'reason', None) or error}".strip().splitlines()[0]
            echo(
                f"logs        not shown: Kubernetes can't be asked for pods in {self._namespace} ({reason}). They need "
                "a KUBECONFIG with the right to read pods and their logs; the page of the run has them, too"
            )
            return
        for pod in pods:
            step = step_of(pod, steps)
            name = pod.metadata.name
            for what, text in (("waiting", trouble_of(pod)), ("lost", _loss_of(pod))):
                if text not in ("", self._troubles.get(name)):
                    self._troubles[name] = text
                    echo(f"{what:<11} {step or name:<16} {text}")
            key = f"{name} {pod.metadata.uid}"  # of a pod that is lost, Argo makes another by the same name
            if step and key not in self._threads and _has_begun(pod):
                thread = threading.Thread(target=self._read, args=(name, step), name=f"log-of-{name}", daemon=True)
                self._threads[key] = thread
                thread.start()

    def finish(self) -> None:
        """Wait for the last lines."""
        self.read_new_pods(None)
        deadline = time.monotonic() + _TIDYING_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ended.set()

    def _read(self, pod: str, step: str) -> None:
        """Print a pod's lines until it ends, resuming where a connection broke."""
        last = ""  # time stamp of the last line, as Kubernetes writes it; they sort as text
        in_json = False
        while not self._ended.is_set():
            try:
                stream = self._api.read_namespaced_pod_log(
                    pod, self._namespace, container=_CONTAINER, follow=True, timestamps=True, _preload_content=False
                )
                for raw in stream:
                    stamp, _, text = raw.decode(errors="replace").rstrip("\n").partition(" ")
                    if stamp <= last:
                        continue
                    last = stamp
                    is_machinery = in_json or _MACHINERY.match(text) is not None
                    in_json = text != "}" if in_json else is_machinery and _BEGINS_JSON.search(text) is not None
                    if not is_machinery:
                        echo(f"{step:<11} | {text}")
                return
            except client.ApiException as error:
                if error.status != 400:  # the container is about to start
                    return
            except urllib3.exceptions.HTTPError:
                pass
            self._ended.wait(_RECONNECT_S)


def step_of(pod: Any, steps: set[str] | None) -> str:
    """The step that a pod runs, by Argo's name of it, such as resnet50-x7k2p.root.train.executor(0); "" for none."""
    path = str((pod.metadata.annotations or {}).get(_NODE_ANNOTATION, ""))
    parts = [re.sub(r"\(.*$", "", part) for part in path.split(".")]
    if not path or parts[-1].endswith("-driver"):
        return ""
    if steps is None:
        return next((part for part in reversed(parts) if part not in ("executor", "root")), "")
    return next((part for part in reversed(parts) if part in steps), "")


def _loss_of(pod: Any) -> str:
    """Return why the cluster ended a pod, such as "OOMKilled" or "Evicted"; "" if it did not."""
    for status in pod.status.container_statuses or ():
        ended = status.state.terminated if status.state else None
        if status.name == _CONTAINER and ended and ended.reason == "OOMKilled":
            (container,) = (container for container in pod.spec.containers if container.name == _CONTAINER)
            limit = ((container.resources and container.resources.limits) or {}).get("memory", "the node")
            return f"OOMKilled: it needs more memory than {limit}"
    return f"{pod.status.reason} {pod.status.message or ''}".strip() if pod.status.reason else ""


def _has_begun(pod: Any) -> bool:
    statuses = pod.status.container_statuses or [] if pod.status else []
    return any(
        status.name == _CONTAINER and status.state and (status.state.running or status.state.terminated)
        for status in statuses
    )


_ENDED = {"SUCCEEDED": 0, "SKIPPED": 0, "FAILED": EXIT_FAILURE, "CANCELED": EXIT_FAILURE}
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.5, 5.0
_LOST_S = 100.0  # without an answer, before the server counts as gone
# Names that Argo has beside the steps, where a run does not say which its steps are.
_NO_STEPS = ("root", "executor", "iteration")


@dataclass
class RunFollower:
    """One run, as its states are printed."""

    server: KfpServer
    client: Any
    run_id: str
    logs: PodLogs | None = None
    namespace: str = ""  # as the user named it
    _state: str = ""
    _steps: dict[str, str] = field(default_factory=dict)  # what was printed of each

    def follow(self) -> int:
        """Poll until the run ends. Returns the exit code. Ctrl-C stops the watching, not the run."""
        # KFP's wait_for_run_completion never ends for a cancelled run and gives up at the first lost connection.
        pause_s, answered_s, is_reported = _SHORTEST_POLL_S, time.monotonic(), False
        try:
            while True:
                try:
                    run = self.client.get_run(self.run_id)
                    self.server.field(run, "run_id")
                    answered_s, is_reported = time.monotonic(), False
                except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError, UserError) as error:
                    is_final = isinstance(error, UserError) or getattr(error, "status", 503) in (401, 403, 404)
                    if time.monotonic() - answered_s > _LOST_S or is_final:
                        raise self._lost(error) from None
                    if not is_reported:
                        echo(f"{self.server.endpoint} does not answer; it is asked again for {_LOST_S:.0f} s")
                    is_reported = True
                else:
                    if self._report(run):
                        return self._exit_code(run)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
        except SystemExit:  # which enginery.cli.main makes of Ctrl-C
            echo(f"\nno longer watching; {self._way_back()}")
            return EXIT_INTERRUPTED

    def _way_back(self) -> str:
        where = self.server.options + (f" --namespace {self.namespace}" if self.namespace else "")
        return f"run {self.run_id} continues. To come back: enginery watch {self.run_id} {where}"

    def _lost(self, error: Exception) -> EngineryError:
        """The error of a server that has answered before, or did not know the run."""
        try:
            with self.server.translate_errors():
                raise error
        except EngineryError as translated:
            if getattr(error, "status", 0) == 404:
                return translated
            text = f"{translated}. It can't be watched any longer; {self._way_back()}"
            refused = isinstance(error, UserError) or getattr(error, "status", 0) in (401, 403)
            kind = UserError if refused else EngineryError
            return kind(text, code="kfp-lost", setting=translated.setting)

    def _report(self, run: Any) -> bool:
        """Print what is new. Returns True if the run has ended."""
        state = str(run.state or "PENDING").upper()
        steps = dict(states_of(run))
        for step, status in steps.items():
            if self._steps.get(step) != status:
                echo(f"step        {step:<16} {status}")
        self._steps.update(steps)
        if state != self._state:
            echo(f"state       {state.lower()}")
            self._state = state
        if self.logs is not None:
            self.logs.read_new_pods(set(steps_of(run)) or None)
        return state in _ENDED

    def _exit_code(self, run: Any) -> int:
        if self.logs is not None:
            self.logs.finish()
        failed = [step for step, status in self._steps.items() if status.startswith("failed")]
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
    seen: set[Any] = set()  # a hostile server's components may hold themselves

    def visit(dag: dict[str, Any]) -> None:
        tasks = dag.get("tasks") or {}
        needed = {name: task.get("dependentTasks") or () for name, task in tasks.items()}
        for name in TopologicalSorter(needed).static_order():
            task = tasks[name]
            held = (task.get("componentRef") or {}).get("name")
            component = components.get(held, {})
            if "dag" not in component:
                names.append(name)
            elif held not in seen:
                seen.add(held)
                visit(component["dag"])

    visit((spec.get("root") or {}).get("dag") or {})
    return names


def states_of(run: Any) -> Iterator[tuple[str, str]]:
    """The state of each step: "running", or of one that runs several times "running, 3 of 8 succeeded"."""
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


def follow(server: KfpServer, client: Any, run_id: str, *, namespace: str, logs: bool) -> int:
    """Follow a run to its end, with the logs of its pods if they are wanted. Returns the exit code."""
    of_pods = PodLogs(namespace or KFP_NAMESPACE, run_id) if logs else None
    return RunFollower(server, client, run_id, of_pods, namespace).follow()
