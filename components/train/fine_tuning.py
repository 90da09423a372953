"""Models that begin with given weights, and layers that keep them."""

from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from components.common.contracts.errors import UserError, shortened
from components.common.contracts.manifests import MANIFEST, CheckpointManifest, load
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model, load_weights, read_weights
from components.train.checkpointing import WEIGHTS
from components.train.config import TrainConfig

_SUFFIXES = (".safetensors", ".pt", ".pth")


def starting_model(config: TrainConfig, num_classes: int, log: StepLog, *, resumes: bool = False) -> nn.Module:
    """Return the model as training begins: fresh or pretrained, all of it or its head alone to be trained.

    Args:
        config: of the training.
        num_classes: outputs of the last layer.
        log: gets a note when the last layer starts fresh.
        resumes: the weights will come from a checkpoint, so pretrained ones are not read; they may be gone by now.

    Raises:
        UserError: no such architecture or weights, or the weights are of another architecture.
    """
    model = build_model(config.architecture, num_classes)
    if config.pretrained and not resumes:
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
    unused = {name for name in weights if name not in own and name.startswith(("aux", "AuxLogits"))}
    load_weights(model, {name: value for name, value in weights.items() if name not in unused}, config.pretrained)
    if is_other_head:
        log.note(f"the pretrained weights are for other classes: {', '.join(sorted(head))} start fresh")


def _read(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Return pretrained weights by name: of a file, a Checkpoint or those that were published."""
    path = Path(config.pretrained)
    if (path / MANIFEST).is_file():
        checkpoint = load(path, CheckpointManifest, verify=(WEIGHTS,))
        if (found := checkpoint.manifest.architecture) != config.architecture:
            raise UserError(
                f"train.pretrained is {path}, a Checkpoint of {found}, and train.architecture is "
                f"{config.architecture}; name one of {config.architecture}, or set train.architecture to {found}",
                code="weights-of-another-architecture",
                setting="train.pretrained",
            )
        return load_file(checkpoint.file(WEIGHTS))
    if path.suffix.lower() in _SUFFIXES:
        return read_weights(path)
    if "/" in config.pretrained or path.exists():
        raise UserError(
            f"train.pretrained is {config.pretrained}, which is neither a weights file ({', '.join(_SUFFIXES)}) nor a "
            "Checkpoint directory",
            code="no-weights",
            setting="train.pretrained",
        )
    name, architecture = config.pretrained, config.architecture
    try:  # from torchvision's or timm's servers, or this user's cache of them
        if architecture.startswith("timm/"):
            import timm

            tag = "" if name == "default" else f".{name}"
            return timm.create_model(f"{architecture.removeprefix('timm/')}{tag}", pretrained=True).state_dict()
        known = {entry.name: entry for entry in torchvision.models.get_model_weights(architecture)}
        known["default"] = torchvision.models.get_model_weights(architecture).DEFAULT
        if name not in known:
            raise UserError(
                f"torchvision has no weights {name!r} of {architecture}; it has {', '.join(known)} (train.pretrained)",
                code="no-weights",
                setting="train.pretrained",
            )
        return known[name].get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # of the network, and timm's of unknown weights
        raise UserError(
            f"can't get the weights {name!r} of {architecture}: {type(error).__name__}: {shortened(error)}. Where "
            "there is no network, name a file in train.pretrained",
            code="weights-out-of-reach",
            setting="train.pretrained",
        ) from None
