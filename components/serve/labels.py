"""Logits in, names and probabilities out: the last model of the ensemble."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.contracts.manifests import RepositoryManifest, load
from components.common.data.baseline import baseline_file, read_baseline
from components.common.data.evaluation import most_likely
from components.serve.admission_control import refusal
from components.serve.drift import DriftMetrics
from components.serve.metrics import PredictionMetrics
from components.serve.repository_check import EXAMPLES_VARIABLE, STATISTICS_TENSOR
from components.serve.shadow import KEYS, Sampler


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the names of the classes and what the outputs look like."""
        # The model before it checked every file.
        root = Path(args["model_repository"]).absolute().parent
        repository = load(root, RepositoryManifest)
        manifest = repository.manifest
        self._sampler = Sampler.of(repository)
        self._classes = np.array([name.encode() for name in manifest.classes], dtype=object)
        self._top_k = manifest.top_k
        self._input = manifest.image_shapes.output_name
        labels = {"model": manifest.name, "version": manifest.version, "precision": manifest.precision}
        file = baseline_file(manifest.precision)
        self._drift: DriftMetrics | None = None
        if file in manifest.files:
            folder = os.environ.get(EXAMPLES_VARIABLE, "") if manifest.config.get("keep_examples") else ""
            of_baseline = {**labels, "baseline": manifest.files[file].digest}
            self._drift = DriftMetrics(read_baseline(root / file), of_baseline, Path(folder) if folder else None)
        self._metrics = PredictionMetrics(labels, self._drift)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; logits that are no numbers are refused, and the others are not touched."""
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        logits = pb.get_input_tensor_by_name(request, self._input).as_numpy()  # [B, classes] float32
        labels = np.empty((len(logits), self._top_k), dtype=object)
        shares = np.empty((len(logits), self._top_k), dtype=np.float32)
        for index, row in enumerate(logits):
            if np.isnan(row).any():
                return refusal(f"the model's answer to image {index} is not a number (NaN): it names no class")
            if not np.isfinite(row.max()):  # of some classes minus infinity is an answer
                return refusal(f"the model's answer to image {index} is infinite: it names no class")
            best, probabilities = most_likely(row, self._top_k)
            labels[index], shares[index] = self._classes[best], probabilities
        for names, confidences in zip(labels, shares, strict=True):
            self._metrics.add(names[0].decode(), float(confidences[0]))
        if self._drift is not None:
            statistics = pb.get_input_tensor_by_name(request, STATISTICS_TENSOR).as_numpy()  # [B, 4] float32
            self._drift.add(logits, statistics, pb.get_input_tensor_by_name(request, "IMAGE"))
        if self._sampler is not None:
            self._sampler.answer(pb.get_input_tensor_by_name(request, KEYS).as_numpy(), labels[:, 0])
        return pb.InferenceResponse([pb.Tensor("LABELS", labels), pb.Tensor("PROBABILITIES", shares)])

    def finalize(self) -> None:
        """Hand on the last counts."""
        self._metrics.close()
