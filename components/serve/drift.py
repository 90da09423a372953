"""Counts of requested images by the baseline's bins, and the last window's distance from it, as Prometheus metrics."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import write_atomically
from components.common.data.baseline import (
    IMAGE_STATISTICS,
    WINDOW,
    Baseline,
    Comparison,
    Divergence,
    StatisticName,
    example_name,
)
from components.common.data.evaluation import confidences_and_entropies
from components.common.data.image_files import rgb, thumbnail
from components.common.data.read_alike import check_encoded

_COLUMNS: tuple[StatisticName, ...] = ("class", "confidence", "entropy", *IMAGE_STATISTICS)
_COUNTERS = {
    "images": "Images by statistic and by bin of the model's baseline.",
    "windows": f"Windows of {WINDOW} images that were compared with the baseline.",
}
_GAUGES = {  # fields of `Divergence`
    "psi": "Population stability index of the last full window against the baseline; 0 before the first.",
    "psi_threshold": "Largest index that chance explains.",
    "js": "Jensen-Shannon divergence of the last full window from the baseline, in bits; 0 before the first.",
    "js_threshold": "Largest divergence that chance explains.",
}
_EXAMPLE_SIDE = 160  # pixels
_MANY_REQUESTS = 64  # whose logits are in memory


class DriftMetrics:
    """Histograms of all images, and the distances of the last full window of 1,000 from the baseline.

    `add` keeps a few numbers for each image; `hand_on` counts them, and another thread calls it once a second.

    Args:
        baseline: of the served model and precision.
        labels: said of every series, such as model and version.
        examples: folder in which one image of each bin is kept, as JPEG of up to 160 pixels; None for none. Of all
            images between two calls of `hand_on` one is looked at, and the newest of a bin stays.
    """

    def __init__(self, baseline: Baseline, labels: Mapping[str, str], examples: Path | None) -> None:
        self._baseline, self._labels, self._examples = baseline, dict(labels), examples
        self._comparison = Comparison(baseline, WINDOW)
        self._lock = threading.Lock()
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []  # logits and image statistics
        self._rows: list[np.ndarray] = []  # [images, statistics] float32 each
        self._example: tuple[bytes, np.ndarray] | None = None  # an encoded image, and its row
        self._num_in_window, self._window = 0, baseline.no_counts()
        counter, gauge = pb.MetricFamily.COUNTER, pb.MetricFamily.GAUGE
        self._families = {
            name: pb.MetricFamily(name=f"enginery_drift_{name}{suffix}", description=text, kind=kind)
            for kinds, suffix, kind in ((_COUNTERS, "_total", counter), (_GAUGES, "", gauge))
            for name, text in kinds.items()
        }
        self._windows = self._series("windows")
        self._images = {
            each.name: [
                self._series("images", statistic=each.name, bin=f"{index:02d}") for index in range(len(each.counts))
            ]
            for each in baseline.statistics
        }
        self._gauges = {
            each.name: {name: self._series(name, statistic=each.name) for name in _GAUGES}
            for each in baseline.statistics
        }
        self._show(replace(each, psi=0.0, js=0.0) for each in self._comparison.compare(self._window))

    def add(self, logits: np.ndarray, statistics: np.ndarray, image: Any) -> None:
        """Images of one request.

        Args:
            logits: [B, classes] float32.
            statistics: [B, 4] float32, IMAGE_STATISTICS.
            image: the encoded images as a tensor of Triton's; None where the repository keeps none.
        """
        with self._lock:
            self._waiting.append((logits.copy(), statistics.copy()))  # the server takes its memory back
            is_wanted = self._examples is not None and image is not None and self._example is None
            if is_wanted or len(self._waiting) == _MANY_REQUESTS:
                self._reduce()
            if is_wanted:
                self._example = image.as_numpy().reshape(-1)[-1], self._rows[-1][-1]

    def _reduce(self) -> None:
        """Make a few numbers for each image of what waits: together, as NumPy takes long for little."""
        if self._waiting:
            logits, statistics = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
            rows = np.column_stack([logits.argmax(axis=1), *confidences_and_entropies(logits), statistics])
            self._rows.append(rows.astype(np.float32))
            self._waiting = []

    def hand_on(self) -> None:
        """Count what was added."""
        with self._lock:
            self._reduce()
            added, self._rows = self._rows, []
            example, self._example = self._example, None
        if not added:
            return
        rows, total = np.concatenate(added), self._baseline.no_counts()
        while len(rows):
            part, rows = np.split(rows, [WINDOW - self._num_in_window])
            for each in self._baseline.statistics:
                counts = each.count(part[:, _COLUMNS.index(each.name)])
                total[each.name] += counts
                self._window[each.name] += counts
            self._num_in_window += len(part)
            if self._num_in_window == WINDOW:
                self._show(self._comparison.compare(self._window))
                self._windows.increment(1)
                self._num_in_window, self._window = 0, self._baseline.no_counts()
        for name, series in self._images.items():
            for one, count in zip(series, total[name].tolist(), strict=True):
                if count:
                    one.increment(count)
        if example is not None and self._examples is not None:  # a write may have failed since
            self._keep(self._examples, *example)

    def _show(self, divergences: Iterable[Divergence]) -> None:
        for found in divergences:
            for name, series in self._gauges[found.statistic].items():
                series.set(getattr(found, name))

    def _keep(self, folder: Path, image: bytes, row: np.ndarray) -> None:
        """Write an image under the name of its bin of each statistic. row: [statistics] float32."""
        try:
            check_encoded(image, "image")  # a client may ask this model alone, and then nobody has checked it
            small = thumbnail(rgb(image), max_side=_EXAMPLE_SIDE, exact_side=0)
            for each in self._baseline.statistics:
                index = int(each.bins(row[_COLUMNS.index(each.name)]))
                write_atomically(folder / example_name(each.name, index), small)
        except UserError:
            return
        except OSError as error:
            pb.Logger.log_warn(f"no examples are kept any more: can't write {folder} ({error.strerror})")
            self._examples = None

    def _series(self, family: str, **labels: str) -> Any:
        return self._families[family].Metric(labels={**self._labels, **labels})
