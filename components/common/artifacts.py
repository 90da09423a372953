"""Manifests: what every artifact of the chain says about itself, and the only way to read or seal one.

An artifact is a directory with a `manifest.json`. It is complete when the manifest exists, because the manifest is
written last. The digest of the manifest is the artifact's identity: it covers the digest of every file.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.digests import canonical_json, digest_bytes, digest_file
from components.common.environment import Environment, environment
from components.common.errors import EngineryError, UserError
from components.common.integrity import (
    check_seal,
    claims_of,
    file_problem,
    first_problem,
    how_to_renew,
    migrated,
    read_manifest,
    seal_of,
    writer_of,
)
from components.common.shapes import ShapeSpec
from components.common.transforms import TransformSpec

MANIFEST = "manifest.json"
FAILURE = "failure.json"  # what a failed step leaves in its output directory

Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    """Size and digest of one file of an artifact."""

    size_bytes: int
    digest: str


class Manifest(_Record):
    """What all artifacts share. `files` is keyed by the path inside the artifact, with forward slashes."""

    schema_version: Literal[2] = 2
    seal: str = Field("", description="Digest of all the rest of this manifest: an edit by hand does not fit it.")
    kind: str
    files: dict[str, FileEntry]
    inputs: dict[str, str] = Field(description="Manifest digest of each artifact this one was made from, by name.")
    config: dict[str, Any] = Field(description="The resolved config of the step that wrote this.")
    environment: Environment


class Split(_Record):
    """One part of a data set: its shards and how many images of each class they hold."""

    num_images: int
    shards: tuple[str, ...] = Field(description="WebDataset tar files; each has a DALI index beside it (.idx).")
    class_counts: tuple[int, ...] = Field(description="Images per class, in the order of `classes`.")
    digest: str = Field(description="Digest of the listing: label and content digest of every image, in order.")


class DatasetStatistics(_Record):
    """Seen while the training split was decoded."""

    mean: tuple[float, float, float] = Field(description="Per RGB channel, in units of 0..1, over the training split.")
    std: tuple[float, float, float]
    min_side: int = Field(description="Shortest image side in pixels, over all splits.")
    median_side: int = Field(description="Median of the shorter side in pixels, over all splits.")
    max_side: int


class DatasetManifest(Manifest):
    """Labelled images in WebDataset shards."""

    kind: Literal["dataset"] = "dataset"
    classes: tuple[str, ...]
    splits: dict[Literal["train", "val"], Split]
    statistics: DatasetStatistics
    num_rejected: int


class EpochRecord(_Record):
    """What one epoch of training measured."""

    train_loss: float
    train_images_per_s: float
    val_loss: float | None = Field(description="Over the validation split; None where it was not finite.")
    val_top1_pct: float


class CheckpointManifest(Manifest):
    """Trained weights and everything needed to use them."""

    kind: Literal["checkpoint"] = "checkpoint"
    architecture: str
    classes: tuple[str, ...]
    transform: TransformSpec
    metrics: dict[str, float] = Field(description="What training measured at its end, by metric name.")
    history: tuple[EpochRecord, ...] = Field((), description="One entry per epoch, the first epoch first.")


class TrainingRecord(_Record):
    """How a model was trained, as its checkpoint tells it."""

    history: tuple[EpochRecord, ...]
    config: dict[str, Any] = Field(description="The resolved config of the train step.")
    metrics: dict[str, float] = Field(description="What training measured at its end, by metric name.")
    environment: Environment


class EngineEntry(_Record):
    """One TensorRT plan of a bundle."""

    file: str
    precision: Precision
    source_onnx: str
    onnx_digest: str = Field("", description="Of the file that it was built from.")
    tensorrt_version: str
    gpu_name: str
    compute_capability: str
    driver_version: str
    flags: tuple[str, ...] = Field(
        (), description="What TensorRT was told about precision: STRONGLY_TYPED, FP16, INT8."
    )
    optimization_level: int | None = Field(None, description="0 builds fastest, 5 runs fastest.")
    build_seconds: float


class Trial(_Record):
    """One candidate that was measured while INT8 was chosen: a calibration, and layers left in float."""

    method: str
    excluded: tuple[str, ...] = Field(description="Nodes of fp32.onnx kept out of INT8, the costliest first.")
    top1_pct: float = Field(description="On the selection images, which are training images.")
    delta_top1_points: float = Field(description="top-1 minus that of FP32 on the same images, in percentage points.")
    low_points: float = Field(description="Lower end of the 95 % interval of that difference (Bonett and Price, 2012).")
    high_points: float = Field(description="Upper end of that interval.")
    agreement_pct: float = Field(description="Images on which FP32 predicts the same class, in per cent.")
    within_budget: bool


class LayerCost(_Record):
    """What one node of the graph costs when it alone runs in INT8."""

    name: str = Field(description="Node of fp32.onnx.")
    operator: str = Field(description="ONNX operator, such as Conv.")
    cost_nats: float = Field(description="Mean Kullback-Leibler divergence of the predicted classes from FP32's.")


class SelectionEntry(_Record):
    """How a calibration and the layers in INT8 were chosen by measurement."""

    runtime: str = Field(description="What ran the candidates: openvino, or torch, which simulates INT8 on a GPU.")
    num_images: int = Field(description="Training images, none of them calibrated with, that candidates ran on.")
    fp32_top1_pct: float
    max_top1_drop_points: float = Field(description="The budget, in percentage points of top-1.")
    min_relative_top1_pct: float = Field(description="The budget, as the least share of FP32's top-1, in per cent.")
    trials: tuple[Trial, ...] = Field(description="In the order in which they were measured.")
    ranking: tuple[LayerCost, ...] = Field(description="Every node that can run in INT8, the costliest first.")
    num_ranking_images: int = Field(description="Calibration images that the ranking rests on; 0 for no ranking.")
    out_of_time: bool = Field(description="Whether the time limit ended the search.")
    seconds: float


class CalibrationEntry(_Record):
    """How the INT8 scales came about."""

    method: str
    num_images: int
    split: str
    seconds: float = Field(description="To run the model over the images, or to read the cache.")
    digest: str = Field("", description="Of graph and weights, images, TransformSpec, method and its parameters.")
    cached: bool = Field(False, description="Whether the histograms came from the cache.")
    excluded: tuple[str, ...] = Field((), description="Nodes of fp32.onnx kept out of INT8, the costliest first.")
    selection: SelectionEntry | None = Field(None, description="None where nothing was compared.")


class BundleManifest(Manifest):
    """One model in several precisions, ready to be measured."""

    kind: Literal["bundle"] = "bundle"
    architecture: str
    classes: tuple[str, ...]
    transform: TransformSpec
    shapes: ShapeSpec
    models: dict[str, str] = Field(description="ONNX file by name: fp32, fp16, int8, int8_fp16.")
    engines: tuple[EngineEntry, ...] = Field(description="TensorRT plans for the GPU that export ran on.")
    engines_missing: str = Field("", description="Why there are no TensorRT plans; empty when there are.")
    calibration: CalibrationEntry
    num_quantized_layers: int = Field(description="Convolutions and matrix products with INT8 inputs and weights.")
    num_quantizable_layers: int
    training: TrainingRecord | None = Field(None, description="None for a model that was not trained by this chain.")


class AccuracyRow(_Record):
    """Accuracy of one precision on the validation split, by the runtime that would serve it."""

    precision: Precision
    runtime: str = Field(description='"tensorrt", "openvino", ...; "n/a" when nothing here runs this precision.')
    device: str = ""
    file: str = ""
    size_bytes: int = 0
    num_images: int = 0
    top1_pct: float | None = None
    top5_pct: float | None = None
    delta_top1_points: float | None = Field(None, description="top1_pct minus that of FP32.")
    agreement_pct: float | None = Field(None, description="Share of images on which the prediction equals FP32's.")
    note: str = ""


class AccuracyReport(_Record):
    """What each precision costs in accuracy. All rows saw exactly the same images."""

    dataset_digest: str
    split_digest: str
    bundle_digest: str
    rows: tuple[AccuracyRow, ...]

    def row(self, precision: str) -> AccuracyRow:
        """The row of a precision."""
        return next(row for row in self.rows if row.precision == precision)


class BenchmarkRow(_Record):
    """Speed of one precision at one batch size, on trtexec's terms."""

    precision: Precision
    runtime: str
    batch_size: int
    images_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    num_iterations: int


class BenchmarkReport(_Record):
    """What each precision buys in speed."""

    bundle_digest: str
    rows: tuple[BenchmarkRow, ...]

    def row(self, precision: str, batch_size: int) -> BenchmarkRow | None:
        """The row of a precision and batch size, or None where it was not measured."""
        rows = (row for row in self.rows if row.precision == precision and row.batch_size == batch_size)
        return next(rows, None)


class ReportManifest(Manifest):
    """The measurements of one bundle, the predictions behind them, and what people and programs read of both."""

    kind: Literal["report"] = "report"
    accuracy: AccuracyReport
    benchmark: BenchmarkReport


class GateCheck(_Record):
    """One threshold: what was measured, what is allowed, and whether it holds."""

    name: str
    measured: float | None
    threshold: float
    verdict: Literal["pass", "fail", "not measured"]
    explanation: str


class VerdictManifest(Manifest):
    """The gate's answer on one bundle."""

    kind: Literal["verdict"] = "verdict"
    passed: bool
    precision: Precision
    checks: tuple[GateCheck, ...]
    note: str = ""


class PromotionManifest(Manifest):
    """What was registered, under which name, version and alias."""

    kind: Literal["promotion"] = "promotion"
    registered_model: str
    version: str
    alias: str
    bundle_digest: str
    verdict_digest: str


AnyManifest = TypeVar("AnyManifest", bound=Manifest)

ALL_FILES = ("",)  # for `load(verify=...)`: every name ends in nothing


@dataclass(frozen=True, kw_only=True)
class Artifact(Generic[AnyManifest]):
    """A sealed artifact on disk."""

    path: Path
    manifest: AnyManifest
    digest: str

    def file(self, name: str) -> Path:
        """Path of one of the artifact's files."""
        return self.path / name


def prepare_directory(path: Path) -> Path:
    """Make the directory that a step writes its artifact into.

    Raises:
        UserError: it holds something already, or can't be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILURE).unlink(missing_ok=True)  # what an earlier try left
        occupied = next(path.iterdir(), None)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"the output {path} is a file; name a directory that is empty or new") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # a full disk is the same wherever it shows, and told in one place
        raise UserError(
            f"can't write the output directory {path}: {error.strerror}; name one that you may write, or make its "
            "folder writable for you"
        ) from None
    if occupied is not None:
        raise UserError(
            f"the output directory {path} is not empty (it holds {occupied.name}); name another or empty it"
        )
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees either nothing or all of it, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only if writing failed, such as on a full disk


def seal(
    path: Path, manifest: type[AnyManifest], *, inputs: dict[str, str], config: BaseModel, **fields: Any
) -> Artifact[AnyManifest]:
    """Record every file under `path` in a manifest and write it last, which completes the artifact."""
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file != path / MANIFEST:
            entry = FileEntry(size_bytes=file.stat().st_size, digest=digest_file(file))
            files[file.relative_to(path).as_posix()] = entry
    sealed = manifest(
        files=files, inputs=inputs, config=config.model_dump(mode="json"), environment=environment(), **fields
    )
    sealed = sealed.model_copy(update={"seal": seal_of(sealed.model_dump(mode="json"))})
    data = canonical_json(sealed.model_dump(mode="json"))
    write_atomically(path / MANIFEST, data)
    return Artifact(path=path, manifest=sealed, digest=digest_bytes(data))


def load(path: Path, manifest: type[AnyManifest], *, verify: tuple[str, ...] = ()) -> Artifact[AnyManifest]:
    """Read an artifact and check what it says of itself: all sizes, and digests of files that end in `verify`.

    Raises:
        UserError: there is no manifest, or it is one of another kind or of an unknown schema version.
        EngineryError: the manifest is damaged or was edited, or a file is missing, changed or was swapped.
    """
    file = path / MANIFEST
    kind = manifest.model_fields["kind"].default
    data = read_manifest(file, kind)
    claimed = migrated(claims_of(data), file, kind)
    try:
        record = manifest.model_validate(claimed) if claimed else manifest.model_validate_json(data)
    except ValidationError as error:
        if (found := claimed.get("kind", kind)) != kind:
            raise UserError(
                f"{path} is a {found}, and a {kind} is needed here; name the output of {writer_of(kind)}"
            ) from None
        raise EngineryError(
            f"{file} is not a valid {kind} manifest: {first_problem(error)}. It is damaged or was edited; "
            f"{how_to_renew(kind)}"
        ) from None
    check_seal(data, file, kind)
    for name, entry in record.files.items():
        digest = entry.digest if verify and name.endswith(verify) else None
        if problem := file_problem(path, name, entry.size_bytes, digest):
            raise EngineryError(f"{problem}. Put the original back, or {how_to_renew(kind)}")
    return Artifact(path=path, manifest=record, digest=digest_bytes(data))
