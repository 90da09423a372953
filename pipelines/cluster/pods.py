"""What the steps of a run print, read from their pods: KFP's API has no path from a step to its log."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import urllib3
from kubernetes import client, config  # type: ignore[import-untyped]
from kubernetes.config import ConfigException  # type: ignore[import-untyped]

from pipelines.console import echo

RUN_LABEL = "pipeline/runid"
_NODE_ANNOTATION = "workflows.argoproj.io/node-name"
_CONTAINER = "main"
_REQUEST_S = 10.0
_TIDYING_S = 5.0  # for the last lines of pods, once the run has ended


def core_api() -> Any:
    """Kubernetes' API, from inside a pod or by a KUBECONFIG.

    Raises:
        ConfigException: there is neither.
    """
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException:
        config.load_kube_config(client_configuration=configuration)
    configuration.retries = urllib3.Retry(1, backoff_factor=0.5)
    return client.CoreV1Api(client.ApiClient(configuration))


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
        self._ended = threading.Event()

    def look(self, steps: set[str] | None) -> None:
        """Begin to read what new pods print.

        Args:
            steps: names of the steps; None for all pods that are no drivers.
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
            self._lose(error)
            return
        for pod in pods:
            step = step_of(pod, steps)
            name = pod.metadata.name
            if step and name not in self._threads and _has_begun(pod):
                thread = threading.Thread(target=self._read, args=(name, step), name=f"log-of-{name}", daemon=True)
                self._threads[name] = thread
                thread.start()

    def finish(self) -> None:
        """Wait for the last lines."""
        self.look(None)
        deadline = time.monotonic() + _TIDYING_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ended.set()

    def _lose(self, error: Exception) -> None:
        self._is_lost = True
        reason = getattr(error, "reason", None) or error
        told = f"{getattr(error, 'status', '')} {reason}".strip().splitlines()[0]
        echo(
            f"logs        not shown: Kubernetes can't be asked for pods in {self._namespace} ({told}). They need a "
            "KUBECONFIG with the right to read pods and their logs; the page of the run has them, too"
        )

    def _read(self, pod: str, step: str) -> None:
        """Pass a pod's lines on until it ends, going on where a connection broke."""
        last = ""  # time stamp of the last line, as Kubernetes writes it; they sort as text
        while not self._ended.is_set():
            try:
                stream = self._api.read_namespaced_pod_log(
                    pod, self._namespace, container=_CONTAINER, follow=True, timestamps=True, _preload_content=False
                )
                for raw in stream:
                    stamp, _, text = raw.decode(errors="replace").rstrip("\n").partition(" ")
                    if stamp > last:
                        last = stamp
                        echo(f"{step:<11} | {text}")
                return
            except client.ApiException as error:
                if error.status != 400:  # the container is about to start
                    return
            except urllib3.exceptions.HTTPError:
                pass
            self._ended.wait(1.0)


def step_of(pod: Any, steps: set[str] | None) -> str:
    """The step that a pod runs, by Argo's name of it, such as resnet50-x7k2p.root.train.executor(0); "" for none."""
    path = str((pod.metadata.annotations or {}).get(_NODE_ANNOTATION, ""))
    parts = [re.sub(r"\(.*$", "", part) for part in path.split(".")]
    if not path or parts[-1].endswith("-driver"):
        return ""
    if steps is None:
        return next((part for part in reversed(parts) if part not in ("executor", "root")), "")
    return next((part for part in reversed(parts) if part in steps), "")


def _has_begun(pod: Any) -> bool:
    statuses = pod.status.container_statuses or [] if pod.status else []
    return any(
        status.name == _CONTAINER and status.state and (status.state.running or status.state.terminated)
        for status in statuses
    )
