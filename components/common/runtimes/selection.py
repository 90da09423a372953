"""The runtime for each precision of a bundle on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import PRECISIONS, CpuModel, Precision
from components.common.runtimes import RUNTIMES, Runtime, RuntimeOption
from components.common.runtimes.runner import Runner

_AUTOMATIC = tuple(runtime for runtime in RUNTIMES.values() if runtime.is_automatic)


@dataclass(frozen=True, kw_only=True)
class RuntimeSelection:
    """A precision and what runs it here: a runner, or the reason why there is none."""

    precision: Precision
    file: Path | None
    runner: Runner | None
    note: str


def select_runtimes(bundle: Artifact[BundleManifest], option: RuntimeOption) -> list[RuntimeSelection]:
    """A runner per precision, or why there is none. Where the bundle's plans don't run here, the notes say why.

    Raises:
        RuntimeUnavailable: `option` names a runtime of plans, and the bundle has none that run here.
    """
    runtime, unused = choose_runtime(bundle, option)
    selections = []
    for precision in PRECISIONS:
        reason = ""
        if precision not in bundle.manifest.models:
            reason = f"the bundle has no {precision.upper()} model"
        elif runtime.runs_plans and not _has_plan(bundle, precision):
            reason = "its engine was not built"
        elif precision not in runtime.precisions:
            reason = unused or f"needs TensorRT on a GPU; a CPU has no {precision.upper()} arithmetic"
        else:
            try:
                selections.append(_open(runtime, bundle, precision, unused))
            except RuntimeUnavailable as error:
                if runtime.runs_plans:
                    raise
                reason = str(error)  # no INT8 file is fit for this CPU; FP32 runs all the same
        if reason:
            selections.append(RuntimeSelection(precision=precision, file=None, runner=None, note=reason))
    return selections


def select_runtime(
    bundle: Artifact[BundleManifest], precision: Precision, option: RuntimeOption, *, same_arithmetic: bool = False
) -> RuntimeSelection:
    """Select what runs one precision: its plan if that was made for this GPU, else the next runtime on its ONNX file.

    FP16 without TensorRT is the FP16 file in FP32 arithmetic, since CPUs have no other: the note says so.

    Args:
        bundle: the models.
        precision: of the model.
        option: a runtime's name, or "auto".
        same_arithmetic: refuse a runtime that computes the precision in another arithmetic.

    Raises:
        RuntimeUnavailable: `option` names a runtime of plans, and the bundle has no such engine that runs here; or no
            INT8 file of the bundle is fit for this CPU.
        UserError: the bundle has no model of this precision.
    """
    runtime, unused = choose_runtime(bundle, option)
    if runtime.runs_plans and not _has_plan(bundle, precision):
        if option == runtime.name:
            message = f"the runtime {option} was asked for, but the bundle has no {precision.upper()} engine"
            raise RuntimeUnavailable(message, code="engine-missing")
        runtime = next(other for other in _AUTOMATIC if not other.runs_plans)
    if precision not in bundle.manifest.models:
        held = ", ".join(sorted(bundle.manifest.models))
        raise UserError(
            f"the bundle {bundle.path} has no {precision.upper()} model; it holds {held}", code="precision-missing"
        )
    if precision in runtime.precisions:
        return _open(runtime, bundle, precision, unused)
    note = f"a CPU has no {precision.upper()} arithmetic"
    if same_arithmetic:
        raise RuntimeUnavailable("; ".join(filter(None, (unused, note))), code="arithmetic-missing")
    return _open(runtime, bundle, precision, unused, f"{note}: the {precision.upper()} file runs in FP32")


def choose_runtime(bundle: Artifact[BundleManifest], option: RuntimeOption) -> tuple[Runtime, str]:
    """The runtime that an option leads to, and why the bundle's plans are not run although there are some.

    Raises:
        RuntimeUnavailable: `option` names a runtime that does not run the bundle here.
    """
    if option != "auto":
        if reason := _why_not(RUNTIMES[option], bundle):
            raise RuntimeUnavailable(f"the runtime {option} was asked for, but {reason}", code="plans-unusable")
        return RUNTIMES[option], ""  # what was asked for needs no reason
    reasons = {runtime.name: _why_not(runtime, bundle) for runtime in _AUTOMATIC}
    chosen = next(runtime for runtime in _AUTOMATIC if not reasons[runtime.name])
    return chosen, "; ".join(filter(None, reasons.values())) if bundle.manifest.engines else ""


def _why_not(runtime: Runtime, bundle: Artifact[BundleManifest]) -> str:
    """Return why the bundle's plans can't be run with a runtime; empty where they can, or it runs no plans."""
    engines = bundle.manifest.engines
    if not runtime.runs_plans:
        return ""
    if not engines:
        return f"the bundle has no engines: {bundle.manifest.engines_missing}"
    if missing := runtime.module.why_unavailable():
        return str(missing)
    for engine in engines:
        if engine.onnx_digest and engine.onnx_digest != bundle.manifest.files[engine.source_onnx].digest:
            return f"{engine.file} was built from another {engine.source_onnx} than the bundle holds; export again"
        if differences := runtime.module.plan_mismatches(engine):
            fix = "build plans for this machine with `enginery engines`"
            return f"{engine.file} was built elsewhere ({'; '.join(differences)}); {fix}"
    return ""


def _has_plan(bundle: Artifact[BundleManifest], precision: Precision) -> bool:
    return any(engine.precision == precision for engine in bundle.manifest.engines)


def _open(
    runtime: Runtime, bundle: Artifact[BundleManifest], precision: Precision, unused: str, note: str = ""
) -> RuntimeSelection:
    """Load a model. `unused` is why the bundle's plans don't run here, `note` what else is to be said."""
    opened = runtime.module.open_model(bundle, precision)
    return RuntimeSelection(
        precision=precision,
        file=opened.file,
        runner=opened.runner,
        note=". ".join(filter(None, (note_of_fallback(runtime, unused), *opened.notes, note))),
    )


def note_of_fallback(runtime: Runtime, unused: str) -> str:
    """Say what runs instead of a bundle's plans; empty where `unused`, the reason against them, is."""
    return f"{runtime.label} ran the ONNX file, not the plan: {unused}" if unused else ""


def fit_model(models: Sequence[CpuModel]) -> CpuModel:
    """The INT8 file for this CPU: of those whose sums do not saturate on it, the one with the most bits.

    Args:
        models: of a bundle or a model repository, at least one.

    Raises:
        RuntimeUnavailable: sums of each would saturate, and the answers would not be those that were measured.
    """
    here = instruction_set()
    fit = [model for model in models if here not in model.saturates_on]
    if not fit:
        held = "; ".join(f"{model.file} ({model.arithmetic})" for model in models)
        unfit = ", ".join(sorted(set.intersection(*(set(model.saturates_on) for model in models))))
        raise RuntimeUnavailable(
            f"no INT8 file is fit for this CPU, which runs INT8 with {here}: sums of {held} saturate on {unfit}. "
            "Export the model again, which writes a file for every CPU, or use a CPU with VNNI",
            code="no-int8-file-for-this-cpu",
        )
    return max(fit, key=lambda model: model.weight_bits)


def not_measured_here(precision: Precision, measured_on: Sequence[str]) -> str:
    """A note for those who run a model on a CPU that its verdict does not cover; empty where it does.

    Args:
        precision: of the model. Only INT8 depends on the CPU.
        measured_on: the instruction sets that the verdict rests on; none where a GPU or nobody measured.
    """
    here = instruction_set()
    if precision != "int8" or here in measured_on:
        return ""
    verdict = f"a verdict on this model was measured with {', '.join(measured_on)}"
    return (
        f"{verdict if measured_on else 'no verdict on this model is of a CPU'}, and this CPU runs INT8 with {here}: "
        "nobody has proved it here. `python -m components.validate` measures it on this CPU"
    )
