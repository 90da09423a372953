"""Batches of a dataset's pairs of sentences, those of similar length together: for training and validation."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, DatasetManifest, file_problem, how_to_renew
from components.common.data.loader import Batch, LoaderState
from components.common.tasks.translation.evaluation import Pairs, read_pairs
from components.common.tasks.translation.vocabulary import BOS, PAD, Vocabulary

LENGTH_STEP = 8  # on GPUs lengths of batches are multiples of it: few shapes, and whole tiles of tensor cores
_WINDOW = 100  # steps whose pairs are sorted by length together
_CHUNK = 10_000  # sentences that are encoded at a time

Indices = npt.NDArray[np.int64]


class _Sentences:
    """Tokens of one language, one after the other in little memory."""

    def __init__(self, lines: list[str], vocabulary: Vocabulary) -> None:
        dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.int32
        parts, lengths = [], []
        for start in range(0, len(lines), _CHUNK):
            tokens = vocabulary.encode(lines[start : start + _CHUNK])
            lengths += [len(ids) for ids in tokens]
            parts.append(np.fromiter((token for ids in tokens for token in ids), dtype))
        self._tokens = np.concatenate(parts)
        self.lengths: Indices = np.array(lengths, np.int64)  # [N] with EOS
        self._starts = np.cumsum(self.lengths) - self.lengths

    def padded(self, which: Indices, length: int) -> Indices:
        """[B] numbers of sentences -> [B, length] their tokens with EOS, PAD behind them."""
        places = np.arange(length)
        within = places < self.lengths[which, None]
        tokens = self._tokens[np.where(within, self._starts[which, None] + places, 0)]
        return np.where(within, tokens, PAD).astype(np.int64)


class SentenceLoader:
    """Batches of one split, epoch after epoch, as Loader has them of images.

    A batch's images are [B, 2, L] int64: the source with EOS, and the target behind BOS and without EOS; its labels
    are [B, L] int64, the target with EOS. PAD fills up; L is the longest sentence's, on a GPU the next multiple of
    LENGTH_STEP.

    In training an epoch is cut into steps, whose pairs are of similar length, in random order. No pair comes twice in
    an epoch; those that fill no step are left out, others each time. What a step holds does not depend on the number
    of processes, so another number of them may resume between two steps. In evaluation each pair comes exactly once,
    the longest first.

    Args:
        dataset: the artifact that preprocess wrote.
        split: "train" or "val".
        training: shuffle, and deliver whole steps alone.
        batch_size: pairs per batch of this process.
        batches_per_step: of training: batches that make one step of the optimizer.
        seed: of shuffling.
        shard_id: this process's part of each step, or of the split; 0 <= shard_id < num_shards.
        num_shards: processes that share the split.
        device_id: GPU to deliver on; None for the CPU.
        first_epoch: of training: epoch to begin with, from 0.
        state: what `state` of a training loader returned, of any process: resume behind what was delivered last.

    Raises:
        EngineryError: the split's file is damaged, or `state` is or belongs to another loader.
        UserError: the training split has too few pairs for one step.
    """

    def __init__(
        self,
        dataset: Artifact[DatasetManifest],
        split: str,
        *,
        training: bool,
        batch_size: int,
        batches_per_step: int = 1,
        seed: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        device_id: int | None = None,
        first_epoch: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._dataset, self._split, self._training, self._seed = dataset, split, training, seed
        self._batch_size, self._batches_per_step = batch_size, batches_per_step
        self._shard_id, self._num_shards, self._device_id = shard_id, num_shards, device_id
        self._length_step = 1 if device_id is None else LENGTH_STEP
        file = dataset.manifest.text_spec.vocabulary
        vocabulary = Vocabulary.read(dataset.file(file))
        self.num_classes = vocabulary.size
        pairs = self._pairs()
        self._sources, self._targets = (_Sentences([pair[side] for pair in pairs], vocabulary) for side in (0, 1))
        self._longest = np.maximum(self._sources.lengths, self._targets.lengths)
        self._step_size = batch_size * batches_per_step * num_shards
        if training:
            self._num_steps = len(pairs) // self._step_size
            self.num_batches = self._num_steps * batches_per_step
            self.num_images = self.num_batches * batch_size
            if not self._num_steps:
                raise UserError(
                    f"{len(pairs)} training pairs are too few for one step of {self._step_size}; set "
                    f"train.global_batch_size to {len(pairs)} or less",
                    code="too-few-images",
                    setting="train.global_batch_size",
                )
        else:
            self.num_images = len(range(shard_id, len(pairs), num_shards))
            self.num_batches = math.ceil(self.num_images / batch_size)
        self._identity = {
            "split": dataset.manifest.splits[split].digest,  # type: ignore[index]
            "vocabulary": dataset.manifest.files[file].digest,
            "seed": seed,
            "pairs_per_step": self._step_size,
        }
        # Batches of training that were delivered, since its first epoch began.
        self.num_delivered = first_epoch * self.num_batches if state is None else self._resumed(state)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        if not self._training:
            own = np.argsort(-self._longest, kind="stable")[self._shard_id :: self._num_shards]
            for start in range(0, len(own), self._batch_size):
                yield self._batch(own[start : start + self._batch_size])
            return
        epoch, done = divmod(self.num_delivered, self.num_batches)
        # [num_batches, pairs of all processes]; each process takes every num_shards-th, so that all have the same work
        batches = self._steps(epoch).reshape(self.num_batches, -1)
        for batch in batches[done:]:
            self.num_delivered += 1
            yield self._batch(batch[self._shard_id :: self._num_shards])

    def state(self) -> dict[str, Any]:
        """Return the state of training behind the batch that was delivered last: the same of all processes.

        A loader made with this `state`, for the same pairs, seed and size of a step, delivers the batches that this one
        will deliver.
        """
        if not self._training:
            raise ValueError("an evaluation loader has no state: it always begins with the first pair")
        return LoaderState.sealed(
            num_delivered=self.num_delivered,
            first_epoch=0,
            identity={**self._identity, "batches_per_step": self._batches_per_step},
            checkpoints=[],
        ).model_dump(mode="json")

    def _steps(self, epoch: int) -> Indices:
        """[num_steps, pairs of a step] the pairs of an epoch, in the order of their length within a step."""
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._longest))[: self._num_steps * self._step_size]
        for start in range(0, len(order), _WINDOW * self._step_size):
            window = order[start : start + _WINDOW * self._step_size]
            window[:] = window[np.lexsort((self._targets.lengths[window], self._longest[window]))]
        return order.reshape(self._num_steps, self._step_size)[rng.permutation(self._num_steps)]

    def _batch(self, which: Indices) -> Batch:
        length = math.ceil(self._longest[which].max() / self._length_step) * self._length_step
        labels = self._targets.padded(which, length)
        inputs = np.full_like(labels, BOS)
        inputs[:, 1:] = labels[:, :-1]
        # The target's own EOS is predicted and never read.
        inputs[np.arange(length) >= self._targets.lengths[which, None]] = PAD
        images = np.stack([self._sources.padded(which, length), inputs], axis=1)
        tensors = [torch.from_numpy(array) for array in (images, labels)]
        if self._device_id is not None:
            device = torch.device("cuda", self._device_id)
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        return Batch(images=tensors[0], labels=tensors[1], task=self._dataset.manifest.task)

    def _pairs(self) -> Pairs:
        """The pairs of the split as preprocess wrote them."""
        (name,) = self._dataset.manifest.splits[self._split].shards  # type: ignore[index]
        entry = self._dataset.manifest.files[name]
        if problem := file_problem(self._dataset.path, name, entry.size_bytes, entry.digest):
            raise EngineryError(f"{problem}; {how_to_renew('dataset')}", code="damaged-dataset")
        return read_pairs(self._dataset, self._split)

    def _resumed(self, state: dict[str, Any]) -> int:
        """Return the batches that a loader of this number of processes would have delivered."""
        where = f"can't resume in the middle of the {self._split} split of {self._dataset.path}: the saved state is"
        saved = LoaderState.read(state, where)
        per_step = saved.identity.get("batches_per_step")
        differing = saved.differences(self._identity)
        if per_step == self._batches_per_step and not differing:
            return saved.num_delivered
        if differing or not isinstance(per_step, int) or per_step < 1 or saved.num_delivered % per_step:
            differing += saved.differences({"batches_per_step": self._batches_per_step})
            raise EngineryError(
                f"{where} of {', '.join(differing)}. Resume with the settings and data of the interrupted run, or "
                "start again",
                code="other-loader-state",
            )
        return saved.num_delivered // per_step * self._batches_per_step
