"""The shape of report.json. `python -m components.validate.schema` prints its JSON schema.

report.html and model_card.md show the same values; images and charts are only in report.html.
"""

import json
import sys
from typing import Any, Literal

from pydantic import Field

from components.common.contracts.environment import Environment
from components.common.contracts.records import (
    AccuracyReport,
    BenchmarkReport,
    CalibrationEntry,
    ClassLoss,
    CpuModel,
    DatasetStatistics,
    EngineEntry,
    EngineLayer,
    NearDuplicates,
    PairedComparison,
    PlacementEntry,
    Precision,
    Record,
    TrainingRecord,
    Trial,
)
from components.common.contracts.transforms import ShapeSpec, TextSpec, TransformSpec
from components.common.contracts.verdict import Verdict


class PredictionChange(PairedComparison):
    """Differences between the predictions of the judged precision and FP32's, image by image."""

    num_differing: int = Field(description="Images on which the two predict different classes.")


class Disagreement(Record):
    """One image on which FP32 and the judged precision predict different classes, or sentence of two translations."""

    index: int = Field(description="Position in the validation split, from 0: the line of val.jsonl or val.tsv.")
    path: str = Field(description="File in the source folder, bytes that are not UTF-8 escaped; empty for a sentence.")
    source: str = Field("", description="The sentence; empty for an image.")
    label: str = Field(description="Class of the image; reference of the sentence.")
    fp32: str = Field(description="Class that FP32 predicts, or its translation.")
    own: str = Field(description="Class that the precision predicts, or its translation.")


class ConfusedPair(Record):
    """Images of one class that the judged precision takes for another."""

    label: str
    predicted: str
    num_images: int
    num_images_fp32: int = Field(description="The same count with FP32.")
    share_pct: float = Field(description="Of all images of the class.")


class Confusion(Record):
    """Pairs of classes that the judged precision confuses."""

    matrix: tuple[tuple[int, ...], ...] | None = Field(
        description="Images by [label][prediction], in the order of `model.classes`; None for more than 200 classes."
    )
    others: dict[Precision, tuple[tuple[int, ...], ...]] = Field(
        {}, description="The same matrix of every other precision that was measured; empty for more than 200 classes."
    )
    pairs: tuple[ConfusedPair, ...] = Field(description="The most frequent confusions, at most 20.")


class ClassChange(ClassLoss):
    """Accuracy on the images of one class."""

    fp32_pct: float
    own_pct: float
    significant: bool = Field(description="Whether p_corrected is below 0.05: the class surely got better or worse.")


class Model(Record):
    """The model that was measured."""

    architecture: str
    classes: tuple[str, ...]
    transform: TransformSpec | None = Field(None, description="None for text.")
    shapes: ShapeSpec | None = Field(None, description="None for text.")
    text: TextSpec | None = Field(None, description="None for images.")
    engines: tuple[EngineEntry, ...]
    engines_missing: str = Field(description="Why TensorRT engines are missing, all or some; empty when none is.")
    layers: tuple[EngineLayer, ...] = Field(
        (), description="Of the engine of the precision that the verdict is on; empty where there is none."
    )


class Calibration(CalibrationEntry):
    """The origin of the INT8 scales, and how much of the model is INT8."""

    num_quantized_layers: int
    num_quantizable_layers: int
    cpu_models: tuple[CpuModel, ...] = Field((), description="The INT8 files for CPUs.")

    @property
    def chosen(self) -> Trial | None:
        """The trial that the model is made of; None where nothing was compared."""
        trials = self.selection.trials[::-1] if self.selection else ()  # the last: measured as it was written
        return next((trial for trial in trials if (trial.method, trial.excluded) == (self.method, self.excluded)), None)


class SplitSummary(Record):
    """One part of the data."""

    name: Literal["train", "val"]
    num_images: int
    digest: str
    fewest: int | None = Field(description="Images of the class that has fewest; None without classes.")
    most: int | None = Field(description="Images of the class that has most.")


class Data(Record):
    """The images or sentences behind the model and the measurement."""

    num_classes: int
    splits: tuple[SplitSummary, ...]
    statistics: DatasetStatistics | None = Field(None, description="None for text.")
    num_rejected: int
    near_duplicates: NearDuplicates | None = Field(None, description="None where they were not looked for.")


class Code(Record):
    """The code that measured."""

    version: str = Field(description="Version of the package enginery.")
    commit: str = Field(description="Git commit; empty where it is not known.")
    modified: bool = Field(description="The working tree held changes that are in no commit.")


class Provenance(Record):
    """Code, digests, configs and machines behind the report."""

    code: Code
    digests: dict[str, str] = Field(description="Of manifests, splits and files, by name.")
    configs: dict[str, dict[str, Any]] = Field(description="Resolved config by step.")
    environments: dict[str, Environment] = Field(description="Machine and libraries by step.")


class Report(Record):
    """report.json: one model in several precisions, measured on one validation split."""

    schema_version: Literal[1] = 1
    created: str = Field(description="When, in UTC: YYYY-MM-DDThh:mm:ssZ.")
    model: Model
    verdict: Verdict
    accuracy: AccuracyReport
    benchmark: BenchmarkReport
    change: PredictionChange | None = Field(description="None where FP32 or the judged precision was not measured.")
    disagreements: tuple[Disagreement, ...] = Field(description="At most 24, spread over the split.")
    confusion: Confusion | None
    class_changes: tuple[ClassChange, ...] = Field(description="Classes with validation images, worst change first.")
    calibration: Calibration
    placement: PlacementEntry | None = Field(None, description="None where the blocks in INT8 were not chosen by time.")
    training: TrainingRecord | None = Field(description="None for a model that was not trained by this chain.")
    data: Data
    provenance: Provenance


def report_schema() -> dict[str, Any]:
    """The JSON schema of report.json."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**dialect, **Report.model_json_schema(mode="serialization")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n")
