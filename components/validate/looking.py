"""One image through a bundle: what each precision predicts, and the maps of layers in FP32 and INT8."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.artifacts import Artifact, BundleManifest
from components.common.errors import EngineryError, UserError
from components.common.evaluation import probabilities
from components.common.image_files import check_encoded, undecodable
from components.common.loader import load_image
from components.common.onnx_files import read_onnx
from components.common.records import Precision
from components.common.runners.torch import TorchGraph, UnsupportedOperators
from components.common.serving import Runtime, Serving, serving_runners
from components.common.transforms import TransformSpec
from components.validate.saliency import Layer, MapKind, chosen_layers, feature_layers, layer_maps, similarity


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one precision says of an image."""

    precision: Precision
    runtime: str
    """"n/a" where nothing here runs this precision."""
    note: str
    """Why there is no prediction, or what to know about it; empty for nothing."""
    probabilities: np.ndarray | None
    """[classes] float64; None where nothing here runs this precision, or its logits hold NaN."""


@dataclass(frozen=True, kw_only=True)
class LayerLook:
    """One layer's maps of an image, each of the layer's own size. [height, width] float32, not scaled."""

    layer: Layer
    fp32: np.ndarray
    int8: np.ndarray

    @property
    def similarity(self) -> float | None:
        """Cosine between the two maps; None where one of them is empty."""
        return similarity(self.fp32, self.int8)


@dataclass(frozen=True, kw_only=True)
class Look:
    """All about one image."""

    file: Path
    pixels: np.ndarray
    """[height, width, 3] uint8: the model's input, with the normalization undone."""
    predictions: tuple[Prediction, ...]
    explained: int
    """The class that Grad-CAM explains: what FP32 predicts."""
    layers: tuple[LayerLook, ...]

    def prediction(self, precision: Precision) -> Prediction:
        """That of a precision."""
        return next(entry for entry in self.predictions if entry.precision == precision)

    def largest_difference(self, precision: Precision) -> float | None:
        """Largest difference of a class's probability to that of FP32; None where either made none."""
        own, reference = (self.prediction(name).probabilities for name in (precision, "fp32"))
        if own is None or reference is None:
            return None
        return float(np.abs(own - reference).max())


@dataclass(frozen=True, kw_only=True)
class Looks:
    """All images, and why there are no maps (empty where there are)."""

    looks: tuple[Look, ...]
    maps_missing: str


def look(
    bundle: Artifact[BundleManifest],
    files: Sequence[Path],
    *,
    layers: Sequence[str] = (),
    kind: MapKind = "gradcam",
    runtime: Runtime = "auto",
) -> Looks:
    """Run images through every precision, and look into FP32 and INT8.

    Maps are computed by PyTorch on the CPU from fp32.onnx and int8.onnx, predictions by what would serve here.

    Args:
        bundle: loaded and verified.
        files: images in the formats that preprocess takes.
        layers: names of layers; none for the default, see `saliency.chosen_layers`.
        kind: of the maps.
        runtime: what runs the precisions.

    Raises:
        UserError: a file is no such image, or a layer is unknown.
        EngineryError: the models can't be run.
    """
    record = bundle.manifest
    inputs = [load_input(file, record.transform) for file in files]
    graphs, found, missing = _graphs(bundle, layers)
    servings = serving_runners(bundle, runtime)
    try:
        predictions = [tuple(_predict(serving, image) for serving in servings) for image in inputs]
    finally:
        for serving in servings:
            if serving.runner is not None:
                serving.runner.close()
    looks = []
    for file, image, predicted in zip(files, inputs, predictions, strict=True):
        explained = _explained(file, predicted)
        maps = [layer_maps(graph, image, found, kind, explained) for graph in graphs]
        looks.append(
            Look(
                file=file,
                pixels=_pixels(image, record.transform),
                predictions=predicted,
                explained=explained,
                layers=tuple(
                    LayerLook(layer=layer, fp32=fp32, int8=int8)
                    for layer, fp32, int8 in zip(found, *maps or ((), ()), strict=True)
                ),
            )
        )
    return Looks(looks=tuple(looks), maps_missing=missing)


def _graphs(bundle: Artifact[BundleManifest], asked: Sequence[str]) -> tuple[list[TorchGraph], list[Layer], str]:
    """FP32 and INT8 and the layers to look into; or nothing, and why PyTorch can't run this model."""
    models = bundle.manifest.models
    if "int8" not in models:
        return [], [], "the bundle has no INT8 model to set beside FP32"
    try:
        fp32 = TorchGraph(read_onnx(bundle.file(models["fp32"])))
        every = feature_layers(fp32, bundle.manifest.shapes)
        if not every and not asked:
            return [], [], "the model has no feature maps of more than one pixel"
        layers = chosen_layers(every, asked)
        return [fp32, TorchGraph(read_onnx(bundle.file(models["int8"])))], layers, ""
    except UnsupportedOperators as error:
        return [], [], str(error)


def _predict(serving: Serving, image: np.ndarray) -> Prediction:
    """image: [1, 3, H, W] float32, normalized."""
    found, note = None, serving.note
    if serving.runner is not None:
        found = probabilities(serving.runner.infer(image)[0])  # [classes]
        if not np.isfinite(found).all():
            found, note = None, "; ".join(filter(None, (note, "its logits hold NaN or infinity")))
    return Prediction(
        precision=serving.precision,
        runtime=serving.runner.runtime if serving.runner is not None else "n/a",
        note=note,
        probabilities=found,
    )


def _explained(file: Path, predictions: Sequence[Prediction]) -> int:
    """What FP32 predicts, or the first precision that predicts at all."""
    first = next((entry.probabilities for entry in predictions if entry.probabilities is not None), None)
    if first is None:
        reasons = "; ".join(f"{entry.precision.upper()}: {entry.note}" for entry in predictions)
        raise EngineryError(f"no precision has a prediction for {file} ({reasons}); export the model again")
    return int(first.argmax())


def load_input(file: Path, transform: TransformSpec) -> np.ndarray:
    """An image file as the model gets it: by the loader's own operators, decoded on the CPU.

    Returns:
        [1, 3, crop_size, crop_size] float32, normalized.

    Raises:
        UserError: there is no such file, or it is not an image that preprocess takes.
    """
    data = _read(file)
    check_encoded(data, str(file))
    try:
        return load_image(data, transform)
    except RuntimeError as error:
        raise undecodable(error, str(file)) from None


def _read(file: Path) -> bytes:
    if file.is_dir():
        raise UserError(f"{file} is a folder; name image files in it, such as {file}/*.jpg")
    if not file.exists():
        raise UserError(f"there is no file {file}; name an image")
    if not file.is_file():
        raise UserError(f"{file} is not a regular file; name an image")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {file}: {error.strerror}; make it readable for you") from None


def _pixels(image: np.ndarray, transform: TransformSpec) -> np.ndarray:
    """[1, 3, H, W] normalized to [H, W, 3] uint8."""
    values = image[0].transpose(1, 2, 0) * np.asarray(transform.std) + np.asarray(transform.mean)
    pixels: np.ndarray = np.clip(np.rint(255 * values), 0, 255).astype(np.uint8)
    return pixels
