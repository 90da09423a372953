"""What can be told before anything runs: files that are not there, and memory that can't suffice."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from components.common.artifacts import MANIFEST
from components.common.environment import gpus
from components.common.errors import UserError
from components.preprocess.sources import check_data_folder
from pipelines.diagnosis.machine import memory_limit
from pipelines.formats import size_text

# What backward needs from forward in FP32, in bytes per image and pixel of image_size squared. Counted with
# torch.autograd.graph.saved_tensors_hooks on meta tensors; ResNet-50: 86 MB per image at 224 px.
_ACTIVATION_BYTES_PER_PIXEL = {
    "resnet18": 443,
    "resnet34": 643,
    "resnet50": 1716,
    "resnet101": 2537,
    "resnet152": 3548,
    "resnext50_32x4d": 2242,
    "wide_resnet50_2": 2242,
    "mobilenet_v2": 1562,
    "mobilenet_v3_large": 881,
    "efficientnet_b0": 1761,
    "convnext_tiny": 2176,
    "densenet121": 2605,
}
_REST_BYTES = 2 * 10**9  # PyTorch, DALI's buffers, weights with gradients and momentum
_MIN_BATCH = 8  # with fewer images BatchNorm learns little


def check_paths(arguments: Mapping[str, Any]) -> None:
    """Look for the files that a run names; of data behind a URI only whether it can be read here at all.

    Raises:
        UserError: there is no such data folder or model on this machine.
    """
    data, model = (str(arguments.get(name) or "") for name in ("data", "model"))
    if data:
        check_data_folder(data)
    path = Path(model)
    if model and "://" not in model and not path.is_file() and not (path / MANIFEST).is_file():
        raise UserError(
            f"there is no model at {path}; name a Checkpoint or Bundle directory, an .onnx file, or weights "
            "(.safetensors, .pt, .pth) together with --architecture"
        )


def training_bytes(arguments: Mapping[str, Any]) -> int | None:
    """Memory that the activations of one training step take on a CPU; None where the model is not in the table."""
    settings = arguments.get("train", {})
    per_pixel = _ACTIVATION_BYTES_PER_PIXEL.get(str(arguments.get("architecture")))
    if per_pixel is None or "global_batch_size" not in arguments:
        return None
    factor = 0.5 if settings.get("precision") in ("bf16", "fp16") else 1.0
    return round(factor * per_pixel * arguments["image_size"] ** 2 * _images_at_once(arguments))


def _images_at_once(arguments: Mapping[str, Any]) -> int:
    """Images whose activations are in memory together: a step's, or a part of them where gradients are accumulated."""
    settings, whole = arguments.get("train", {}), int(arguments["global_batch_size"])
    each = settings.get("per_gpu_batch_size", 0)
    return min(whole, each * (settings.get("num_processes", 0) or 1)) if each else whole


def check_memory(arguments: Mapping[str, Any]) -> str:
    """Compare what training on this machine's CPU takes with what there is.

    Returns:
        A warning where it is likely not enough; empty where it is, where a GPU trains, or where it is not known.

    Raises:
        UserError: more than the machine has at all, so that the run would end by being killed.
    """
    needed_bytes = None if gpus() else training_bytes(arguments)
    if needed_bytes is None:
        return ""
    total_bytes, available_bytes = _memory()
    if needed_bytes + _REST_BYTES <= available_bytes:
        return ""
    batch_size, image_size = _images_at_once(arguments), arguments["image_size"]
    per_image = needed_bytes / batch_size
    needs = (
        f"training {arguments['architecture']} at {image_size} px with batch {batch_size} on a CPU takes about "
        f"{size_text(needed_bytes + _REST_BYTES)} of memory"
    )
    fitting = 1
    while 2 * fitting * per_image + _REST_BYTES <= available_bytes and 2 * fitting < batch_size:
        fitting *= 2
    smaller = f"--global-batch-size {fitting}, " if fitting >= _MIN_BATCH else ""
    fix = f"Try {smaller}a smaller --image-size than {image_size}, or a machine with an NVIDIA GPU"
    if needed_bytes > total_bytes:
        raise UserError(f"{needs}, and this machine has {size_text(total_bytes)}. {fix}")
    return f"{needs}, and {size_text(available_bytes)} are available: it may be killed. {fix}"


def _memory() -> tuple[int, int]:
    """Memory that there is with swap, and what of it is available now, both inside a container's limit; in bytes."""
    memory = psutil.virtual_memory()
    total_bytes, available_bytes = memory.total + psutil.swap_memory().total, memory.available
    limit_bytes = memory_limit()
    if limit_bytes is None:
        return total_bytes, available_bytes
    return min(total_bytes, limit_bytes), min(available_bytes, limit_bytes)
