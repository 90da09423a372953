"""TensorRT 8.6, 10 and 11 as a library: why it can't be used here, its one logger, and how a plan is loaded."""

import functools
import importlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from components.common.contracts.environment import gpus
from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.records import HARDWARE_COMPATIBLE, STRIPPED, VERSION_COMPATIBLE, EngineEntry

_log = logging.getLogger(__name__)

_INSTALL = "run `pip install 'enginery[tensorrt]'` (in a checkout: `make install-tensorrt`)"


def why_no_tensorrt() -> str | None:
    """None when TensorRT imports and a CUDA GPU is usable; else one sentence that says what is missing and the fix."""
    if not torch.cuda.is_available():
        return (
            f"no CUDA GPU is usable here (torch {torch.__version__} finds none): TensorRT needs an NVIDIA GPU, its "
            "driver, and a CUDA_VISIBLE_DEVICES that does not hide it; use the OpenVINO runtime on machines without one"
        )
    try:
        trt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt":
            return f"the Python package tensorrt is not installed: {_INSTALL}"
        return _without_libraries(error)
    except (ImportError, OSError, RuntimeError) as error:
        return _without_libraries(error)
    if not hasattr(trt, "Builder"):  # an empty folder called tensorrt imports as a namespace package
        return _without_libraries("the package has no Builder")
    return None


def _without_libraries(cause: Exception | str) -> str:
    return (
        f"the Python package tensorrt is installed but does not load ({cause}): the package is a stub that fetches "
        f"its libraries from NVIDIA's package index, so where that index is reachable {_INSTALL}, "
        "or use NVIDIA's container"
    )


def load_tensorrt() -> ModuleType:
    """The module `tensorrt`.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here; the message is that of `why_no_tensorrt`.
    """
    missing = why_no_tensorrt()
    if missing is not None:
        raise RuntimeUnavailable(missing)
    return importlib.import_module("tensorrt")


def driver_version() -> str:
    """Version of the NVIDIA driver; "unknown" where NVML is not reachable, as in some sandboxes."""
    found = gpus()
    return found[0].driver if found else "unknown"


def start(make: Callable[[], Any]) -> Any:
    """The Builder or Runtime that `make` makes.

    Raises:
        RuntimeUnavailable: TensorRT is there but does not start, as with too old a driver.
    """
    try:
        return make()
    except TypeError:  # what pybind11 raises when the library returns no object
        trt = load_tensorrt()
        raise RuntimeUnavailable(
            f"TensorRT {trt.__version__} can't start on {torch.cuda.get_device_name()}, driver {driver_version()}: "
            f"{tensorrt_logger().take_errors()}; a newer driver is the usual fix"
        ) from None


def plan_mismatches(entry: EngineEntry) -> list[str]:
    """How this machine differs from the one that a plan was built on, a phrase each; empty where the plan fits.

    TensorRT itself says no more of a plan that does not fit than that it can't be read. A version-compatible plan also
    runs on later versions of the same major one, a hardware-compatible plan on every GPU of compute capability 8.0 or
    newer. Another driver is no mismatch: `load_engine` only tells of it.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
    """
    trt = load_tensorrt()
    version, gpu = trt.__version__, torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    differences = []
    if version != entry.tensorrt_version and not (
        VERSION_COMPATIBLE in entry.flags and _is_later(version, entry.tensorrt_version)
    ):
        differences.append(f"TensorRT {entry.tensorrt_version} there, {version} here")
    if HARDWARE_COMPATIBLE not in entry.flags or capability < (8, 0):
        shown = "{}.{}".format(*capability)
        if gpu != entry.gpu_name:
            differences.append(f"GPU {entry.gpu_name} there, {gpu} here")
        if shown != entry.compute_capability:
            differences.append(f"compute capability {entry.compute_capability} there, {shown} here")
    return differences


def _other_driver(entry: EngineEntry) -> str:
    """How the driver differs from the one that a plan was built with; empty where it does not, or nobody knows."""
    there, here = entry.driver_version, driver_version()
    return "" if there == here or "unknown" in (there, here) else f"driver {there} there, {here} here"


def _is_later(version: str, than: str) -> bool:
    """Whether a version is of the same major one and not older."""
    numbers, least = ([int(number) for number in re.findall(r"\d+", text)] for text in (version, than))
    return numbers[:1] == least[:1] and numbers >= least


def load_engine(plan_path: Path, entry: EngineEntry | None) -> tuple[Any, Any]:
    """A plan's runtime, which must outlive its engine, and the engine.

    Args:
        plan_path: The plan; the ONNX file that it was built from lies beside it.
        entry: What the bundle's manifest says of it, which is checked first; None for a plan just built here.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
        UserError: the plan was built for another GPU or TensorRT version; the message says what differs.
        EngineryError: a stripped plan can't take the weights of its ONNX file.
    """
    trt = load_tensorrt()
    flags = entry.flags if entry is not None else ()
    fix = "export again on this machine, or build plans for it with `enginery engines`"
    if entry is not None and (differences := plan_mismatches(entry)):
        raise UserError(f"the plan {plan_path} was built elsewhere ({'; '.join(differences)}): {fix}")
    other_driver = _other_driver(entry) if entry is not None else ""
    logger = tensorrt_logger()
    logger.take_errors()
    runtime = start(lambda: trt.Runtime(logger))
    if VERSION_COMPATIBLE in flags:
        runtime.engine_host_code_allowed = True  # such a plan carries TensorRT's lean runtime; its digest was checked
    engine = runtime.deserialize_cuda_engine(plan_path.read_bytes())
    if engine is None:
        raise UserError(
            f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()} can't load the plan {plan_path}: "
            f"{logger.take_errors()}. A plan runs only on the TensorRT version and GPU model it was built with"
            f"{f' ({other_driver})' if other_driver else ''}: {fix}"
        )
    if other_driver:
        _log.warning("the plan %s, which runs here, was built with another driver (%s)", plan_path, other_driver)
    if entry is not None and STRIPPED in flags:
        _refit(trt, engine, plan_path.with_name(entry.source_onnx))
    return runtime, engine


def _refit(trt: ModuleType, engine: Any, onnx_path: Path) -> None:
    """Put the weights of an ONNX file into an engine that was built without them."""
    refitter = trt.Refitter(engine, tensorrt_logger())
    loaded = trt.OnnxParserRefitter(refitter, tensorrt_logger()).refit_from_file(str(onnx_path))
    if not (loaded and refitter.refit_cuda_engine()):
        reason = tensorrt_logger().take_errors()
        raise EngineryError(f"the stripped plan can't take its weights from {onnx_path}: {reason}; export again")


@functools.cache
def tensorrt_logger() -> Any:
    """The process's one TensorRT logger: it logs, and `take_errors()` returns the errors since it was last asked.

    One only, because TensorRT keeps the first logger it is given for as long as any builder or runtime lives.
    """
    trt = load_tensorrt()
    severities = trt.ILogger.Severity
    levels = {
        severities.INTERNAL_ERROR: logging.ERROR,
        severities.ERROR: logging.ERROR,
        severities.WARNING: logging.WARNING,
    }

    class CollectingLogger(trt.ILogger):  # type: ignore[misc, name-defined]  # tensorrt has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # TensorRT calls this from its own threads, too; appending to a list is atomic.
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                self.errors.append(message)
            _log.log(level, "TensorRT: %s", message)

        def take_errors(self) -> str:
            taken, self.errors = self.errors, []
            return "; ".join(taken) or "TensorRT gave no reason"

    return CollectingLogger()
