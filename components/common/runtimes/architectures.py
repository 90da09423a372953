"""Models by name, over torchvision and timm."""

import difflib
import pickle
import re
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from components.common.contracts.errors import UserError, shortened
from components.common.contracts.foreign import refuse_lfs_pointer
from components.common.tasks import TASKS, TaskName, networks_of, task_of

_MAX_PROBLEMS = 3  # that are shown of weights that don't fit
_WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")  # that DataParallel and torch.compile put before names
_USUAL_SIZES = (224, 256, 288, 320)  # of images, in pixels


def _known_architectures(task: TaskName) -> list[str]:
    """Names that `build_model` takes, with NAME for one of timm's."""
    if not TASKS[task].classifies:
        return [f"{task}/{each}" for each in networks_of(task)]
    import torchvision  # which takes half as long to import as all of PyTorch; an ONNX file needs none of it

    return ["timm/NAME", *torchvision.models.list_models(module=torchvision.models)]


def check_architecture(architecture: str) -> None:
    """Look up a network's name as `build_model` takes it, without building it.

    Raises:
        UserError: no such model; it names the closest ones.
    """
    task = task_of(architecture)
    network, is_timm, name = architecture.partition("timm/")
    known = _known_architectures(task)
    if (f"{network}timm/NAME" if is_timm else architecture) not in known:
        usual, also = known, ""
        if TASKS[task].classifies:
            usual = ["resnet50", "mobilenet_v2", "efficientnet_b0"]
            also = " (any of torchvision's classifiers; timm's as timm/NAME)"
        of_others = [name for other in TASKS if other != task for name in _known_architectures(other)]
        otherwise = f"such as {', '.join(usual)}"
        raise _unknown(f"no model {architecture!r}", architecture, [*known, *of_others], otherwise, also)
    if is_timm:
        import timm

        if not timm.is_model(name):
            listed = "`python -c 'import timm; print(timm.list_models())'` lists them"
            raise _unknown(f"timm has no model {name!r}", name, timm.list_models(), listed)


def _unknown(what: str, name: str, known: list[str], otherwise: str, also: str = "") -> UserError:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else otherwise
    return UserError(f"{what}; {hint}{also}", code="unknown-architecture", setting="architecture")


def build_model(architecture: str, num_classes: int) -> nn.Module:
    """A network with fresh weights and `num_classes` outputs.

    Args:
        architecture: a torchvision name such as "resnet50", or "timm/" and a timm name; for another task than
            classification its name and one of its networks, such as "segmentation/fpn_small"; some of these take a
            backbone of timm, such as "detection/fcos_fpn/timm/convnext_tiny".
        num_classes: outputs of the last layer.

    Raises:
        UserError: no such model.
    """
    check_architecture(architecture)
    if not TASKS[task := task_of(architecture)].classifies:
        own = networks_of(task)
        name, has_backbone, backbone = architecture.removeprefix(f"{task}/").partition("/timm/")
        return own[f"{name}/timm/NAME"](num_classes, backbone) if has_backbone else own[name](num_classes)
    if architecture.startswith("timm/"):
        import timm

        return timm.create_model(architecture.removeprefix("timm/"), num_classes=num_classes)
    options: dict[str, object] = {}
    if architecture in ("googlenet", "inception_v3"):
        # From torchvision's own first weights, of std 0.1, inception_v3 learns slowly: PyTorch's default is used.
        options = {"aux_logits": False, "init_weights": False}
    if architecture.startswith(("resnet", "resnext", "wide_resnet")):
        # A residual branch that starts at zero trains faster and more stably from scratch (Goyal et al., 2017).
        options = {"zero_init_residual": True}
    import torchvision

    return torchvision.models.get_model(architecture, weights=None, num_classes=num_classes, **options)


def call_on_meta(model: nn.Module, images: torch.Tensor) -> Any:
    """Run a model on copies of its tensors that have no data, and return its output; the model stays as it is.

    Args:
        model: any.
        images: on the meta device.
    """
    # Each tensor by one name: with two, as of a module in two places, torch puts back the copy instead.
    weights = {
        f"{path}.{name}".removeprefix("."): torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for path, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    return torch.func.functional_call(model, weights, (images,), tie_weights=False)


def read_weights(path: Path, source: str = "") -> dict[str, torch.Tensor]:
    """Weights by name from a .safetensors file or a plain state_dict; nothing in it is run.

    Args:
        path: the file.
        source: where it came from, in messages; empty for `path`.

    Raises:
        UserError: there is no such file, it can't be read, or it holds something else.
    """
    source = source or str(path)
    is_safetensors = path.suffix.lower() == ".safetensors"
    try:
        refuse_lfs_pointer(path, source)
        _refuse_packed(path, source)
        weights = load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no weights file {source}", code="weights-missing") from None
    except UserError:
        raise
    except Exception as error:  # whatever damaged files make the readers raise
        if not is_safetensors and not _is_from_torch(path):
            raise UserError(
                f"can't read the weights in {source}: torch.save did not write it, or it is damaged", code="not-weights"
            ) from None
        if "TorchScript" in str(error):
            raise _no_weights_but_torchscript(source) from None
        if isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{source} holds more than weights, and loading it would run code from the file. "
                "Save plain weights with torch.save(model.state_dict(), path) or as .safetensors",
                code="weights-hold-code",
            ) from None
        raise UserError(
            f"can't read the weights in {source}: the file is damaged or cut short, so copy or save it again "
            f"({type(error).__name__}: {shortened(error)})",
            code="not-weights",
        ) from None
    for key in ("state_dict", "model"):  # as timm and torchvision's training scripts save them, beside the optimizer's
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise UserError(
            f"{source} is no plain state_dict; save one with torch.save(model.state_dict(), path)", code="not-weights"
        )
    if all(name.startswith("model.") for name in weights):  # where a LightningModule has it
        weights = {name.removeprefix("model."): value for name, value in weights.items()}
    return {_WRAPPERS.sub("", name): value for name, value in weights.items()}


def _refuse_packed(path: Path, source: str) -> None:
    """Refuse a zip whose entries unpack to more than it has bytes, as torch.save writes none."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return
    with zipfile.ZipFile(path) as archive:
        num_bytes = sum(entry.file_size for entry in archive.infolist())
        is_torchscript = any(name.endswith("/constants.pkl") for name in archive.namelist())
    if num_bytes > path.stat().st_size:
        if is_torchscript:  # whose code is packed
            raise _no_weights_but_torchscript(source)
        message = f"{source} unpacks to {num_bytes:,} bytes, more than it has; save the weights again with torch.save"
        raise UserError(message, code="weights-packed")


def _no_weights_but_torchscript(source: str) -> UserError:
    return UserError(
        f"{source} is a TorchScript program, not weights. Give the model as ONNX (torch.onnx.export), or its "
        "weights alone: torch.save(torch.jit.load(path).state_dict(), other_path)",
        code="torchscript",
    )


def _is_from_torch(path: Path) -> bool:
    """True if a file begins as those of torch.save do: a zip archive, or a pickle as of old."""
    with path.open("rb") as file:
        start = file.read(2)
    return start == b"PK" or start[:1] == b"\x80"


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Load weights strictly.

    Raises:
        UserError: names or shapes don't fit the model, or a number is no floating-point one, or not finite.
    """
    named = OrderedDict(weights)
    named._metadata = {"": {"version": model._version}}  # type: ignore[attr-defined]  # MNASNet asks for it
    try:
        model.load_state_dict(named, strict=True)
    except RuntimeError as error:
        problems = [shortened(line.rstrip(". "), 200) for line in str(error).splitlines()[1:]]
        more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise UserError(
            f"the weights in {source} don't fit this model: {'; '.join(problems[:_MAX_PROBLEMS])}{more}; name the "
            "architecture that they are of, and data with as many classes",
            code="weights-do-not-fit",
        ) from None
    for name, values in model.state_dict().items():  # of this model's size: a file's few bytes may claim any
        if not values.is_floating_point():
            continue
        if name in weights and not (given := weights[name]).is_floating_point():
            message = (
                f"the weights {name!r} in {source} are {given.dtype}, as of a quantized model; give those in floating "
                "point that it was made from"
            )
            raise UserError(message, code="weights-not-float")
        if not bool(values.isfinite().all()):
            message = f"the weights {name!r} in {source} hold NaN or infinity; take an earlier checkpoint"
            raise UserError(message, code="weights-not-finite")


def check_image_size(network: nn.Module, architecture: str, image_size: int) -> None:
    """Check that a network takes images of this size and can be written as ONNX for them.

    Args:
        network: best on the meta device, where only shapes are computed. Is in eval mode afterwards.
        architecture: its name.
        image_size: in pixels.

    Raises:
        UserError: it does not, or can't.
    """
    device = next(network.parameters()).device
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
    except NotImplementedError:
        return  # some operators have no shapes without numbers
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__  # an assert may have no text
        raise UserError(
            f"{architecture} can't run on images of {image_size} x {image_size} pixels: {reason}. Choose another "
            "--image-size; most networks take 224",
            code="image-size-unsupported",
            setting="image_size",
        ) from None
    check_pooling(network, architecture, image_size)


def check_pooling(network: nn.Module, architecture: str, image_size: int) -> None:
    """Check that a network's adaptive pooling can be written as ONNX, which has only that by whole factors.

    Args:
        network: takes images of this size. Only shapes are computed, on the meta device; it stays as it is.
        architecture: its name.
        image_size: in pixels.

    Raises:
        UserError: it can't.
    """
    if uneven := _uneven_pooling(network, image_size):
        fitting = next((size for size in _USUAL_SIZES if _uneven_pooling(network, size) == ""), None)
        raise UserError(
            f"{architecture} can't be written as ONNX for images of {image_size} x {image_size} pixels: its layer "
            f"{uneven}, and ONNX has only whole factors. Choose another "
            f"{f'--image-size, such as {fitting}' if fitting else 'architecture, or another --image-size'}",
            code="size-not-exportable",
            setting="image_size",
        )


def _uneven_pooling(network: nn.Module, image_size: int) -> str | None:
    """Return which layer pools by no whole factor, and how; empty if none does, None where that is not known."""
    uneven: list[str] = []

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        (height, width), (rows, columns) = inputs[0].shape[-2:], output.shape[-2:]
        if height % rows or width % columns:
            uneven.append(f"{name} pools {height} x {width} to {rows} x {columns}")

    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.AdaptiveAvgPool2d)}
    if all(layer.output_size in (1, (1, 1)) for layer in layers.values()):
        return ""
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            call_on_meta(network, torch.empty(1, 3, image_size, image_size, device="meta"))
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it may need numbers, or other images
        return uneven[0] if uneven else None
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return uneven[0] if uneven else ""
