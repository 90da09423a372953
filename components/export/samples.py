"""Which training images calibrate, and which others the calibrations are compared on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from components.common.artifacts import Artifact, DatasetManifest
from components.common.digests import digest_json
from components.common.loader import Batch, Loader
from components.common.transforms import TransformSpec
from components.export.config import ExportConfig

# Below this, one image is a point of top-1 or more, and a comparison would only measure chance.
MIN_SELECTION_IMAGES = 100


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A run of consecutive images of the training split: a stratified sample, since preprocess ordered it so."""

    dataset: Artifact[DatasetManifest]
    transform: TransformSpec
    start: int
    num_images: int
    batch_size: int
    device_id: int | None  # GPU to decode on; None for the CPU

    def __iter__(self) -> Iterator[Batch]:
        """Batches by the evaluation transform; the last one may be smaller."""
        position, end = 0, self.start + self.num_images
        loader = Loader(self.dataset, "train", self.transform, batch_size=self.batch_size, device_id=self.device_id)
        for batch in loader:
            first, last = max(self.start - position, 0), min(end - position, len(batch.images))
            position += len(batch.images)
            if last > first:
                yield Batch(images=batch.images[first:last], labels=batch.labels[first:last])
            if position >= end:
                return

    def digest(self) -> str:
        """Digest of the images' contents and of what is done to them."""
        images = [entry["sha256"] for entry in self._listed()]
        return digest_json({"images": images, "transform": self.transform.model_dump(mode="json")})

    def ids(self) -> tuple[str, ...]:
        """Keys of the images in the training split's listing."""
        return tuple(entry["key"] for entry in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        with self.dataset.file("train.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in islice(lines, self.start, self.start + self.num_images)]


def split_samples(
    config: ExportConfig, dataset: Artifact[DatasetManifest], transform: TransformSpec, device_id: int | None
) -> tuple[Samples, Samples | None]:
    """The images to calibrate with, and the others to choose by; None where too few are left to tell anything.

    Both are from the training split. Validation images decide later, and would be no evidence had they chosen too.
    """
    available = dataset.manifest.splits["train"].num_images
    choosing = config.num_selection_images > 0 and (config.calibration_method == "auto" or config.fallback)
    # Of a small data set calibration gets at most half, so that something is left to choose by.
    num_calibration = min(config.num_calibration_images, max(available // 2, 1) if choosing else available)
    num_selection = min(config.num_selection_images, available - num_calibration) if choosing else 0
    if num_selection < MIN_SELECTION_IMAGES:
        num_calibration, num_selection = min(config.num_calibration_images, available), 0

    def samples(start: int, num_images: int) -> Samples:
        return Samples(
            dataset=dataset,
            transform=transform,
            start=start,
            num_images=num_images,
            batch_size=min(32, num_images),
            device_id=device_id,
        )

    return samples(0, num_calibration), samples(num_calibration, num_selection) if num_selection else None
