"""Models that begin with given weights, and layers that keep them."""

import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torchvision
from torch import nn

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import UserError, shortened
from components.common.contracts.manifests import MANIFEST, CheckpointManifest, load
from components.common.contracts.transforms import IMAGENET_MEAN, IMAGENET_STD
from components.common.data.places import check_uri, fetched, file_name, is_uri, local_path, translate_errors
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model, load_weights, read_weights
from components.common.tasks import task_of
from components.train.checkpointing import WEIGHTS
from components.train.config import TrainConfig

_SUFFIXES = (".safetensors", ".pt", ".pth")
_ENDS = ", ".join(_SUFFIXES)
# Of torchvision's networks, and of none here: heads for training alone, and FCOS's centerness.
_UNUSED = ("aux", "AuxLogits", "head.regression_head.bbox_ctrness.")
# Of torchvision: their weights are for mean and std 0.5, which its networks make of ImageNet's themselves.
_HALF = ("googlenet", "inception_v3", "detection/ssdlite320_mobilenet_v3_large")


def starting_model(config: TrainConfig, num_classes: int, log: StepLog, *, reads: bool = True) -> nn.Module:
    """Return the model as training begins: fresh or pretrained, all of it or its head alone to be trained.

    Args:
        config: of the training.
        num_classes: outputs of the last layer.
        log: gets a note when the last layer starts fresh.
        reads: read pretrained weights. Not where they come from a checkpoint, as they may be gone by now, or from
            rank 0.

    Raises:
        UserError: no such architecture or weights, or the weights are of another architecture.
    """
    model = build_model(config.architecture, num_classes)
    if config.pretrained and reads:
        _begin_with(model, _read(config), head_names(config.architecture), config, log)
    if config.freeze_backbone:
        if not config.pretrained:
            raise UserError(
                "train.freeze_backbone keeps all layers but the last as they are, and they are random: name weights in "
                'train.pretrained, such as "default" or a file',
                code="no-pretrained-weights",
                setting="train.pretrained",
            )
        freeze_backbone(model, config.architecture)
    return model


def freeze_backbone(model: nn.Module, architecture: str) -> None:
    """Leave only a model's head to be trained."""
    head = head_names(architecture)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in head)


def head_names(architecture: str) -> set[str]:
    """Return the names of the weights whose shape follows the number of classes."""
    with torch.device("meta"):
        two, three = (build_model(architecture, num_classes).state_dict() for num_classes in (2, 3))
    return {name for name, tensor in two.items() if three[name].shape != tensor.shape}


def keep_frozen_statistics(model: nn.Module) -> None:
    """Put frozen BatchNorm layers of a model in training mode back: their statistics belong to their weights."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(p.requires_grad for p in own):
            module.eval()


def _begin_with(
    model: nn.Module, weights: dict[str, torch.Tensor], head: set[str], config: TrainConfig, log: StepLog
) -> None:
    own = model.state_dict()
    is_other_head = any(name not in weights or weights[name].shape != own[name].shape for name in head)
    if is_other_head:
        weights = {**weights, **{name: own[name] for name in head}}
    unused = {name for name in weights if name not in own and name.startswith(_UNUSED)}
    load_weights(model, {name: value for name, value in weights.items() if name not in unused}, config.pretrained)
    if is_other_head:
        log.note(f"the pretrained weights are for other classes: {', '.join(sorted(head))} start fresh")


def check_pretrained(config: TrainConfig) -> None:
    """Refuse weights that can't be used before a run; what would be downloaded is left to training.

    Raises:
        UserError: there are no such weights on this machine, or they are others than meant.
        EngineryError: the Checkpoint is damaged.
    """
    name = config.pretrained
    if is_uri(name):
        _check_weights_uri(name)
    elif name and (path := _local(config)) is not None:
        _check_digest(path, config.pretrained_sha256, name)
        read_weights(path, name)
    elif name:
        _known(config.architecture, name)


def pretrained_normalization(config: TrainConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std that pretrained weights were trained with; ImageNet's where there are none, or it is not known."""
    name, architecture = config.pretrained, config.architecture
    known: Any = None
    if name and (local_path(name) / MANIFEST).is_file():
        known = load(local_path(name), CheckpointManifest).manifest.image_transform
    elif name and not is_uri(name) and _local(config) is None:
        if architecture in _HALF:
            return (0.5,) * 3, (0.5,) * 3
        known = _known(architecture, name)
        known = known if architecture.startswith("timm/") else known.transforms()
    return tuple(getattr(known, "mean", IMAGENET_MEAN)), tuple(getattr(known, "std", IMAGENET_STD))


def _local(config: TrainConfig) -> Path | None:
    """Return the file of weights on this machine, which need not be there; None for published ones."""
    name = config.pretrained
    path = local_path(name)
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, config.architecture)
    if path.suffix.lower() in _SUFFIXES:
        return path
    if "/" in name or path.exists():
        raise _no_weights(f"{name}, neither a weights file ({_ENDS}) nor a Checkpoint directory")
    return None


def _read(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Return pretrained weights by name: of a file, here or behind a URI, a Checkpoint or those that were published."""
    name, architecture = config.pretrained, config.architecture
    source, is_published = name, False
    with tempfile.TemporaryDirectory(prefix="enginery-weights-") as scratch:
        path = _download(name, Path(scratch)) if is_uri(name) else _local(config)
        if path is None:
            path = _published(architecture, name)
            source, is_published = str(path), True
        _check_digest(path, config.pretrained_sha256, source)
        weights = read_weights(path, source)
    if is_published and architecture.startswith("timm/"):
        return _translated(_timm_name(architecture, name), weights, source)
    return weights


def _translated(name: str, weights: dict[str, torch.Tensor], source: str) -> dict[str, torch.Tensor]:
    """Return weights under timm's names: some files have those of their authors."""
    import timm

    try:
        return timm.create_model(name, True, pretrained_cfg_overlay={"state_dict": weights}).state_dict()
    except Exception as error:  # whatever other names and shapes than timm expects lead to
        raise UserError(
            f"the weights in {source} are not those of timm's {name}: {type(error).__name__}: {shortened(error)}. "
            "Remove the file, so that it is fetched again, or name other weights in train.pretrained",
            code="weights-do-not-fit",
            setting="train.pretrained",
        ) from None


def _check_weights_uri(uri: str) -> None:
    check_uri(uri, "train.pretrained")
    if not file_name(uri).endswith(_SUFFIXES):
        raise _no_weights(f"{uri}, which names no weights file ({_ENDS})")


def _download(uri: str, scratch: Path) -> Path:
    _check_weights_uri(uri)
    with translate_errors(uri):
        return fetched(uri, scratch)


def _of_checkpoint(folder: Path, architecture: str) -> Path:
    checkpoint = load(folder, CheckpointManifest, verify=(WEIGHTS,))
    if (found := checkpoint.manifest.architecture) != architecture:
        raise _no_weights(
            f"{folder}, a Checkpoint of {found}, and train.architecture is {architecture}; name one of {architecture}, "
            f"or set train.architecture to {found}",
            code="weights-of-another-architecture",
        )
    return checkpoint.file(WEIGHTS)


def _published(architecture: str, name: str) -> Path:
    """Return the file of published weights in this user's cache, where it comes to if it is not there."""
    try:
        if architecture.startswith("timm/"):
            return _of_timm(architecture, name)
        return _of_torch_hub(_known(architecture, name).url)
    except OSError as error:  # of the network, or the cache
        raise UserError(
            f"can't get the weights {name!r} of {architecture}: {type(error).__name__}: {shortened(error)}. Where "
            "there is no network, name a file or the URI of a copy in train.pretrained",
            code="weights-out-of-reach",
            setting="train.pretrained",
        ) from None


def _known(architecture: str, name: str) -> Any:
    """Return what timm or torchvision says of published weights. Raises UserError: there are none of this name."""
    if not architecture.startswith("timm/"):
        known = _of_torchvision(architecture)
        if name not in known:
            raise _no_weights(f"{name}, and torchvision has of {architecture} {', '.join(known) or 'none'}")
        return known[name]
    import timm

    try:
        entry = timm.get_pretrained_cfg(_timm_name(architecture, name))
    except RuntimeError as error:
        raise _no_weights(f"{name}: {shortened(error)}") from None
    if entry is None or not entry.has_weights:
        raise _no_weights(f"{name}, and timm has no weights of {architecture}")
    return entry


def _of_torchvision(architecture: str) -> dict[str, Any]:
    """Return what torchvision publishes of a network of any task, by name; empty for none."""
    try:
        found = torchvision.models.get_model_weights(architecture.removeprefix(f"{task_of(architecture)}/"))
    except ValueError:  # it is none of torchvision's
        return {}
    return {**{entry.name: entry for entry in found}, "default": found.DEFAULT}


def _of_timm(architecture: str, name: str) -> Path:
    """Return a file of Hugging Face's hub or its mirror (HF_ENDPOINT), in the hub's cache (HF_HOME)."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    entry = _known(architecture, name)
    if not entry.hf_hub_id:
        return _of_torch_hub(entry.url)
    try:
        path = Path(hf_hub_download(entry.hf_hub_id, "model.safetensors"))
    except EntryNotFoundError:
        path = Path(hf_hub_download(entry.hf_hub_id, "pytorch_model.bin"))
    digest = path.resolve().name  # by which the hub calls large files, and does not check them
    _check_digest(path, digest if re.fullmatch("[0-9a-f]{64}", digest) else "", str(path))
    return path


def _of_torch_hub(url: str) -> Path:
    """Return a file in torch's folder (TORCH_HOME), from its server if it is not there."""
    path = Path(torch.hub.get_dir(), "checkpoints", urlsplit(url).path.rpartition("/")[2])
    named = re.search("-([0-9a-f]{8,})$", path.stem)
    digest = named[1] if named else ""  # its first digits
    if path.exists():
        _check_digest(path, digest, str(path))
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        found = fetched(url, Path(scratch))
        _check_digest(found, digest, url)
        return found.replace(path)


def _timm_name(architecture: str, name: str) -> str:
    return architecture.removeprefix("timm/") + ("" if name == "default" else f".{name}")


def _check_digest(path: Path, expected: str, source: str) -> None:
    """Refuse weights whose SHA-256 has other digits than `expected`, which may be its first ones, or none."""
    if expected and path.is_file() and not (found := digest_file(path).removeprefix("sha256:")).startswith(expected):
        raise UserError(
            f"the weights at {source} have the SHA-256 {found} and should have {expected}: they are damaged or others. "
            "Remove the file if it lies in a cache, so that it is fetched again, or correct train.pretrained_sha256",
            code="weights-of-another-digest",
            setting="train.pretrained",
        )


def _no_weights(found: str, *, code: str = "no-weights") -> UserError:
    return UserError(f"train.pretrained is {found}", code=code, setting="train.pretrained")
