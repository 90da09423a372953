"""Logits in, names and probabilities out: the last model of the ensemble."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.contracts.manifests import RepositoryManifest, load
from components.common.data.evaluation import most_likely
from components.serve.admission_control import refusal
from components.serve.metrics import PredictionMetrics


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the names of the classes and what the outputs look like."""
        # The model before it checked every file.
        manifest = load(Path(args["model_repository"]).absolute().parent, RepositoryManifest).manifest
        self._classes = np.array([name.encode() for name in manifest.classes], dtype=object)
        self._top_k = manifest.top_k
        self._input = manifest.shapes.output_name
        labels = {"model": manifest.name, "version": manifest.version, "precision": manifest.precision}
        self._metrics = PredictionMetrics(labels)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; logits that are no numbers are refused, and the others are not touched."""
        return [self._response(pb.get_input_tensor_by_name(request, self._input).as_numpy()) for request in requests]

    def _response(self, logits: np.ndarray) -> Any:
        """logits: [B, classes] float32."""
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
        return pb.InferenceResponse([pb.Tensor("LABELS", labels), pb.Tensor("PROBABILITIES", shares)])

    def finalize(self) -> None:
        """Hand on the last counts."""
        self._metrics.close()
