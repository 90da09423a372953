"""Predictions of runners over one split: every runner sees exactly the same decoded images."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from components.common.loader import Batch, to_numpy
from components.common.runners import Runner

TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The best classes of every image, in the loader's order."""

    top: np.ndarray  # [N, k] int32, class indices, most likely first; k = min(5, classes)
    labels: np.ndarray  # [N] int32

    @property
    def num_images(self) -> int:
        """Images predicted."""
        return len(self.labels)

    @property
    def right(self) -> np.ndarray:
        """[N] bool: whether the most likely class is the label."""
        right: np.ndarray = self.top[:, 0] == self.labels
        return right

    @property
    def top1_pct(self) -> float:
        """Share of images whose most likely class is the label, in per cent."""
        return 100.0 * float(self.right.mean())

    @property
    def top5_pct(self) -> float:
        """Share of images with the label among the five most likely classes, in per cent."""
        return 100.0 * float((self.top == self.labels[:, None]).any(axis=1).mean())

    def agreement_pct(self, other: "Predictions") -> float:
        """Share of images on which both predict the same class, in per cent."""
        return 100.0 * float((self.top[:, 0] == other.top[:, 0]).mean())


def predict(
    runners: Mapping[str, Runner], batches: Iterable[Batch], num_images: int, progress: Callable[[int, int], None]
) -> dict[str, Predictions]:
    """Run every runner over the same images, decoding each once.

    Args:
        runners: by name.
        batches: from an evaluation loader.
        num_images: how many images the batches hold in all, for the progress.
        progress: called with images done and images in all.
    """
    top: dict[str, list[np.ndarray]] = {name: [] for name in runners}
    labels: list[np.ndarray] = []
    done = 0
    for batch in batches:
        images = to_numpy(batch.images)  # [B, 3, H, W] float32, normalized
        for name, runner in runners.items():
            top[name].append(top_classes(runner.infer(images)))
        labels.append(batch.labels.cpu().numpy().astype(np.int32))
        done += len(images)
        progress(done, num_images)
    expected = np.concatenate(labels)
    return {name: Predictions(top=np.concatenate(parts), labels=expected) for name, parts in top.items()}


def top_classes(logits: np.ndarray) -> np.ndarray:
    """The most likely classes of each row, ties to the lower index. [B, classes] float -> [B, k] int32."""
    order = np.argsort(-logits, axis=1, kind="stable")
    return order[:, :TOP_K].astype(np.int32)
