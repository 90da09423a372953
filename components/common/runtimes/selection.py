"""Which runtime would serve each precision of a bundle on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import PRECISIONS, CpuModel, EngineEntry, Precision
from components.common.runtimes import Runner

Runtime = Literal["auto", "tensorrt", "openvino", "onnxruntime"]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A precision and what runs it here: a runner, or the reason why there is none."""

    precision: Precision
    file: Path | None
    runner: Runner | None
    note: str


def serving_runners(bundle: Artifact[BundleManifest], runtime: Runtime) -> list[Serving]:
    """A runner per precision, or why there is none. Where the bundle's plans don't run here, the notes say why.

    Raises:
        RuntimeUnavailable: `runtime` is "tensorrt" and the bundle has no engines that run here.
    """
    engines, unused = _engines_for(bundle, runtime)
    servings = []
    for precision in PRECISIONS:
        if precision in engines:
            servings.append(_on_tensorrt(bundle, engines[precision]))
        elif precision not in bundle.manifest.models:
            reason = f"the bundle has no {precision.upper()} model"
            servings.append(Serving(precision=precision, file=None, runner=None, note=reason))
        elif runtime == "onnxruntime":
            servings.append(_on_onnxruntime(bundle, precision))
        elif engines or precision == "fp16":
            without = unused or "needs TensorRT on a GPU; a CPU has no FP16 arithmetic"
            reason = "its engine was not built" if engines else without
            servings.append(Serving(precision=precision, file=None, runner=None, note=reason))
        else:
            try:
                servings.append(_on_openvino(bundle, precision, unused))
            except RuntimeUnavailable as error:  # no INT8 file is fit for this CPU; FP32 runs all the same
                servings.append(Serving(precision=precision, file=None, runner=None, note=str(error)))
    return servings


def serving_runner(bundle: Artifact[BundleManifest], precision: Precision, runtime: Runtime) -> Serving:
    """What runs one precision here: its plan where it was made for this GPU, else OpenVINO on its ONNX file.

    FP16 without TensorRT is the FP16 file in FP32 arithmetic, since CPUs have no other: the note says so.

    Raises:
        RuntimeUnavailable: `runtime` is "tensorrt" and the bundle has no such engine that runs here; or no INT8 file
            of the bundle is fit for this CPU.
        UserError: the bundle has no model of this precision.
    """
    engines, unused = _engines_for(bundle, runtime)
    if precision in engines:
        return _on_tensorrt(bundle, engines[precision])
    if runtime == "tensorrt":
        raise RuntimeUnavailable(
            f"the runtime tensorrt was asked for, but the bundle has no {precision.upper()} engine"
        )
    if precision not in bundle.manifest.models:
        held = ", ".join(sorted(bundle.manifest.models))
        raise UserError(f"the bundle {bundle.path} has no {precision.upper()} model; it holds {held}")
    if runtime == "onnxruntime":
        return _on_onnxruntime(bundle, precision)
    serving = _on_openvino(bundle, precision, unused)
    if precision == "fp16":
        note = "a CPU has no FP16 arithmetic: the FP16 file runs in FP32"
        serving = replace(serving, note=". ".join(filter(None, (serving.note, note))))
    return serving


def _engines_for(bundle: Artifact[BundleManifest], runtime: Runtime) -> tuple[dict[str, EngineEntry], str]:
    """The engines that run here, by precision, and why the bundle's don't; empty where nobody needs to know."""
    engines, missing = _usable_engines(bundle, runtime)
    if runtime == "tensorrt" and not engines:
        raise RuntimeUnavailable(f"the runtime tensorrt was asked for, but {missing}")
    # What was asked for needs no reason; plans that nothing runs although they are there do.
    return engines, missing if runtime == "auto" and bundle.manifest.engines else ""


def _usable_engines(bundle: Artifact[BundleManifest], runtime: Runtime) -> tuple[dict[str, EngineEntry], str]:
    if runtime not in ("auto", "tensorrt"):
        return {}, f"the runtime {runtime} was asked for"
    engines = bundle.manifest.engines
    if not engines:
        return {}, f"the bundle has no engines: {bundle.manifest.engines_missing}"
    from components.common.runtimes.tensorrt_library import plan_mismatches, why_no_tensorrt

    if missing := why_no_tensorrt():
        return {}, missing
    for engine in engines:
        if engine.onnx_digest and engine.onnx_digest != bundle.manifest.files[engine.source_onnx].digest:
            return {}, f"{engine.file} was built from another {engine.source_onnx} than the bundle holds; export again"
        if differences := plan_mismatches(engine):
            fix = "build plans for this machine with `enginery engines`"
            return {}, f"{engine.file} was built elsewhere ({'; '.join(differences)}); {fix}"
    return {engine.precision: engine for engine in engines}, ""


def _on_tensorrt(bundle: Artifact[BundleManifest], engine: EngineEntry) -> Serving:
    from components.common.runtimes.tensorrt import TensorRTRunner

    file = bundle.file(engine.file)
    runner = TensorRTRunner(file, bundle.manifest.shapes, engine)
    notes = []
    if "TF32" in engine.flags:
        notes.append("TF32: inputs of convolutions and matrix products are rounded to 10 bits")
    if engine.mantissa_bits is not None:
        notes.append(f"weights are rounded to {engine.mantissa_bits} bits of mantissa")
    return Serving(precision=engine.precision, file=file, runner=runner, note=". ".join(notes))


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
            "Export the model again, which writes a file for every CPU, or use a CPU with VNNI"
        )
    return max(fit, key=lambda model: model.weight_bits)


def not_measured_here(precision: Precision, measured_on: Sequence[str]) -> str:
    """What to tell somebody who runs a model on a CPU that its verdict does not speak of; empty where it does.

    Args:
        precision: of the model. Only INT8 depends on the CPU.
        measured_on: the instruction sets that the verdict rests on; none where a GPU or nobody measured.
    """
    here = instruction_set()
    if precision != "int8" or here in measured_on:
        return ""
    return (
        f"a verdict on this model was measured with {', '.join(measured_on) or 'no CPU'}, and this CPU runs INT8 with "
        f"{here}: nobody has proved it here. `python -m components.validate` measures it on this CPU"
    )


def _on_openvino(bundle: Artifact[BundleManifest], precision: Precision, unused: str) -> Serving:
    """`unused` is why the bundle's plans don't run here; empty where it has none."""
    from components.common.runtimes.openvino import OpenVINORunner

    notes = [f"OpenVINO ran the ONNX file, not the plan: {unused}"] if unused else []
    file = bundle.manifest.models[precision]
    if precision == "int8":
        model = fit_model(bundle.manifest.int8_on_cpus)
        file = model.file
        notes.append(f"{model.arithmetic}, on {instruction_set()}")
    runner = OpenVINORunner(bundle.file(file), bundle.manifest.shapes)
    return Serving(precision=precision, file=bundle.file(file), runner=runner, note=". ".join(notes))


def _on_onnxruntime(bundle: Artifact[BundleManifest], precision: Precision) -> Serving:
    from components.common.runtimes.onnxruntime import OnnxRuntimeRunner

    file = bundle.file(bundle.manifest.models[precision])
    runner = OnnxRuntimeRunner(file, bundle.manifest.shapes)
    return Serving(precision=precision, file=file, runner=runner, note="simulated: numerical reference")
