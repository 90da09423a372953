"""Where the model comes from: a Checkpoint of the train step, or a file of the user's own."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from components.common.artifacts import MANIFEST, Artifact, CheckpointManifest, DatasetManifest, load
from components.common.digests import digest_file
from components.common.errors import UserError
from components.common.models import build_model, load_weights, read_weights
from components.common.records import TrainingRecord
from components.common.shapes import ShapeSpec
from components.common.transforms import TransformSpec, transform_for
from components.export.config import ExportConfig
from components.export.onnx_export import export_onnx, normalize_user_onnx

_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A model as fp32.onnx, and what is known of it."""

    architecture: str
    classes: tuple[str, ...]
    transform: TransformSpec
    shapes: ShapeSpec
    input_digest: str  # of the checkpoint's manifest, or of the user's file
    module: nn.Module | None  # None when the model came as ONNX
    training: TrainingRecord | None = None  # None when the model is the user's own


def write_fp32_onnx(
    model: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path
) -> SourceModel:
    """Write the model as FP32 ONNX at opset 17.

    Args:
        model: a Checkpoint directory, an .onnx file, or weights (.safetensors, .pt, .pth) of `config.architecture`.
        dataset: its classes are the model's outputs, in order.
        config: image size and normalization of a model that is no Checkpoint.
        destination: the ONNX file to write.

    Raises:
        UserError: there is no such model, or it doesn't fit the data set.
    """
    if model.is_dir() and (model / MANIFEST).exists():
        return _from_checkpoint(model, dataset, config, destination)
    if not model.is_file():
        raise UserError(
            f"there is no model at {model}; name a Checkpoint or Bundle directory, an .onnx file, or weights "
            f"({', '.join(_WEIGHT_SUFFIXES)}) together with export.architecture"
        )
    if model.suffix == ".onnx":
        return _from_onnx(model, dataset, config, destination)
    if model.suffix in _WEIGHT_SUFFIXES:
        return _from_weights(model, dataset, config, destination)
    raise UserError(f"{model} is neither .onnx nor weights ({', '.join(_WEIGHT_SUFFIXES)})")


def _from_checkpoint(
    path: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path
) -> SourceModel:
    checkpoint = load(path, CheckpointManifest, verify=(".safetensors",))
    record = checkpoint.manifest
    if record.classes != dataset.manifest.classes:
        raise UserError(
            f"the checkpoint {path} was trained on other classes than the data set has: "
            f"{compare_classes(record.classes, dataset.manifest.classes)}"
        )
    module = build_model(record.architecture, len(record.classes))
    load_weights(module, load_file(checkpoint.file("weights.safetensors")), str(path))
    shapes = _shapes(record.transform, config)
    export_onnx(module, destination, shapes)
    return SourceModel(
        architecture=record.architecture,
        classes=record.classes,
        transform=record.transform,
        shapes=shapes,
        input_digest=checkpoint.digest,
        module=module,
        training=TrainingRecord(
            history=record.history,
            config=record.config,
            metrics=record.metrics,
            environment=record.environment,
            profile=record.profile,
        ),
    )


def _from_weights(
    path: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path
) -> SourceModel:
    if not config.architecture:
        raise UserError(f"{path} holds weights only: name their architecture, such as --architecture resnet50")
    classes = dataset.manifest.classes
    module = build_model(config.architecture, len(classes))
    load_weights(module, read_weights(path), str(path))
    transform = _own_transform(config, config.image_size)
    shapes = _shapes(transform, config)
    export_onnx(module, destination, shapes)
    return SourceModel(
        architecture=config.architecture,
        classes=classes,
        transform=transform,
        shapes=shapes,
        input_digest=digest_file(path),
        module=module,
    )


def _from_onnx(path: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path) -> SourceModel:
    classifier = normalize_user_onnx(path, destination)
    classes = dataset.manifest.classes
    if classifier.num_classes != len(classes):
        raise UserError(
            f"{path} has {classifier.num_classes} outputs but the data set has {len(classes)} classes. For a folder "
            "that holds only some of the model's classes, or in another order, give preprocess.class_names_file"
        )
    shapes = classifier.shapes
    if shapes.height != shapes.width:
        raise UserError(f"{path} takes {shapes.height} x {shapes.width} pixels; only square inputs are supported")
    transform = _own_transform(config, shapes.height)
    batches = {"opt_batch": min(config.opt_batch, config.max_batch), "max_batch": config.max_batch}
    return SourceModel(
        architecture=config.architecture or path.stem,
        classes=classes,
        transform=transform,
        shapes=shapes.model_copy(update=batches),
        input_digest=digest_file(path),
        module=None,
    )


def _own_transform(config: ExportConfig, image_size: int) -> TransformSpec:
    spec = transform_for(image_size, resize_ratio=config.resize_ratio, interpolation=config.interpolation)
    return spec.model_copy(update={"mean": config.mean, "std": config.std})


def _shapes(transform: TransformSpec, config: ExportConfig) -> ShapeSpec:
    return ShapeSpec(
        height=transform.crop_size,
        width=transform.crop_size,
        opt_batch=min(config.opt_batch, config.max_batch),
        max_batch=config.max_batch,
    )


def compare_classes(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """Where two lists of classes, which are not the same, differ first."""
    if len(first) != len(second):
        return f"{len(first)} against {len(second)}"
    index = next(index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return f"class {index} is {first[index]!r} against {second[index]!r}"
