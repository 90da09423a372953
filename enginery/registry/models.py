"""Versions of registered models: how people name them, what they have shown, and a list of them."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import Record
from components.common.registry.promotions import CHAMPION
from components.common.registry.store import without_credentials
from enginery.local.state import StateDirectory
from enginery.local.summary import RunSummary, SummaryBuilder

if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry.model_registry import RegisteredVersion, Registry

_REFERENCE = re.compile(r"(?P<name>[\w.-]+)(@(?P<alias>[\w-]+)|[/:](?P<number>\d+))")


class VersionRow(Record):
    """One line of `enginery models`, from the tags that promote set; None and "" for versions of other origin."""

    model: str
    version: str
    aliases: tuple[str, ...]
    verdict: str
    precision: str = Field(description="What the verdict recommends.")
    score_pct: float | None = Field(description="Of that precision, on the validation split below.")
    validation_split_digest: str
    bundle_digest: str
    gpu: str = Field(description="What the TensorRT plans run on; empty where there are none.")
    tensorrt: str
    created: float = Field(description="In seconds since the epoch.")
    mlflow_run_id: str


def open_registry() -> "Registry":
    """The registry of the tracking store in use.

    Raises:
        UserError: nothing was ever registered there.
        EngineryError: it can't be reached.
    """
    from components.common.registry.model_registry import Registry

    return Registry.open(StateDirectory.current().tracking_uri)


def is_reference(text: str) -> bool:
    """True if a text names a version, as NAME@alias, NAME/3 or NAME:3, and no file."""
    return _REFERENCE.fullmatch(text) is not None and not Path(text).expanduser().exists()


def find_version(registry: "Registry", text: str) -> "RegisteredVersion":
    """The version that a person means.

    Raises:
        UserError: there is none.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        message = f"{text!r} names no version; write NAME@alias or NAME/VERSION. See `enginery models`"
        raise UserError(message, code="invalid-reference")
    if match["alias"]:
        return registry.by_alias(match["name"], match["alias"])
    return registry.version(match["name"], match["number"])


def list_versions(registry: "Registry", name: str | None) -> list[VersionRow]:
    """The versions of one model, or of all, newest first."""
    names = [name] if name is not None else registry.names()
    return [_row(version) for entry in names for version in registry.versions(entry)]


def _row(version: "RegisteredVersion") -> VersionRow:
    tags = version.tags
    try:
        score_pct = float(tags.get("score_pct") or tags["top1_pct"])
    except (KeyError, ValueError):  # registered by an older enginery, or by something else
        score_pct = math.nan
    return VersionRow(
        model=version.name,
        version=version.number,
        aliases=tuple(sorted(version.aliases, key=lambda alias: (alias != CHAMPION, alias))),
        verdict=tags.get("verdict", ""),
        precision=tags.get("precision", ""),
        score_pct=score_pct if math.isfinite(score_pct) else None,
        validation_split_digest=tags.get("validation_split_digest", ""),
        bundle_digest=tags.get("bundle_digest", ""),
        gpu=tags.get("gpu", ""),
        tensorrt=tags.get("tensorrt", ""),
        created=version.created,
        mlflow_run_id=version.run_id,
    )


def version_summary(registry: "Registry", text: str) -> RunSummary:
    """Return the evaluation of a version as a run's summary, by the sealed report that lies in the registry.

    Raises:
        UserError: there is no such version.
        EngineryError: it has no report, or the report was changed.
    """
    from components.common.contracts.manifests import BundleManifest, load_manifest
    from components.common.registry.version_evaluation import evaluation_of

    version = find_version(registry, text)
    label = f"{version.name}/{version.number}"
    try:
        with evaluation_of(registry, version) as evaluation, registry.files(version, "bundle", "manifest.json") as file:
            report, verdict = evaluation.report.manifest, evaluation.verdict.manifest
            bundle = load_manifest(file, BundleManifest).manifest
    except EngineryError as error:
        raise EngineryError(f"{version.label} can't be compared: {error}", code=error.code) from error
    builder = SummaryBuilder(0.0)
    results = report.model_dump(mode="json", include={"accuracy", "benchmark"})
    builder.handle({"event": "results", **results})
    builder.handle({"event": "verdict", "word": verdict.word, **verdict.model_dump(mode="json")})
    training = {"train": bundle.training.config} if bundle.training is not None else {}
    return builder.summary(
        pipeline=version.name,
        run_id=label,
        status="done",
        exit_code=0,
        message="",
        seconds_total=0.0,
        arguments={**training, "export": bundle.config, "validate": report.config},
        registered=label,
        champion=CHAMPION in version.aliases,
        run_directory="",
        tracking_uri=without_credentials(registry.uri),
        mlflow_run_id=version.run_id,
        environment=report.environment,
    )
