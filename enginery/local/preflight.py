"""Checks before anything runs: data or a model that can't be used, too few images, too little memory."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil

from components.common.contracts.environment import environment, gpus
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import MANIFEST, check_task, claims_of
from components.common.contracts.records import CALIBRATION_METHODS
from components.common.contracts.settings import resolve
from components.common.contracts.statistics import SIGNIFICANCE, chance_of
from components.common.contracts.verdict import SPEED_SETTINGS
from components.common.data.read_alike import Rejected, decode
from components.common.runtimes import RUNTIMES
from components.common.tasks import TASKS, task_of
from components.export.config import ExportConfig
from components.export.model_check import check_apart
from components.gate.config import GateConfig
from components.preprocess.config import PreprocessConfig
from components.preprocess.sources import (
    FOLDER,
    Source,
    Unreadable,
    check_data_folder,
    find_samples,
    is_listed_soon,
    is_uri,
    kind_of,
    local_path,
    read_sample,
)
from components.preprocess.sources.parallel_text import find_texts
from components.train.config import TrainConfig
from components.validate.config import ValidateConfig
from enginery.doctor.machine import memory_limit
from enginery.formats import size_text

if TYPE_CHECKING:
    from components.common.runtimes.counting import TrainingMemory

# What the activations of the largest of torchvision's classifiers, vit_h_14, take in FP32, per image and pixel, and its
# weights, their gradients and two moments: where as much fits, nothing need be counted.
_MOST_BYTES_PER_PIXEL = 14_000
_MOST_FIXED_BYTES = 632_045_800 * 16
_MOST_BYTES_PER_TOKEN = 10**6
_MOST_FIXED_BYTES_OF_TEXT = 2 * 10**9
_FEW_TOKENS = 16  # of a sentence, where nobody has counted them yet: longer ones take more
_LEAST_SIZE = 64  # of images: smaller ones are padded, and take up to as much
_REST_BYTES = 2 * 10**9  # PyTorch, DALI's buffers
_MIN_BATCH = 8  # with fewer images BatchNorm learns little
_MAX_OPENED = 256  # files that are opened to see whether any is an image
_MAX_UNPACKED_BYTES = 1 << 26  # of a compressed archive that is unpacked to list it
_LISTING_S = 10.0  # that listing a folder behind a URI may take


def check_inputs(arguments: Mapping[str, Any], *, in_containers: bool = False) -> str:
    """Look at a run's data and model as far as that takes seconds, so that nothing is packed in vain.

    Behind a URI only a table is listed, or a folder of images that takes a moment, and of compressed archives small
    ones. Otherwise weights are only read; the steps do the rest.

    Args:
        arguments: of the run.
        in_containers: see `check_measurements`.

    Returns:
        What could not be looked at; empty where all was.

    Raises:
        UserError: they can't be used, don't fit each other, or can't give the proof that the gate asks for.
        EngineryError: the model is damaged.
    """
    check_paths(arguments)
    _check_task(arguments)
    _check_architecture(arguments)
    _check_pretrained(arguments)
    check_measurements(arguments, in_containers=in_containers)
    if _is_text(arguments):
        _check_texts(arguments)
        return ""
    with TemporaryDirectory() as scratch:
        source = _listed(arguments, Path(scratch))
        if source is not None:
            _check_for_images(source, arguments)
            val = source.splits["val"]
            most = Counter(sample.label for sample in val).most_common(1)[0][1]
            num_train = len(source.splits["train"]) - source.num_refused
            check_validation(arguments, num_train, num_val=len(val), num_of_class=most)
    _check_exportable(arguments)
    if (model := str(arguments.get("model") or "")) and "://" not in model:
        classes = source.classes if source is not None else None
        image_size = int(arguments.get("image_size") or 224)
        check_apart(Path(model), str(arguments.get("architecture") or ""), classes, image_size)
    if source is not None or "preprocess" not in arguments:
        return ""
    return (
        f"listing {arguments['data']} takes long, so whether its validation images are enough for the gate is checked "
        "after preprocess"
    )


def _check_task(arguments: Mapping[str, Any]) -> None:
    """Refuse a Checkpoint or Bundle of another task, before its data is read as that of this one."""
    file = Path(str(arguments.get("model") or "")) / MANIFEST
    found = claims_of(file.read_bytes()).get("task") if file.is_file() else None
    if isinstance(found, str) and found in TASKS:
        fix = f"`enginery run {TASKS[found].pipeline}` trains and quantizes such models"
        check_task(f"the model {file.parent}", found, task_of(str(arguments.get("architecture") or "")), fix)


def _check_architecture(arguments: Mapping[str, Any]) -> None:
    """Refuse a network that there is not. The usual one needs no look-up, and of a model `check_apart` does it."""
    architecture = str(arguments.get("architecture") or "")
    if architecture in ("", TrainConfig.model_fields["architecture"].default) or arguments.get("model"):
        return
    from components.common.runtimes.architectures import check_architecture

    check_architecture(architecture)


def _check_exportable(arguments: Mapping[str, Any]) -> None:
    """Refuse a network that would be trained in vain. Of torchvision's all can be exported, of timm's most."""
    architecture = str(arguments.get("architecture") or "")
    if "timm/" in architecture and not arguments.get("model"):
        from components.export.onnx_export import check_exportable

        check_exportable(architecture, arguments["image_size"])


def _check_pretrained(arguments: Mapping[str, Any]) -> None:
    settings = arguments.get("train") or {}
    if not settings.get("pretrained"):
        return
    from components.train.fine_tuning import check_pretrained

    own = {"architecture": arguments["architecture"]} if arguments.get("architecture") else {}
    check_pretrained(resolve(TrainConfig, "train", settings, own))


def _is_text(arguments: Mapping[str, Any]) -> bool:
    return TASKS[task_of(str(arguments.get("architecture") or ""))].of_text


def _check_texts(arguments: Mapping[str, Any]) -> None:
    """Refuse a folder without files of pairs, which are read by the step; behind a URI it finds them."""
    data = str(arguments.get("data") or "")
    if "preprocess" in arguments and data and not is_uri(data):
        config = _preprocess_config(arguments)
        find_texts(data, (config.source_language, config.target_language), Path())


def _listed(arguments: Mapping[str, Any], scratch: Path) -> Source | None:
    """The samples that the preprocess step will find; None where finding it takes longer than a moment."""
    data = str(arguments.get("data") or "")
    if "preprocess" not in arguments or not data or not _is_listed_soon(data):
        return None
    config = _preprocess_config(arguments)
    return find_samples(
        data,
        val_fraction=config.val_fraction,
        seed=config.seed,
        class_names_file=config.class_names_file,
        scratch=scratch,
        task=config.task,
    )


def _is_listed_soon(data: str) -> bool:
    kind = kind_of(data)
    if is_uri(data):
        return kind.is_table or (kind is FOLDER and is_listed_soon(data, seconds=_LISTING_S))
    return not kind.is_compressed or local_path(data).stat().st_size <= _MAX_UNPACKED_BYTES


def _preprocess_config(arguments: Mapping[str, Any]) -> PreprocessConfig:
    own = {name: arguments[name] for name in ("data", "seed") if name in arguments}
    task = {"task": task_of(str(arguments.get("architecture") or ""))}
    return resolve(PreprocessConfig, "preprocess", arguments["preprocess"], own, task)


def _check_for_images(source: Source, arguments: Mapping[str, Any]) -> None:
    """Open files, spread over the data, until one is an image, which most often is the first."""
    max_pixels = _preprocess_config(arguments).max_pixels
    samples = [sample for split in source.splits.values() for sample in split]
    opened = samples[:: math.ceil(len(samples) / _MAX_OPENED)]
    reason = ""
    for sample in opened:
        try:
            decode(read_sample(source.storage, sample), max_pixels)
            return
        except (OSError, Unreadable, Rejected) as error:
            reason = reason or f"{sample.path}: {error}"
    raise UserError(
        f"{arguments['data']} holds no image that can be used: {len(opened):,} of its {len(samples):,} files were "
        f"opened, such as {reason}. Name a folder with images that open in a viewer, or, in a table, whole paths of "
        "such images, as a/b.jpg",
        code="no-usable-image",
        setting="--data",
    )


def check_measurements(arguments: Mapping[str, Any], *, in_containers: bool = False) -> None:
    """Refuse a run that would end without plans that it asks for, or without what its gate judges.

    Args:
        arguments: of the run.
        in_containers: the steps have TensorRT, whatever is installed here.

    Raises:
        UserError: a setting of export, validate or gate asks for what this machine does not do.
    """
    if not {"export", "validate", "gate"} <= arguments.keys():
        return
    export, thresholds = resolve(ExportConfig, "export", arguments["export"]), _thresholds(arguments)
    own = {name: arguments[name] for name in ("latency_budget",) if name in arguments}
    validate = resolve(ValidateConfig, "validate", arguments["validate"], own, {"gate": thresholds})
    no_plans = "export.tensorrt is off" if export.tensorrt == "off" else _no_tensorrt(in_containers)
    usable = (each for each in RUNTIMES.values() if each.is_automatic and not (each.runs_plans and no_plans))
    runtime = next(usable) if validate.runtime == "auto" else RUNTIMES[validate.runtime]
    file = Path(str(arguments.get("model") or "")) / MANIFEST
    is_bundle = file.is_file() and claims_of(file.read_bytes()).get("kind") == "bundle"
    max_batch = math.inf if is_bundle else export.max_batch  # a bundle keeps its own
    sizes = [size for size in validate.batch_sizes(on_gpu=runtime.runs_plans) if size <= max_batch]
    if is_bundle and no_plans:
        raise _refusal("--model", f"of a bundle only plans are built, but {no_plans}. Give the model itself")
    if export.tensorrt == "on" and no_plans:
        raise _refusal("export.tensorrt", f"plans are asked for (on), but {no_plans}. Set it to auto")
    if runtime.runs_plans and no_plans:
        raise _refusal("validate.runtime", f"{runtime.label} is asked for, but {no_plans}. Set it to auto")
    smoothing = {name for name, method in CALIBRATION_METHODS.items() if method.is_smoothing}
    for setting, is_set, off in (
        ("export.calibration_method", arguments.get("calibration_method") in smoothing, "auto"),
        ("validate.corruptions", validate.corruptions, "false"),
        ("gate.max_class_drop_points", thresholds.max_class_drop_points > 0, "0"),
        ("train.image_sizes", bool((arguments.get("train") or {}).get("image_sizes")), "[]"),
    ):
        if is_set and _is_text(arguments):
            raise _refusal(setting, f"it is about networks of images, and this one translates. Set it to {off}")
    for setting, asks, off in (
        ("gate.precision", thresholds.precision == "fp16", "int8"),
        ("gate.min_speedup_fp16", thresholds.min_speedup_fp16 > 0, "0"),
    ):
        if asks and "fp16" not in runtime.precisions:
            why = f"{runtime.label} would measure, which has no FP16 on CPUs{f' ({no_plans})' if no_plans else ''}"
            raise _refusal(
                setting, f"it needs FP16, but {why}. Use a machine with TensorRT and a GPU, or set it to {off}"
            )
    for name in SPEED_SETTINGS:
        if getattr(thresholds, name) and not runtime.measures_speed:
            text = f"the speed of {runtime.label} is not measured. Set validate.runtime to auto, or this to 0"
            raise _refusal(f"gate.{name}", text)
    if thresholds.max_p99_ms and thresholds.p99_batch_size not in sizes:
        text = f"{thresholds.p99_batch_size} is not among the batches that are measured ({', '.join(map(str, sizes))})"
        raise _refusal("gate.p99_batch_size", f"{text}. Take one of them, or name it in validate.benchmark_batch_sizes")


def _refusal(setting: str, text: str) -> UserError:
    return UserError(f"{setting}: {text}", code="not-measured-here", setting=setting)


def _no_tensorrt(in_containers: bool) -> str:
    """Return why no plans can be built and run here; empty where they may."""
    if not gpus():
        return "there is no usable NVIDIA GPU here"
    if not in_containers and "tensorrt" not in environment().versions:
        return "TensorRT is not installed (`make install-tensorrt`)"
    return ""


def _thresholds(arguments: Mapping[str, Any]) -> GateConfig:
    own = {name: arguments[name] for name in ("max_drop_points",) if name in arguments}
    return resolve(GateConfig, "gate", arguments["gate"], own)


def check_validation(arguments: Mapping[str, Any], num_train: int, *, num_val: int, num_of_class: int) -> None:
    """Refuse data whose validation images are too few for the gate, whatever the model answers.

    Args:
        arguments: of the run.
        num_train: training images.
        num_val: validation images.
        num_of_class: those of the most frequent class.

    Raises:
        UserError: the validation images are too few, or too many of them are of one class.
    """
    if "gate" not in arguments:
        return
    thresholds = _thresholds(arguments)
    needed: float = thresholds.min_validation_images
    why, allow = f"gate.min_validation_images is {needed:,}", f"--set gate.min_validation_images={num_val}"
    task = TASKS[task_of(str(arguments.get("architecture") or ""))]
    is_share, unit = task.classifies, task.unit
    # of mAP, mIoU and BLEU images prove a share of FP32's score, which is not known yet
    budgets = {"a larger --max-drop-points": thresholds.max_drop_points} if is_share else {}
    if thresholds.min_relative_score_pct > 0:
        budgets["a smaller gate.min_relative_score_pct"] = 100 - thresholds.min_relative_score_pct
    if thresholds.confident and budgets:
        proving = {fix: images_to_prove(points, is_share=is_share) for fix, points in budgets.items()}
        if max(proving.values()) > max(needed, num_val):
            needed = max(proving.values())
            drop = f"{min(budgets.values()):g} {'points' if is_share else '% of the score'}"
            why = f"a drop of at most {drop} can't be proved by fewer, even if INT8 answers all as FP32"
            tight = " and ".join(fix for fix, number in proving.items() if number > num_val)
            also = f"; either also needs {allow}" if num_val < thresholds.min_validation_images else ""
            allow = f"{tight}, or --set gate.confident=false, which judges the measured drop alone{also}"
    if num_val >= needed:
        if is_share:
            _check_chance(thresholds, num_val, num_of_class)
        return
    total = num_val + num_train
    share = math.ceil(100 * needed / total) / 100 if needed < math.inf else 1.0
    more = f"--set preprocess.val_fraction={share:g} where the data has no val/ of its own" if share <= 0.5 else ""
    least = f"at least {needed:,} are needed" if needed < math.inf else "no number is enough"
    fixes = ", ".join(filter(None, (f"more {unit}" if needed < math.inf else "", more)))
    raise UserError(
        f"{num_val:,} of the {total:,} {unit} validate, and {least}: {why}. "
        f"Give {f'{fixes}, or ' if fixes else ''}{allow}",
        code="too-few-validation-images",
        setting="gate.min_validation_images",
    )


def _check_chance(thresholds: GateConfig, num_images: int, most: int) -> None:
    """Refuse images of which so many are of one class that always answering it can't be told from a perfect model."""
    if not thresholds.require_above_chance or chance_of(num_images, num_images, most / num_images) < SIGNIFICANCE:
        return
    raise UserError(
        f"{most:,} of {num_images:,} validation images are of one class, so even a model that is right on all of them "
        "is not significantly above one that always answers it. Give more images of other classes, or "
        "--set gate.require_above_chance=false",
        code="one-sided-validation-images",
        setting="gate.require_above_chance",
    )


def images_to_prove(budget_points: float, *, is_share: bool = True) -> float:
    """Fewest images that prove a drop to be within a budget, where both models answer all of them alike.

    The exact one-sided 95 % interval of a share of which no case was seen (the rule of three: at most about 3 of N). Of
    a score that is no share of images, 3 / N of FP32's: see bootstrap_comparison.
    """
    share = budget_points / 100
    if share <= 0:
        return math.inf
    if not is_share:
        return math.ceil(round(3 / share, 6))
    return 1 if share >= 1 else math.ceil(math.log(SIGNIFICANCE) / math.log1p(-share))


def check_paths(arguments: Mapping[str, Any]) -> None:
    """Look for the files that a run names; of data behind a URI only whether it can be read here at all.

    Raises:
        UserError: there is no such data folder or model on this machine.
    """
    data, model = (str(arguments.get(name) or "") for name in ("data", "model"))
    if data:
        check_data_folder(data, task_of(str(arguments.get("architecture") or "")))
    path = Path(model)
    if model and "://" not in model and not path.is_file() and not (path / MANIFEST).is_file():
        raise UserError(
            f"there is no model at {path}; name a Checkpoint or Bundle directory, an .onnx file, or weights "
            "(.safetensors, .pt, .pth) together with --architecture",
            code="no-model",
            setting="--model",
        )


def training_memory(arguments: Mapping[str, Any]) -> "TrainingMemory | None":
    """Memory of a training step; None where nothing is trained, or the model is one that can't be counted."""
    settings, architecture = arguments.get("train", {}), str(arguments.get("architecture") or "")
    if not architecture or "global_batch_size" not in arguments:
        return None
    precision = settings.get("precision", "auto")
    half = precision in ("bf16", "fp16") or (precision == "auto" and bool(gpus()))
    try:
        num_moments = 1 if settings.get("optimizer", "sgd") == "sgd" else 2
        return _count(architecture, _input_size(arguments), half, bool(settings.get("freeze_backbone")), num_moments)
    except UserError:  # such as of an image size that the network does not take: the step says it
        return None


@functools.cache
def _count(architecture: str, size: int, half: bool, frozen: bool, num_moments: int) -> "TrainingMemory":
    from components.common.runtimes import counting
    from components.train.fine_tuning import freeze_backbone

    def prepare(model: Any) -> None:
        if frozen:
            freeze_backbone(model, architecture)

    return counting.training_memory(architecture, size, half=half, num_moments=num_moments, prepare=prepare)


def _input_size(arguments: Mapping[str, Any]) -> int:
    """Side of the images in pixels, or tokens of a sentence."""
    if _is_text(arguments):
        return _FEW_TOKENS
    return max((arguments["image_size"], *arguments.get("train", {}).get("image_sizes", ())))


def _images_at_once(arguments: Mapping[str, Any], num_gpus: int) -> int:
    """Images whose activations are in one memory together: of a step, or of a part of it where gradients accumulate.

    Processes on a CPU share its memory; each GPU has its own.
    """
    settings, whole = arguments.get("train", {}), int(arguments["global_batch_size"])
    each = settings.get("per_gpu_batch_size", 0)
    num_processes = settings.get("num_processes", 0) or num_gpus or 1
    if num_gpus:
        return int(min(each or whole, max(1, whole // num_processes)))
    return min(whole, each * num_processes) if each else whole


def check_memory(arguments: Mapping[str, Any]) -> str:
    """Compare what training takes with the memory of this machine's GPUs, or without one of its CPU.

    Returns:
        A warning where it is likely not enough; empty where it is, or where it is not known.

    Raises:
        UserError: more than the machine has at all, so that a run on its CPU would end by being killed.
    """
    if "global_batch_size" not in arguments or not arguments.get("architecture"):
        return ""
    devices, size, of_text = gpus(), _input_size(arguments), _is_text(arguments)
    batch_size = _images_at_once(arguments, len(devices))
    memory_bytes = min(gpu.memory_bytes for gpu in devices) if devices else _memory()[1]
    is_small = not arguments["architecture"].startswith("timm/")
    each, fixed = max(size, _LEAST_SIZE) ** 2 * _MOST_BYTES_PER_PIXEL, _MOST_FIXED_BYTES
    if of_text:
        each, fixed = size * _MOST_BYTES_PER_TOKEN, _MOST_FIXED_BYTES_OF_TEXT
    if is_small and batch_size * each + fixed + _REST_BYTES <= memory_bytes:
        return ""
    memory = training_memory(arguments)
    if memory is None:
        return ""
    of = f"on sentences of {size} tokens" if of_text else f"at {size} px"
    start = f"training {arguments['architecture']} {of} with batch {batch_size} on a"
    if devices:
        return _check_gpu_memory(arguments, memory, batch_size, f"{start} GPU")
    needed_bytes = memory.needed_bytes(batch_size) + _REST_BYTES
    total_bytes, available_bytes = _memory()
    if needed_bytes <= available_bytes:
        return ""
    needs = f"{start} CPU takes about {size_text(needed_bytes)} of memory"
    fitting = memory.largest_batch(available_bytes - _REST_BYTES) // _MIN_BATCH * _MIN_BATCH
    if memory.fixed_bytes + _REST_BYTES > total_bytes:
        needs += f", {size_text(memory.fixed_bytes)} of it for weights, gradients and optimizer at any batch"
    smaller = f"--global-batch-size {fitting}, " if fitting else ""
    fix = f"Try {smaller}{_smaller_input(arguments)}, or a machine with an NVIDIA GPU"
    if needed_bytes > total_bytes:
        text = f"{needs}, and this machine has {size_text(total_bytes)}. {fix}"
        raise UserError(text, code="too-little-memory", setting="--global-batch-size")
    return f"{needs}, and {size_text(available_bytes)} are available: it may be killed. {fix}"


def _check_gpu_memory(arguments: Mapping[str, Any], memory: "TrainingMemory", batch_size: int, start: str) -> str:
    """Warn only: a compiled model may keep less than what autograd would."""
    gpu = min(gpus(), key=lambda each: each.memory_bytes)
    needed_bytes = memory.needed_bytes(batch_size) + _REST_BYTES
    if needed_bytes <= gpu.memory_bytes:
        return ""
    # Gradients accumulate over equal parts.
    largest = memory.largest_batch(gpu.memory_bytes - _REST_BYTES)
    fitting = next((n for n in range(largest, 0, -1) if batch_size % n == 0), 0)
    text = f"{start} takes about {size_text(needed_bytes)} of memory, and {gpu.name} has {size_text(gpu.memory_bytes)}"
    smaller = _smaller_input(arguments)
    if fitting:
        unit = TASKS[task_of(arguments["architecture"])].unit
        return f"{text}. At most {largest} {unit} fit: try --set train.per_gpu_batch_size={fitting}, or {smaller}"
    if memory.fixed_bytes + _REST_BYTES > gpu.memory_bytes:
        fixed = size_text(memory.fixed_bytes)
        return f"{text}: weights, gradients and optimizer alone take {fixed}. Try a smaller network or a larger GPU"
    return f"{text}, too little for one. Try {smaller}"


def _smaller_input(arguments: Mapping[str, Any]) -> str:
    if _is_text(arguments):
        return "a smaller --architecture"
    return f"a smaller --image-size than {_input_size(arguments)}"


def _memory() -> tuple[int, int]:
    """Memory that there is with swap, and what of it is available now, both inside a container's limit; in bytes."""
    memory = psutil.virtual_memory()
    total_bytes, available_bytes = memory.total + psutil.swap_memory().total, memory.available
    limit_bytes = memory_limit()
    if limit_bytes is None:
        return total_bytes, available_bytes
    return min(total_bytes, limit_bytes), min(available_bytes, limit_bytes)
