"""One image through a bundle: predictions of each precision, maps of layers in FP32 and INT8, and their picture."""

import io
import logging
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import PercentFormatter
from PIL import Image

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, BundleManifest, check_task
from components.common.contracts.records import Precision
from components.common.contracts.transforms import TransformSpec
from components.common.data.dali_pipelines import load_image
from components.common.data.evaluation import probabilities
from components.common.data.image_files import undecodable
from components.common.data.read_alike import check_encoded
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.selection import RuntimeSelection, select_runtimes
from components.common.runtimes.torch import TorchGraph, UnsupportedOperators
from components.validate.charts import shortened
from components.validate.saliency import FeatureLayer, MapKind, chosen_layers, feature_layers, layer_maps, similarity


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of one precision for an image."""

    precision: Precision
    runtime: str
    """"n/a" where nothing here runs this precision."""
    note: str
    """The reason why there is no prediction, or what to know about it; empty for nothing."""
    probabilities: np.ndarray | None
    """[classes] float64; None where nothing here runs this precision, or its logits hold NaN."""


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """One layer's maps of an image, each of the layer's own size. [height, width] float32, not scaled."""

    layer: FeatureLayer
    fp32: np.ndarray
    int8: np.ndarray

    @property
    def similarity(self) -> float | None:
        """Cosine between the two maps; None where one of them is empty."""
        return similarity(self.fp32, self.int8)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All about one image."""

    file: Path
    pixels: np.ndarray
    """[height, width, 3] uint8: the model's input, with the normalization undone."""
    predictions: tuple[Prediction, ...]
    class_index: int
    """The class that Grad-CAM explains: what FP32 predicts."""
    layers: tuple[LayerMaps, ...]

    def prediction(self, precision: Precision) -> Prediction:
        """Return the prediction of a precision."""
        return next(entry for entry in self.predictions if entry.precision == precision)

    def largest_difference(self, precision: Precision) -> float | None:
        """Largest difference of a class's probability to that of FP32; None where either made none."""
        own, reference = (self.prediction(name).probabilities for name in (precision, "fp32"))
        if own is None or reference is None:
            return None
        return float(np.abs(own - reference).max())


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All images, and why there are no maps (empty where there are)."""

    explanations: tuple[Explanation, ...]
    maps_missing: str


def inspect(
    bundle: Artifact[BundleManifest],
    files: Sequence[Path],
    *,
    layers: Sequence[str] = (),
    kind: MapKind = "gradcam",
) -> Inspection:
    """Run images through every precision, and look into FP32 and INT8.

    Maps are computed by PyTorch on the CPU from fp32.onnx and int8.onnx, predictions by what would serve here.

    Args:
        bundle: loaded and verified.
        files: images in the formats that preprocess takes.
        layers: names of layers; none for the default, see `saliency.chosen_layers`.
        kind: of the maps.

    Raises:
        UserError: a file is no such image, or a layer is unknown.
        EngineryError: the models can't be run.
    """
    check_task(f"the bundle {bundle.path}", bundle.manifest.task, "classification", "name one of a classifier")
    record = bundle.manifest
    inputs = [load_input(file, record.image_transform) for file in files]
    graphs, found, missing = _graphs(bundle, layers)
    selections = select_runtimes(bundle, "auto")
    try:
        predictions = [tuple(_predict(selection, image) for selection in selections) for image in inputs]
    finally:
        for selection in selections:
            if selection.runner is not None:
                selection.runner.close()
    explanations = []
    for file, image, predicted in zip(files, inputs, predictions, strict=True):
        class_index = _first_class(file, predicted)
        maps = [layer_maps(graph, image, found, kind, class_index) for graph in graphs]
        explanations.append(
            Explanation(
                file=file,
                pixels=_pixels(image, record.image_transform),
                predictions=predicted,
                class_index=class_index,
                layers=tuple(
                    LayerMaps(layer=layer, fp32=fp32, int8=int8)
                    for layer, fp32, int8 in zip(found, *maps or ((), ()), strict=True)
                ),
            )
        )
    return Inspection(explanations=tuple(explanations), maps_missing=missing)


def _graphs(bundle: Artifact[BundleManifest], asked: Sequence[str]) -> tuple[list[TorchGraph], list[FeatureLayer], str]:
    """FP32 and INT8 and the layers to look into; or nothing, and why PyTorch can't run this model."""
    models = bundle.manifest.models
    if "int8" not in models:
        return [], [], "the bundle has no INT8 model to set beside FP32"
    try:
        fp32 = TorchGraph(read_onnx(bundle.file(models["fp32"])))
        every = feature_layers(fp32, bundle.manifest.image_shapes)
        if not every and not asked:
            return [], [], "the model has no feature maps of more than one pixel"
        layers = chosen_layers(every, asked)
        return [fp32, TorchGraph(read_onnx(bundle.file(models["int8"])))], layers, ""
    except UnsupportedOperators as error:
        return [], [], str(error)


def _predict(selection: RuntimeSelection, image: np.ndarray) -> Prediction:
    """image: [1, 3, H, W] float32, normalized."""
    found, note = None, selection.note
    if selection.runner is not None:
        found = probabilities(selection.runner.infer(image)[0])  # [classes]
        if not np.isfinite(found).all():
            found, note = None, "; ".join(filter(None, (note, "its logits hold NaN or infinity")))
    return Prediction(
        precision=selection.precision,
        runtime=selection.runner.runtime if selection.runner is not None else "n/a",
        note=note,
        probabilities=found,
    )


def _first_class(file: Path, predictions: Sequence[Prediction]) -> int:
    """The class that FP32 predicts, or the first precision that predicts at all."""
    first = next((entry.probabilities for entry in predictions if entry.probabilities is not None), None)
    if first is None:
        reasons = "; ".join(f"{entry.precision.upper()}: {entry.note}" for entry in predictions)
        message = f"no precision has a prediction for {file} ({reasons}); export the model again"
        raise EngineryError(message, code="no-prediction")
    return int(first.argmax())


def load_input(file: Path, transform: TransformSpec) -> np.ndarray:
    """An image file as the model gets it: by the loader's own operators, decoded on the CPU.

    Returns:
        [1, 3, crop_size, crop_size] float32, normalized.

    Raises:
        UserError: there is no such file, or it is not an image that preprocess takes.
    """
    data, _ = check_encoded(_read(file), str(file))
    try:
        return load_image(data, transform)
    except RuntimeError as error:
        raise undecodable(error, str(file)) from None


def _read(file: Path) -> bytes:
    if not file.exists():
        raise UserError(f"there is no file {file}; name an image", code="no-file")
    if not file.is_file():
        raise UserError(f"{file} is no regular file; name an image, such as {file}/*.jpg", code="not-a-file")
    try:
        return file.read_bytes()
    except OSError as error:
        message = f"can't read {file}: {error.strerror}; make it readable for you"
        raise UserError(message, code="unreadable-file") from None


def _pixels(image: np.ndarray, transform: TransformSpec) -> np.ndarray:
    """[1, 3, H, W] normalized to [H, W, 3] uint8."""
    values = image[0].transpose(1, 2, 0) * np.asarray(transform.std) + np.asarray(transform.mean)
    pixels: np.ndarray = np.clip(np.rint(255 * values), 0, 255).astype(np.uint8)
    return pixels


_COLORS = {"fp32": "#64748b", "fp16": "#c2780c", "int8": "#0d8a72"}  # those of the report's light page
_TEXT, _MUTED, _LINE = "#1e293b", "#64748b", "#e2e8f0"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "xtick.color": _MUTED,
    "ytick.color": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.titlesize": 9,
    "text.parse_math": False,  # in a name a dollar is a dollar
}
_NUM_TOP = 3
_MAP_INCHES = 1.55
_BARS_INCHES = 1.75
_CHARACTER_INCHES = 0.085  # of a class's name, beside the bars
_BLOCK_INCHES = 3.85  # height of an image's block: two maps, and the text around them
_HEAD_INCHES = 0.32
_DPI = 150
_SMALL_SIDE = 64  # up to this size, an image's own pixels are shown as squares
_MAX_NAME = 16  # characters of a class
_TITLES: dict[MapKind, str] = {
    "gradcam": "Grad-CAM: what speaks for the class that FP32 predicts",
    "activation": "Activation: mean magnitude over the channels",
}


def picture(explanations: Sequence[Explanation], classes: Sequence[str], kind: MapKind, title: str) -> bytes:
    """A PNG with a block per image, one below the other.

    Args:
        explanations: one or more, all with the same layers (which may be none).
        classes: names of the classes.
        kind: of the maps.
        title: one line above everything, such as the model's name.
    """
    num_layers = len(explanations[0].layers)
    longest = max(len(shortened(classes[index], _MAX_NAME)) for entry in explanations for index in _top_classes(entry))
    names = 0.3 + _CHARACTER_INCHES * longest
    widths = [2 * _MAP_INCHES, names + _BARS_INCHES, *([_MAP_INCHES] * num_layers)]
    size = (sum(widths) + 1.3, _HEAD_INCHES + _BLOCK_INCHES * len(explanations))
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # of a class that no font here can write
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        figure = Figure(figsize=size, facecolor="white")
        side, head = 0.35 / size[0], 1 - _HEAD_INCHES / size[1]
        figure.text(side, 1 - 0.14 / size[1], title, fontsize=11, fontweight="bold", va="top")
        if num_layers:
            figure.text(1 - side, 1 - 0.17 / size[1], _TITLES[kind], color=_MUTED, ha="right", va="top")
        blocks = figure.add_gridspec(len(explanations), 1, left=side, right=1 - side, bottom=0, top=head, hspace=0)
        for row, entry in enumerate(explanations):
            _draw_explanation(figure, blocks[row, 0], entry, classes, widths)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
    return file.getvalue()


def _draw_explanation(
    figure: Figure, block: SubplotSpec, explanation: Explanation, classes: Sequence[str], widths: Sequence[float]
) -> None:
    top, bottom = 0.55 / _BLOCK_INCHES, 0.3 / _BLOCK_INCHES
    rows = block.subgridspec(3, 1, height_ratios=[top, 1 - top - bottom, bottom], hspace=0)
    grid = rows[1].subgridspec(2, len(widths), width_ratios=widths, wspace=0.16, hspace=0.07)
    image = figure.add_subplot(grid[:, 0])
    smooth = max(explanation.pixels.shape[:2]) > _SMALL_SIDE
    image.imshow(explanation.pixels, interpolation="antialiased" if smooth else "nearest")
    height, width = explanation.pixels.shape[:2]
    image.set_xlabel(f"as the model sees it, {width} x {height} px", color=_MUTED, fontsize=8)
    _without_ticks(image)
    image.set_title(_wrapped(explanation.file.name, 44), loc="left", fontweight="bold")
    bars = rows[1].subgridspec(1, len(widths), width_ratios=widths, wspace=0.16)[0, 1]
    _draw_bars(figure, bars, explanation, classes, widths[1] - _BARS_INCHES)
    for column, entry in enumerate(explanation.layers, 2):
        axes = [figure.add_subplot(grid[row, column]) for row in (0, 1)]
        _draw_maps(axes, explanation.pixels, entry)
        if column == 2:
            for place, precision in zip(axes, ("fp32", "int8"), strict=True):
                place.set_ylabel(precision.upper(), color=_COLORS[precision], fontweight="bold", labelpad=3)


def _draw_bars(
    figure: Figure, place: SubplotSpec, explanation: Explanation, classes: Sequence[str], names: float
) -> None:
    """The classes that any precision has among its first three, a bar per precision. `names`: inches for theirs."""
    answers = [entry for entry in explanation.predictions if entry.probabilities is not None]
    shown = _top_classes(explanation)
    inner = place.subgridspec(1, 2, width_ratios=[names, _BARS_INCHES], wspace=0)
    axes = figure.add_subplot(inner[0, 1])
    height = 0.8 / len(answers)
    for position, entry in enumerate(answers):
        assert entry.probabilities is not None
        rows = [row + (position - (len(answers) - 1) / 2) * height for row in range(len(shown))]
        values = [float(entry.probabilities[index]) for index in shown]
        axes.barh(rows, values, 0.86 * height, color=_COLORS[entry.precision], label=entry.precision.upper())
        for row, value in zip(rows, values, strict=True):
            percent = "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"
            axes.text(value + 0.02, row, percent, va="center", fontsize=7.5, color=_TEXT)
    axes.set_yticks(range(len(shown)), [shortened(classes[index], _MAX_NAME) for index in shown])
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_xlim(0, 1.32)
    axes.set_xticks([0, 0.5, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.06, 1.0), ncols=3, frameon=False, fontsize=8, handlelength=0.8,
        columnspacing=0.9, handletextpad=0.4, borderpad=0.1,
    )  # fmt: skip


def _top_classes(explanation: Explanation) -> list[int]:
    """The first three of each precision, the likeliest in FP32 first."""
    found: dict[int, float] = {}
    for entry in explanation.predictions:
        if entry.probabilities is None:
            continue
        for index in np.argsort(-entry.probabilities, kind="stable")[:_NUM_TOP]:
            found.setdefault(int(index), float(entry.probabilities[index]))
    return sorted(found, key=lambda index: -found[index])


def _draw_maps(axes: Sequence[Axes], pixels: np.ndarray, entry: LayerMaps) -> None:
    """FP32 above INT8, on one scale."""
    largest = float(max(entry.fp32.max(), entry.int8.max()))
    for place, values in zip(axes, (entry.fp32, entry.int8), strict=True):
        place.imshow(_overlay(pixels, values / largest if largest > 0 else values))
        _without_ticks(place)
    layer = entry.layer
    axes[0].set_title(f"{_wrapped(layer.name, 22)}\n{layer.width} x {layer.height}", fontsize=8)
    alike = entry.similarity
    text = "nothing speaks for it" if alike is None else f"cosine {alike:.3f}"
    axes[1].set_xlabel(text, fontsize=8, color=_MUTED)


def _overlay(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A map in colours over the image in gray.

    Args:
        pixels: [H, W, 3] uint8.
        values: [h, w] in 0..1; scaled to the image's size, bilinear, as in the paper.

    Returns:
        [H', W', 3] float in 0..1; a small image is enlarged, so that the map over it is smooth.
    """
    gray = Image.fromarray(pixels).convert("L")
    factor = max(1, -(-224 // max(gray.size)))
    size = (gray.width * factor, gray.height * factor)
    scaled = Image.fromarray(np.ascontiguousarray(values, np.float32)).resize(size, Image.Resampling.BILINEAR)
    heat = np.clip(np.asarray(scaled), 0, 1)
    ground = np.asarray(gray.resize(size, Image.Resampling.NEAREST))[..., None] / 255.0
    colors = matplotlib.colormaps["inferno"](heat)[..., :3]
    opacity = (0.35 + 0.4 * heat)[..., None]
    overlay: np.ndarray = (1 - opacity) * ground + opacity * colors
    return overlay


def _without_ticks(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …")) or text[:width]
