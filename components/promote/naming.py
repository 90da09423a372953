"""The name that a model is registered under, and whether the versions that are there are of the same model."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from components.common.contracts.digests import digest_json
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest
from components.common.registry.model_registry import Registry
from components.promote.config import PromoteConfig

_FILES = (".onnx", ".safetensors", ".pt", ".pth")
_WORDS = {"architecture": "architecture", "classes_digest": "class list", "source": "source file"}


def model_name(config: PromoteConfig, bundle: BundleManifest) -> str:
    """The configured name; else that of the user's model file; else that of the architecture."""
    if config.registered_model:
        return config.registered_model
    file = PurePosixPath(config.source)
    return re.sub(r"[^\w.-]+", "-", file.stem if file.suffix in _FILES else bundle.architecture)


def identity(config: PromoteConfig, bundle: BundleManifest) -> dict[str, str]:
    """Tags of a version that say which model it is of."""
    tags = {
        "architecture": bundle.architecture,
        "classes_digest": digest_json(list(bundle.classes)),
        "model_digest": bundle.inputs.get("model", ""),
        "source": config.source,
    }
    return {name: value for name, value in tags.items() if value}


def check_name(config: PromoteConfig, registry: Registry, name: str, own: Mapping[str, str]) -> None:
    """Refuse a name whose versions are all of another model.

    Another model is one of another architecture or class list. Under a name that nobody chose it is also one of another
    source file, unless that file is the same to the byte. What a version of an earlier release does not tell is taken
    as equal.

    Raises:
        UserError: the name belongs to another model.
    """
    if config.allow_other_model or name not in registry.names():
        return
    asked = ("architecture", "classes_digest") if config.registered_model else tuple(_WORDS)
    versions = registry.versions(name)
    differences = [
        [key for key in asked if key in own and own[key] != version.tags.get(key, own[key])] for version in versions
    ]
    for version, different in zip(versions, differences, strict=True):
        if different == ["source"] and version.tags.get("model_digest") == own.get("model_digest"):
            return  # the same file in another place
    if not differences or [] in differences:
        return
    version, key = versions[0], differences[0][0]
    values = "" if key == "classes_digest" else f": {version.tags[key]} there, {own[key]} here"
    raise UserError(
        f"{version.label} is of another model than this one (another {_WORDS[key]}{values}), and one would replace the "
        "other as champion. Give this one a name of its own (--registered-model NAME), or put it there all the same "
        "(--set promote.allow_other_model=true)"
    )
