"""Predictions of runners over one split: every runner sees exactly the same decoded images."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from components.common.contracts.records import PairedComparison
from components.common.contracts.statistics import mcnemar, paired_counts
from components.common.contracts.transforms import TransformSpec
from components.common.data.baseline import image_statistics
from components.common.runtimes.runner import Runner, to_numpy
from components.common.tasks import TASKS, predictions_of
from components.common.tasks.predictions import ByClass, Predictions, Top1Drop

if TYPE_CHECKING:  # torch and DALI, which the image of promote has not
    from components.common.data.loader import Batch

TOP_K = 5
NUM_BINS = 15  # of confidence, as in Guo et al. (2017)
_MAX_INT16_CLASSES = 32_768
_SUM_TOLERANCE = 1e-2  # of probabilities, which FP16 adds up to no better


def _nothing() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, kw_only=True)
class ClassPredictions(Predictions):
    """The best classes of every image, in the loader's order.

    This is all that grows with the number of images: 2 k + 8 bytes each (18 for five classes or more), 4 k + 8 where
    there are more than 32,768 classes, and 16 for the label and the image's statistics, which all precisions share.
    """

    # [N, k] int16 or int32, class indices, most likely first; k = min(5, classes). -1 where they name none
    top: np.ndarray
    labels: np.ndarray  # [N] int32
    # [N] float32, 0..1 each: the most likely class's probability, and the entropy of all over the largest possible
    confidences: np.ndarray = field(default_factory=_nothing)
    entropies: np.ndarray = field(default_factory=_nothing)
    # [N, 3] float32: see `image_statistics`
    image_statistics: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.float32))

    @classmethod
    def of(cls, outputs: np.ndarray, labels: np.ndarray) -> Self:
        """See Predictions. outputs: [B, classes] logits."""
        confidences, entropies = confidences_and_entropies(outputs)
        return cls(
            top=top_classes(outputs).astype(np.int16 if outputs.shape[1] <= _MAX_INT16_CLASSES else np.int32),
            labels=labels.astype(np.int32),
            confidences=confidences.astype(np.float32),
            entropies=entropies.astype(np.float32),
        )

    @property
    def num_images(self) -> int:
        """Images predicted."""
        return len(self.labels)

    @property
    def num_undefined(self) -> int:
        """Images whose logits name no class, which is never right."""
        return int((self.top[:, 0] < 0).sum())

    @property
    def right(self) -> np.ndarray:
        """[N] bool: True where the most likely class is the label."""
        right: np.ndarray = self.top[:, 0] == self.labels
        return right

    @property
    def score_pct(self) -> float:
        """Share of images whose most likely class is the label, in per cent."""
        return 100.0 * float(self.right.mean())

    @property
    def top5_pct(self) -> float:
        """Share of images with the label among the five most likely classes, in per cent."""
        return 100.0 * float((self.top == self.labels[:, None]).any(axis=1).mean())

    @property
    def ece_pct(self) -> float | None:
        """Expected calibration error in per cent: how far confidence and accuracy lie apart; None without confidences.

        Over 15 bins of equal width, of which bin i holds confidences above i/15 and up to (i+1)/15, the mean over
        images of the distance between the mean confidence and the accuracy of an image's bin (Guo et al., "On
        Calibration of Modern Neural Networks", 2017, equation 3). 0 is best.
        """
        if not len(self.confidences):
            return None
        confidences = self.confidences.astype(np.float64)
        bins = np.clip(np.ceil(confidences * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)  # [N]
        return 100 * float(np.abs(np.bincount(bins, confidences - self.right)).sum()) / len(confidences)

    def measures(self) -> dict[str, float | tuple[float, ...] | None]:
        """See Predictions."""
        return {"top5_pct": self.top5_pct, "ece_pct": self.ece_pct}

    def chance(self, classes: tuple[str, ...]) -> tuple[str, float]:
        """See Predictions."""
        counts = np.bincount(self.labels)  # [classes up to the last one seen] images
        return classes[int(counts.argmax())], 100 * float(counts.max() / len(self.labels))

    def num_unseen(self, num_classes: int) -> int:
        """See Predictions."""
        return num_classes - len(np.unique(self.labels))

    def num_differing(self, other: Self) -> int:
        """Images of which both predict different classes."""
        return int((self.top[:, 0] != other.top[:, 0]).sum())

    def differing(self, other: Self, most: int) -> np.ndarray:
        """See Predictions: spread over the split, which is sorted by class, so that they show many classes."""
        every = np.flatnonzero(self.top[:, 0] != other.top[:, 0])
        return every[np.unique(np.linspace(0, len(every) - 1, min(len(every), most)).round().astype(int))]

    def described(self, place: int, classes: tuple[str, ...]) -> tuple[str, str]:
        """See Predictions."""
        return classes[self.labels[place]], class_name(classes, int(self.top[place, 0]))

    def select(self, which: "slice | np.ndarray") -> Self:
        """The classes that were predicted of some images, and their labels."""
        return type(self)(top=self.top[which], labels=self.labels[which])

    def comparison(self, fp32: Self) -> PairedComparison:
        """See Predictions; with McNemar's test."""
        return PairedComparison.of(*paired_counts(fp32.right, self.right))

    def by_class(self, fp32: Self, num_classes: int) -> ByClass:
        """See Predictions; with McNemar's test on each class."""

        def images_of(which: np.ndarray) -> np.ndarray:
            return np.bincount(self.labels[which], minlength=num_classes)

        counts = images_of(self.labels >= 0)
        regressed, improved = images_of(fp32.right & ~self.right), images_of(~fp32.right & self.right)
        with np.errstate(invalid="ignore"):
            shares = [100 * (images_of(right) / counts) for right in (fp32.right, self.right)]
        p_values = [
            mcnemar(*pair)[0] if any(pair) else math.nan
            for pair in zip(regressed.tolist(), improved.tolist(), strict=True)
        ]
        return ByClass(
            num_images=counts,
            fp32_pct=shares[0],
            own_pct=shares[1],
            num_regressed=regressed,
            num_improved=improved,
            p_values=np.array(p_values),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """See Predictions: [N, k] int16 or int32 classes, and the labels."""
        return {"": self.top, "labels": self.labels}

    def drop(self, fp32: Self, num_images: int) -> Top1Drop:
        """The drop in top-1 against FP32, on so many images at best; on these where they are as many."""
        return Top1Drop.of(self.comparison(fp32), num_images)


NO_CLASS = "nothing (NaN or infinity)"  # in place of a class, where the logits name none


def class_name(classes: tuple[str, ...], index: int) -> str:
    """The name of a predicted class; -1 is none."""
    return classes[index] if index >= 0 else NO_CLASS


def predict(
    runners: Mapping[str, Runner],
    batches: Iterable["Batch"],
    num_images: int,
    progress: Callable[[int, int], None],
    transform: TransformSpec | None = None,
) -> dict[str, Predictions]:
    """Run every runner over the same images, decoding each once. Of outputs no more is kept than `predictions_of` says.

    Images that the loader delivers on a GPU stay there.

    Args:
        runners: by name.
        batches: from an evaluation loader.
        num_images: how many images the batches hold in all, for the progress.
        progress: called with images done and images in all.
        transform: by which the images were normalized, to keep their statistics; None for not.
    """
    parts: dict[str, list[Predictions]] = {name: [] for name in runners}
    statistics: list[tuple[Any, ...]] = []
    done = 0
    rest = iter(batches)

    def read() -> tuple[Any, np.ndarray, type[Predictions]] | None:
        if (batch := next(rest, None)) is None:
            return None
        # [B, 3, H, W] float32, normalized; on the host made contiguous once for all runners
        images = batch.images if batch.images.is_cuda else to_numpy(batch.images)
        if transform is not None and TASKS[batch.task].classifies:
            statistics.append(image_statistics(images, transform))
        return images, batch.labels.cpu().numpy(), predictions_of(batch.task)

    def count(name: str, kind: type[Predictions], outputs: np.ndarray, labels: np.ndarray) -> None:
        parts[name].append(kind.of(outputs, labels))

    # While the runners work on a batch, one thread reads the next one, and one counts, in order, what they said before.
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as counter:
        counted: deque[Future[None]] = deque()
        ahead = reader.submit(read)
        while (batch := ahead.result()) is not None:
            ahead = reader.submit(read)
            images, labels, kind = batch
            for name, runner in runners.items():
                counted.append(counter.submit(count, name, kind, runner.infer(images), labels))
                if len(counted) > len(runners):
                    counted.popleft().result()
            done += len(images)
            progress(done, num_images)
        for left in counted:
            left.result()
    found = {name: type(own[0]).join(own) for name, own in parts.items()}
    if statistics:  # on a GPU they come to the host now, where nothing waits for it
        on_host = np.concatenate([np.stack([to_numpy(each) for each in batch], axis=1) for batch in statistics])
        found = {name: replace(own, image_statistics=on_host) for name, own in found.items()}  # type: ignore[type-var]
    return found


def predict_in_parts(
    parts: Sequence[tuple[Mapping[str, Runner], Iterable["Batch"]]],
    num_images: int,
    progress: Callable[[int, int], None],
    transform: TransformSpec | None = None,
) -> dict[str, Predictions]:
    """Run the parts of a split at the same time, each by runners of its own, as `predict` runs a whole one.

    Args:
        parts: runners by name, the same names in each, and the batches of a part. A thread each: the work is done by
            GPUs and by libraries that let other threads run meanwhile.
        num_images: how many images the parts hold in all, for the progress.
        progress: see `predict`.
        transform: see `predict`.

    Returns:
        The predictions of all parts, one part after the other.
    """
    done, lock, stop = [0] * len(parts), threading.Lock(), threading.Event()

    def until_stopped(batches: Iterable["Batch"]) -> Iterator["Batch"]:
        for batch in batches:
            if stop.is_set():
                return
            yield batch

    def run(index: int) -> dict[str, Predictions]:
        def advance(now: int, _: int) -> None:
            with lock:
                done[index] = now
                progress(sum(done), num_images)

        runners, batches = parts[index]
        return predict(runners, until_stopped(batches), num_images, advance, transform)

    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(run, index) for index in range(len(parts))]
        try:
            for future in as_completed(futures):
                future.result()  # the first error ends all parts, and so does Ctrl-C
        finally:
            stop.set()
    results = [future.result() for future in futures]
    return {name: type(own).join([result[name] for result in results]) for name, own in results[0].items()}


def names_class(logits: np.ndarray) -> np.ndarray:
    """True for images that have a likeliest class: no logit is NaN, and the largest is finite. [..., classes] -> [...].

    Of some classes minus infinity is an answer. The others count as wrong, and nobody who runs the model answers them.
    """
    named: np.ndarray = np.isfinite(logits.max(axis=-1))  # NaN is the largest
    return named


def top_classes(logits: np.ndarray) -> np.ndarray:
    """The most likely classes of each row, ties to the lower index. [B, classes] float -> [B, k] int32.

    A row that names no class predicts nothing: -1 in every place. An order among what is left of one with NaN would
    count it as right for the images of some class, most often the first.

    Takes the largest k times over instead of sorting, which costs as much as an engine does: of 1,000 classes only 5
    are wanted.
    """
    k = min(TOP_K, logits.shape[1])
    if not np.isfinite(logits).all():  # rare, and taking out the largest would not tell -inf from what was taken
        ordered = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
        ordered[~names_class(logits)] = -1
        return ordered
    left, rows = logits.copy(), np.arange(len(logits))
    top = np.empty((len(logits), k), np.int32)
    for place in range(k):
        top[:, place] = left.argmax(axis=1)  # the first of equals
        left[rows, top[:, place]] = -np.inf
    return top


def confidences_and_entropies(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax probability of each row's most likely class, and the entropy of all over that of equal ones.

    A row that is probabilities already, as of a model that ends in a softmax, is taken as it is. A row with NaN or
    infinity has no confidence and no entropy: 0.

    Args:
        logits: [B, classes] float.

    Returns:
        Two of [B] float64 in 0..1.
    """
    largest = logits.max(axis=1, keepdims=True)  # [B, 1]
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits - largest
        odds = np.exp(shifted)
        total = odds.sum(axis=1).astype(np.float64)
        weighted = np.multiply(odds, shifted, where=odds > 0, out=np.zeros_like(odds))  # without 0 times infinity
        entropies = np.log(total) - weighted.sum(axis=1) / total
    confidences = 1 / total
    for row in np.flatnonzero(largest[:, 0] <= 1 + _SUM_TOLERANCE):
        if _are_probabilities(logits[row]):
            confidences[row] = min(1.0, float(largest[row, 0]))
            shares = logits[row][logits[row] > 0].astype(np.float64)
            entropies[row] = -(shares * np.log(shares)).sum()
    entropies = np.clip(entropies / max(np.log(logits.shape[1]), 1e-9), 0, 1)
    return np.nan_to_num(confidences, nan=0.0), np.nan_to_num(entropies, nan=0.0)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of images' logits, by the rule of `confidences_and_entropies`. [..., classes] float -> the same."""
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        odds = np.exp(values - values.max(axis=-1, keepdims=True))
    shares = odds / odds.sum(axis=-1, keepdims=True)
    return np.where(_are_probabilities(values)[..., None], values, shares)


def most_likely(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest classes of images and their probabilities, the likeliest first, ties in the order of classes.

    Args:
        logits: [..., classes] float, of images that name one.
        top_k: 1 or more.

    Returns:
        Indices, [..., k] int64, and probabilities, [..., k] float64; k is at most the number of classes.
    """
    best = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]
    return best, np.take_along_axis(probabilities(logits), best, axis=-1)


def _are_probabilities(logits: np.ndarray) -> np.ndarray:
    """True for images whose output is that of a softmax already. [..., classes] float -> [...] bool."""
    is_near: np.ndarray = abs(logits.sum(axis=-1, dtype=np.float64) - 1) < _SUM_TOLERANCE
    return (logits.min(axis=-1) >= 0) & is_near
