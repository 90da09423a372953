"""The model to export: a Checkpoint of the train step, or a file of the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import UserError
from components.common.contracts.foreign import refuse_lfs_pointer
from components.common.contracts.manifests import (
    ALL_FILES,
    MANIFEST,
    Artifact,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    check_task,
    claims_of,
    load,
    write_atomically,
)
from components.common.contracts.records import TrainingRecord
from components.common.contracts.transforms import ShapeSpec, TransformSpec, transform_for
from components.common.runtimes.architectures import build_model, check_image_size, load_weights, read_weights
from components.common.tasks import task_of
from components.export.config import WEIGHT_SUFFIXES, ExportConfig
from components.export.onnx_export import (
    OnnxClassifier,
    check_answers,
    export_onnx,
    read_user_onnx,
)


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
    note: str = ""  # what a person should know of how it was taken over


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
        UserError: there is no such model, or it doesn't fit the dataset.
    """
    if model.is_dir() and (model / MANIFEST).exists():
        return _from_checkpoint(model, dataset, config, destination)
    check_file(model, config.architecture)
    task, fix = task_of(config.architecture), "name a dataset of the model's task"
    check_task(f"the dataset {dataset.path}", dataset.manifest.task, task, fix)
    if model.suffix.lower() == ".onnx":
        return _from_onnx(model, dataset, config, destination)
    classes = dataset.manifest.classes
    module = _module(read_weights(model), model, config.architecture, len(classes), config.image_size)
    transform = _own_transform(config, config.image_size)
    shapes = _shapes(transform, config)
    export_onnx(module, destination, shapes)
    return SourceModel(
        architecture=config.architecture,
        classes=classes,
        transform=transform,
        shapes=shapes,
        input_digest=digest_file(model),
        module=module,
    )


def check_file(model: Path, architecture: str) -> None:
    """Check a model's file without reading it.

    Raises:
        UserError: there is none, it is of no kind that is read, needs an architecture, or was not fetched by Git LFS.
    """
    if not model.is_file():
        raise UserError(
            f"there is no model at {model}; name a Checkpoint or Bundle directory, an .onnx file, or weights "
            f"({', '.join(WEIGHT_SUFFIXES)}) together with export.architecture",
            code="model-missing",
            setting="model",
        )
    suffix = model.suffix.lower()
    if suffix in WEIGHT_SUFFIXES and not architecture:
        message = f"{model} holds weights only: name their architecture, such as --architecture resnet50"
        raise UserError(message, code="architecture-missing", setting="architecture")
    if suffix not in (".onnx", *WEIGHT_SUFFIXES):
        message = (
            f"{model} is neither .onnx nor weights ({', '.join(WEIGHT_SUFFIXES)}): write the model as "
            "ONNX (torch.onnx.export, tf2onnx, paddle2onnx), or save its state_dict"
        )
        raise UserError(message, code="unknown-model-format", setting="model")
    refuse_lfs_pointer(model)


def check_model(model: Path, architecture: str, classes: Sequence[str] | None, image_size: int) -> None:
    """Refuse a model of which `write_fp32_onnx` or a rebuild would not make a bundle, before there is a dataset.

    Args:
        model: as for `write_fp32_onnx`, or a Bundle directory.
        architecture: of weights.
        classes: the data's; None where they are not known yet.
        image_size: of the images that weights will see, in pixels.

    Raises:
        UserError: it is no model, or doesn't fit the classes.
        EngineryError: a file of it is damaged.
    """
    if model.is_dir() and (model / MANIFEST).exists():
        checkpoint = None
        if claims_of((model / MANIFEST).read_bytes()).get("kind") == "bundle":
            found: BundleManifest | CheckpointManifest = load(model, BundleManifest, verify=ALL_FILES).manifest
        else:
            checkpoint = load(model, CheckpointManifest, verify=(".safetensors",))
            found = checkpoint.manifest
        own, fix = found.classes, "name another model"
        check_task(f"the model {model}", found.task, task_of(architecture), fix)
        if classes is not None and own != tuple(classes):
            message = f"the model {model} has other classes than the data: {compare_classes(own, tuple(classes))}"
            raise UserError(message, code="other-classes")
        if checkpoint is not None:
            _module_of_checkpoint(checkpoint)
        return
    if model.suffix.lower() in WEIGHT_SUFFIXES and not architecture and model.is_file():
        read_weights(model)  # what holds none is refused for that
    check_file(model, architecture)
    if model.suffix.lower() == ".onnx":
        classifier, _ = read_user_onnx(model)
        _check_fits(model, classifier, len(classes) if classes is not None else classifier.num_classes)
    elif classes is not None:
        _module(read_weights(model), model, architecture, len(classes), image_size)
    else:
        read_weights(model)


def _from_checkpoint(
    path: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path
) -> SourceModel:
    checkpoint = load(path, CheckpointManifest, verify=(".safetensors",))
    record = checkpoint.manifest
    fix = "name a dataset of the checkpoint's task"
    check_task(f"the dataset {dataset.path}", dataset.manifest.task, record.task, fix)
    if record.classes != dataset.manifest.classes:
        raise UserError(
            f"the checkpoint {path} was trained on other classes than the dataset has: "
            f"{compare_classes(record.classes, dataset.manifest.classes)}",
            code="other-classes",
        )
    module = _module_of_checkpoint(checkpoint)
    shapes = _shapes(record.image_transform, config)
    export_onnx(module, destination, shapes)
    return SourceModel(
        architecture=record.architecture,
        classes=record.classes,
        transform=record.image_transform,
        shapes=shapes,
        input_digest=checkpoint.digest,
        module=module,
        training=TrainingRecord.model_validate(record, from_attributes=True),
    )


def _module_of_checkpoint(checkpoint: Artifact[CheckpointManifest]) -> nn.Module:
    record = checkpoint.manifest
    weights = load_file(checkpoint.file("weights.safetensors"))
    return _module(weights, checkpoint.path, record.architecture, len(record.classes), record.image_transform.crop_size)


def _module(
    weights: dict[str, torch.Tensor], source: Path, architecture: str, num_classes: int, image_size: int
) -> nn.Module:
    """The network of these weights in eval mode, if it takes images of this size and gives answers."""
    module = build_model(architecture, num_classes)
    load_weights(module, weights, str(source))
    check_image_size(module, architecture, image_size)
    check_answers(module, ShapeSpec(height=image_size, width=image_size), source)
    return module


def _check_fits(path: Path, classifier: OnnxClassifier, num_classes: int) -> None:
    """Check that a user's ONNX file can be fed with square images of so many classes."""
    if classifier.num_classes != num_classes:
        raise UserError(
            f"{path} has {classifier.num_classes} outputs but the dataset has {num_classes} classes. For a folder "
            "that holds only some of the model's classes, or in another order, give preprocess.class_names_file",
            code="other-classes",
        )
    shapes = classifier.shapes
    if shapes.height != shapes.width:
        raise UserError(
            f"{path} takes {shapes.height} x {shapes.width} pixels; only square inputs are supported", code="not-square"
        )


def _from_onnx(path: Path, dataset: Artifact[DatasetManifest], config: ExportConfig, destination: Path) -> SourceModel:
    classifier, content = read_user_onnx(path)
    write_atomically(destination, content)
    classes, shapes = dataset.manifest.classes, classifier.shapes
    _check_fits(path, classifier, len(classes))
    transform = _own_transform(config, shapes.height)
    return SourceModel(
        architecture=config.architecture or path.stem,
        classes=classes,
        transform=transform,
        shapes=shapes.model_copy(update=_batches(config)),
        input_digest=digest_file(path),
        module=None,
        note=f"{path.name} ends in a softmax, which is left out: all files here give logits"
        if classifier.had_softmax
        else "",
    )


def _own_transform(config: ExportConfig, image_size: int) -> TransformSpec:
    spec = transform_for(image_size, resize_ratio=config.resize_ratio, interpolation=config.interpolation)
    return spec.model_copy(update={"mean": config.mean, "std": config.std})


def _shapes(transform: TransformSpec, config: ExportConfig) -> ShapeSpec:
    return ShapeSpec(height=transform.crop_size, width=transform.crop_size, **_batches(config))


def _batches(config: ExportConfig) -> dict[str, int]:
    return {"opt_batch": min(config.opt_batch, config.max_batch), "max_batch": config.max_batch}


def compare_classes(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """The first difference between two lists of classes, which are not the same."""
    if len(first) != len(second):
        return f"{len(first)} against {len(second)}"
    index = next(index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return f"class {index} is {first[index]!r} against {second[index]!r}"
