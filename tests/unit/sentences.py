"""The steps on English and German phrases: a translator, made once."""

from itertools import islice
from pathlib import Path

import numpy as np

from enginery.datasets.phrases import phrase_pair
from tests.conftest import Shared
from tests.steps import step
from tests.unit.shapes import THRESHOLDS, Chain

HOSTILE = "<b>&  12</b>"  # the first sentence to validate on, HTML
_NUM_PAIRS = {"val": 48, "train": 1280}


def made_translator(shared: Shared) -> Chain:
    """Dataset, checkpoint and bundle, of few pairs: its translations are bad, but not all alike."""

    def build(folder: Path) -> None:
        (folder / "data").mkdir()
        rng = np.random.default_rng(0)
        pairs = iter(dict(phrase_pair(rng) for _ in range(2 * sum(_NUM_PAIRS.values()))).items())
        for split, number in _NUM_PAIRS.items():
            lines = [(HOSTILE, HOSTILE)] * (split == "val") + list(islice(pairs, number))
            text = "".join(f"{source}\t{target}\n" for source, target in lines)
            (folder / "data" / f"{split}.tsv").write_text(text, encoding="utf-8")
        data = folder / "dataset"
        settings: dict[str, object] = {"data": str(folder / "data"), "task": "translation", "vocabulary_size": 500}
        step("preprocess", data, settings)
        settings = {"architecture": "translation/lstm_small", "epochs": 3, "optimizer": "adamw", "num_processes": 1}
        settings |= {"global_batch_size": 32, "learning_rate": 0.032, "label_smoothing": 0.0}
        step("train", folder / "checkpoint", settings, dataset=data)
        settings = {"num_calibration_images": 32, "num_selection_images": 64, "calibration_method": "max"}
        settings |= {"gate": THRESHOLDS}
        step("export", folder / "bundle", settings, model=folder / "checkpoint", dataset=data)

    return Chain(folder=shared("translator", build))
