"""Where a report's model and numbers came from: code, digests, configs, machines."""

import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from components.common.artifacts import Artifact, BundleManifest, DatasetManifest
from components.common.environment import environment
from components.validate.config import ValidateConfig
from components.validate.schema import Code, Provenance

COMMIT_VARIABLE = "ENGINERY_COMMIT"  # set in container images, which hold no git checkout
_PLACES = ("data", "class_names_file", "pretrained", "cache")  # fields that may name a folder or file of a machine
_ROOT = Path(__file__).resolve().parents[2]


def gather_provenance(
    config: ValidateConfig, bundle: Artifact[BundleManifest], data: Artifact[DatasetManifest]
) -> Provenance:
    """All that leads from the report back to images, code and machines."""
    model, training = bundle.manifest, bundle.manifest.training
    digests = {
        "dataset": data.digest,
        **{f"{name} split": split.digest for name, split in data.manifest.splits.items()},
        "model": model.inputs["model"],
        "bundle": bundle.digest,
        **{name: model.files[name].digest for name in sorted(model.files)},
    }
    configs = {"preprocess": data.manifest.config, "export": model.config, "validate": config.model_dump(mode="json")}
    machines = {"preprocess": data.manifest.environment, "export": model.environment, "validate": environment()}
    if training is not None:
        configs["train"], machines["train"] = training.config, training.environment
    order = [step for step in ("preprocess", "train", "export", "validate") if step in configs]
    return Provenance(
        code=code_version(),
        digests=digests,
        configs={step: _without_folders(configs[step]) for step in order},
        environments={step: machines[step] for step in order},
    )


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as it may leave the machine: of a path no more than its last part. URIs stay, which hold no secrets."""
    return {
        key: Path(value).name if key in _PLACES and value and "://" not in value else value
        for key, value in config.items()
    }


def code_version() -> Code:
    """Version of the package, and the commit from the environment or from the checkout that this file is in."""
    try:
        version = metadata.version("enginery")
    except metadata.PackageNotFoundError:
        version = ""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return Code(version=version, commit=commit, modified=False)
    if not (_ROOT / ".git").exists():  # installed elsewhere, perhaps inside somebody else's repository
        return Code(version=version, commit="", modified=False)
    commit = _git("rev-parse", "HEAD")
    return Code(version=version, commit=commit, modified=bool(commit and _git("status", "--porcelain", "-uno")))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a file system that hangs: the commit is not known
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
