"""ONNX Runtime on the CPU: the numerical reference. It simulates Q/DQ in floats, so its speed says nothing."""

from pathlib import Path
from typing import Unpack

import numpy as np
import onnxruntime

from components.common.contracts.environment import cpu_name, num_cores
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnx_files import onnx_content, parse_onnx
from components.common.runtimes.runner import BenchmarkOptions, Images, OpenModel, Timing, measure_host, to_numpy


def new_session(model: Path | bytes) -> onnxruntime.InferenceSession:
    """A CPU session that uses the cores this process may use and is silent below errors.

    Args:
        model: its file, or what is in it.
    """
    options = onnxruntime.SessionOptions()
    # Not ORT_ENABLE_ALL: its changes of layout end the process on a ViT in FP16 (onnxruntime 1.31.1).
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.intra_op_num_threads = num_cores()
    options.log_severity_level = 3
    # Q/DQ in floats: the integers that it would put in their place saturate on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    content = onnx_content(model) if isinstance(model, Path) else model
    parse_onnx(content, model if isinstance(model, Path) else Path("model"))
    return onnxruntime.InferenceSession(
        content,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["AttentionFusion"],  # fails on some networks in FP16 (onnxruntime 1.31.1)
        enable_fallback=0,  # no second try, of which it would print the reason as the file's author wrote it
    )


def open_model(bundle: Artifact[BundleManifest], precision: Precision) -> OpenModel:
    """The model of a precision."""
    file = bundle.file(bundle.manifest.models[precision])
    runner = OnnxRuntimeRunner(file, bundle.manifest.image_shapes)
    return OpenModel(file=file, runner=runner, notes=("simulated: numerical reference",))


class OnnxRuntimeRunner:
    """One ONNX file on the CPU."""

    runtime = "onnxruntime"
    memory_bytes = None

    def __init__(self, onnx_path: Path, shapes: ShapeSpec) -> None:
        """Load."""
        self._shapes = shapes
        self.device = f"{cpu_name()}, {num_cores()} cores"
        self._session = new_session(onnx_path)

    def infer(self, images: Images) -> np.ndarray:
        """See Runner."""
        feeds = {self._shapes.input_name: to_numpy(images)}
        logits: np.ndarray = self._session.run([self._shapes.output_name], feeds)[0]
        return logits.astype(np.float32, copy=False)

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """See Runner."""
        return measure_host(self.infer, self._shapes, batch_size, how)

    def close(self) -> None:
        """See Runner."""
        del self._session
