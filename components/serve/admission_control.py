"""Refuse requests that can't be answered: invalid ones, and those beyond the length of the queue."""

import http.client
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import triton_python_backend_utils as pb


def refusal(reason: str) -> Any:
    """The response to a request that is at fault: HTTP 400, INVALID_ARGUMENT of gRPC. Nothing is logged of it."""
    return pb.InferenceResponse([], pb.TritonError(reason, pb.TritonError.INVALID_ARG))


METRICS_VARIABLE = "ENGINERY_METRICS_URL"  # set by `enginery serve`; else Triton's own port
PARAMETER = "max_pending_requests"  # of a model's configuration
_DEFAULT_URL = "http://127.0.0.1:8002/metrics"
_METRIC = b"nv_inference_pending_request_count{model="
_POLL_S = 0.25
_TIMEOUT_S = 2.0
_FAILURES = 10  # in a row before anything is said: the first images warm up a server whose metrics are not there yet


class PendingRequests:
    """Counts what waits before some models, while there is work.

    A thread of its own asks, at most four times a second and only while `admit` is called: idle, it costs nothing.

    Args:
        models: whose queues count, together.
        config: the own model's configuration, as the Python backend hands it over.
    """

    def __init__(self, models: Sequence[str], config: str) -> None:
        parsed = json.loads(config)
        self._limit = int(parsed["parameters"][PARAMETER]["string_value"])
        self._models = {model.encode() for model in models}
        url = urlsplit(os.environ.get(METRICS_VARIABLE) or _DEFAULT_URL)
        self._address, self._path = url.netloc, url.path or "/"
        self._connection: http.client.HTTPConnection | None = None
        self._num, self._num_failures = 0, 0
        self._work = threading.Event()
        family = pb.MetricFamily(
            name="enginery_overload_refusals_total",
            description="Requests that were turned away because too many waited.",
            kind=pb.MetricFamily.COUNTER,
        )
        self._family, self._refused = family, family.Metric(labels={"model": parsed["name"]})
        threading.Thread(target=self._run, name="pending", daemon=True).start()

    def admit(self, requests: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        """The requests to be answered, and responses that turn the last ones away: as many as wait too many."""
        self._work.set()
        num_refused = min(max(self._num - self._limit, 0), len(requests))
        if not num_refused:
            return requests, []
        reason = f"{self._num} requests wait, and up to {self._limit} may: the server is overloaded, try again later"
        self._num -= num_refused
        self._refused.increment(num_refused)
        # An error for each: the server frees it with its response, and reading a shared one again ended the server.
        refusals = [pb.TritonError(reason, pb.TritonError.UNAVAILABLE) for _ in range(num_refused)]
        return requests[:-num_refused], [pb.InferenceResponse([], refusal) for refusal in refusals]

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            self._num = self._ask()
            threading.Event().wait(_POLL_S)

    def _ask(self) -> int:
        """One request on a connection that stays open: opening one costs as much as some images."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
            self._connection.request("GET", self._path)
            counts = pending(self._connection.getresponse().read())
            self._num_failures = 0
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            self._num_failures += 1
            if self._num_failures == _FAILURES:
                pb.Logger.log_warn(
                    f"no bound on waiting requests: http://{self._address}{self._path} does not answer ({error}); "
                    f"name the server's metrics in {METRICS_VARIABLE}"
                )
            return 0
        return sum(count for model, count in counts.items() if model in self._models)


def pending(metrics: bytes) -> Mapping[bytes, int]:
    """Waiting requests by model, from the text of Triton's metrics."""
    start = metrics.find(_METRIC)  # its series follow one another
    lines = metrics[start : metrics.find(b"# HELP", start)].split(b"\n") if start >= 0 else []
    found = (line[len(_METRIC) :].split(b"} ") for line in lines if line.startswith(_METRIC))
    return {labels.split(b'"')[1]: int(float(count)) for labels, count in found}
