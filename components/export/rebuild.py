"""A bundle's plans once more, for another GPU: the same ONNX files, scales and choices, other engines."""

import json
import shutil
from pathlib import Path

from components.common.artifacts import MANIFEST, Artifact, BundleManifest, DatasetManifest, prepare_directory, seal
from components.common.errors import RuntimeUnavailable, UserError
from components.common.runners.tensorrt_library import why_no_tensorrt
from components.common.steplog import StepLog
from components.export.config import ExportConfig
from components.export.plans import build_plans, cache_folder, describe_plans

_SETTINGS_OF_PLANS = ("tensorrt", "engine_options", "optimization_level", "workspace_bytes", "cache", "verify")


def is_bundle(model: Path) -> bool:
    """Whether a directory says that it is a Bundle. Whether it is a sound one, `load` says."""
    try:
        return bool(json.loads((model / MANIFEST).read_bytes())["kind"] == "bundle")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def rebuild(
    config: ExportConfig,
    log: StepLog,
    *,
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    output: Path,
) -> str:
    """Write a bundle that differs from `bundle` in its plans only, which are for the GPU here.

    Nothing is calibrated or chosen anew: of the settings only those of TensorRT are read.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here: there would be nothing to build.
        UserError: the data set has other classes, or `config.tensorrt` is "off".
        EngineryError: a plan can't be built.
    """
    if bundle.manifest.classes != data.manifest.classes:
        raise UserError(f"the bundle {bundle.path} and the data set {data.path} have different classes")
    if config.tensorrt == "off":
        raise UserError(f"{bundle.path} is a bundle, of which only plans are built, but export.tensorrt is off")
    if missing := why_no_tensorrt():
        raise RuntimeUnavailable(f"no plans can be built of the bundle {bundle.path}: {missing}")
    if data.digest != bundle.manifest.inputs.get("dataset"):
        log.note("the bundle was calibrated on another data set than the one it is validated on here")
    prepare_directory(output)
    for name in (*bundle.manifest.models.values(), "scales.json"):
        shutil.copyfile(bundle.file(name), output / name)
    needed = config.model_copy(update={"tensorrt": "on"})  # without plans there is nothing new
    engines, _ = build_plans(needed, bundle.manifest.shapes, output, cache_folder(config), log)
    carried = bundle.manifest.model_dump(
        exclude={"schema_version", "seal", "kind", "files", "inputs", "config", "environment", "engines"}
        | {"engines_missing"}
    )
    settings = {name: getattr(config, name) for name in _SETTINGS_OF_PLANS}
    seal(
        output,
        BundleManifest,
        inputs={"model": bundle.digest, "dataset": data.digest},
        config=ExportConfig.model_validate(bundle.manifest.config | settings),
        engines=engines,
        **carried,
    )
    return f"{describe_plans(engines)} from the bundle {bundle.digest[:19]}"
