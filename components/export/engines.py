"""TensorRT plans from ONNX files, by one code path for TensorRT 8.6, 10 and 11.

What a version lacks is found with `hasattr`, never by its number: 11 renumbered enums and dropped weak typing. Where
networks are strongly typed (10 and 11) precision is a property of the ONNX file; on 8.6 flags ask for it.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import torch

from components.common.contracts.digests import digest_file, digest_json
from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import (
    FP16_MANTISSA_BITS,
    HARDWARE_COMPATIBLE,
    PRECISIONS,
    STRIPPED,
    VERSION_COMPATIBLE,
    EngineEntry,
    Precision,
)
from components.common.contracts.transforms import ShapeSpec
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.common.runtimes.onnx_files import onnx_content, parse_onnx, read_onnx
from components.common.runtimes.tensorrt import (
    driver_version,
    load_tensorrt,
    start,
    tensorrt_logger,
    version_of_builder,
)
from components.export.config import CACHE_VARIABLE, TIMING_CACHES, EngineOption, ExportConfig
from components.export.inspection import UnreadableLayers, inspect_engine
from components.export.placement import keep_apart, node_id
from components.export.precision import round_weights, scaled_convolutions

_log = logging.getLogger(__name__)

_STRONGLY_TYPED_FILES = {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8_fp16.onnx"}
_WEAKLY_TYPED_FILES = {"fp32": "fp32.onnx", "fp16": "fp32.onnx", "int8": "int8.onnx"}
_CACHE_REFUSED = "timing cache will not be used"  # 8.6, of what it wrote for another Myelin graph
_FAILS_TO_MERGE = "chooseHigherPrecision"  # where 8.6.0's graph optimizer ends; see `placement.keep_apart`


def onnx_file_for(precision: Precision) -> str:
    """Name of the bundle's ONNX file that a precision is compiled from on the TensorRT installed here.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
    """
    return (_STRONGLY_TYPED_FILES if is_strongly_typed() else _WEAKLY_TYPED_FILES)[precision]


Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # smallest, tuned for, largest


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs of a network, and the sizes of its inputs that a plan takes: those of each profile.

    `fp16` names those that are float16 where the plan is not FP32.
    """

    profiles: Sequence[Mapping[str, Sizes]]
    outputs: Sequence[str]
    fp16: Collection[str] = ()

    @classmethod
    def of_images(cls, shapes: ShapeSpec) -> "Tensors":
        """Batches of images. One profile: execution contexts share it."""
        batches = (shapes.min_batch, shapes.opt_batch, shapes.max_batch)
        low, tuned, high = (shapes.input_shape(batch) for batch in batches)
        return cls([{shapes.input_name: (low, tuned, high)}], [shapes.output_name])


@dataclass(frozen=True)
class _Order:
    """A plan to be built; see `build_engine`."""

    onnx_path: Path
    precision: Precision
    tensors: Tensors
    cache_file: Path | None
    optimization_level: int
    workspace_bytes: int
    options: frozenset[EngineOption]
    mantissa_bits: int


def build_engine(
    onnx_path: Path,
    plan_path: Path,
    *,
    precision: Precision,
    shapes: ShapeSpec | Tensors,
    timing_cache_path: Path | None = None,
    optimization_level: int = 3,
    workspace_bytes: int = 4 << 30,
    options: Collection[EngineOption] = (),
    mantissa_bits: int = FP16_MANTISSA_BITS,
) -> EngineEntry:
    """Compile an ONNX file for the current CUDA device and write the plan.

    Args:
        onnx_path: The file that `onnx_file_for(precision)` names.
        plan_path: Where the plan goes; written in full or not at all.
        precision: "fp32" (with TF32 off unless `options` has it), "fp16" or "int8".
        shapes: Names of inputs and outputs, and the batches or sizes the plan has to take.
        timing_cache_path: Directory of timing caches, one file per TensorRT version, GPU model, driver, precision and
            set of options, or None. A second build with the same cache takes a fraction of the time and chooses the
            same kernels.
        optimization_level: 0 (quick build) to 5 (slow build, fastest engine); TensorRT's own default is 3.
        workspace_bytes: Most scratch memory that a layer may use on the GPU.
        options: What else the plan shall be, of what `check_options` accepts; see `ExportConfig.engine_options`.
        mantissa_bits: Explicit mantissa bits that the weights of an FP16 plan keep; see `precision.round_weights`.

    Returns:
        What a bundle's manifest says of the plan, without its layers (see `inspection`).

    Raises:
        UserError: the file is missing or has other tensors.
        RuntimeUnavailable: TensorRT can't be used here.
        EngineryError: TensorRT can't parse or build the model; the message holds its reasons.
    """
    if not onnx_path.is_file():
        raise UserError(f"there is no ONNX file {onnx_path} to build the {precision} engine from", code="onnx-missing")
    trt = load_tensorrt()
    cache_file = None
    if timing_cache_path is not None:
        cache_file = timing_cache_path / _timing_cache_name(trt, precision, options, read_onnx(onnx_path))
    bits = mantissa_bits if precision == "fp16" else FP16_MANTISSA_BITS
    tensors = shapes if isinstance(shapes, Tensors) else Tensors.of_images(shapes)
    major, minor = torch.cuda.get_device_capability()
    plan_path.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for level in (optimization_level, 3 if optimization_level != 3 else 2):
        order = _Order(onnx_path, precision, tensors, cache_file, level, workspace_bytes, frozenset(options), bits)
        started = time.perf_counter()
        plan, flags, kept_bits = _plan(trt, order)
        content = memoryview(plan).tobytes()
        write_atomically(plan_path, content)
        entry = EngineEntry(
            file=plan_path.name,
            precision=precision,
            source_onnx=onnx_path.name,
            onnx_digest=digest_file(onnx_path),
            tensorrt_version=version_of_builder(trt, content),
            gpu_name=torch.cuda.get_device_name(),
            compute_capability=f"{major}.{minor}",
            driver_version=driver_version(),
            flags=flags,
            optimization_level=level,
            mantissa_bits=kept_bits,
            build_seconds=time.perf_counter() - started,
            failed_forms=tuple(failed),
        )
        try:
            tensorrt.open_context(plan_path, entry)  # TensorRT 8.6 built one for which it then had none
        except EngineryError as error:
            plan_path.unlink()
            failed.append(f"optimization level {level}: {error}")
            _log.warning("%s; trying another optimization level than %d", error, level)
        else:
            return entry
    message = f"TensorRT {trt.__version__} builds {onnx_path} as {precision} and can't run it: {'; '.join(failed)}"
    raise EngineryError(message, code="build-failed")


def _plan(trt: ModuleType, order: _Order) -> tuple[Any, tuple[str, ...], int | None]:
    """A plan, TensorRT's flags, and the mantissa bits of weights that were rounded; see `EngineEntry`."""
    logger = tensorrt_logger()
    logger.take_errors()
    content, kept_bits = _content(order)
    plan, flags = _try_to_build(trt, order, content)
    reasons = "" if plan is not None else logger.take_errors()
    if _FAILS_TO_MERGE in reasons:
        model = onnx.load_model_from_string(content)
        if apart := keep_apart(model):
            _log.warning(
                "TensorRT failed to merge convolutions that read the same tensor; building again with %d of them kept "
                "apart, which changes no result",
                len(apart),
            )
            plan, flags = _try_to_build(trt, order, model.SerializeToString())
            reasons = "" if plan is not None else logger.take_errors()
    if plan is None:
        message = f"TensorRT {trt.__version__} can't build {order.onnx_path} as {order.precision}: {reasons}"
        raise EngineryError(message, code="build-failed")
    return plan, flags, kept_bits


def _content(order: _Order) -> tuple[bytes, int | None]:
    """The ONNX file's content, with weights rounded where that is ordered, and to how many bits if any were."""
    content = onnx_content(order.onnx_path)
    model = parse_onnx(content, order.onnx_path)
    if order.mantissa_bits >= FP16_MANTISSA_BITS:
        return content, None
    if not round_weights(model, order.mantissa_bits):
        _log.warning("%s has no constant weights that could be rounded: the plan keeps all bits", order.onnx_path)
        return content, None
    if num_scaled := scaled_convolutions(model):
        _log.warning(
            "convolutions of %s that a BatchNormalization follows: %d. TensorRT may multiply it into their rounded "
            "weights, which have all bits again then: export the model in eval mode, where PyTorch merges the two",
            order.onnx_path,
            num_scaled,
        )
    return model.SerializeToString(), order.mantissa_bits


def _try_to_build(trt: ModuleType, order: _Order, model: bytes) -> tuple[Any, tuple[str, ...]]:
    """A plan of the ONNX file's content, or None where TensorRT fails, and the flags that it was given."""
    builder = start(lambda: trt.Builder(tensorrt_logger()))
    network = builder.create_network(_network_flags(trt))
    _parse(trt, network, model, order.onnx_path)
    _check_tensors(network, order.onnx_path, order.tensors)
    if order.precision != "fp32" and not _is_strongly_typed(trt):  # else the file says so
        for io_tensor in _io_tensors(network):
            if io_tensor.name in order.tensors.fp16:
                io_tensor.dtype = trt.float16
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    config.builder_optimization_level = order.optimization_level
    # Names and formats of all layers stay readable: the report says from them which layers run in INT8.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    _leave_out_external_kernels(trt, config)
    if hasattr(trt.PreviewFeature, "PROFILE_SHARING_0806"):
        # Else a second execution context on the same profile fails to enqueue on 8.6.
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    flags = _set_precision(trt, config, order.precision, order.options) + _set_options(trt, config, order.options)
    for sizes in order.tensors.profiles:
        profile = builder.create_optimization_profile()
        for name, limits in sizes.items():
            profile.set_shape(name, *limits)
        config.add_optimization_profile(profile)
    _load_timing_cache(config, order.cache_file)
    plan = builder.build_serialized_network(network, config)
    if plan is not None and any(_CACHE_REFUSED in error for error in tensorrt_logger().errors):
        _log.warning("TensorRT could not use the timing cache %s, which starts again", order.cache_file)
        if order.cache_file is not None:
            order.cache_file.unlink(missing_ok=True)
    elif plan is not None:
        _save_timing_cache(config, order.cache_file)
    return plan, flags


def is_strongly_typed() -> bool:
    """True if the TensorRT here takes precisions from the ONNX file.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
    """
    return _is_strongly_typed(load_tensorrt())


def _is_strongly_typed(trt: ModuleType) -> bool:
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED") or not hasattr(trt.BuilderFlag, "FP16")


def _network_flags(trt: ModuleType) -> int:
    """Bits of `create_network`: 8.6 has to know of the batch axis, 10 to keep the types of the ONNX file."""
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return flags


def _parse(trt: ModuleType, network: Any, model: bytes, onnx_path: Path) -> None:
    parser = trt.OnnxParser(network, tensorrt_logger())
    if parser.parse(model):
        return
    reasons = [str(parser.get_error(index)).strip() for index in range(parser.num_errors)]
    listed = "".join(f"\n  {number}. {reason}" for number, reason in enumerate(reasons, start=1))
    raise EngineryError(
        f"TensorRT {trt.__version__} can't parse {onnx_path}:{listed or ' ' + tensorrt_logger().take_errors()}\n"
        "Usual causes: an operator this version lacks, or a newer ONNX opset than it reads (8.6: opset 17)",
        code="onnx-not-parsed",
    )


def _io_tensors(network: Any) -> list[Any]:
    """Inputs, then outputs."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    return inputs + [network.get_output(index) for index in range(network.num_outputs)]


def _check_tensors(network: Any, onnx_path: Path, tensors: Tensors) -> None:
    names = [io_tensor.name for io_tensor in _io_tensors(network)]
    inputs, outputs = names[: network.num_inputs], names[network.num_inputs :]
    expected = [*tensors.profiles[0]]
    if inputs != expected or outputs != [*tensors.outputs]:
        raise UserError(
            f"{onnx_path} has inputs {inputs} and outputs {outputs}, expected inputs {expected} and outputs "
            f"{[*tensors.outputs]}: export it with these names, or name the model's own in its shapes",
            code="wrong-tensors",
        )


def _set_precision(trt: ModuleType, config: Any, precision: str, options: Collection[EngineOption]) -> tuple[str, ...]:
    """Ask for a precision. Returns the flags, in TensorRT's words."""
    flags: tuple[str, ...] = ()
    if precision == "fp32" and hasattr(trt.BuilderFlag, "TF32"):
        if "tf32" in options:
            flags = ("TF32",)  # on by default
        else:
            config.clear_flag(trt.BuilderFlag.TF32)  # FP32 in a report means FP32
    if _is_strongly_typed(trt):
        return (*flags, "STRONGLY_TYPED")  # the ONNX file says the precision, and TensorRT refuses flags beside it
    if precision != "fp32" and hasattr(trt.BuilderFlag, "FP16"):
        config.set_flag(trt.BuilderFlag.FP16)
        flags = (*flags, "FP16")
    if precision == "int8" and hasattr(trt.BuilderFlag, "INT8"):
        config.set_flag(trt.BuilderFlag.INT8)
        flags = (*flags, "INT8")
    return flags


def _set_options(trt: ModuleType, config: Any, options: Collection[EngineOption]) -> tuple[str, ...]:
    """Ask for all options but tf32, which `check_options` has seen. Returns the flags, in TensorRT's words."""
    flags: list[str] = []
    if "version_compatible" in options:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        flags.append(VERSION_COMPATIBLE)
    if "hardware_compatible" in options:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        flags.append(HARDWARE_COMPATIBLE)
    if "refittable" in options:
        config.set_flag(trt.BuilderFlag.REFIT)
        flags.append("REFIT")
    if "stripped" in options:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        flags.append(STRIPPED)
    return tuple(flags)


def check_options(options: Collection[EngineOption]) -> None:
    """Check that the TensorRT here has these options.

    Raises:
        UserError: it lacks an option.
        RuntimeUnavailable: TensorRT can't be used here.
    """
    trt = load_tensorrt()
    has: dict[EngineOption, bool] = {
        "version_compatible": hasattr(trt.BuilderFlag, "VERSION_COMPATIBLE"),
        "hardware_compatible": hasattr(trt, "HardwareCompatibilityLevel"),
        "stripped": hasattr(trt.BuilderFlag, "STRIP_PLAN"),
    }
    for option in options:
        if not has.get(option, True):
            raise UserError(
                f"TensorRT {trt.__version__} builds no {option} plans: take {option} out of export.engine_options, or "
                "use a newer TensorRT",
                code="option-unsupported",
                setting="engine_options",
            )


def _leave_out_external_kernels(trt: ModuleType, config: Any) -> None:
    """Build without kernels of cuBLAS and cuDNN, which 11 dropped: a plan should need TensorRT and the driver only."""
    sources = config.get_tactic_sources()
    if hasattr(trt.TacticSource, "CUBLAS"):
        sources &= ~(1 << int(trt.TacticSource.CUBLAS))
    if hasattr(trt.TacticSource, "CUBLAS_LT"):
        sources &= ~(1 << int(trt.TacticSource.CUBLAS_LT))
    if hasattr(trt.TacticSource, "CUDNN"):
        sources &= ~(1 << int(trt.TacticSource.CUDNN))
    config.set_tactic_sources(sources)


def _timing_cache_name(
    trt: ModuleType, precision: str, options: Collection[EngineOption], model: onnx.ModelProto
) -> str:
    """Timings hold for one TensorRT version, GPU model and driver.

    A file per network and precision, because 8.6 can't read all that it wrote for another one and does without the
    cache then, and per set of options, because timings belong to builder flags such as TF32 and REFIT (TensorRT
    developer guide, "Timing Cache"). A network is its operators, and so its layers in INT8, and the shapes of its
    weights: training again changes no name.
    """
    shapes = sorted(list(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) > 1)
    layers = digest_json([shapes, [node.op_type for node in model.graph.node]])
    name = f"tensorrt-{trt.__version__}_{torch.cuda.get_device_name()}_driver-{driver_version()}"
    name = "_".join([name, layers.removeprefix("sha256:")[:16], precision, *sorted(set(options))])
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()) + ".timing"


def _load_timing_cache(config: Any, cache_file: Path | None) -> None:
    """Give the build a timing cache: that of `cache_file` when there is a usable one, else an empty one."""
    known = b""
    try:
        known = cache_file.read_bytes() if cache_file is not None else b""
    except FileNotFoundError:
        pass  # the first build here
    except OSError as error:
        _log.warning("can't read the timing cache %s, so this build takes longer: %s", cache_file, error.strerror)
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):
        _log.warning(
            "the timing cache %s is not usable and starts again: %s", cache_file, tensorrt_logger().take_errors()
        )
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _save_timing_cache(config: Any, cache_file: Path | None) -> None:
    """Keep the timings for later builds. The plan, which took minutes, is as good where they can't be kept."""
    cache = config.get_timing_cache()
    if cache_file is None or cache is None:
        return
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache_file, memoryview(cache.serialize()).tobytes())
    except OSError as error:
        _log.warning("can't keep the timing cache %s, so the next build takes as long: %s", cache_file, error.strerror)


def cache_folder(settings: ExportConfig) -> Path | None:
    """Folder of calibration results and timing caches; None for none."""
    folder = settings.cache or os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else None


def check_tensorrt(settings: ExportConfig) -> None:
    """Refuse to begin what would end without the plans that are asked for.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here, and `settings.tensorrt` is "on".
    """
    if settings.tensorrt == "on" and (missing := tensorrt.why_unavailable()):
        raise RuntimeUnavailable(
            f"export.tensorrt is on, but {missing}", code="tensorrt-unavailable", setting="tensorrt"
        )


def build_plans(
    settings: ExportConfig,
    shapes: ShapeSpec,
    output: Path,
    cache: Path | None,
    log: StepLog,
    build_int8: Callable[[EngineEntry], EngineEntry] | None = None,
) -> tuple[tuple[EngineEntry, ...], str]:
    """Build the plans of all precisions beside the ONNX files in `output`. Returns them, and why there are none.

    Args:
        settings: of TensorRT.
        shapes: of the models.
        output: folder of the ONNX files, and of the plans.
        cache: folder of timing caches; None for none.
        log: gets progress.
        build_int8: makes the INT8 plan, given the FP16 plan; None compiles the INT8 file as it is.

    Raises:
        EngineryError: a plan can't be built, and `settings.tensorrt` is "on".
        UserError: the TensorRT here lacks one of `settings.engine_options`.
    """
    if settings.tensorrt == "off":
        return (), "export.tensorrt is off"
    if missing := tensorrt.why_unavailable():
        log.note(f"no TensorRT engines: {missing}")
        return (), missing
    check_options(settings.engine_options)  # asked for by name: with auto, too, it is no reason to do without
    graph = read_onnx(output / "fp32.onnx").graph
    entries: list[EngineEntry] = []
    for number, precision in enumerate(PRECISIONS):
        try:
            if precision == "int8" and build_int8 is not None:
                entry = build_int8(entries[-1])
            else:
                file = output / onnx_file_for(precision)
                with log.heartbeat("building engines", number, len(PRECISIONS), precision):
                    entry = compile_plan(settings, shapes, file, graph, precision=precision, cache=cache, log=log)
        except EngineryError as error:
            if settings.tensorrt == "on":
                raise
            log.warning(f"no {precision} engine: {error}")
            return tuple(entries), str(error)
        log.metrics({f"engine_build_seconds_{precision}": entry.build_seconds})
        entries.append(entry)
    log.progress("building engines", len(PRECISIONS), len(PRECISIONS))
    return tuple(entries), ""


def compile_plan(
    settings: ExportConfig,
    shapes: ShapeSpec,
    onnx_path: Path,
    graph: onnx.GraphProto,
    *,
    precision: Precision,
    cache: Path | None,
    log: StepLog,
) -> EngineEntry:
    """Build a plan beside an ONNX file, and ask for the layers of its convolutions, which are those of `graph`.

    Raises:
        EngineryError: it can't be built; nothing is left of it.
    """
    plan_path = onnx_path.with_name(f"{precision}.plan")
    convolutions = [node_id(node) for node in graph.node if node.op_type == "Conv"]
    try:
        entry = build_engine(
            onnx_path,
            plan_path,
            precision=precision,
            shapes=shapes,
            timing_cache_path=cache / TIMING_CACHES if cache else None,
            optimization_level=settings.optimization_level,
            workspace_bytes=settings.workspace_bytes,
            options=settings.engine_options,
            mantissa_bits=settings.fp16_mantissa_bits,
        )
        return entry.model_copy(update={"layers": inspect_engine(plan_path, entry, shapes, convolutions)})
    except UnreadableLayers as error:
        log.warning(f"the report says nothing of the layers of {plan_path.name}: {error}")
        return entry
    except EngineryError:
        plan_path.unlink(missing_ok=True)  # a plan that no entry tells of would be shipped, and nobody would measure it
        raise


def describe_plans(entries: Sequence[EngineEntry]) -> str:
    """Return a few words on what was built, and on how much of the INT8 engine is INT8."""
    if not entries:
        return "no TensorRT engines here"
    text = f"{len(entries)} TensorRT engines"
    for entry in entries:
        if entry.precision == "int8" and entry.layers is not None:
            total = sum(entry.layers.convolutions.values())
            text += f", {entry.layers.convolutions.get('INT8', 0)} of {total} convolutions in INT8"
    return text
