"""Batches of sentences: every pair once, little padding, the same for any number of processes, and resumable."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.common.contracts.digests import digest_file
from components.common.contracts.environment import environment
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.records import FileEntry, Split
from components.common.contracts.transforms import TextSpec
from components.common.data.loader import Batch
from components.common.tasks.translation.batches import LENGTH_STEP, SentenceLoader
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD, Vocabulary, train_vocabulary
from enginery.datasets.phrases import phrase_pair
from tests.conftest import Dataset
from tests.unit.common.data.test_loader_resume import same
from tests.unit.refusals import refuses

Pairs = dict[str, list[tuple[str, str]]]
NUM_TRAIN, NUM_VAL = 1000, 103
BATCH_SIZE, NUM_SHARDS, PER_STEP = 8, 2, 3  # 20 steps of 48, and 40 pairs left out
NUM_BATCHES = 60


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    rng, found = np.random.default_rng(0), dict[str, str]()
    while len(found) < NUM_TRAIN + NUM_VAL:
        found.setdefault(*phrase_pair(rng))
    listed = list(found.items())
    return {"train": listed[:NUM_TRAIN], "val": listed[NUM_TRAIN:]}


@pytest.fixture
def dataset(pairs: Pairs, tmp_path: Path) -> Dataset:
    lines = (line for split in pairs.values() for pair in split for line in pair)
    train_vocabulary(lines, 400, tmp_path / "vocabulary.model")
    for split, listed in pairs.items():
        (tmp_path / f"{split}.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in listed), encoding="utf-8")
    files = {one.name: FileEntry(size_bytes=one.stat().st_size, digest=digest_file(one)) for one in tmp_path.iterdir()}
    splits: dict[Any, Split] = {}
    for split, listed in pairs.items():
        shard = f"{split}.tsv"
        splits[split] = Split(num_images=len(listed), shards=(shard,), class_counts=(), digest=files[shard].digest)
    size = Vocabulary.read(tmp_path / "vocabulary.model").size
    manifest = DatasetManifest(
        task="translation",
        text=TextSpec(source_language="en", target_language="de", num_tokens=size, max_tokens=100),
        files=files,
        inputs={},
        config={},
        environment=environment(),
        classes=(),
        splits=splits,
        num_rejected=0,
    )
    return Artifact(path=tmp_path, manifest=manifest, digest="")


def train(dataset: Dataset, **options: Any) -> SentenceLoader:
    given = {"batch_size": BATCH_SIZE, "batches_per_step": PER_STEP, "seed": 3, "num_shards": NUM_SHARDS}
    return SentenceLoader(dataset, "train", training=True, **{**given, **options})


def sentences(dataset: Dataset, batch: Batch) -> list[tuple[str, str]]:
    vocabulary = Vocabulary.read(dataset.file("vocabulary.model"))
    sides = (vocabulary.decode(tokens.tolist()) for tokens in (batch.images[:, 0], batch.labels))
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("length_step", [1, LENGTH_STEP])  # on a CPU and on a GPU
def test_batches_are_as_networks_read(dataset: Dataset, pairs: Pairs, length_step: int) -> None:
    loader = SentenceLoader(dataset, "val", training=False, batch_size=10)
    assert loader._length_step == 1
    loader._length_step = length_step
    batches = list(loader)
    assert [len(batch.labels) for batch in batches] == [10] * 10 + [3]
    assert (len(loader), loader.num_images) == (11, NUM_VAL)
    assert loader.num_classes == Vocabulary.read(dataset.file("vocabulary.model")).size
    assert sorted(pair for batch in batches for pair in sentences(dataset, batch)) == sorted(pairs["val"])
    for batch in batches:
        assert (batch.images.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
        number, _, length = batch.images.shape
        assert (batch.images.shape, batch.labels.shape) == ((number, 2, length), (number, length))
        assert length % length_step == 0
        source, inputs = batch.images.unbind(1)
        for row, read, label in zip(source, inputs, batch.labels, strict=True):
            ended = (label != PAD).sum()
            assert label[ended - 1] == EOS
            assert EOS not in label[: ended - 1]
            assert not label[ended:].any()
            assert read[0] == BOS
            assert torch.equal(read[1:ended], label[: ended - 1])
            assert not read[ended:].any()
            ended = (row != PAD).sum()
            assert row[ended - 1] == EOS
            assert not row[ended:].any()
        assert max((source != PAD).sum(1).max(), (batch.labels != PAD).sum(1).max()) > length - length_step
    assert all(map(same, batches, loader))  # again from the start


@pytest.mark.parametrize("num_shards", [1, 2, 7, 200])
def test_validation_has_all_pairs(dataset: Dataset, pairs: Pairs, num_shards: int) -> None:
    loaders = [
        SentenceLoader(dataset, "val", training=False, batch_size=9, shard_id=shard, num_shards=num_shards)
        for shard in range(num_shards)
    ]
    found = [[pair for batch in loader for pair in sentences(dataset, batch)] for loader in loaders]
    assert [len(own) for own in found] == [loader.num_images for loader in loaders]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert sorted(pair for own in found for pair in own) == sorted(pairs["val"])
    with pytest.raises(ValueError, match="has no state"):
        loaders[0].state()


def test_epochs_have_no_pair_twice_and_little_padding(dataset: Dataset, pairs: Pairs) -> None:
    loaders = [train(dataset, shard_id=shard) for shard in range(NUM_SHARDS)]
    epochs: list[list[tuple[str, str]]] = []
    shares = []
    for _ in range(3):
        batches = [batch for loader in loaders for batch in loader]
        assert [len(batch.labels) for batch in batches] == [BATCH_SIZE] * NUM_BATCHES * NUM_SHARDS
        epochs.append([pair for batch in batches for pair in sentences(dataset, batch)])
        assert len(set(epochs[-1])) == len(epochs[-1]) == 960
        assert set(epochs[-1]) <= set(pairs["train"])
        shares += [((batch.images != PAD).float().mean().item()) for batch in batches]
        widths = [batch.labels.shape[1] for batch in batches[:NUM_BATCHES]]
        assert len(set(widths)) > 3
        assert widths != sorted(widths)
    assert epochs[0] != epochs[1]
    left_out = [set(pairs["train"]) - set(epoch) for epoch in epochs]
    assert len(left_out[0] & left_out[1] & left_out[2]) < 5
    everything = [max(len(one), len(other)) for one, other in pairs["train"]]
    unsorted = np.mean(everything) / max(everything)
    assert np.mean(shares) > 0.55 > unsorted


def test_the_processes_have_batches_of_the_same_length(dataset: Dataset) -> None:
    first, second = (list(train(dataset, shard_id=shard)) for shard in range(NUM_SHARDS))
    assert not any(map(same, first, second))
    apart = [abs(one.labels.shape[1] - other.labels.shape[1]) for one, other in zip(first, second, strict=True)]
    assert Counter(apart)[0] > 0.8 * NUM_BATCHES


@pytest.mark.parametrize("first_epoch", [0, 2])
def test_resumed_loaders_deliver_the_rest(dataset: Dataset, first_epoch: int) -> None:
    whole = train(dataset, shard_id=1, first_epoch=first_epoch)
    states, batches = [whole.state()], []
    for _ in range(3):
        for batch in whole:
            batches.append(batch)
            states.append(whole.state())
    assert len(batches) == 3 * NUM_BATCHES
    for index in (0, 1, 59, 60, 61, 119, 120, 150):  # first and last of an epoch, in the middle of a step
        resumed = train(dataset, shard_id=1, state=json.loads(json.dumps(states[index])))
        assert resumed.num_delivered == first_epoch * NUM_BATCHES + index
        assert resumed.state() == states[index]
        rest = [batch for _ in range(3) for batch in resumed]
        assert all(map(same, batches[index:], rest))
    later = list(train(dataset, shard_id=1, first_epoch=first_epoch + 1))
    assert all(map(same, batches[NUM_BATCHES : 2 * NUM_BATCHES], later))


def test_another_number_of_processes_resumes_between_two_steps(dataset: Dataset) -> None:
    def steps(num_shards: int, per_step: int, state: dict[str, Any]) -> list[list[tuple[str, str]]]:
        options = {"num_shards": num_shards, "batches_per_step": per_step, "state": state}
        size = 48 // num_shards // per_step
        own = [list(train(dataset, batch_size=size, shard_id=shard, **options)) for shard in range(num_shards)]
        return [
            sorted(pair for part in own for batch in part[at : at + per_step] for pair in sentences(dataset, batch))
            for at in range(0, len(own[0]), per_step)
        ]

    loader = train(dataset)
    for _ in loader:
        if loader.num_delivered == 5 * PER_STEP:
            break
    expected = steps(NUM_SHARDS, PER_STEP, loader.state())
    assert len(expected) == 15
    for num_shards, per_step in ((1, 1), (4, 3), (3, 2), (1, 6)):
        assert steps(num_shards, per_step, loader.state()) == expected


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"seed": 4}, "seed 3 instead of 4"),
        ({"batch_size": 7}, "pairs_per_step 48 instead of 42"),
        ({"batches_per_step": 6, "batch_size": 4}, "batches_per_step 3 instead of 6"),  # in the middle of a step
    ],
)
def test_the_state_of_another_loader_is_refused(dataset: Dataset, other: dict[str, Any], word: str) -> None:
    loader = train(dataset)
    next(iter(loader))
    with refuses("other-loader-state", says=word):
        train(dataset, **other, state=loader.state())
    with refuses("damaged-loader-state"):  # in other ways, too: test_loader_resume.py
        train(dataset, state={**loader.state(), "num_delivered": 2})


def test_too_few_pairs_and_a_changed_file(dataset: Dataset) -> None:
    with refuses("too-few-images", "train.global_batch_size"):
        train(dataset, batch_size=200)
    path = dataset.file("train.tsv")
    content = path.read_bytes()
    path.write_bytes(content[:-10] + b"x" + content[-9:])
    with refuses("damaged-dataset"):
        train(dataset)
    path.write_bytes(content[:-10])
    with refuses("damaged-dataset"):
        train(dataset)
