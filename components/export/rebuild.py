"""A bundle's plans once more, for another GPU: the same ONNX files, scales and choices, other engines."""

import json
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.manifests import (
    MANIFEST,
    Artifact,
    BundleManifest,
    DatasetManifest,
    prepare_directory,
    seal,
)
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.export.calibration import Samples
from components.export.config import ONNX_FILES, ExportConfig
from components.export.engines import build_plans, cache_folder, describe_plans
from components.export.sources import compare_classes

_SETTINGS_OF_PLANS = (
    "tensorrt",
    "engine_options",
    "fp16_mantissa_bits",
    "optimization_level",
    "workspace_bytes",
    "cache",
    "verify",
)


class _CarriedConfig(BaseModel):
    """The bundle's settings as its own export wrote them, perhaps of another version, with those of its plans here."""

    model_config = ConfigDict(extra="allow")


def is_bundle(model: Path) -> bool:
    """True if a directory says that it is a Bundle; `load` says if it is a sound one."""
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

    Nothing is calibrated or chosen again: of the settings only those of TensorRT are read.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here: there would be nothing to build.
        UserError: the dataset has other classes, the bundle lacks a file, or `config.tensorrt` is "off".
        EngineryError: a plan can't be built.
    """
    if bundle.manifest.classes != data.manifest.classes:
        raise UserError(
            f"the bundle {bundle.path} has other classes than the dataset {data.path}: "
            f"{compare_classes(bundle.manifest.classes, data.manifest.classes)}. Name the images that it was made with",
            code="other-classes",
        )
    if config.tensorrt == "off":
        raise UserError(
            f"{bundle.path} is a bundle, of which only plans are built, but export.tensorrt is off: set it to auto",
            code="nothing-to-build",
            setting="tensorrt",
        )
    on_cpus = (model.file for model in bundle.manifest.cpu_models)
    names = {*ONNX_FILES.values(), "scales.json", *bundle.manifest.models.values(), *on_cpus}
    if absent := sorted(names - set(bundle.manifest.files)):
        raise UserError(
            f"the bundle {bundle.path} has no {', '.join(absent)}, so export the model again", code="bundle-incomplete"
        )
    if missing := tensorrt.why_unavailable():
        raise RuntimeUnavailable(
            f"no plans can be built of the bundle {bundle.path}: {missing}", code="tensorrt-unavailable"
        )
    if not _has_the_calibration_images(bundle.manifest, data):
        log.note(
            "the training split here does not begin with the images that calibrated the bundle: with other images, or "
            "another --seed or preprocess.val_fraction, images that the model was trained on may be among those that "
            "it is validated on"
        )
    if ignored := _ignored(config):
        log.warning(
            f"without effect here: export.{', export.'.join(ignored)}. A bundle keeps its shapes, its calibration and "
            "its choice of layers; for others export the model again"
        )
    prepare_directory(output)
    for name in sorted(names):
        shutil.copyfile(bundle.file(name), output / name)
    needed = config.model_copy(update={"tensorrt": "on"})  # without plans there is nothing new
    engines, _ = build_plans(needed, bundle.manifest.image_shapes, output, cache_folder(config), log)
    carried = bundle.manifest.model_dump(
        exclude={"schema_version", "seal", "kind", "files", "inputs", "config", "environment", "engines"}
        | {"engines_missing"}
    )
    settings = config.model_dump(mode="json", include=set(_SETTINGS_OF_PLANS))
    seal(
        output,
        BundleManifest,
        inputs={"model": bundle.digest, "dataset": data.digest},
        config=_CarriedConfig.model_validate(bundle.manifest.config | settings),
        engines=engines,
        **carried,
    )
    return f"{describe_plans(engines)} from the bundle {bundle.digest[:19]}"


def _has_the_calibration_images(bundle: BundleManifest, data: Artifact[DatasetManifest]) -> bool:
    """True if the training split begins with the images that calibrated the bundle, wherever it was made.

    If so, they were split as for the bundle: how many images a class has for training, and the seed, order the split.
    """
    if data.digest == bundle.inputs.get("dataset"):
        return True
    calibration = bundle.calibration
    here = Samples(
        dataset=data,
        transform=bundle.image_transform,
        start=0,
        num_images=calibration.num_images,
        batch_size=1,
        device_id=None,
    )
    return here.digest() == calibration.images_digest


def _ignored(config: ExportConfig) -> list[str]:
    """Settings that were given, other than by default, and that a bundle's plans do not depend on."""
    # A pipeline always gives the gate's thresholds, and the steps after this one read them.
    others = sorted(config.model_fields_set - {*_SETTINGS_OF_PLANS, "gate"})
    return [name for name in others if getattr(config, name) != ExportConfig.model_fields[name].default]
