"""Quantized candidates on training images: in integer arithmetic on a CPU, simulated by PyTorch on a GPU."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch

from components.common.evaluation import Predictions, predict
from components.common.runners import Runner
from components.common.runners.torch import TorchRunner
from components.common.shapes import ShapeSpec
from components.common.steplog import StepLog
from components.export.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Runs models with the runtime that would serve them.

    On a GPU PyTorch computes what the Q/DQ nodes say, in FP32. Engines would take minutes each to build, and differ
    from the simulation by rounding only; `validate` measures the engine of the candidate that is chosen.
    """

    shapes: ShapeSpec
    device: torch.device
    directory: Path  # for temporary files
    log: StepLog

    @property
    def runtime(self) -> str:
        """Name of the runtime that the candidates run on."""
        return "torch" if self.device.type == "cuda" else "openvino"

    def predictions(self, models: Mapping[str, onnx.ModelProto], samples: Samples, text: str) -> dict[str, Predictions]:
        """Predictions of each model, all on the same images; `text` is shown with the progress."""
        with self.runners(models) as runners:
            return predict(
                runners,
                samples,
                samples.num_images,
                lambda done, total: self.log.progress(text, done, total, unit="images"),
            )

    def logits(self, model: onnx.ModelProto, batches: list[torch.Tensor]) -> np.ndarray:
        """Logits of some images, [N, classes] float32. batches: [B, 3, H, W] float32 each, normalized."""
        with self.runners({"model": model}) as runners:
            return np.concatenate([runners["model"].infer(images) for images in batches])

    @contextmanager
    def runners(self, models: Mapping[str, onnx.ModelProto]) -> Iterator[dict[str, Runner]]:
        """The models, loaded, as long as the context lasts."""
        loaded: dict[str, Runner] = {}
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            try:
                for name, model in models.items():
                    file = Path(folder, f"{name}.onnx")
                    onnx.save(model, file)
                    loaded[name] = self._runner(file)
                yield loaded
            finally:
                for runner in loaded.values():
                    runner.close()

    def _runner(self, file: Path) -> Runner:
        if self.runtime == "torch":
            return TorchRunner(file, self.shapes, self.device)
        from components.common.runners.openvino import OpenVINORunner  # a GPU machine need not have it

        return OpenVINORunner(file, self.shapes)
