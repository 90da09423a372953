"""DALI loaders built from a data set's shards and its TransformSpec, on the CPU or a GPU.

The evaluation pipeline does what TransformSpec says and nothing else; the training pipeline adds augmentation.
"""

import hashlib
import json
import math
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as math_ops
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from components.common.artifacts import Artifact, DatasetManifest
from components.common.environment import num_cores
from components.common.errors import EngineryError
from components.common.records import Split
from components.common.transforms import Augmentation, TransformSpec

IMAGE_EXTENSIONS = ("jpg", "png", "webp", "bmp", "tif")
_INTERPOLATION = {"bilinear": types.DALIInterpType.INTERP_LINEAR, "bicubic": types.DALIInterpType.INTERP_CUBIC}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images and labels on the loader's device."""

    images: torch.Tensor  # [B, 3, H, W] float32, channels_last, normalized
    labels: torch.Tensor  # [B] int64


def _normalize(images: Any, spec: TransformSpec, *, mirror: Any, crop: int | None, **position: Any) -> Any:
    scale = [255.0 * value for value in spec.std]
    mean = [255.0 * value for value in spec.mean]
    crops = {"crop": (crop, crop)} if crop else {}
    # HWC float32: permuted to NCHW on arrival, this is torch's channels_last without a copy.
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="HWC", mean=mean, std=scale, mirror=mirror, **crops, **position
    )


@pipeline_def(enable_conditionals=False)
def _evaluation_pipeline(reader: dict[str, Any], spec: TransformSpec, device: str) -> tuple[Any, Any]:
    # label: uint8 text of fixed width, see _labels
    raw, label = fn.readers.webdataset(**reader)
    return _evaluated(raw, spec, device), label


@pipeline_def(enable_conditionals=False)
def _file_pipeline(encoded: bytes, spec: TransformSpec) -> Any:
    raw = fn.external_source(source=[np.frombuffer(encoded, np.uint8)], batch=False, cycle=True, dtype=types.UINT8)
    return _evaluated(raw, spec, "cpu")


def _evaluated(raw: Any, spec: TransformSpec, device: str) -> Any:
    """What TransformSpec says of encoded images, and nothing else. Returns HWC float32."""
    images = fn.decoders.image(raw, device="mixed" if device == "gpu" else "cpu", output_type=types.RGB)
    # Sizes and positions are computed here because DALI rounds both in its own way: one pixel off the transforms
    # that published models were trained with (torchvision's Resize and CenterCrop) on most aspect ratios.
    shape = fn.peek_image_shape(raw)  # [H, W, C] int64 on the host, EXIF orientation applied
    height, width = shape[0], shape[1]
    shorter = math_ops.min(height, width)
    height, width = (side * spec.resize_size // shorter for side in (height, width))
    size = fn.cast(fn.stack(height, width), dtype=types.FLOAT)
    images = fn.resize(images, size=size, interp_type=_INTERPOLATION[spec.interpolation], antialias=True)
    y, x = (_center(side - spec.crop_size) for side in (height, width))
    return _normalize(images, spec, mirror=0, crop=spec.crop_size, crop_pos_y=y, crop_pos_x=x)


def _center(margin: Any) -> Any:
    """Where the central window starts, as DALI wants it: a share of the margin. Halves go to the even pixel."""
    odd = margin % 2
    start = odd * (2 * ((margin + 1) // 4)) + (1 - odd) * (margin // 2)
    return fn.cast(start, dtype=types.FLOAT) / math_ops.max(margin, 1)


@pipeline_def(enable_conditionals=False)
def _training_pipeline(
    reader: dict[str, Any], spec: TransformSpec, augmentation: Augmentation, device: str
) -> tuple[Any, Any]:
    raw, label = fn.readers.webdataset(**reader)
    ratio = augmentation.max_aspect_ratio
    images = fn.decoders.image_random_crop(
        raw,
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        random_area=[augmentation.min_area, 1.0],
        random_aspect_ratio=[1 / ratio, ratio],
    )
    images = fn.resize(
        images, size=[spec.crop_size] * 2, interp_type=_INTERPOLATION[spec.interpolation], antialias=True
    )
    mirror = fn.random.coin_flip(probability=augmentation.flip_probability)
    return _normalize(images, spec, mirror=mirror, crop=None), label


class Loader:
    """Batches of one split, epoch after epoch.

    In training every rank gets the same number of full batches; the samples that don't fill one are left to the
    next epochs' shuffle. In evaluation each image comes exactly once and the last batch may be smaller.
    """

    def __init__(
        self,
        dataset: Artifact[DatasetManifest],
        split: str,
        spec: TransformSpec,
        *,
        batch_size: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        device_id: int | None = None,
        num_threads: int = 0,
    ) -> None:
        """Build the pipeline.

        Args:
            dataset: the artifact that preprocess wrote.
            split: "train" or "val".
            spec: resize, crop and normalization.
            batch_size: images per batch of this process.
            augmentation: None for evaluation.
            seed: of shuffling and augmentation.
            shard_id: this process's part of the split, 0 <= shard_id < num_shards.
            num_shards: processes that share the split.
            device_id: GPU to decode and to deliver on; None for the CPU.
            num_threads: decoder threads; 0 for one per core.
        """
        self._dataset = dataset
        self._split = split
        info = dataset.manifest.splits[split]  # type: ignore[index]
        training = augmentation is not None
        reader = _reader(dataset.path, info, training=training, shard_id=shard_id, num_shards=num_shards)
        options = {
            "batch_size": batch_size,
            "num_threads": num_threads or num_cores(),
            "device_id": device_id,
            "seed": seed + 1000003 * shard_id,
        }
        device = "cpu" if device_id is None else "gpu"
        if augmentation is not None:
            pipe = _training_pipeline(reader, spec, augmentation, device, **options)
        else:
            pipe = _evaluation_pipeline(reader, spec, device, **options)
        first, last = (info.num_images * shard // num_shards for shard in (shard_id, shard_id + 1))
        self.num_images = last - first
        if training:
            # The smallest part decides for all ranks, so that none waits for a batch that never comes.
            self.num_batches = info.num_images // num_shards // batch_size
        else:
            self.num_batches = math.ceil(self.num_images / batch_size)
        with _explained(dataset, split):
            pipe.build()
            self._iterator = _torch_iterator(pipe, self.num_batches * batch_size if training else None)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._iterator)
        while True:
            with _explained(self._dataset, self._split):
                (batch,) = next(batches, (None,))
            if batch is None:
                return
            images = batch["images"].permute(0, 3, 1, 2)
            # DALI reads labels on the host; images may already be on the GPU.
            yield Batch(images=images, labels=_labels(batch["labels"]).to(images.device, non_blocking=True))


def _reader(folder: Path, split: Split, *, training: bool, shard_id: int, num_shards: int) -> dict[str, Any]:
    """Arguments of DALI's reader for this process's part of a split."""
    return {
        "name": "reader",
        "paths": [str(folder / shard) for shard in split.shards],
        "index_paths": [str((folder / shard).with_suffix(".idx")) for shard in split.shards],
        "ext": [";".join(IMAGE_EXTENSIONS), "cls"],
        "missing_component_behavior": "error",
        "random_shuffle": training,
        "initial_fill": min(8192, split.num_images),
        "shard_id": shard_id,
        "num_shards": num_shards,
        "stick_to_shard": not training,
        "pad_last_batch": not training,
        "dont_use_mmap": False,
    }


@contextmanager
def _explained(dataset: Artifact[DatasetManifest], split: str) -> Iterator[None]:
    """Turn what DALI says of a damaged shard, which names neither shard nor image, into one message.

    Raises:
        EngineryError: a sample could not be read or decoded. Other errors, such as no GPU memory, pass.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "readers.webdataset" not in text and "decoders.image" not in text:
            raise
        reason = " ".join(text.rpartition("encountered:")[2].partition("Current pipeline")[0].split())
        damaged = first_damaged_sample(dataset, split)
        if damaged:
            raise EngineryError(
                f"{damaged}. Make the data set anew with `python -m components.preprocess` "
                f"(in a pipeline: enginery run ... --no-reuse) (DALI: {reason})"
            ) from error
        raise EngineryError(
            f"DALI can't decode the {split} split of {dataset.path}, though every sample is as preprocess packed it: "
            f"{reason}. `enginery doctor` shows whether DALI works here"
        ) from error


def first_damaged_sample(dataset: Artifact[DatasetManifest], split: str) -> str:
    """The first sample of a split that is not what preprocess packed, as a sentence; empty when all are."""
    with dataset.file(f"{split}.jsonl").open(encoding="utf-8") as lines:
        entries = {entry["key"]: entry for entry in map(json.loads, lines)}
    for shard in dataset.manifest.splits[split].shards:  # type: ignore[index]
        file = dataset.file(shard)
        try:
            with tarfile.open(file) as archive:
                for member in archive:
                    key, _, extension = member.name.partition(".")
                    content = archive.extractfile(member)
                    if extension not in IMAGE_EXTENSIONS or content is None:
                        continue
                    entry = entries.get(key, {"path": "unknown", "sha256": ""})
                    if hashlib.sha256(content.read()).hexdigest() != entry["sha256"]:
                        return (
                            f"the shard {file} is damaged: sample {member.name}, made from {entry['path']}, "
                            "is not what preprocess packed"
                        )
        except (OSError, tarfile.TarError) as error:
            return f"the shard {file} is damaged: {error}"
    return ""


def _torch_iterator(pipe: Any, epoch_size: int | None) -> DALIGenericIterator:
    """Torch batches of `pipe`: exactly `epoch_size` images an epoch in full batches, or the whole split once."""
    options: dict[str, Any] = {"auto_reset": True, "prepare_first_batch": False}
    if epoch_size is None:
        options |= {"reader_name": "reader", "last_batch_policy": LastBatchPolicy.PARTIAL}
        return DALIGenericIterator([pipe], ["images", "labels"], **options)
    with warnings.catch_warnings():
        # DALI advises against a size set by hand, because samples then move between epochs. Here they should.
        warnings.simplefilter("ignore")
        options |= {"size": epoch_size, "last_batch_policy": LastBatchPolicy.DROP}
        return DALIGenericIterator([pipe], ["images", "labels"], **options)


def _labels(encoded: torch.Tensor) -> torch.Tensor:
    """Decimal text of fixed width to numbers. encoded: [B, width] uint8, ASCII digits."""
    digits = encoded.to(torch.int64) - ord("0")
    powers = 10 ** torch.arange(digits.shape[1] - 1, -1, -1, dtype=torch.int64, device=digits.device)
    return (digits * powers).sum(dim=1)


def load_image(encoded: bytes, spec: TransformSpec) -> np.ndarray:
    """One image file as evaluation delivers it: by the same operators, decoded on the CPU.

    Args:
        encoded: the file's content, in a format of IMAGE_EXTENSIONS.
        spec: resize, crop and normalization.

    Returns:
        [1, 3, crop_size, crop_size] float32, normalized, C-contiguous.

    Raises:
        RuntimeError: DALI can't decode it.
    """
    pipe = _file_pipeline(encoded, spec, batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    pipe.build()
    (images,) = pipe.run()
    return np.ascontiguousarray(np.asarray(images.as_array()).transpose(0, 3, 1, 2))
