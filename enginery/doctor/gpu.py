"""Checks of NVIDIA GPUs: found, driven, and used by the libraries."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from components.common.contracts.environment import gpu_memory_bytes
from components.common.contracts.manifests import BundleManifest
from components.common.contracts.records import EngineEntry, same_version
from enginery.doctor.checks import Finding, absent, missing, ok, warning
from enginery.doctor.probes import ProbeError, Probes
from enginery.formats import size_text
from enginery.pins import IN_CONTAINERS, plan_needs, plan_server, tensorrt_of_images

# CUDA major version -> oldest driver that runs it (NVIDIA, CUDA Toolkit release notes, minor version compatibility).
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INSTALL_DRIVER = (
    "install NVIDIA's driver, branch R580 or newer (Ubuntu: sudo ubuntu-drivers install; else "
    "https://www.nvidia.com/drivers) and restart; in a container the driver is the host's: docker run --gpus all, "
    "in Kubernetes resources.limits nvidia.com/gpu: 1"
)
_WITHOUT_GPU = "training, INT8 and its verdict work on the CPU; training is slower, and no FP16 or TensorRT engines"
_ADD_GPU = "to have those, use a machine with an NVIDIA GPU (Turing or newer) and its driver (R580 or newer)"


@dataclass(frozen=True)
class NvidiaGpu:
    """One GPU, whether CUDA may use it or not."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Nvml:
    """The driver's answers."""

    gpus: tuple[NvidiaGpu, ...]
    driver: str
    error: str  # why there is nothing; "" when there is


class GpuChecks:
    """The checks share what the driver says and the probes' answers."""

    def __init__(self, probes: Probes, pci_devices: Path = Path("/sys/bus/pci/devices")) -> None:
        self._probes = probes
        self._pci_devices = pci_devices

    @cached_property
    def nvml(self) -> Nvml:
        """Ask the driver."""
        import pynvml

        try:
            pynvml.nvmlInit()
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            gpus = tuple(
                NvidiaGpu(
                    str(pynvml.nvmlDeviceGetName(handle)),
                    gpu_memory_bytes(handle),
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                )
                for handle in handles
            )
        except pynvml.NVMLError as error:
            return Nvml((), "", str(error))
        return Nvml(gpus, driver, "" if gpus else "the driver sees no GPU")

    def guard(self, find: Callable[[], Finding]) -> Finding:
        """Run a check that makes sense only with a GPU that CUDA may use; the line on the GPU has the fix."""
        if not self.nvml.gpus:
            return absent("needs an NVIDIA GPU")
        if os.environ.get(_VISIBLE, "all") in ("", "-1"):
            return absent(f"needs a GPU that {_VISIBLE} does not hide")
        return find()

    def gpus(self) -> Finding:
        """The GPUs by NVML."""
        nvml = self.nvml
        if nvml.gpus:
            found = "; ".join(
                f"{nvml.gpus.count(gpu)} x {gpu.name}, {size_text(gpu.memory_bytes)}, compute capability "
                f"{gpu.capability[0]}.{gpu.capability[1]}"
                for gpu in dict.fromkeys(nvml.gpus)
            )
            if (visible := os.environ.get(_VISIBLE)) in ("", "-1"):
                return warning(f"{found}; hidden by {_VISIBLE}={visible!r}", f"unset {_VISIBLE}")
            return ok(found)
        if "mismatch" in nvml.error.lower():
            return missing(f"none: {nvml.error}", "restart: the driver was updated, and the old one is still loaded")
        if num_cards := self._cards_on_pci():
            return missing(f"NVIDIA cards on the PCI bus: {num_cards}, but no driver: {nvml.error}", _INSTALL_DRIVER)
        return absent(f"no NVIDIA GPU ({nvml.error}): {_WITHOUT_GPU}", _ADD_GPU)

    def _cards_on_pci(self) -> int:
        """NVIDIA display or compute controllers, with or without a driver."""
        cards = 0
        for device in self._pci_devices.glob("*") if self._pci_devices.is_dir() else ():
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
            cards += vendor == "0x10de" and kind.startswith("0x03")
        return cards

    def driver(self) -> Finding:
        """New enough for the CUDA that PyTorch was built with."""
        if not self.nvml.driver:
            return missing("none", _INSTALL_DRIVER) if self._cards_on_pci() else absent("needs an NVIDIA GPU")
        cuda = self._probes.ask("torch", "cuda")
        found = self.nvml.driver
        if cuda is None:
            return ok(f"{found}; PyTorch here is not built for CUDA")
        oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
        if oldest is None:
            return warning(f"{found}; not known what CUDA {cuda} needs", "see NVIDIA's CUDA Toolkit release notes")
        if driver_number(found) >= driver_number(oldest):
            return ok(f"{found} (PyTorch's CUDA {cuda} needs {oldest})")
        return missing(f"{found} is too old: PyTorch's CUDA {cuda} needs {oldest} or newer", _INSTALL_DRIVER)

    def torch_sees_cuda(self) -> Finding:
        """PyTorch on the GPU."""
        cuda, version = self._probes.ask("torch", "cuda"), self._probes.ask("torch", "version")
        if cuda is None:
            return missing(f"torch {version} is a build without CUDA", "run: make clean install")
        if self._probes.ask("torch", "available"):
            return ok(f"torch {version}, CUDA {cuda}, GPUs: {self._probes.ask('torch', 'num_gpus')}")
        reason = self._probes.ask("torch", "why_not") or "PyTorch gives no reason"
        return missing(
            f"torch {version} (CUDA {cuda}) can't use the GPU: {reason}",
            "see the line on the driver; after a driver update restart; in a container check that /dev/nvidia* exist",
        )

    def capability(self) -> Finding:
        """PyTorch's code for this generation of GPUs."""
        names = self._probes.ask("torch", "architectures")
        oldest = min((gpu.capability for gpu in self.nvml.gpus), default=(0, 0))
        found = f"{oldest[0]}.{oldest[1]}; PyTorch is built for {' '.join(names)}"
        if supported(oldest, names):
            return ok(found)
        return missing(found, "use a GPU of a listed generation, or a PyTorch build for yours: https://pytorch.org")

    def dali_decodes(self) -> Finding:
        """Decode a JPEG on the GPU."""
        try:
            if self._probes.ask("dali", "gpu_decodes"):
                return ok("a JPEG decoded on the GPU")
            reason = "wrong result"
        except ProbeError as error:
            reason = str(error)
        return missing(
            f"decoding a JPEG on the GPU failed: {reason}",
            "see the line on the driver; in a container give it all of the driver: "
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all; to validate meanwhile: --set validate.loader=cpu",
        )

    def tensorrt(self) -> Finding:
        """TensorRT, which builds and runs engines."""
        reason = self._probes.ask("torch", "no_tensorrt")
        if reason is not None:
            found, _, fix = reason.partition(": ")
            return missing(found, fix or "make install-tensorrt")
        here, served = self._probes.ask("torch", "tensorrt"), tensorrt_of_images()
        if same_version(here, served):
            return ok(f"TensorRT {here}, as in the images")
        return warning(
            f"TensorRT {here}; the image `serve` has {served} and loads no plans of another version",
            f"make install-tensorrt, or build plans that are to be served with {IN_CONTAINERS}",
        )

    def plans(self, bundle: BundleManifest) -> Finding:
        """The needs of a bundle's plans, whether they run here, and the image that serves them."""
        if not bundle.engines:
            return absent(
                f"none: {bundle.engines_missing}",
                "build some on a machine with a GPU and TensorRT: enginery engines BUNDLE --data DIR",
            )
        server, fix = plan_server(bundle.engines)
        found = f"they need {plan_needs(bundle.engines)}; {self._here(bundle.engines)}; {server}"
        return warning(found, fix) if fix else ok(found)

    def _here(self, engines: Sequence[EngineEntry]) -> str:
        gpu = next(iter(self.nvml.gpus), None)
        tensorrt = self._probes.ask("torch", "tensorrt") if gpu else None
        if gpu is None or tensorrt is None:
            return f"not here, without {'TensorRT' if gpu else 'an NVIDIA GPU'}"
        named = (one for engine in engines for one in engine.mismatches(tensorrt, gpu.name, gpu.capability))
        differences = ", ".join(dict.fromkeys(named))
        return f"not here ({differences})" if differences else "they run here"


def driver_number(text: str) -> tuple[int, ...]:
    """A driver's version as numbers: "580.65.06" is (580, 65, 6)."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def supported(capability: tuple[int, int], architectures: list[str]) -> bool:
    """True if a build has machine code (same major version, minor not above) or PTX (any newer GPU) for a GPU."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")  # sm_90a: code for exactly that generation
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False
