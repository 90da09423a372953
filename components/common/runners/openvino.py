"""OpenVINO: INT8 in integer arithmetic, and FP32 as FP32, on CPUs."""

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import properties as props

from components.common.environment import cpu_name, num_cores
from components.common.runners import Timing, measure_host
from components.common.shapes import ShapeSpec


def cpu_has_vnni() -> bool:
    """Whether the CPU multiplies INT8 without saturating intermediate sums (AVX-512 VNNI, AVX-VNNI or AMX).

    Without it OpenVINO's products of u8 and s8 can saturate at 16 bits, which shifts accuracy.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True  # not Linux on x86: nothing known against it
    flags = next((line for line in text.splitlines() if line.startswith("flags")), None)
    return flags is None or any(name in flags.split() for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


class OpenVINORunner:
    """One ONNX file compiled for the CPU."""

    runtime = "openvino"

    def __init__(self, onnx_path: Path, shapes: ShapeSpec) -> None:
        """Compile. The precision is what the file says: the hint keeps OpenVINO from running FP32 in BF16."""
        self._shapes = shapes
        self.device = f"{cpu_name()}, {num_cores()} cores"
        core = ov.Core()
        self._compiled = core.compile_model(
            core.read_model(onnx_path),
            "CPU",
            {
                props.hint.performance_mode: props.hint.PerformanceMode.LATENCY,
                props.hint.inference_precision: ov.Type.f32,
                props.inference_num_threads: num_cores(),
            },
        )
        self._request = self._compiled.create_infer_request()

    def infer(self, images: np.ndarray) -> np.ndarray:
        """See Runner."""
        result = self._request.infer([images], share_inputs=True)
        return np.array(result[0], dtype=np.float32)

    def measure(self, batch_size: int, *, warmup_s: float, duration_s: float, min_iterations: int) -> Timing:
        """See Runner. On a CPU there is no transfer, so latency is the call."""
        return measure_host(
            lambda images: self._request.infer([images], share_inputs=True, share_outputs=True),
            self._shapes,
            batch_size,
            warmup_s=warmup_s,
            duration_s=duration_s,
            min_iterations=min_iterations,
        )

    def close(self) -> None:
        """See Runner."""
        del self._request, self._compiled
