"""Quantized candidates on the selection images: in integer arithmetic on a CPU, simulated by PyTorch on a GPU."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from components.common.evaluation import Predictions, predict
from components.common.runners import Runner
from components.common.runners.openvino import OpenVINORunner
from components.common.runners.torch import TorchRunner
from components.common.shapes import ShapeSpec
from components.common.steplog import StepLog
from components.export.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Runs models on the selection images.

    On a GPU PyTorch computes what the Q/DQ nodes say, in FP32. Engines would take minutes each to build, and differ
    from the simulation by rounding only; `validate` measures the engine of the candidate that is chosen.
    """

    samples: Samples
    shapes: ShapeSpec
    device: torch.device
    directory: Path  # for temporary files
    log: StepLog

    @property
    def runtime(self) -> str:
        """Name of the runtime that the candidates run on."""
        return "torch" if self.device.type == "cuda" else "openvino"

    def measure(self, models: Mapping[str, onnx.ModelProto], text: str) -> dict[str, Predictions]:
        """Predictions of each model, all on the same images; `text` is shown with the progress."""
        runners: dict[str, Runner] = {}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self.directory))
            for name, model in models.items():
                file = Path(folder, f"{name}.onnx")
                onnx.save(model, file)
                runners[name] = self._runner(file)
                stack.callback(runners[name].close)
            return predict(
                runners,
                self.samples,
                self.samples.num_images,
                lambda done, total: self.log.progress(text, done, total, "images"),
            )

    def _runner(self, file: Path) -> Runner:
        if self.runtime == "torch":
            return TorchRunner(file, self.shapes, self.device)
        return OpenVINORunner(file, self.shapes)
