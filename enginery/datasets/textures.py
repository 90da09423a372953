"""Textures: a dataset of any size of procedural images that a ResNet-50 learns, but not to perfection."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from components.common.data.image_files import encode_image
from enginery.datasets import (
    MAX_IMAGE_SIZE,
    SPLITS,
    DatasetSummary,
    ImageTask,
    check_range,
    is_written,
    run_tasks,
    write_dataset,
    write_whole,
)

Array = npt.NDArray[np.float32]

SYNTHESIS_VERSION = 1
"""Raise it when a change alters the images of a given seed: it guards resumed directories."""

TRAITS = ("form", "order", "coverage", "grain", "hue", "hue_step", "scale")
"""form, order: meaning depends on the family. coverage: which of the two colours prevails. grain: wavelength
of the fine texture over that of the structure. hue, hue_step: first colour, and the way to the second.
scale: wavelength of the structure."""

TRAIT_SPREADS = np.array([0.16, 0.16, 0.16, 0.16, 0.12, 0.20, 0.32])
"""Standard deviation of an image's traits about its class, the range of every trait being 1. With 50 classes
an observer who reads all traits without error is right for 96 % of the images; ResNet-50 from scratch reached
82 % after 16 epochs."""

HUE = TRAITS.index("hue")
BASE_SIZE = 224  # px; wavelengths are given at this size and scale with the image


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """Coordinates of a structure: rotated, shifted and bent coordinates in units of its wavelength."""

    x: Array
    """[size, size], wavelengths, across the structure."""
    y: Array
    """[size, size], wavelengths, along the structure."""
    angle: float
    """Rotation of the structure, radians."""
    wavelength: float
    """Wavelength of the structure, px."""


def class_traits(class_index: int) -> npt.NDArray[np.float64]:
    """[7] traits of a class, each in [0, 1).

    An additive recurrence on the generalised golden ratio (Roberts 2018, "The unreasonable effectiveness of
    quasirandom sequences") fills the cube evenly for any number of classes: class k is the same texture in
    a set of 10 and of 1,000 classes, and more classes are harder.
    """
    dimensions = len(TRAITS)
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    steps = ratio ** -np.arange(1, dimensions + 1, dtype=np.float64)
    return (0.5 + (class_index + 1) * steps) % 1.0


def draw_traits(rng: np.random.Generator, class_index: int) -> npt.NDArray[np.float64]:
    """[7] traits of one image: its class's, plus normal noise. All but the hue are kept in [-0.25, 1.25]."""
    traits = class_traits(class_index) + TRAIT_SPREADS * rng.standard_normal(len(TRAITS))
    hue = traits[HUE] % 1.0
    traits = np.clip(traits, -0.25, 1.25)
    traits[HUE] = hue
    return traits


def texture_image(rng: np.random.Generator, class_index: int, size: int) -> Image.Image:
    """One RGB image of size x size px. Everything random is drawn from `rng`, in a fixed order."""
    form, order, coverage, grain, hue, hue_step, scale = draw_traits(rng, class_index).tolist()
    # 13 to 32 px at 224, the class's part; the nuisance moves it by a third of an octave on top
    wavelength = size / BASE_SIZE * 13.0 * 2 ** (1.3 * scale + 0.33 * rng.standard_normal())
    wavelength = max(wavelength, 3.0)
    # Coordinates under a random rotation and shift, bent a little at the scale of a few wavelengths
    angle = rng.uniform(0, 2 * math.pi)
    shift_x, shift_y = rng.uniform(0, 64, 2).astype(np.float32)
    rows, columns = _grid(size)
    x = (columns * (math.cos(angle) / wavelength) + rows * (math.sin(angle) / wavelength)).astype(np.float32)
    y = (rows * (math.cos(angle) / wavelength) - columns * (math.sin(angle) / wavelength)).astype(np.float32)
    bend = rng.uniform(0.0, 0.12) * value_noise(rng, size, 5 * wavelength)
    canvas = Canvas(x=x + (shift_x + bend), y=y + (shift_y - bend), angle=angle, wavelength=wavelength)
    structure = FAMILIES[class_index % len(FAMILIES)](rng, canvas, form, order)

    # pixels: [size, size, 3] float32, 0..255
    colours, offset = _colour_table(rng, coverage, hue, hue_step)
    pixels = colours[np.clip(structure * 64 + 128, 0, 255).astype(np.uint8)]
    fine = value_noise(rng, size, wavelength * 0.09 * 2 ** (2.1 * grain))
    shade = 1 + rng.uniform(0.12, 0.28) * fine + _light(rng, size)
    pixels *= shade[..., None]
    pixels += offset
    return _degrade(rng, Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)))


def value_noise(rng: np.random.Generator, size: int, wavelength: float) -> Array:
    """[size, size] smooth noise of about unit deviation whose features are `wavelength` px wide."""
    nodes = min(size, max(2, round(2 * size / max(wavelength, 2.0))))
    noise = rng.standard_normal((nodes, nodes), dtype=np.float32)
    if nodes == size:
        return noise
    return np.asarray(Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)) * np.float32(1.2)


@lru_cache(maxsize=4)
def _grid(size: int) -> tuple[Array, Array]:
    """Row numbers [size, 1] and column numbers [1, size], centred on the image."""
    line = np.arange(size, dtype=np.float32) - np.float32(size / 2)
    return line[:, None], line[None, :]


def _wave(turns: Array) -> Array:
    wave: Array = np.sin(np.float32(2 * math.pi) * turns)
    return wave


def _stripes(rng: np.random.Generator, canvas: Canvas, form: float, order: float) -> Array:
    """Two parallel gratings. form: ratio of their frequencies. order: how strongly they waver."""
    size = canvas.x.shape[0]
    waver = np.float32(0.02 + 0.45 * max(order, 0.0)) * value_noise(rng, size, 3 * canvas.wavelength)
    across = canvas.x * np.float32(0.75) + waver
    ratio = 1.3 + 1.7 * form
    return np.float32(1.1) * _wave(across) + np.float32(0.8) * _wave(across * np.float32(ratio))


def _weave(rng: np.random.Generator, canvas: Canvas, form: float, order: float) -> Array:
    """Two crossing gratings. form: the angle between them. order: from their product to their maximum."""
    angle = math.radians(30 + 60 * form) * rng.choice((-1, 1))
    first = _wave(canvas.x)
    second = _wave(canvas.x * np.float32(math.cos(angle)) + canvas.y * np.float32(math.sin(angle)))
    share = np.float32(min(max(order, 0.0), 1.0))
    product = np.float32(2.2) * first * second
    return (1 - share) * product + share * (np.float32(2.2) * np.maximum(first, second) - np.float32(0.9))


def _cells(rng: np.random.Generator, canvas: Canvas, form: float, order: float) -> Array:
    """Cellular noise (Worley 1996). form: from round dots to polygons. order: from a lattice to random places."""
    jitter = 0.1 + 0.8 * max(order, 0.0)
    nodes = 64
    centres = (0.5 + jitter * (rng.random((2, nodes, nodes), dtype=np.float32) - 0.5)).reshape(2, -1)
    x = canvas.x[::2, ::2] * np.float32(0.8)  # every other pixel: the distances are smooth, and costly
    y = canvas.y[::2, ::2] * np.float32(0.8)
    column, row = np.floor(x), np.floor(y)
    x -= column
    y -= row
    column, row = column.astype(np.int32), row.astype(np.int32)
    nearest = np.full(x.shape, 9.0, np.float32)  # squared distances, wavelengths
    second = nearest.copy()
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            index = ((row + down) & (nodes - 1)) * nodes + ((column + right) & (nodes - 1))
            dx = centres[0][index] + (np.float32(right) - x)
            dy = centres[1][index] + (np.float32(down) - y)
            distance = dx * dx + dy * dy
            second = np.minimum(second, np.maximum(nearest, distance))
            nearest = np.minimum(nearest, distance)
    nearest, second = np.sqrt(nearest), np.sqrt(second)
    share = np.float32(min(max(form, 0.0), 1.0))
    dots = np.float32(5.0) * (np.float32(0.42) - nearest)
    polygons = np.float32(4.0) * (second - nearest - np.float32(0.3))
    field = Image.fromarray((1 - share) * dots + share * polygons)
    return np.asarray(field.resize(canvas.x.shape, Image.Resampling.BILINEAR))


def _blobs(rng: np.random.Generator, canvas: Canvas, form: float, order: float) -> Array:
    """Filtered noise. form: from labyrinth (narrow band) to clouds (wide band). order: how elongated."""
    stretch = 2 ** (1.6 * max(order, 0.0))
    width = 0.10 + 0.75 * max(form, 0.0)  # natural logarithm of frequency

    def spectrum(across: Array, along: Array) -> Array:
        radius = np.hypot(across, along * np.float32(stretch)) + np.float32(1e-4)
        amplitude: Array = np.exp(-((np.log(radius) / np.float32(width)) ** 2) / 2) / radius
        return amplitude

    return _filtered_noise(rng, canvas, spectrum)


def _fibres(rng: np.random.Generator, canvas: Canvas, form: float, order: float) -> Array:
    """Noise of two directions. form: the angle between them. order: how much each direction scatters."""
    half_angle = math.radians(12 + 33 * max(form, 0.0))
    scatter = 0.06 + 0.30 * max(order, 0.0)  # radians

    def spectrum(across: Array, along: Array) -> Array:
        radius = np.hypot(across, along) + np.float32(1e-4)
        # the direction of a wave has no sign: fold it to 0..pi/2 and compare with the two lobes at once
        lobe = np.arctan2(np.abs(along), np.abs(across)) - np.float32(half_angle)
        band = np.log(radius) / np.float32(0.3)
        amplitude: Array = np.exp(-(band**2 + (lobe / np.float32(scatter)) ** 2) / 2)
        return amplitude

    return _filtered_noise(rng, canvas, spectrum)


def _filtered_noise(rng: np.random.Generator, canvas: Canvas, spectrum: Callable[[Array, Array], Array]) -> Array:
    """[size, size] noise of unit deviation. `spectrum`: amplitude at frequencies in units of 1/wavelength."""
    size = canvas.x.shape[0]
    rows = np.fft.fftfreq(size)[:, None].astype(np.float32) * np.float32(canvas.wavelength)
    columns = np.fft.rfftfreq(size)[None, :].astype(np.float32) * np.float32(canvas.wavelength)
    cos, sin = np.float32(math.cos(canvas.angle)), np.float32(math.sin(canvas.angle))
    amplitude = spectrum(columns * cos + rows * sin, rows * cos - columns * sin)
    amplitude[0, 0] = 0
    parts = rng.standard_normal((*amplitude.shape, 2), dtype=np.float32)
    waves = parts.view(np.complex64)[..., 0] * amplitude
    field: Array = np.fft.irfft2(waves, s=(size, size)).astype(np.float32)
    field /= field.std() + np.float32(1e-9)
    return field


FAMILIES = (_stripes, _weave, _cells, _blobs, _fibres)


def _colour_table(rng: np.random.Generator, coverage: float, hue: float, hue_step: float) -> tuple[Array, np.float32]:
    """Colour of each level of the structure, with a contrast and a colour cast, and an offset to add.

    Returns:
        [256, 3] float32, 0..255, from -2 (level 0) to 2 deviations; the offset that a low contrast adds.
    """
    level = np.linspace(-2, 2, 256)
    mix = 1 / (1 + np.exp(-rng.uniform(1.5, 4.0) * (level - 0.8 * (1 - 2 * coverage))))
    dark, bright = rng.uniform(0.18, 0.5), rng.uniform(0.55, 0.95)
    if rng.random() < 0.5:
        dark, bright = bright, dark
    first = _rgb(hue, rng.uniform(0.2, 0.65), dark)
    second = _rgb(hue + 0.08 + 0.42 * hue_step, rng.uniform(0.2, 0.65), bright)
    contrast = rng.uniform(0.4, 1.0)
    gains = 255 * contrast * np.exp(0.13 * rng.standard_normal(3))
    colours = (first + mix[:, None] * (second - first)) * gains
    return colours.astype(np.float32), np.float32((1 - contrast) * rng.uniform(60, 190))


def _rgb(hue: float, saturation: float, value: float) -> npt.NDArray[np.float64]:
    """[3] RGB in [0, 1] from hue (1 = full turn), saturation and value."""
    ramp: npt.NDArray[np.float64] = np.abs((hue * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1
    return value * (1 - saturation * (1 - np.clip(ramp, 0, 1)))


def _light(rng: np.random.Generator, size: int) -> Array:
    """[size, size] illumination gradient, up to 0.45 towards the edges, in a random direction."""
    angle = rng.uniform(0, 2 * math.pi)
    slope = rng.uniform(0, 0.45) / (size / 2)
    rows, columns = _grid(size)
    return columns * np.float32(math.cos(angle) * slope) + rows * np.float32(math.sin(angle) * slope)


def _degrade(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """Blur, occluding patches, noise."""
    blur = rng.uniform(-0.8, 1.6) * image.width / BASE_SIZE  # px; a third of the images stay sharp
    if blur > 0:
        image = image.filter(ImageFilter.BoxBlur(blur))
    # Draw 0 to 4 plain patches: ellipses and tilted boxes of 10 to 45 % of the image's side
    draw = ImageDraw.Draw(image)
    size = image.width
    for _ in range(rng.integers(0, 5)):
        x, y = rng.uniform(0, size, 2)
        half_width, half_height = rng.uniform(0.05, 0.225, 2) * size
        colour = tuple(int(part) for part in rng.integers(0, 256, 3))
        if rng.random() < 0.5:
            draw.ellipse((x - half_width, y - half_height, x + half_width, y + half_height), fill=colour)
            continue
        tilt = rng.uniform(0, math.pi)
        cos, sin = math.cos(tilt), math.sin(tilt)
        corners = [(half_width * a, half_height * b) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
        draw.polygon([(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in corners], fill=colour)
    noise = rng.uniform(0, 14) * rng.standard_normal((image.height, image.width, 1), dtype=np.float32)
    noisy = np.asarray(image) + np.rint(noise).astype(np.int16)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


JPEG_QUALITY = 90
MIN_IMAGE_SIZE = 16  # px; below about 64 the fine textures are gone
IMAGES_PER_TASK = 64  # about half a second of work: a fine progress bar, and Ctrl-C answers quickly


def write_textures(
    directory: Path,
    *,
    num_classes: int = 50,
    num_train: int = 40000,
    num_val: int = 10000,
    seed: int = 0,
    image_size: int = 224,
    num_workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> DatasetSummary:
    """Write DIRECTORY/{train,val}/<class>/<index>.jpg and, last, DIRECTORY/dataset.json.

    Classes are balanced; a remainder goes to the first classes, one image each. An unfinished run of the
    same arguments is continued, a finished one left alone.

    Args:
        directory: New, empty, or of an earlier run with the same arguments.
        num_classes: 1 or more. More classes lie closer together: 50 is what the difficulty was set for.
        num_train: Images of the training split, all classes together; at least one per class.
        num_val: The same for the validation split.
        seed: 0 or more. Another seed gives other images of the same classes.
        image_size: Width and height, px.
        num_workers: Processes; 0 = one per core that this process may use.
        on_progress: Called with the number of images that have just become ready.

    Raises:
        UserError: an argument is out of range, or the directory holds something else.
    """
    check_range(num_classes=(num_classes, 1), image_size=(image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE))
    check_range("one image per class", num_train=(num_train, num_classes), num_val=(num_val, num_classes))
    check_range(seed=(seed, 0), num_workers=(num_workers, 0))
    arguments: dict[str, str | int] = {
        "dataset": "textures",
        "num_classes": num_classes,
        "num_train": num_train,
        "num_val": num_val,
        "seed": seed,
        "image_size": image_size,
        "jpeg_quality": JPEG_QUALITY,
        "synthesis_version": SYNTHESIS_VERSION,
    }

    def write() -> None:
        tasks = list(_tasks(directory, num_classes, (num_train, num_val), seed, image_size))
        for folder in {task.folder for task in tasks}:
            folder.mkdir(parents=True, exist_ok=True)
        run_tasks(_write_task, tasks, num_workers, on_progress)

    return write_dataset(directory, arguments, write, num_images=num_train + num_val, num_classes=num_classes)


def _tasks(
    directory: Path, num_classes: int, num_images: tuple[int, int], seed: int, image_size: int
) -> Iterator[ImageTask]:
    digits = max(3, len(str(num_classes - 1)))
    for split, split_name in enumerate(SPLITS):
        least, extra = divmod(num_images[split], num_classes)
        for class_index in range(num_classes):
            yield from ImageTask(
                folder=directory / split_name / f"{class_index:0{digits}d}",
                seed=seed,
                split=split,
                class_index=class_index,
                indices=range(least + (class_index < extra)),
                image_size=image_size,
            ).parts(IMAGES_PER_TASK)


def _write_task(task: ImageTask) -> None:
    """Write the images that an earlier run has not."""
    for index in task.indices:
        path = task.folder / f"{index:05d}.jpg"
        if not is_written(path):
            write_whole(path, texture_jpeg(task.seed, task.split, task.class_index, index, task.image_size))


def texture_jpeg(seed: int, split: int, class_index: int, index: int, image_size: int) -> bytes:
    """JPEG bytes of one image, a function of these numbers alone."""
    rng = np.random.default_rng((seed, split, class_index, index))
    return encode_image(texture_image(rng, class_index, image_size), "JPEG", quality=JPEG_QUALITY)
