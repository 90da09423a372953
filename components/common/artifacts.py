"""Manifests: what every artifact of the chain says about itself, and the only way to read or seal one.

An artifact is a directory with a `manifest.json`. It is complete when the manifest exists, because the manifest is
written last. The digest of the manifest is the artifact's identity: it covers the digest of every file.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.digests import canonical_json, digest_bytes, digest_file
from components.common.environment import Environment, environment
from components.common.errors import EngineryError, UserError
from components.common.shapes import ShapeSpec
from components.common.transforms import TransformSpec

MANIFEST = "manifest.json"
FAILURE = "failure.json"  # what a failed step leaves in its output directory
SCHEMA_VERSION = 1

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

    schema_version: Literal[1] = 1
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
    tensorrt_version: str
    gpu_name: str
    compute_capability: str
    driver_version: str
    build_seconds: float


class CalibrationEntry(_Record):
    """How the INT8 scales came about."""

    method: str
    num_images: int
    split: str
    seconds: float


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
        raise UserError(f"can't write the output directory {path}: {error.strerror}") from None
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
    data = canonical_json(sealed.model_dump(mode="json"))
    write_atomically(path / MANIFEST, data)
    return Artifact(path=path, manifest=sealed, digest=digest_bytes(data))


def load(path: Path, manifest: type[AnyManifest], *, verify: tuple[str, ...] = ()) -> Artifact[AnyManifest]:
    """Read an artifact and check what it says of itself: all sizes, and digests of files that end in `verify`.

    Raises:
        UserError: there is no manifest, or it is one of another kind or of another schema version.
        EngineryError: the manifest is damaged, or a file is missing, changed or was swapped.
    """
    file = path / MANIFEST
    kind = manifest.model_fields["kind"].default
    try:
        data = file.read_bytes()
    except OSError:
        raise UserError(
            f"{path} is no finished {kind}: it has no {MANIFEST}. Name the output of a finished step"
        ) from None
    claimed = _claims(data)
    if claimed and claimed.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{file} has schema_version {claimed.get('schema_version', 'none')}, and this enginery reads "
            f"{SCHEMA_VERSION}. Use the enginery that wrote it, or run the step that writes it again"
        )
    try:
        record = manifest.model_validate_json(data)
    except ValidationError as error:
        if (found := claimed.get("kind", kind)) != kind:
            raise UserError(f"{path} is a {found}, and a {kind} is needed here") from None
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise EngineryError(f"{file} is not a valid {kind} manifest: {where}: {problem['msg']}") from None
    for name, entry in record.files.items():
        _check_file(path, name, entry, by_digest=name.endswith(verify) if verify else False)
    return Artifact(path=path, manifest=record, digest=digest_bytes(data))


def _claims(data: bytes) -> dict[str, Any]:
    """What a manifest says of itself, unchecked; nothing where it is too damaged to say."""
    try:
        record = json.loads(data)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _check_file(path: Path, name: str, entry: FileEntry, *, by_digest: bool) -> None:
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()):
        raise EngineryError(f"{path / MANIFEST} names a file outside the artifact: {name}")
    if not file.is_file():
        raise EngineryError(f"{path} is damaged: {name} is missing. Run the step that writes it again")
    size_bytes = file.stat().st_size
    if size_bytes != entry.size_bytes:
        raise EngineryError(
            f"{path} is damaged: {name} has {size_bytes} bytes, its manifest says {entry.size_bytes}. Run the step anew"
        )
    if by_digest and (digest := digest_file(file)) != entry.digest:
        raise EngineryError(f"{file} was changed after it was sealed: {digest}, its manifest says {entry.digest}")
