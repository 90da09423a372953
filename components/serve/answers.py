"""A network's outputs in, an answer as JSON out: the last model of an ensemble that finds boxes or masks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.contracts.manifests import RepositoryManifest, load
from components.common.tasks.answers import View, answers_of
from components.serve.admission_control import refusal
from components.serve.repository_check import ANSWER_TENSOR, SIZES_TENSOR


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the names of the classes and what the outputs look like."""
        # The model before it checked every file.
        manifest = load(Path(args["model_repository"]).absolute().parent, RepositoryManifest).manifest
        self._answers, self._classes = answers_of(manifest.task), manifest.classes
        self._transform, self._input = manifest.image_transform, manifest.image_shapes.output_name

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; outputs that are no numbers are refused, and the others are not touched."""
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        outputs = pb.get_input_tensor_by_name(request, self._input).as_numpy()  # [B, ...] float32
        sizes = pb.get_input_tensor_by_name(request, SIZES_TENSOR).as_numpy()  # [B, 2] int64: width, height
        said = np.empty((len(outputs), 1), dtype=object)
        for index, (output, (width, height)) in enumerate(zip(outputs, sizes.tolist(), strict=True)):
            if not np.isfinite(output).all():
                return refusal(f"the model's answer to image {index} is not a number (NaN) or infinite")
            view = View.of((width, height), self._transform)
            said[index] = json.dumps(self._answers.answer(output, self._classes, view)).encode()
        return pb.InferenceResponse([pb.Tensor(ANSWER_TENSOR, said)])
