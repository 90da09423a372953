"""Models by name, over torchvision and timm."""

import torch
import torchvision
from torch import nn

from components.common.errors import UserError


def known_architectures() -> list[str]:
    """Names that `build_model` takes from torchvision; timm's come with the prefix "timm/"."""
    return torchvision.models.list_models(module=torchvision.models)


def build_model(architecture: str, num_classes: int) -> nn.Module:
    """A classifier with fresh weights and `num_classes` outputs.

    Args:
        architecture: a torchvision name such as "resnet50", or "timm/" and a timm name.
        num_classes: outputs of the last layer.

    Raises:
        UserError: no such model.
    """
    if architecture.startswith("timm/"):
        import timm

        name = architecture.removeprefix("timm/")
        if not timm.is_model(name):
            raise UserError(
                f"timm has no model {name!r}; `python -c 'import timm; print(timm.list_models())'` lists them"
            )
        return timm.create_model(name, num_classes=num_classes)
    if architecture not in known_architectures():
        import difflib

        close = difflib.get_close_matches(architecture, known_architectures(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "such as resnet50, mobilenet_v2 or efficientnet_b0"
        raise UserError(f"no model {architecture!r}; {hint} (any of torchvision's classifiers; timm's as timm/NAME)")
    options: dict[str, object] = {}
    if architecture in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    if architecture.startswith(("resnet", "resnext", "wide_resnet")):
        # A residual branch that starts at zero trains faster and more stably from scratch (Goyal et al., 2017).
        options = {"zero_init_residual": True}
    return torchvision.models.get_model(architecture, weights=None, num_classes=num_classes, **options)


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Load weights strictly.

    Raises:
        UserError: names or shapes don't fit the model, or a number is not finite.
    """
    for name, values in weights.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise UserError(f"the weights {name!r} in {source} hold NaN or infinity; take an earlier checkpoint")
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        problems = " ".join(str(error).split())[:400]
        raise UserError(f"the weights in {source} don't fit this model: {problems}") from None
