"""Manifests: what every artifact of the chain says about itself, and the only way to read, seal or verify one."""

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from components.common.contracts.digests import canonical_json, digest_bytes, digest_file, digest_json
from components.common.contracts.environment import Environment, environment
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import (
    AccuracyReport,
    Batching,
    BenchmarkReport,
    CalibrationEntry,
    CpuModel,
    DatasetStatistics,
    EngineEntry,
    EpochRecord,
    FileEntry,
    FileName,
    GateCheck,
    Metrics,
    NearDuplicates,
    PlacementEntry,
    Precision,
    ProfileRecord,
    Recommendation,
    Record,
    Split,
    StreamRecord,
    TrainingRecord,
)
from components.common.contracts.settings import fingerprinted
from components.common.contracts.transforms import ShapeSpec, TextSpec, TransformSpec
from components.common.registry.promotions import ChampionComparison
from components.common.tasks import TASKS, TaskName

MANIFEST = "manifest.json"
FAILURE = "failure.json"  # what a failed step leaves in its output directory
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\\]+")
PARTIAL_OUTPUT = ".unfinished"  # folder in an output directory whose step can resume; no part of the artifact


def is_plain_path(name: str) -> bool:
    """True for the path of a file inside a folder, as it is usually written."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and name != "."
    return inside and str(path) == name and _PLAIN.fullmatch(name) is not None


class Manifest(Record):
    """Fields that all artifacts share. `files` is keyed by the path inside the artifact, with forward slashes."""

    schema_version: Literal[2] = 2
    seal: str = Field("", description="Digest of all the rest of this manifest: a manual edit does not fit it.")
    kind: str
    files: dict[str, FileEntry]
    inputs: dict[str, str] = Field(description="Manifest digest of each artifact this one was made from, by name.")
    config: dict[str, Any] = Field(
        description="The resolved config of the step that wrote this, without what only decides its speed."
    )
    environment: Environment

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        if wrong := [name for name in files if not is_plain_path(name)]:
            raise ValueError(f"{wrong[0]!r} is no path of a file inside the artifact")
        return files

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if missing := [name for name in self._named_files() if name not in self.files]:
            raise ValueError(f"it names {missing[0]!r}, which is none of its files")
        return self

    def _named_files(self) -> Iterator[str]:
        """Files that other fields name, which are opened and copied: they must be in `files`, by their digests."""
        yield from ()


class OfTask(Manifest):
    """Fields of a dataset, a model or what serves it, by its task: of images or of text."""

    task: TaskName = "classification"
    text: TextSpec | None = Field(None, description="Of a task of text; None for images.")

    def _named_files(self) -> Iterator[str]:
        if self.text is not None:
            yield self.text.vocabulary

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        fields = {"statistics", "transform", "shapes"} & set(type(self).model_fields)
        wanted = {"text"} if TASKS[self.task].of_text else fields
        given = {name for name in ("text", *fields) if getattr(self, name) is not None}
        if given != wanted:
            raise ValueError(f"of {self.task} it holds {', '.join(sorted(wanted))}, and has {', '.join(sorted(given))}")
        return self

    @property
    def text_spec(self) -> TextSpec:
        """`text`, of a task of text."""
        assert self.text is not None
        return self.text


class OfImages(OfTask):
    """Size and preparation of images, where the task is of images."""

    transform: TransformSpec | None = Field(None, description="None for text.")

    @property
    def image_transform(self) -> TransformSpec:
        """`transform`, of a task of images."""
        assert self.transform is not None
        return self.transform


class OfNetwork(OfImages):
    """Files and facts of an exported network."""

    shapes: ShapeSpec | None = Field(None, description="None for text.")

    @property
    def image_shapes(self) -> ShapeSpec:
        """`shapes`, of a task of images."""
        assert self.shapes is not None
        return self.shapes


class DatasetManifest(OfTask):
    """Labelled images in WebDataset shards, or pairs of sentences in files of tab-separated values."""

    kind: Literal["dataset"] = "dataset"
    classes: tuple[str, ...]
    splits: dict[Literal["train", "val"], Split] = Field(min_length=2)
    statistics: DatasetStatistics | None = Field(None, description="None for text.")
    num_rejected: int
    num_rejected_annotations: int = Field(0, description="Objects of the packed images that were left out.")
    near_duplicates: NearDuplicates | None = Field(None, description="None where they were not looked for.")

    def _named_files(self) -> Iterator[str]:
        yield from super()._named_files()
        for split in self.splits.values():
            for shard in split.shards:
                yield shard
                if self.text is None:
                    yield str(PurePosixPath(shard).with_suffix(".idx"))

    @property
    def num_outputs(self) -> int:
        """Width of a network's last layer: classes, or tokens of the vocabulary."""
        return len(self.classes) if self.text is None else self.text.num_tokens

    @property
    def image_statistics(self) -> DatasetStatistics:
        """`statistics`, of a task of images."""
        assert self.statistics is not None
        return self.statistics


class DatasetPartManifest(Manifest):
    """Some of a dataset's shards, packed on their own; `merge` joins all parts."""

    kind: Literal["dataset_part"] = "dataset_part"
    classes: tuple[str, ...]
    part: str = Field(pattern="^[1-9][0-9]*/[1-9][0-9]*$", description="Which one of how many, such as 3/8.")
    plan_digest: str = Field(description="Of the listing and settings that all parts of a dataset share.")
    shards: tuple[FileName, ...] = Field(description="Names of its shards without extension, in order.")


class CheckpointManifest(OfImages):
    """Trained weights and everything needed to use them."""

    kind: Literal["checkpoint"] = "checkpoint"
    architecture: str
    classes: tuple[str, ...]
    metrics: Metrics = Field(description="What training measured at its end, by metric name.")
    history: tuple[EpochRecord, ...] = Field((), description="One entry per epoch, the first epoch first.")
    profile: ProfileRecord | None = Field(None, description="None where no steps were recorded (train.profile_steps).")

    @property
    def score_name(self) -> str:
        """Name of the score that training validated by: top-1, mIoU."""
        return TASKS[self.task].training_score or TASKS[self.task].score_name

    @property
    def published_epoch(self) -> int:
        """The epoch, from 1, that the weights are of: the last one, or of train.publish best the first of the best."""
        scores = [epoch.val_score_pct for epoch in self.history]
        is_best = self.config["publish"] == "best"
        return 1 + scores.index(self.metrics["val_score_pct"]) if is_best else len(scores)


class BundleManifest(OfNetwork):
    """One model in several precisions, ready to be measured."""

    kind: Literal["bundle"] = "bundle"
    architecture: str
    classes: tuple[str, ...]
    models: dict[str, str] = Field(description="ONNX file by name: fp32, fp16, int8, int8_fp16.")
    cpu_models: tuple[CpuModel, ...] = Field(min_length=1, description="INT8 for CPUs.")
    engines: tuple[EngineEntry, ...] = Field(description="TensorRT plans for the GPU that export ran on.")
    engines_missing: str = Field("", description="Why TensorRT plans are missing, all or some; empty when none is.")
    calibration: CalibrationEntry
    placement: PlacementEntry | None = Field(None, description="None where the blocks in INT8 were not chosen by time.")
    num_quantized_layers: int = Field(description="Convolutions and matrix products with INT8 inputs and weights.")
    num_quantizable_layers: int
    training: TrainingRecord | None = Field(None, description="None for a model that was not trained by this chain.")

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        """A model repository takes these names, beside programs: `model.py` would be run."""
        if "fp32" not in self.models:
            raise ValueError("there is no FP32 model")
        for name in (*self.models.values(), *(model.file for model in self.cpu_models)):
            if "/" in name or not name.endswith(".onnx"):
                raise ValueError(f"the model {name!r} is no file NAME.onnx")
        return self

    def _named_files(self) -> Iterator[str]:
        yield from super()._named_files()
        yield from self.models.values()
        yield from (model.file for model in self.cpu_models)
        for entry in self.engines:
            yield from (entry.file, entry.source_onnx)
            if entry.layers is not None:
                yield entry.layers.file


class ReportManifest(Manifest):
    """The measurements of one bundle, the predictions behind them, and what people and programs read of both."""

    kind: Literal["report"] = "report"
    accuracy: AccuracyReport
    benchmark: BenchmarkReport


class VerdictManifest(Manifest):
    """The gate's answer on one bundle."""

    kind: Literal["verdict"] = "verdict"
    passed: bool
    precision: Precision
    checks: tuple[GateCheck, ...]
    recommendation: Recommendation | None = Field(None, description="None where the checks do not lead to one.")
    note: str = ""

    @property
    def word(self) -> str:
        """The verdict in short: "pass, not proved" where the measured drop was judged without its interval."""
        if not self.passed:
            return "fail" if any(check.verdict == "fail" for check in self.checks) else "not enough evidence"
        return "pass" if self.config.get("confident") else "pass, not proved"

    @property
    def served_precision(self) -> Precision:
        """The precision to ship: the recommended precision, else the one that was judged."""
        return self.recommendation.precision if self.recommendation is not None else self.precision


class PromotionManifest(Manifest):
    """A registered version: name, number and alias."""

    kind: Literal["promotion"] = "promotion"
    registered_model: str
    version: str
    alias: str
    bundle_digest: str
    verdict_digest: str
    champion: bool = Field(False, description="Whether the version became the champion.")
    why: str = Field("", description="Why, or why not.")
    comparison: ChampionComparison | None = Field(None, description="None where there was nothing to compare with.")
    audit_run_id: str = Field("", description="MLflow run of the entry in the audit log.")


class RepositoryManifest(OfNetwork):
    """A model repository for Triton: one promoted precision of a bundle."""

    kind: Literal["repository"] = "repository"
    name: str = Field(description="Of the ensemble that takes encoded images; the other models' names begin with it.")
    version: str = Field(description="Of the registered model; empty for a bundle that came from no registry.")
    precision: Precision
    classes: tuple[str, ...]
    top_k: int = Field(description="How many classes the ensemble names for each image.")
    cpu_model: str = Field(description="The ONNX file that OpenVINO runs where there is no GPU; empty for INT8.")
    cpu_models: tuple[CpuModel, ...] = Field((), description="Of INT8: the files, of which each CPU takes a fit one.")
    measured_on: tuple[str, ...] = Field((), description="The CPU's instruction sets that the verdict rests on.")
    engines: tuple[EngineEntry, ...] = Field(description="The TensorRT plans; `file` is the path in the repository.")
    batching: dict[Literal["gpu", "cpu"], Batching] = Field(description="By what serves; no gpu without plans.")

    def _named_files(self) -> Iterator[str]:
        yield from super()._named_files()
        yield from filter(None, [self.cpu_model])
        yield from (model.file for model in self.cpu_models)
        yield from (entry.file for entry in self.engines)


class AnalysisManifest(Manifest):
    """Labels of the frames of videos."""

    kind: Literal["analysis"] = "analysis"
    architecture: str
    precision: Precision
    classes: tuple[str, ...]
    streams: tuple[StreamRecord, ...]
    frames_per_s: float = Field(description="Labelled frames of all streams over the wall time.")


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

    def copy_to(self, folder: Path) -> Path:
        """Copy what the manifest names into a new folder, and nothing else that may lie there."""
        for name in (MANIFEST, *self.manifest.files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.file(name), folder / name)
        return folder


def make_directory(path: Path) -> None:
    """Make an output directory, if it is not there.

    Raises:
        UserError: it can't be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):  # said now, and not after an hour of work
            raise PermissionError(errno.EACCES, "it is closed to this user, or mounted read-only")
    except (FileExistsError, NotADirectoryError):
        message = f"the output {path} is a file; name a directory that is empty or new"
        raise UserError(message, code="output-is-file", setting="--output") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # a full disk is the same wherever it shows, and explained in one place
        raise UserError(
            f"can't write the output directory {path}: {error.strerror}; name one that you may write, or make its "
            "folder writable for you",
            code="output-not-writable",
            setting="--output",
        ) from None


def prepare_directory(path: Path) -> Path:
    """Make the directory that a step writes its artifact into.

    Raises:
        UserError: it holds something already, or can't be written.
    """
    make_directory(path)
    (path / FAILURE).unlink(missing_ok=True)  # what an earlier try left
    if (occupied := next(path.iterdir(), None)) is not None:
        message = f"the output directory {path} is not empty (it holds {occupied.name}); name another or empty it"
        raise UserError(message, code="output-not-empty", setting="--output")
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees either nothing or all of it, also after a power cut.

    Several may write the same file: the last one's stays.
    """
    # The process id alone is not unique where containers share a folder: in each, the step may be number 1.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only if writing failed, such as on a full disk


def seal(
    path: Path,
    manifest: type[AnyManifest],
    *,
    inputs: dict[str, str],
    config: BaseModel,
    known: Mapping[str, FileEntry] = MappingProxyType({}),
    **fields: Any,
) -> Artifact[AnyManifest]:
    """Record every file under `path` in a manifest and write it last, which completes the artifact.

    Args:
        path: The artifact's directory.
        manifest: Its kind.
        inputs: Manifest digest of each artifact that it was made from, by name.
        config: Of the step.
        known: Files whose digest was taken while they were written, by path inside the artifact.
        fields: The rest of the manifest.
    """
    files = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and file != path / MANIFEST and not name.startswith(f"{PARTIAL_OUTPUT}/"):
            files[name] = known.get(name) or FileEntry(size_bytes=file.stat().st_size, digest=digest_file(file))
    sealed = manifest(files=files, inputs=inputs, config=fingerprinted(config), environment=environment(), **fields)
    sealed = sealed.model_copy(update={"seal": seal_of(sealed.model_dump(mode="json"))})
    data = canonical_json(sealed.model_dump(mode="json"))
    write_atomically(path / MANIFEST, data)
    return Artifact(path=path, manifest=sealed, digest=digest_bytes(data))


def load_manifest(file: Path, manifest: type[AnyManifest]) -> Artifact[AnyManifest]:
    """Read a manifest alone and check its seal. What lies beside it is not looked at.

    Raises:
        UserError: there is no manifest, or it is one of another kind or of an unknown schema version.
        EngineryError: the manifest is damaged or was edited.
    """
    path, kind = file.parent, manifest.model_fields["kind"].default
    data = read_manifest(file, kind)
    claimed = claims_of(data)
    if claimed:
        _check_version(claimed, file, kind)
    try:
        record = manifest.model_validate(claimed) if claimed else manifest.model_validate_json(data)
    except ValidationError as error:
        if (found := claimed.get("kind", kind)) != kind:
            message = f"{path} is a {found}, and a {kind} is needed here; name the output of {writer_of(kind)}"
            raise UserError(message, code="other-kind") from None
        raise EngineryError(
            f"{file} is not a valid {kind} manifest: {first_problem(error)}. It is damaged or was edited; "
            f"{how_to_renew(kind)}",
            code="invalid-manifest",
        ) from None
    check_seal(claimed, data, file, kind)
    return Artifact(path=path, manifest=record, digest=digest_bytes(data))


def load(path: Path, manifest: type[AnyManifest], *, verify: tuple[str, ...] = ()) -> Artifact[AnyManifest]:
    """Read an artifact and check what it says of itself: all sizes, and digests of files that end in `verify`.

    Raises:
        UserError: there is no manifest, or it is one of another kind or of an unknown schema version.
        EngineryError: the manifest is damaged or was edited, or a file is missing, changed or was swapped.
    """
    artifact = load_manifest(path / MANIFEST, manifest)
    for name, entry in artifact.manifest.files.items():
        digest = entry.digest if verify and name.endswith(verify) else None
        if problem := file_problem(path, name, entry.size_bytes, digest):
            message = f"{problem}. Put the original back, or {how_to_renew(artifact.manifest.kind)}"
            raise EngineryError(message, code="damaged-artifact")
    return artifact


def check_task(what: str, found: TaskName, needed: TaskName, fix: str) -> None:
    """See that two things are of the same task, or that a step knows it.

    Raises:
        UserError: `found`, the task of what the message calls `what`, is not what is needed; `fix` says what to do.
    """
    if found != needed:
        raise UserError(f"{what} is of {found}, and {needed} is needed here; {fix}", code="other-task")


MAX_MANIFEST_BYTES = 8 << 20  # tens of thousands of files; JSON may take 25 times as much in memory
SCHEMA_VERSION = 2  # of manifests; 1 had no seal, and no release wrote it
# Kind of an artifact -> the step that writes it.
_STEPS = {
    "dataset": "preprocess",
    "dataset_part": "preprocess --part",
    "checkpoint": "train",
    "bundle": "export",
    "report": "validate",
    "verdict": "gate",
    "promotion": "promote",
    "analysis": "analyze",
}


_COMMANDS = {"repository": "`enginery serve export`", "shadow": "`enginery shadow`"}  # of kinds that no step writes


def writer_of(kind: str) -> str:
    """The command that writes a kind of artifact."""
    if kind in _COMMANDS:
        return _COMMANDS[kind]
    return f"`python -m components.{_STEPS.get(kind, kind)}`"


def how_to_renew(kind: str) -> str:
    """The fix for an artifact that is of no use."""
    if kind in _COMMANDS:
        return f"write it again with {writer_of(kind)}"
    if kind not in _STEPS:  # a name from a file of anybody, or of none
        return "write it again"
    return f"write it again with {writer_of(kind)} (in a pipeline: enginery run ... --no-reuse)"


def read_manifest(file: Path, kind: str) -> bytes:
    """A manifest as it is on disk.

    Raises:
        UserError: there is none, or it can't be read.
        EngineryError: it is larger than any of ours.
    """
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES or not file.is_file():
            more = f"has more than {MAX_MANIFEST_BYTES:,} bytes, or is no plain file"
            message = f"{file} {more}, so it is no manifest; {how_to_renew(kind)}"
            raise EngineryError(message, code="invalid-manifest")
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{file.parent} is no finished {kind}: it has no {file.name}. Name the output of a finished step, "
            f"here of {writer_of(kind)}",
            code="no-manifest",
        ) from None
    except OSError as error:
        message = f"can't read {file}: {error.strerror}; make it readable for you"
        raise UserError(message, code="unreadable-manifest") from None


def seal_of(record: dict[str, Any]) -> str:
    """The seal that belongs to a manifest: the digest of all its other fields."""
    return digest_json({name: value for name, value in record.items() if name != "seal"})


def claims_of(data: bytes) -> dict[str, Any]:
    """The content of a manifest, unchecked; nothing where it is too damaged."""
    try:
        record = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def first_problem(error: ValidationError) -> str:
    """The first error in a manifest, behind the field that it is about; no field where it is no JSON at all."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _check_version(record: dict[str, Any], file: Path, kind: str) -> None:
    """Check that a manifest is of today's schema.

    Raises:
        UserError: its schema version is another.
    """
    version = record.get("schema_version")
    if type(version) is int and version == SCHEMA_VERSION:
        return
    newer = type(version) is int and version > SCHEMA_VERSION  # true is an int, too
    wrote = ": a newer enginery wrote it. Update enginery (git pull, then make install), or"
    found = "none" if version is None else json.dumps(version)
    raise UserError(
        f"{file} has schema_version {found}, and this enginery reads {SCHEMA_VERSION}"
        f"{wrote if newer else '. No released enginery wrote it so;'} {how_to_renew(kind)}",
        code="unknown-schema-version",
    )


def check_seal(record: dict[str, Any], data: bytes, file: Path, kind: str) -> None:
    """Check that a valid manifest, `record`, is what was sealed, to the byte: its `data` are the artifact's identity.

    Raises:
        EngineryError: it was edited since.
    """
    seal = record.get("seal")
    problem = f"its content does not fit its seal {seal or '(empty)'}"
    with suppress(ValueError, RecursionError):  # what has no canonical form, such as 1e999, was never sealed
        if seal == seal_of(record):
            if data == canonical_json(record):
                return
            problem = "its content is the same, its layout is not"
    message = f"{file} was edited after it was sealed: {problem}. Put the original back, or {how_to_renew(kind)}"
    raise EngineryError(message, code="broken-seal")


def file_problem(path: Path, name: str, size_bytes: int, digest: str | None) -> str:
    """The damage of one file of the artifact at `path`; empty for none. Without `digest` the size alone is checked."""
    file = path / name
    if not is_plain_path(name) or not file.resolve().is_relative_to(path.resolve()):
        return f"the manifest of {path} names a file outside the artifact: {name}"
    if not file.is_file():
        return f"{path} is damaged: {name} is missing"
    found_bytes = file.stat().st_size
    if found_bytes != size_bytes:
        return f"{path} is damaged: {name} has {found_bytes} bytes, its manifest says {size_bytes}"
    if digest is not None and (found := digest_file(file)) != digest:
        return f"{file} was changed after it was sealed: {found}, its manifest says {digest}"
    return ""
