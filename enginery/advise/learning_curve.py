"""Would more images help? Trainings on parts of the data, a power law through their errors, and its uncertainty.

Error = floor + scale * images ** -exponent, as found for many tasks (Hestness et al., "Deep Learning Scaling is
Predictable, Empirically", 2017). Every part is trained for as many steps as the whole, so that less data is not less
training, and all are judged by the same validation images.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from components.common.contracts.errors import EngineryError, UserError, shortened
from components.common.contracts.manifests import CheckpointManifest, DatasetManifest, load
from components.common.contracts.settings import load_yaml, resolve
from components.common.runtimes.counting import count_model
from components.common.tasks import TASKS, task_of
from components.preprocess.config import PreprocessConfig
from components.preprocess.packing import stratified
from components.preprocess.sources import find_samples
from components.train.config import TrainConfig
from enginery.local.parameters import own_config

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
WORTH_POINTS = 0.5  # by less, twice the images are said not to help
_EXPONENTS = np.geomspace(0.05, 1.2, 20)  # one as likely as its double, before errors say more
_NUM_DRAWS = 2000
_LAST_LINES = 400  # characters of a failed step's output


@dataclass(frozen=True, kw_only=True)
class Point:
    """Trainings on one number of images."""

    num_images: int
    errors: tuple[float, ...]
    """Share of wrong validation images of each run."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Error at some number of images; ranges are meant to hold in 90 % of cases."""

    num_images: int
    error_pct: tuple[float, float, float]
    """Low, middle, high."""
    gain_points: tuple[float, float, float]
    """Gain over the largest number of images measured: low, middle, high."""


def forecast(points: Sequence[Point], num_val: int, num_images: int) -> Forecast:
    """Extend the curve.

    Args:
        points: measured, of at least three numbers of images.
        num_val: validation images, of which few make an error uncertain.
        num_images: where to look.
    """
    sizes = np.array([point.num_images for point in points], dtype=float)
    means = np.array([np.mean(point.errors) for point in points])
    runs = np.array([len(point.errors) for point in points])
    spread = np.mean([np.var(point.errors, ddof=1) if len(point.errors) > 1 else 0.0 for point in points])
    smooth = (means * num_val + 0.5) / (num_val + 1)  # no error seen is not none
    variances = smooth * (1 - smooth) / num_val + spread / runs
    chance = np.random.default_rng(0)
    draws = np.clip(chance.normal(means, np.sqrt(variances), (_NUM_DRAWS, len(points))), 0, 1)
    floors, scales, exponents = _fits(sizes / sizes.max(), draws, 1 / variances, chance)
    there = floors + scales * (num_images / sizes.max()) ** -exponents
    return Forecast(num_images=num_images, error_pct=_range_pct(there), gain_points=_range_pct(floors + scales - there))


def _range_pct(values: np.ndarray) -> tuple[float, float, float]:
    low, middle, high = 100 * np.quantile(values, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)


def _fits(
    sizes: np.ndarray, draws: np.ndarray, weights: np.ndarray, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floor, scale and exponent for each draw: least squares, nothing negative, the exponent by how well each fits.

    Args:
        sizes: [points], over the largest.
        draws: [draws, points] errors.
        weights: [points] of their squares.
        chance: draws the exponents.
    """
    terms = sizes ** -_EXPONENTS[:, None]  # [exponents, points]
    total, first, second = weights.sum(), terms @ weights, terms**2 @ weights
    errors, products = (draws @ weights)[:, None], draws @ (terms * weights).T  # [draws, 1], [draws, exponents]
    scales = np.maximum((total * products - first * errors) / (total * second - first**2), 0)
    floors = (errors - scales * first) / total
    scales = np.where(floors < 0, products / second, scales)
    floors = np.maximum(floors, 0)
    misses = draws[:, None] - floors[..., None] - scales[..., None] * terms  # [draws, exponents, points]
    squares = misses**2 @ weights
    chances = np.exp(-0.5 * (squares - squares.min(axis=1, keepdims=True)))
    steps = np.cumsum(chances, axis=1)
    drawn = np.argmax(steps >= chance.random((len(draws), 1)) * steps[:, -1:], axis=1)
    rows = np.arange(len(draws))
    return floors[rows, drawn], scales[rows, drawn], _EXPONENTS[drawn]


def verdict(twice: Forecast) -> str:
    """Return in words whether twice the images would help."""
    low, _, high = twice.gain_points
    gain = f"{low:.2f} to {high:.2f} points"
    if low >= WORTH_POINTS:
        return f"More images help: twice as many would gain {gain}."
    if high < WORTH_POINTS:
        return f"More images hardly help: twice as many would gain {gain}."
    return f"Undecided: twice as many would gain {gain}; more validation images or runs would narrow that."


def miss(foretold: Forecast, largest: Point, num_val: int) -> str:
    """A warning where the largest number's error is far outside of what the smaller ones foretold; else empty."""
    error = float(np.mean(largest.errors))
    allowed_pct = 200 * (error * (1 - error) / num_val) ** 0.5  # two standard errors of its validation
    low, _, high = foretold.error_pct
    if low - allowed_pct <= 100 * error <= high + allowed_pct:
        return ""
    return (
        f"No curve goes through these errors: {100 * error:.2f} % were wrong of the last row, where {low:.2f} to "
        f"{high:.2f} % were foretold. Do not rely on the gain; more epochs or runs give steadier errors."
    )


def measure(
    data: Path,
    architecture: str,
    output: Path,
    *,
    config: Path | None,
    num_runs: int,
    on_progress: Callable[[str], None],
) -> tuple[list[Point], int]:
    """Train on parts of a folder of images, and return the points and the number of validation images.

    Args:
        data: a folder that preprocess takes, on this machine.
        architecture: what to train.
        output: existing folder for datasets and checkpoints.
        config: a pipeline's YAML file of settings, or one of enginery's own by its name.
        num_runs: trainings of each number of images, with seeds of their own.
        on_progress: called with a line before each training.

    Raises:
        UserError: the data is no folder, the network no classifier, a setting is wrong, or there are too few images.
        EngineryError: a step failed.
    """
    if not data.is_dir():
        raise UserError(
            f"{data} is no folder on this machine; unpack it first", code="no-folder", setting="--how-much-data"
        )
    if not TASKS[task := task_of(architecture)].classifies:
        message = f"{architecture} is for {task}, and --how-much-data trains classifiers alone, such as resnet18"
        raise UserError(message, code="other-task", setting="MODEL")
    content = load_yaml(own_config(config)) if config else {}
    recipe = {name: value for name, value in content.items() if name in TrainConfig.model_fields}
    recipe |= {**content.get("train", {}), "architecture": architecture}
    packing = {**content.get("preprocess", {}), "data": str(data)}
    train, preprocess = resolve(TrainConfig, "train", recipe), resolve(PreprocessConfig, "preprocess", packing)
    count_model(architecture, train.image_size)  # refuses one that there is not, before images are read
    with TemporaryDirectory() as scratch:
        source = find_samples(
            str(data), val_fraction=preprocess.val_fraction, seed=preprocess.seed, class_names_file="",
            scratch=Path(scratch),
        )  # fmt: skip
    samples = source.splits["train"]
    if len(samples) * SHARES[0] < max(train.global_batch_size, 2 * len(source.classes)):
        raise UserError(
            f"{data}: an eighth of {len(samples)} training images is less than a batch or than two of each class; "
            "a learning curve needs more",
            code="too-few-images",
            setting="--how-much-data",
        )
    found: dict[int, list[float]] = {}
    num_val = 0
    for run in range(num_runs):
        order = stratified(samples, run)
        for share in SHARES:
            number = round(share * len(order))
            on_progress(f"run {run + 1} of {num_runs}: {number} images")
            folder = output / f"{number}_{run}"
            parts = {"train": order[:number], "val": source.splits["val"]}
            for name, part in parts.items():
                _link(data, [(sample.path, source.classes[sample.label]) for sample in part], folder / "images" / name)
            # The same validation images for all: those like training images stay.
            own = {**packing, "data": str(folder / "images"), "near_duplicates": "report"}
            _step("preprocess", own, folder / "dataset")
            epochs = max(1, round(train.epochs / share))
            once = {"epochs": epochs, "validation_epochs": epochs, "checkpoint_epochs": epochs, "seed": run}
            _step("train", {**recipe, **once}, folder / "checkpoint", dataset=folder / "dataset")
            score = load(folder / "checkpoint", CheckpointManifest).manifest.metrics["val_score_pct"]
            num_val = load(folder / "dataset", DatasetManifest).manifest.splits["val"].num_images
            found.setdefault(number, []).append(1 - score / 100)
            shutil.rmtree(folder)
    return [Point(num_images=number, errors=tuple(errors)) for number, errors in sorted(found.items())], num_val


def _link(data: Path, images: Sequence[tuple[str, str]], folder: Path) -> None:
    """Lay out files, each with its class, in a folder per class."""
    for index, (path, label) in enumerate(images):
        target = folder / label / f"{index}_{Path(path).name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(data / path, target)
        except OSError:  # another file system
            shutil.copyfile(data / path, target)


def _step(name: str, settings: Mapping[str, Any], output: Path, **inputs: Path) -> None:
    """Run a step in a process of its own, without tracking."""
    file = output.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(settings)))
    options = [part for key, value in inputs.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", f"components.{name}", "--config", str(file), "--output", str(output), *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-_LAST_LINES:]
        raise EngineryError(f"{name} failed: {shortened(said)}", code="step-failed")
