"""The inference runtimes: one table, from which options, measurements, gates and promotion follow.

Servers and translators run TensorRT and OpenVINO alone.

A new runtime is an entry of the table and a module of its name beside this file, which is imported only where the
runtime is used. The module has `open_model(bundle, precision) -> OpenModel` (see `runner`), and for a runtime that runs
plans `why_unavailable()` and `plan_mismatches(entry)`, too (see `tensorrt`).
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from components.common.contracts.records import AccuracyReport


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """An inference runtime and its abilities. Imports nothing of the runtime itself."""

    name: str
    """As in options and reports; also the name of its module."""
    label: str
    """As people write it."""
    distributions: tuple[str, ...]
    """Packages on PyPI, one of which brings its library: versions of it are recorded, and belong to cache keys."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "int8")
    """Those that it computes as their files say."""
    runs_plans: bool = False
    """True if it runs plans, which are built for a GPU; false if it runs the bundle's ONNX files."""
    can_be_chosen: bool = True
    """True if the option `runtime` has it."""
    is_automatic: bool = False
    """True if "auto" takes it: the first of the table that can be used."""
    measures_speed: bool = False
    """True if its speed is that of serving; a simulation's speed says nothing."""
    measures_streams: bool = False
    """True if it runs several batches at the same time."""
    measures_without_transfers: bool = False
    """True if the copies to and from a GPU can be left out of a measurement."""
    depends_on_instruction_set: bool = False
    """True if its INT8 arithmetic depends on the CPU's instruction set."""
    serves_concurrently: bool = False
    """True if Triton runs several of its batches at the same time, and requests may wait for others."""

    @property
    def module(self) -> Any:
        """The module that opens models with it.

        Raises:
            RuntimeUnavailable: its library is not installed.
        """
        return importlib.import_module(f"{__name__}.{self.name}")


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            name="tensorrt",
            label="TensorRT",
            distributions=("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
            runs_plans=True,
            is_automatic=True,
            measures_speed=True,
            measures_streams=True,
            measures_without_transfers=True,
            serves_concurrently=True,
        ),
        Runtime(
            name="openvino",
            label="OpenVINO",
            distributions=("openvino",),
            precisions=("fp32", "int8"),
            is_automatic=True,
            measures_speed=True,
            measures_streams=True,
            depends_on_instruction_set=True,
        ),
        Runtime(name="onnxruntime", label="ONNX Runtime", distributions=("onnxruntime",)),
        # Simulates INT8 on GPUs while export chooses calibration and layers.
        Runtime(name="torch", label="PyTorch", distributions=("torch",), can_be_chosen=False),
    )
}
RUNTIME_OPTIONS = ("auto", *(name for name, runtime in RUNTIMES.items() if runtime.can_be_chosen))
if TYPE_CHECKING:
    RuntimeOption = str
else:
    RuntimeOption = Literal[RUNTIME_OPTIONS]


def runs_plans(name: str) -> bool:
    """True if a report's runtime ran plans, not ONNX files. A report may name one that is not in the table."""
    return name in RUNTIMES and RUNTIMES[name].runs_plans


def measured_plans(accuracy: "AccuracyReport") -> set[str]:
    """Names of the plans that a report has measured: what another runtime did says nothing of them."""
    return {row.file for row in accuracy.rows if runs_plans(row.runtime)}
