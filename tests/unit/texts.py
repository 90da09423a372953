"""A dataset of phrases and an exported translator of it, whose weights are almost as they were drawn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import BundleManifest, DatasetManifest, load, seal
from components.common.contracts.records import Split
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import TextSpec
from components.common.process.steplog import StepLog
from components.common.tasks.translation.vocabulary import train_vocabulary
from components.export.config import ExportConfig
from components.export.run import run as export
from components.preprocess.config import PreprocessConfig
from components.train.config import TrainConfig
from components.train.run import run as train
from enginery.datasets.phrases import phrase_pair

HOSTILE = "<b>&  12</b>"
MAX_TOKENS = 40
NUM_VAL = 24


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Artifacts of the steps."""

    dataset: Path
    bundle: Path

    @property
    def text(self) -> TextSpec:
        """Of both."""
        return load(self.bundle, BundleManifest).manifest.text_spec


def write_dataset(path: Path) -> Path:
    """Pairs of English and German phrases; the first one to validate on is HTML."""
    every = dict.fromkeys(phrase_pair(np.random.default_rng(seed)) for seed in range(400))
    pairs = [pair for pair in every if max(map(len, pair)) < MAX_TOKENS][:120]
    vocabulary, parts = path / "vocabulary.model", {"val": [(HOSTILE, HOSTILE), *pairs[: NUM_VAL - 1]]}
    parts["train"] = pairs[NUM_VAL:]
    path.mkdir()
    for name, own in parts.items():
        (path / f"{name}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in own), encoding="utf-8")
    size = train_vocabulary((line for pair in pairs for line in pair), 400, vocabulary)
    seal(
        path,
        DatasetManifest,
        inputs={},
        config=resolve(PreprocessConfig, "preprocess", {"data": "phrases.tsv"}),
        task="translation",
        text=TextSpec(source_language="en", target_language="de", num_tokens=size, max_tokens=MAX_TOKENS),
        classes=(),
        num_rejected=0,
        splits={
            name: Split(
                num_images=len(own), shards=(f"{name}.tsv",), class_counts=(), digest=digest_file(path / f"{name}.tsv")
            )
            for name, own in parts.items()
        },
    )
    return path


def write_bundle(dataset: Path, root: Path) -> Path:
    """A bundle of an LSTM in FP32 and INT8; so little trained, it says something of every sentence."""
    recipe = {"architecture": "translation/lstm_small", "epochs": 1, "global_batch_size": 32, "num_processes": 1}
    train(
        resolve(TrainConfig, "train", {**recipe, "learning_rate": 1e-5, "optimizer": "adamw"}),
        StepLog("train"),
        dataset=dataset,
        output=root / "checkpoint",
    )
    settings = {"num_calibration_images": 8, "calibration_method": "max", "fallback": False}
    export(
        resolve(ExportConfig, "export", {**settings, "num_selection_images": 0}),
        StepLog("export"),
        model=root / "checkpoint",
        dataset=dataset,
        output=root / "bundle",
    )
    return root / "bundle"
