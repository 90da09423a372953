"""Batches of a dataset's shards by its TransformSpec, on the CPU or a GPU: for training, calibration, validation."""

import atexit
import base64
import hashlib
import json
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from nvidia import dali
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from pydantic import Field, ValidationError, model_validator

from components.common.contracts.digests import digest_json
from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, DatasetManifest, file_problem, first_problem
from components.common.contracts.records import Record, Split
from components.common.contracts.transforms import Augmentation, TransformSpec
from components.common.data.corruptions import Corruption, corrupted
from components.common.data.dali_pipelines import decoder_options, evaluation_pipeline, training_pipeline
from components.common.data.image_files import IMAGE_EXTENSIONS, decoder_reason, read_samples
from components.common.tasks import TASKS, TaskName, load_task

# On a GPU two pipelines decode by turns: while one waits for the slowest image of its batch, the other works. The
# second one leaves out up to a batch more, so up to a step: only where an epoch has many.
_NUM_PIPELINES = 2
_MIN_STEPS = 32
_RENEW = "Make the dataset again with `python -m components.preprocess` (in a pipeline: enginery run ... --no-reuse)"
# What an error says when memory ran out: torch, CUDA; DALI (dali/core/cuda_error.h), twice; cuDNN and cuBLAS; torch on
# a CPU.
NO_MEMORY = ("out of memory", "Can't allocate", "CUDA allocation failed", "ALLOC_FAILED", "can't allocate memory")
# What it says where a sample is to blame; the last two of labels.
_OF_DATA = ("readers.webdataset", "decoders.image", "reinterpret", "IsDenseTensor")
READ_TIMEOUT_S = 300.0
# Of the JPEG files, the share that the hardware decoder takes. DALI's own 0.65 is slower on an H200 (see
# benchmarks/loader.py).
HW_DECODER_LOAD = 0.9
_MAX_PENDING = 2  # copies that may be under way; each keeps a batch of DALI's from being overwritten
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Images that one process reads of a split, and batches that it delivers, epoch by epoch."""

    num_shards: int
    """Processes that have a part of the split; in evaluation no more than there are images."""
    num_pipelines: int
    """DALI pipelines of each process, each with its share of the process's part."""
    num_images: int
    """Images of this process's part."""
    num_batches: int
    """Batches that are delivered."""
    num_read: int
    """Batches that each pipeline makes."""

    @property
    def num_dropped(self) -> int:
        """Batches that are read at an epoch's end and not delivered."""
        return self.num_read * self.num_pipelines - self.num_batches


def plan_evaluation(num_images: int, batch_size: int, shard_id: int, num_shards: int) -> EpochPlan:
    """Each image exactly once. Arguments as of Loader; `num_images` is the whole split's."""
    num_shards = min(num_shards, num_images)
    own = _part(num_images, shard_id, num_shards) if shard_id < num_shards else 0
    num_batches = math.ceil(own / batch_size)
    return EpochPlan(
        num_shards=num_shards, num_pipelines=1, num_images=own, num_batches=num_batches, num_read=num_batches
    )


def plan_training(
    num_images: int,
    batch_size: int,
    shard_id: int,
    num_shards: int,
    *,
    batches_per_step: int,
    num_pipelines: int,
    on_gpu: bool,
) -> EpochPlan:
    """Whole steps of full batches. Arguments as of Loader; `num_images` is the whole split's.

    Raises:
        UserError: there are too few images for one step on every process.
    """
    step_size = batch_size * batches_per_step
    if not num_pipelines:
        many = num_images // num_shards // step_size >= _MIN_STEPS
        num_pipelines = _NUM_PIPELINES if on_gpu and many else 1
    num_shares = num_shards * num_pipelines
    # The smallest share decides for all, so that no rank waits for a batch that never comes.
    num_batches = num_images // num_shares // step_size * batches_per_step * num_pipelines
    if not num_batches:
        raise _too_few(num_images, step_size, num_shards, num_pipelines)
    return EpochPlan(
        num_shards=num_shards,
        num_pipelines=num_pipelines,
        num_images=_part(num_images, shard_id, num_shards),
        num_batches=num_batches,
        # DALI fills up the last batch of the largest share and gives as many of them to all, so that its epochs end
        # together everywhere, with a batch. The one in which images are repeated is dropped, and what fills no step.
        num_read=math.ceil(math.ceil(num_images / num_shares) / batch_size),
    )


def _part(num_images: int, shard_id: int, num_shards: int) -> int:
    """Images of a process's part, as DALI cuts it."""
    first, last = (num_images * shard // num_shards for shard in (shard_id, shard_id + 1))
    return last - first


def _too_few(num_images: int, step_size: int, num_shards: int, num_pipelines: int) -> UserError:
    largest = num_images // num_shards * num_shards
    setting = "train.global_batch_size"
    if not largest:
        setting, fix = "", f"; train with {num_images} or fewer, or add images"
    elif step_size * num_shards <= largest:
        setting, fix = "", f", each with {num_pipelines} pipelines; leave num_pipelines at 0, or take fewer"
    else:
        fix = f"; set {setting} to {largest} or less"
    few = f"{num_images} training images are too few for one batch of {step_size} on each of {num_shards} processes"
    return UserError(f"{few}{fix}", code="too-few-images", setting=setting)


class LoaderState(Record):
    """State of a training loader: numbers and text only."""

    num_delivered: int = Field(ge=0, description="Batches since the first epoch began.")
    first_epoch: int = Field(ge=0, description="The epoch that DALI's pipelines began with.")
    identity: dict[str, Any] = Field(description="What decides which batches come, by name.")
    checkpoints: list[str] = Field(description="DALI's own of each pipeline, in base64.")
    digest: str = Field(description="Of the rest: DALI believes a damaged checkpoint, or ends with the process.")

    @classmethod
    def sealed(cls, **fields: Any) -> "LoaderState":
        """The state of these fields, with its digest."""
        return cls(**fields, digest=digest_json(fields))

    @classmethod
    def read(cls, state: dict[str, Any], where: str) -> "LoaderState":
        """Read what `state` of a loader returned; `where` begins the message.

        Raises:
            EngineryError: it is damaged.
        """
        try:
            return cls.model_validate(state)
        except ValidationError as error:
            raise EngineryError(
                f"{where} damaged, or no loader's ({first_problem(error)}). Take an earlier checkpoint, or start again",
                code="damaged-loader-state",
            ) from None

    @model_validator(mode="after")
    def _whole(self) -> "LoaderState":
        if self.digest != digest_json(self.model_dump(mode="json", exclude={"digest"})):
            raise ValueError("its content does not fit its digest")
        return self

    def differences(self, identity: dict[str, Any]) -> list[str]:
        """Describe what `identity` has otherwise."""
        return [
            f"{name} {self.identity.get(name)} instead of {value}"
            for name, value in identity.items()
            if self.identity.get(name) != value
        ]


class Mixer:
    """Mixes every image of a batch with its neighbour, by torchvision's MixUp or CutMix, or either at random.

    Sources: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018); Yun et al., "CutMix" (2019).
    """

    def __init__(self, augmentation: Augmentation, num_classes: int) -> None:
        """Without mixup_alpha and cutmix_alpha in `augmentation`, batches stay as they are."""
        self._ways: list[Callable[..., Any]] = []
        if not (augmentation.mixup_alpha or augmentation.cutmix_alpha):
            return
        from torchvision.transforms import v2  # takes seconds, and few recipes mix

        if augmentation.mixup_alpha:
            self._ways.append(v2.MixUp(alpha=augmentation.mixup_alpha, num_classes=num_classes))
        if augmentation.cutmix_alpha:
            self._ways.append(v2.CutMix(alpha=augmentation.cutmix_alpha, num_classes=num_classes))

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, seed: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels after mixing, a function of these arguments alone.

        Args:
            images: [B, 3, H, W] float32 or float16, channels_last.
            labels: [B] int64.
            seed: of the way, the share and the place of the box.

        Returns:
            [B, 3, H, W] of the same dtype, channels_last; and [B, num_classes] float32, rows of sum 1.
        """
        if not self._ways:
            return images, labels
        rng = np.random.default_rng(seed)
        way = self._ways[rng.integers(len(self._ways))]
        # torchvision draws from torch's global generator of the CPU, which belongs to the caller.
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(int(rng.integers(2**63)))
            images, labels = way(images, labels)
        finally:
            generator.set_state(before)
        return images.contiguous(memory_format=torch.channels_last), labels


class OwnedOutputs:
    """Copies DALI's outputs, and lets go of each when the GPU has copied it.

    DALI hands out its memory without a copy, and takes it back as soon as the tensor is gone on the host: it knows
    nothing of torch's streams. The host is ahead of the GPU, so a batch would be overwritten by a later one while, or
    before, the GPU reads it. What is torch's is freed in the order of its streams.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def copied(self, output: torch.Tensor) -> torch.Tensor:
        """The copy, on the current stream, with the same strides."""
        while self._pending and (len(self._pending) == _MAX_PENDING or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            _, done = self._pending.popleft()
            done.synchronize()
        copy = output.clone()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(output.device))
        self._pending.append((output, done))
        return copy


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images and labels on the loader's device."""

    images: torch.Tensor  # [B, 3, H, W] float32, in training also float16; channels_last, normalized
    labels: torch.Tensor
    """[B] int64; where mixup or cutmix is on, [B, num_classes] float32, rows of sum 1.

    Of segmentation [B, H, W] int64, 255 for void. Of detection [B, M, 6] float32: x1, y1, x2, y2 in pixels of the
    images, class, 1 if ignored; rows of class -1 fill up.
    """
    task: TaskName = "classification"

    def part(self, which: slice) -> "Batch":
        """Some of the images."""
        return replace(self, images=self.images[which], labels=self.labels[which])


class Loader:
    """Batches of one split, epoch after epoch.

    In training every rank gets the same number of full batches. No image comes twice in an epoch, on one rank or on
    two; those that don't fill a batch are left out of it, others each time. An epoch that was left in the middle is
    continued by the next iteration. In evaluation each image comes exactly once and the last batch may be smaller; of
    fewer images than processes, the last processes have none.

    Args:
        dataset: the artifact that preprocess wrote.
        split: "train" or "val".
        spec: resize, crop and normalization.
        batch_size: images per batch of this process.
        batches_per_step: of training: batches that make one step, so that an epoch has a whole number of steps.
        augmentation: None for evaluation.
        image_sizes: side of training images in pixels, epoch by epoch, the last one for all that follow; empty
            for always spec.crop_size.
        fp16: in training, deliver float16: what autocast makes of images anyway, in half the memory.
        seed: of shuffling, augmentation and the noise of corruptions.
        corruptions: of evaluation: each image comes once in every one of these ways, one after the other, and not as
            it is; empty for the image itself. `num_images` and `len` count what is decoded.
        shard_id: this process's part of the split, 0 <= shard_id < num_shards.
        num_shards: processes that share the split.
        device_id: GPU to decode and to deliver on; None for the CPU.
        num_threads: decoder threads; 0 for one per core.
        hw_decoder_load: share of the JPEG files that a GPU's hardware decoder takes, where it has one; 0..1.
        decode_on: of training: "cpu" leaves decoding to the cores where `device_id` is a GPU, too.
        num_pipelines: of training: DALI pipelines that make batches by turns, each from its share of the part; 0 for
            two on a GPU, where an epoch has 32 steps or more, and one otherwise.
        read_timeout_s: seconds without a batch after which reading counts as stuck.
        first_epoch: of training: epoch to begin with, from 0; another number of processes has done those before it.
        state: what `state` of a training loader returned: resume behind the batch that was delivered last.

    Raises:
        EngineryError: a shard can't be read, reading is stuck, or `state` is damaged or of another loader.
        UserError: the training split has too few images for one batch on every process, or `augmentation` mixes images
            whose labels can't be mixed.
    """

    def __init__(
        self,
        dataset: Artifact[DatasetManifest],
        split: str,
        spec: TransformSpec,
        *,
        batch_size: int,
        batches_per_step: int = 1,
        augmentation: Augmentation | None = None,
        image_sizes: Sequence[int] = (),
        fp16: bool = False,
        seed: int = 0,
        corruptions: Sequence[Corruption] = (),
        shard_id: int = 0,
        num_shards: int = 1,
        device_id: int | None = None,
        num_threads: int = 0,
        hw_decoder_load: float = HW_DECODER_LOAD,
        decode_on: Literal["gpu", "cpu"] = "gpu",
        num_pipelines: int = 0,
        read_timeout_s: float = READ_TIMEOUT_S,
        first_epoch: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._dataset, self._split, self._device_id, self.spec = dataset, split, device_id, spec
        self._read_timeout_s = read_timeout_s
        self._training = augmentation is not None
        self._seed = (seed, shard_id)
        self._batch_size, self._num_versions = batch_size, max(1, len(corruptions))
        batch_size = max(1, batch_size // self._num_versions)
        info = dataset.manifest.splits[split]  # type: ignore[index]
        part = (info.num_images, batch_size, shard_id, num_shards)
        on_gpu = device_id is not None
        if augmentation is None:
            plan = plan_evaluation(*part)
        else:
            plan = plan_training(*part, batches_per_step=batches_per_step, num_pipelines=num_pipelines, on_gpu=on_gpu)
        num_shards, num_pipelines = plan.num_shards, plan.num_pipelines
        self.num_images, self.num_batches, self._num_dropped = plan.num_images, plan.num_batches, plan.num_dropped
        self.num_classes = len(dataset.manifest.classes)
        self._task = load_task(dataset.manifest.task)
        move_label = self._task.move_label()
        if move_label is not None and augmentation is not None:
            _check_unmixed(augmentation, dataset.manifest.task)
        self._owned, self._owned_labels = OwnedOutputs(), OwnedOutputs()
        self._mixer = Mixer(augmentation or Augmentation(), self.num_classes)
        self._identity = {
            "split": info.digest,
            "seed": seed,
            "batch_size": batch_size,
            "batches_per_step": batches_per_step,
            "shard_id": shard_id,
            "num_shards": num_shards,
            "num_pipelines": num_pipelines,
            "device": ("gpu" if decode_on == "gpu" else "gpu, decoded on cpu") if on_gpu else "cpu",
            "augmentation": augmentation.model_dump(mode="json") if augmentation else None,
            "image_sizes": list(image_sizes),
            "half": fp16,
            "spec": spec.model_dump(mode="json"),
            "dali": dali.__version__,
        }
        saved = None if state is None else self._saved(state)
        first_epoch = self._first_epoch = first_epoch if saved is None else saved.first_epoch
        # Batches of training that were delivered, since its first epoch began.
        self.num_delivered = first_epoch * self.num_batches if saved is None else saved.num_delivered
        readers = [
            _reader(dataset, info, self._training, shard_id * num_pipelines + share, num_shards * num_pipelines)
            for share in range(num_pipelines)
        ]
        decoder_id = device_id if decode_on == "gpu" else None
        statistics = dataset.manifest.image_statistics
        decoder = decoder_options(
            statistics, batch_size, num_pipelines, device_id=decoder_id, hw_decoder_load=hw_decoder_load
        )
        num_threads = max(1, (num_threads or num_cores()) // num_pipelines)
        options = {"batch_size": batch_size, "num_threads": num_threads, "device_id": device_id}

        def build(share: int) -> DALIGenericIterator:
            own = options | {"seed": seed + 1000003 * (shard_id * num_pipelines + share) + 15485863 * first_epoch}
            if augmentation is None:
                start, longest = info.num_images * shard_id // num_shards, math.ceil(info.num_images / num_shards)
                places = range(start, start + longest)  # all parts have as many batches as the longest
                versions = partial(corrupted, corruptions=corruptions, side=spec.crop_size, seed=seed, places=places)
                corrupt = versions if corruptions else None
                return DALIGenericIterator(  # the whole part of a split once, again and again
                    [evaluation_pipeline(readers[share], spec, decoder, corrupt, move_label, **own)],
                    ["images", "labels"],
                    reader_name="reader",
                    last_batch_policy=LastBatchPolicy.PARTIAL,
                    auto_reset=True,
                    prepare_first_batch=False,
                )
            own_sizes = image_sizes[min(first_epoch, len(image_sizes) - 1) :] if image_sizes else ()
            sizes = (lambda batch: own_sizes[min(batch // plan.num_read, len(own_sizes) - 1)]) if own_sizes else None
            checkpoint = None if saved is None else base64.b64decode(saved.checkpoints[share])
            resume = {"enable_checkpointing": True, "checkpoint": checkpoint}
            pipe = training_pipeline(
                readers[share], spec, augmentation, decoder, sizes, fp16, on_gpu, move_label, **own, **resume
            )
            # Full batches without end. Epochs are counted by the loader: to DALI's samples they mean nothing.
            return DALIGenericIterator([pipe], ["images", "labels"], prepare_first_batch=False)

        self._iterators: list[DALIGenericIterator] = []
        self._turn = 0 if saved is None else saved.num_delivered % self.num_batches % num_pipelines
        self._watchdog = Watchdog(f"loader of {split}", read_timeout_s)
        if not self.num_images:  # DALI wants one in each part
            return
        # DALI keeps every thread from running while it opens the shards, so see first whether they answer.
        self._watched(lambda: _open_all(readers[0]))
        self._watched(lambda: _check_indexes(dataset, split))
        if decoder_id is not None:
            self._watched(lambda: _keep_decoders(decoder_id))
        for share in range(num_pipelines):
            self._iterators.append(self._watched(partial(build, share)))

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        if not self._training:
            while (batch := self._next()) is not None:
                # DALI lets every part have as many batches as the largest, be they empty.
                for start in range(0, len(batch.labels), self._batch_size):
                    yield batch.part(slice(start, start + self._batch_size))
            return
        for _ in range(self.num_batches - self.num_delivered % self.num_batches):
            batch = self._next()
            assert batch is not None  # a training pipeline never ends
            images, labels = self._mixer(batch.images, batch.labels, (*self._seed, self.num_delivered))
            if not (self.num_delivered + 1) % self.num_batches:
                for _ in range(self._num_dropped):
                    self._next()
            self.num_delivered += 1
            yield replace(batch, images=images, labels=labels)

    def state(self) -> dict[str, Any]:
        """Return the state of training behind the batch that was delivered last: numbers and text only.

        A Loader made with the same arguments and this `state` delivers the batches that this one will deliver:
        the same images in the same order with the same augmentation. Batches that DALI has prepared ahead don't
        count. Of every rank its own.
        """
        if not self._training:
            raise ValueError("an evaluation loader has no state: it always begins with the first image")
        checkpoints = [iterator.checkpoints()[0] for iterator in self._iterators]
        return LoaderState.sealed(
            num_delivered=self.num_delivered,
            first_epoch=self._first_epoch,
            identity=self._identity,
            checkpoints=[base64.b64encode(checkpoint).decode() for checkpoint in checkpoints],
        ).model_dump(mode="json")

    def _saved(self, state: dict[str, Any]) -> LoaderState:
        where = f"can't resume in the middle of the {self._split} split of {self._dataset.path}: the saved state is"
        saved = LoaderState.read(state, where)
        if differing := saved.differences(self._identity):
            raise EngineryError(
                f"{where} of {', '.join(differing)}. Resume with the settings and versions of the interrupted run, "
                "or start again",
                code="other-loader-state",
            )
        return saved

    def _next(self) -> Batch | None:
        # The other thread has a current stream of its own, and what it enqueues must be ordered with the caller's.
        stream = None if self._device_id is None else torch.cuda.current_stream(self._device_id)

        def fetch() -> Any:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return next(self._iterators[self._turn], (None,)) if self._iterators else (None,)

        (batch,) = self._watched(fetch)
        self._turn = (self._turn + 1) % max(1, len(self._iterators))
        if batch is None:
            return None
        images = batch["images"].flatten(0, -4).permute(0, 3, 1, 2)  # [B, H, W, 3], or [B, versions, H, W, 3]
        if stream is not None:
            images = self._owned.copied(images)
        # DALI reads labels on the host; images, and masks with them, may already be on the GPU.
        fetched = self._owned_labels.copied(batch["labels"]) if batch["labels"].is_cuda else batch["labels"]
        labels = self._task.labels(fetched)
        if not labels.is_cuda:  # masks on a GPU are not waited for
            self._check_classes(fetched, labels)
        labels = labels.repeat_interleave(self._num_versions, dim=0)
        labels = labels.to(images.device, non_blocking=True)
        return Batch(images=images, labels=labels, task=self._dataset.manifest.task)

    def _check_classes(self, fetched: torch.Tensor, labels: torch.Tensor) -> None:
        """See that labels, as they are packed and as Batch has them, are classes: they become places in memory."""
        given = self._task.classes(fetched, labels)
        if not len(given):  # of a process with fewer images than the others
            return
        low, high = (given + 1).aminmax()  # one more: -1 is none, and so is 255 of bytes
        if not int(TASKS[self._dataset.manifest.task].classifies) <= low <= high <= self.num_classes:
            raise EngineryError(
                f"a label of the {self._split} split of {self._dataset.path} is none of its {self.num_classes} "
                f"classes. {_RENEW}",
                code="damaged-dataset",
            )

    def _watched(self, function: Callable[[], _Result]) -> _Result:
        try:
            with translate_errors(self._dataset, self._split):
                return self._watchdog.call(function)
        except TimeoutError as error:
            raise EngineryError(
                f"reading the {self._split} split of {self._dataset.path} is stuck: nothing came in "
                f"{self._read_timeout_s:g} seconds. See whether its storage answers: "
                f"cat {self._dataset.path}/{self._split}-*.tar > /dev/null",
                code="read-timeout",
            ) from error


def _check_unmixed(augmentation: Augmentation, task: TaskName) -> None:
    for name in ("mixup_alpha", "cutmix_alpha"):
        if getattr(augmentation, name):
            raise UserError(
                f"train.augmentation.{name} mixes classes of whole images, and labels of {task} lie on the image; set "
                f"{name} to 0",
                code="unmixable-labels",
                setting=f"train.augmentation.{name}",
            )


def _reader(
    dataset: Artifact[DatasetManifest], split: Split, training: bool, shard_id: int, num_shards: int
) -> dict[str, Any]:
    """Arguments of DALI's reader for this process's part of a split."""
    folder, task = dataset.path, dataset.manifest.task
    return {
        "name": "reader",
        "paths": [str(folder / shard) for shard in split.shards],
        "index_paths": [str((folder / shard).with_suffix(".idx")) for shard in split.shards],
        "ext": [";".join(IMAGE_EXTENSIONS), TASKS[task].label_member],
        "missing_component_behavior": "error",
        "random_shuffle": training,
        "initial_fill": min(8192, split.num_images),
        "shard_id": shard_id,
        "num_shards": num_shards,
        "stick_to_shard": not training,  # in training the parts go round the ranks, epoch by epoch
        "pad_last_batch": True,
        "dont_use_mmap": False,
    }


_kept: list[Any] = []  # see _keep_decoders


def _keep_decoders(device_id: int) -> None:
    """Keep a GPU's image decoders loaded while this process lives, for all its GPUs, by a small pipeline.

    DALI unloads them with the last pipeline. Loading them is most of what building a pipeline takes, and no other
    thread of Python's runs meanwhile: loaders of several GPUs wait for each other.
    """
    if _kept:
        return
    small = dali.Pipeline(batch_size=1, num_threads=1, device_id=device_id)
    with small:
        encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1)
        small.set_outputs(dali.fn.decoders.image(encoded, device="mixed"))
    small.build()
    _kept.append(small)
    atexit.register(_kept.clear)  # before CUDA goes


def _open_all(reader: dict[str, Any]) -> None:
    for path in (*reader["paths"], *reader["index_paths"]):
        with suppress(FileNotFoundError), Path(path).open("rb"):  # DALI tells what is missing
            pass


class Watchdog:
    """Runs calls, one after the other, in a thread of its own, and waits for each no longer than `limit_s` seconds.

    A call that is stuck stays so: nothing can end a thread that hangs in a library. Its thread is a daemon, so the
    process can still end, and holds what the call belongs to, so that no destructor waits for it either.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stuck = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return what `function` returns, and raise what it raises.

        Raises:
            TimeoutError: this call, or one before it, did not come back in time.
        """
        future: Future[_Result] = Future()
        if self._stuck:
            raise TimeoutError
        self._calls.put((future, function))
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            self._stuck = not future.done()  # or the function raised it
            raise


def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        _run(*call)
        del call  # it would keep a batch alive while this thread waits for the next call


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # whatever it is, the caller raises it
        future.set_exception(error)


@contextmanager
def translate_errors(dataset: Artifact[DatasetManifest], split: str) -> Iterator[None]:
    """Turn what DALI says of a damaged shard, which names neither shard nor image, into one message.

    Raises:
        EngineryError: a sample could not be read or decoded. Other errors, such as no GPU memory, pass.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        of_data = any(sign in text for sign in _OF_DATA)
        if not of_data or any(sign in text for sign in NO_MEMORY):
            raise
        reason = decoder_reason(error)
        if damaged := _first_damaged_sample(dataset, split):
            raise EngineryError(f"{damaged}. {_RENEW} (DALI: {reason})", code="damaged-dataset") from error
        raise EngineryError(
            f"DALI can't decode the {split} split of {dataset.path}, though every sample is as preprocess packed it: "
            f"{reason}. `enginery doctor` shows whether DALI works here",
            code="undecodable-dataset",
        ) from error


def _check_indexes(dataset: Artifact[DatasetManifest], split: str) -> None:
    """See that the shards' indexes fit manifest and shards: DALI believes them, and crashes on some that don't.

    Raises:
        EngineryError: one does not.
    """
    info, num_images = dataset.manifest.splits[split], 0  # type: ignore[index]
    for shard in info.shards:
        if problem := _index_problem(dataset, shard):
            raise EngineryError(f"{problem}. {_RENEW}", code="damaged-dataset")
        num_images += _num_indexed(dataset, shard)
    if num_images != info.num_images:
        raise EngineryError(
            f"the indexes of the {split} split of {dataset.path} list {num_images} images, its manifest says "
            f"{info.num_images}. {_RENEW}",
            code="damaged-dataset",
        )


def _index_problem(dataset: Artifact[DatasetManifest], shard: str) -> str:
    name = str(Path(shard).with_suffix(".idx"))
    entry = dataset.manifest.files[name]
    return file_problem(dataset.path, name, entry.size_bytes, entry.digest)


def _num_indexed(dataset: Artifact[DatasetManifest], shard: str) -> int:
    """Samples that an index lists, whose digest may be right although nobody packed it.

    Raises:
        EngineryError: a member does not lie behind the one before and in the shard, or is none that is packed.
    """
    index, shard_bytes = dataset.file(shard).with_suffix(".idx"), dataset.manifest.files[shard].size_bytes
    kinds = [extension.encode() for extension in IMAGE_EXTENSIONS], [TASKS[dataset.manifest.task].label_member.encode()]
    with suppress(ValueError, OverflowError):  # no numbers, or too large ones
        # A line has less than 128 bytes, and its members 2048 or more.
        data = index.read_bytes() if index.stat().st_size <= shard_bytes / 16 else b""
        head, _, lines = data.partition(b"\n")
        fields = lines.split()  # extension, offset, size and name of an image, then of its label
        starts, sizes = (np.fromiter(map(int, fields[column::4]), np.int64) for column in (1, 2))
        edges = np.stack([starts, starts + sizes], axis=1).ravel()  # a sum that is too large is negative
        in_order = (np.append(edges, shard_bytes) >= np.append(0, edges)).all()
        known = all(set(fields[4 * place :: 8]) <= set(kind) for place, kind in enumerate(kinds))
        number, rest = divmod(len(fields), 8)
        if in_order and known and not rest and data.isascii() and head == b"v1.2 %d" % number:
            return number
    raise EngineryError(f"{index} does not list the samples of its shard. {_RENEW}", code="damaged-dataset")


def _first_damaged_sample(dataset: Artifact[DatasetManifest], split: str) -> str:
    """The first sample of a split that is not what preprocess packed, as a sentence; empty when all are."""
    with dataset.file(f"{split}.jsonl").open(encoding="utf-8") as lines:
        entries = {entry["key"]: entry for entry in map(json.loads, lines)}
    for shard in dataset.manifest.splits[split].shards:  # type: ignore[index]
        file = dataset.file(shard)
        try:
            for key, members in read_samples(file, entries.__contains__):
                for extension, data in members.items():
                    wanted = entries[key].get("sha256" if extension in IMAGE_EXTENSIONS else "label_sha256")
                    if wanted and hashlib.sha256(data).hexdigest() != wanted:
                        return (
                            f"the shard {file} is damaged: sample {key}.{extension}, made from {entries[key]['path']}, "
                            "is not what preprocess packed"
                        )
        except OSError as error:
            return f"the shard {file} is damaged: {error}"
    return ""
