"""Predictions of a served model as Prometheus metrics beside Triton's own."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.serve.drift import DriftMetrics

PREDICTIONS = "enginery_predictions_total"
CONFIDENCES = "enginery_prediction_confidence_bucket"
CONFIDENCE_SUM = "enginery_prediction_confidence_sum"
CONFIDENCE_COUNT = "enginery_prediction_confidence_count"
BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # upper bounds of the confidence's buckets
_FLUSH_S = 1.0


class PredictionMetrics:
    """Counts predictions by label, and how sure the model was.

    Each update of a metric is a message between two processes, some 50 microseconds. So predictions are added up here,
    and handed on once a second by a thread of its own: Prometheus asks less often than that.

    The confidences are a histogram in Prometheus' sense, written as counters: the backend's own kind takes one value
    at a time.

    Args:
        labels: said of every series, such as model and version.
        drift: also handed on; None for none.
    """

    def __init__(self, labels: Mapping[str, str], drift: DriftMetrics | None) -> None:
        self._labels, self._drift = dict(labels), drift
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._labelled: Counter[str] = Counter()
        self._bins = np.zeros(len(BOUNDS), np.int64)
        self._sum = 0.0
        self._predictions = _counters(PREDICTIONS, "Images by the label that was predicted.")
        self._buckets = _counters(CONFIDENCES, "Images by the probability of the predicted label: up to le.")
        self._total = _counters(CONFIDENCE_SUM, "Sum of the predicted labels' probabilities.")
        self._count = _counters(CONFIDENCE_COUNT, "Images whose predicted label had a probability.")
        self._series: dict[tuple[int, str], Any] = {}
        self._hand_on()  # all buckets are there from the beginning, as 0
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def add(self, label: str, confidence: float) -> None:
        """One image's prediction. confidence: 0..1."""
        with self._lock:
            self._labelled[label] += 1
            self._bins[min(int(np.searchsorted(BOUNDS, confidence)), len(BOUNDS) - 1)] += 1
            self._sum += confidence

    def close(self) -> None:
        """Hand on what is left, and end the thread."""
        self._stopped.set()
        self._thread.join()
        self._hand_on()

    def _run(self) -> None:
        while not self._stopped.wait(_FLUSH_S):
            self._hand_on()

    def _hand_on(self) -> None:
        with self._lock:
            labelled, bins, total = self._labelled, self._bins, self._sum
            self._labelled, self._bins, self._sum = Counter(), np.zeros_like(bins), 0.0
        for label, count in labelled.items():
            self._increment(self._predictions, {"label": label}, count)
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), (*np.cumsum(bins), bins.sum()), strict=True):
            self._increment(self._buckets, {"le": bound}, int(count))
        self._increment(self._total, {}, total)
        self._increment(self._count, {}, int(bins.sum()))
        if self._drift is not None:
            self._drift.hand_on()

    def _increment(self, family: Any, labels: Mapping[str, str], amount: float) -> None:
        key = (id(family), str(labels))
        if key not in self._series:
            self._series[key] = family.Metric(labels={**self._labels, **labels})
        elif not amount:
            return
        self._series[key].increment(amount)


def _counters(name: str, meaning: str) -> Any:
    return pb.MetricFamily(name=name, description=meaning, kind=pb.MetricFamily.COUNTER)
