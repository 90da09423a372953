"""Imports the engine rooms in processes of their own: one that crashes or hangs takes only itself down.

`python -m enginery.doctor.probes torch` prints what it found as lines of JSON; `Probes` starts them side by side.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PREFIX = "@probe "
_LIMIT_S = 180.0  # a cold disk on a busy machine may take half of it to read PyTorch


class ProbeError(Exception):
    """The process said nothing; the message says how it ended."""


class Probes:
    """One process per library, started at once."""

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        """Start them."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._started = time.monotonic()
        self._answers: dict[str, tuple[dict[str, Any], str]] = {}
        self._processes = {
            name: subprocess.Popen(
                # -P: a file called torch.py in the working directory is not the library.
                [sys.executable, "-P", "-m", "enginery.doctor.probes", name],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for name in names or tuple(PROBES)
        }

    def ask(self, name: str, key: str) -> Any:
        """The value that a probe printed for `key`.

        Raises:
            ProbeError: the probe ended before it said that.
        """
        if name not in self._answers:
            self._answers[name] = self._wait(self._processes[name])
        values, ending = self._answers[name]
        if key not in values:
            raise ProbeError(ending)
        return values[key]

    def close(self) -> None:
        """End the probes that nobody asked."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()

    def _wait(self, process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
        left_s = max(self._started + _LIMIT_S - time.monotonic(), 0.1)
        try:
            output, errors = process.communicate(timeout=left_s)
            ending = _ending(process.returncode, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ending = f"gave no answer in {_LIMIT_S:.0f} s"
        values: dict[str, Any] = {}
        for line in output.splitlines():
            if line.startswith(_PREFIX):
                values.update(json.loads(line.removeprefix(_PREFIX)))
        return values, ending


def _ending(code: int, errors: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {code}"


def _say(**values: Any) -> None:
    print(_PREFIX + json.dumps(values), flush=True)


def _probe_torch() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
    reasons = [str(entry.message).splitlines()[0] for entry in caught if "CUDA" in str(entry.message)]
    flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None  # get_arch_list() is empty without a GPU
    _say(
        version=torch.__version__,
        cuda=torch.version.cuda,
        available=available,
        num_gpus=torch.cuda.device_count() if available else 0,
        why_not="; ".join(reasons),
        architectures=(flags or "").split(),
    )
    from components.common.runtimes import tensorrt

    reason = tensorrt.why_unavailable()
    _say(no_tensorrt=reason, tensorrt=None if reason else tensorrt.load_tensorrt().__version__)


def _probe_dali() -> None:
    import io

    import numpy as np
    import nvidia.dali as dali
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 100, 50)).save(buffer, "JPEG")
    encoded = np.frombuffer(buffer.getvalue(), dtype=np.uint8)

    @pipeline_def(batch_size=1, num_threads=1)
    def decode(device: str) -> Any:
        return fn.decoders.image(fn.external_source(lambda: [encoded]), device=device)

    def shape(device: str, device_id: int | None) -> Any:
        pipe: Any = decode(device, device_id=device_id)
        pipe.build()
        return pipe.run()[0].shape()

    _say(version=dali.__version__, cpu_decodes=shape("cpu", None) == [(64, 64, 3)])
    from components.common.contracts.environment import gpus

    if gpus():
        _say(gpu_decodes=shape("mixed", 0) == [(64, 64, 3)])


def _probe_openvino() -> None:
    import openvino

    version = openvino.__version__.split("-")[0]
    devices = openvino.Core().available_devices
    _say(version=version, devices=devices)


def _probe_video() -> None:
    import av
    import numpy as np

    from components.analyze.videos import OpenVideo, find_videos, has_nvdec
    from components.common.contracts.errors import EngineryError

    def decodes(file: str, decoder: str) -> bool:
        try:
            video = OpenVideo(*find_videos((file,)), decoder=decoder, read_timeout_s=1.0)
        except EngineryError:
            return False
        return any(True for _ in video.decoded()) and video.decodes_on_gpu == (decoder == "cuda")

    os.environ["SVT_LOG"] = "0"  # AV1's encoder talks
    found: dict[str, list[str]] = {"cpu": [], "cuda": []}
    decoders = ("cpu", "cuda") if has_nvdec() else ("cpu",)
    encoders = {"H.264": "libx264", "HEVC": "libx265", "VP9": "libvpx-vp9", "AV1": "libsvtav1"}
    with tempfile.TemporaryDirectory() as folder:
        for name, encoder in encoders.items():
            file = f"{folder}/{encoder}.mkv"
            with av.open(file, "w") as container:
                stream: Any = container.add_stream(encoder, rate=25, width=256, height=256, pix_fmt="yuv420p")
                pixels = np.zeros((256, 256, 3), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                container.mux(stream.encode(None))
            for decoder in decoders:
                if decodes(file, decoder):
                    found[decoder].append(name)
    _say(version=av.__version__, **found)


PROBES: Mapping[str, Callable[[], None]] = {
    "torch": _probe_torch,
    "dali": _probe_dali,
    "openvino": _probe_openvino,
    "video": _probe_video,
}

if __name__ == "__main__":
    PROBES[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # taking torch and DALI apart costs a second and tells nothing
