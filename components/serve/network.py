"""The network on a CPU, by OpenVINO: what serves where there is no GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model, not_measured_here
from components.serve.admission_control import PendingRequests
from components.serve.repository_check import open_from

_UNMEASURED_BATCH = 16  # largest batch of a model whose speed nobody measured


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the repository and compile the model that is fit for this CPU, in the arithmetic that its file says."""
        repository = open_from(Path(args["model_repository"]))
        record = repository.manifest
        self._shapes = record.image_shapes
        file = fit_model(record.cpu_models).file if record.cpu_models else record.cpu_model
        if note := not_measured_here(record.precision, record.measured_on):
            pb.Logger.log_warn(note)
        self._runner = OpenVINORunner(repository.file(file), self._shapes)
        self._pending = PendingRequests([args["model_name"]], args["model_config"])
        preferred = repository.manifest.batching["cpu"].preferred_batch_size
        self._largest = min(preferred or _UNMEASURED_BATCH, self._shapes.max_batch)
        # OpenVINO prepares itself for every new size of a batch, which takes as long as many batches.
        for size in range(1, self._largest + 1):
            self._runner.infer(np.zeros(self._shapes.input_shape(size), np.float32))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the requests of a dynamic batch as one batch, or several of the size that was measured best."""
        admitted, refused = self._pending.admit(requests)
        return [*(self._answer(admitted) if admitted else ()), *refused]

    def _answer(self, requests: Sequence[Any]) -> list[Any]:
        inputs = [pb.get_input_tensor_by_name(request, self._shapes.input_name).as_numpy() for request in requests]
        # images: [B, 3, H, W] float32, of all requests together
        images = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        logits = self._logits(images)
        responses, start = [], 0
        for part in inputs:
            tensor = pb.Tensor(self._shapes.output_name, logits[start : start + len(part)])
            responses.append(pb.InferenceResponse([tensor]))
            start += len(part)
        return responses

    def _logits(self, images: np.ndarray) -> np.ndarray:
        """[B, 3, H, W] float32 -> [B, classes] float32, in batches of at most the size that was measured best."""
        if len(images) <= self._largest:
            return self._runner.infer(images)
        starts = range(0, len(images), self._largest)
        return np.concatenate([self._runner.infer(images[start : start + self._largest]) for start in starts])

    def finalize(self) -> None:
        """Free the model's memory."""
        self._runner.close()
