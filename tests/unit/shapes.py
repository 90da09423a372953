"""The steps on `enginery data shapes`: chains of other tasks than classification, each made once."""

from dataclasses import dataclass
from pathlib import Path

from enginery.datasets.shapes import write_shapes
from tests.conftest import Shared, run_step
from tests.steps import step

THRESHOLDS = {"max_drop_points": 100.0, "min_relative_score_pct": 0.0, "min_validation_images": 10}
THRESHOLDS |= {"require_above_chance": False}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Folders of the artifacts."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        return self.folder / name


def made_chain(shared: Shared, task: str, architecture: str) -> Chain:
    """The chain on few images."""

    def build(folder: Path) -> None:
        write_shapes(folder / "data", num_train=96, num_val=48, image_size=64)
        data = folder / "dataset"
        run_step(folder / "data", data, task=task)
        settings = {"architecture": f"{task}/{architecture}", "image_size": 64, "epochs": 2, "optimizer": "adamw"}
        settings |= {"global_batch_size": 16, "learning_rate": 0.064, "num_processes": 1, "resize_ratio": 1.0}
        settings |= {"label_smoothing": 0.0}
        step("train", folder / "checkpoint", settings, dataset=data)
        settings = {"tensorrt": "off", "num_ranking_images": 4, "mixed_engines": 0, "num_calibration_images": 32}
        step("export", folder / "bundle", settings, model=folder / "checkpoint", dataset=data)
        settings = {"benchmark_seconds": 0.02, "benchmark_warmup_seconds": 0.0, "min_iterations": 1}
        settings |= {"benchmark_batch_sizes": [1], "gate": THRESHOLDS, "corruptions": True}
        step("validate", folder / "report", settings, bundle=folder / "bundle", dataset=data)

    return Chain(folder=shared(f"{task}_chain", build))
