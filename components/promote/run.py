"""promote: Bundle + Report + Verdict -> MLflow model version, and perhaps the champion."""

from pathlib import Path

from components.common.contracts.digests import canonical_json
from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import (
    ALL_FILES,
    Artifact,
    BundleManifest,
    DatasetManifest,
    PromotionManifest,
    ReportManifest,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.process.steplog import StepLog
from components.common.registry.alias_changes import change_aliases
from components.common.registry.audit_log import Entry, entry_json
from components.common.registry.model_registry import PARTS, Part, Registry
from components.common.registry.promotions import CHAMPION
from components.common.registry.trust import check_chain, read_statements
from components.common.registry.version_evaluation import Standing, check_tags, load_standing, standing_of
from components.promote.champion import Decision, Judgement
from components.promote.config import PromoteConfig
from components.promote.naming import check_name, identity, model_name
from components.promote.packaging import log_measured, measures, settings, upload

AUDIT = "audit.json"


def run(
    config: PromoteConfig, log: StepLog, *, bundle: Path, report: Path, verdict: Path, dataset: Path, output: Path
) -> str:
    """Check that the inputs belong together, upload, register, and compare with the champion. See the package.

    Raises:
        GateFailed: the verdict is not a pass.
        EngineryError: report or verdict are of another bundle or data set, no key of the machine's policy signed the
            verdict, or MLflow's server went away.
        UserError: no MLflow is configured, or the name belongs to another model.
    """
    models = load(bundle, BundleManifest, verify=ALL_FILES)
    standing = load_standing(report, verdict)
    if not standing.passed:
        raise GateFailed(f"the verdict {verdict} is not a pass; only a bundle that passed its gate is promoted")
    if standing.report.manifest.inputs["bundle"] != models.digest:
        raise EngineryError(f"the report {report} was measured on another bundle than {bundle}; validate this one")
    _check_measured(models, standing.report)
    digests: dict[str, str] = {part: standing.digests[part] for part in PARTS}
    check_chain(f"the bundle {bundle}", digests, read_statements(verdict), environment="", say=log.note)
    data = load(dataset, DatasetManifest)
    if data.manifest.splits["val"].digest != standing.split_digest:
        raise EngineryError(
            f"the report {report} was measured on other images than the validation split of {dataset}; name the data "
            "set that was given to validate, or validate again"
        )
    if log.run is None:
        raise UserError("promote registers in MLflow: set MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db")
    registry, name = Registry(log.run.client), model_name(config, models.manifest)
    if log.tracking_lost:
        raise registry.lost(f"{name} is not registered")
    with registry.reached(f"{name} is not registered"):
        check_name(config, registry, name, identity(config, models.manifest))
    config = config.model_copy(update={"registered_model": name})
    prepare_directory(output)
    log.dataset("val", standing.split_digest, data.manifest.splits["val"].num_images, "validation")
    with registry.reached(f"{name} is not registered"):
        version = _register(config, log, registry, models, standing)
    decision = Decision(config, registry, version, standing, data, log)
    with registry.reached(f"{name} version {version} is registered, and its aliases may not be set"):
        entry = change_aliases(registry, name, decision.propose, run_id=log.run.run_id)
    return _record(config, log, output, models, standing, version, decision.judgement, entry)


def _register(
    config: PromoteConfig,
    log: StepLog,
    registry: Registry,
    models: Artifact[BundleManifest],
    standing: Standing,
) -> str:
    """Upload what was measured and register it as a version without an alias yet. Returns the version's number."""
    assert log.run is not None
    num_bytes = sum(entry.size_bytes for entry in models.manifest.files.values())
    log.progress("uploading", 0, 1, f"{num_bytes / 1e6:.0f} MB")
    tags = {**standing.tags, **identity(config, models.manifest), **_made_for(models.manifest)}
    name, run = config.registered_model, log.run
    parts: dict[Part, Path] = {"bundle": models.path, "report": standing.report.path, "verdict": standing.verdict.path}
    measured = standing.report.manifest
    measured_on = measured.accuracy.measured_on(standing.precision)
    folders = {PARTS[part]: path for part, path in parts.items()}
    model_id = upload(run, name, models, standing.precision, tags, folders, measured_on)
    told = measures(measured), settings(models.manifest, measured)
    log_measured(run, model_id, *told, split_digest=standing.split_digest)
    number = registry.create_version(name, run.run_id, tags, model_id=model_id)
    version = registry.version(config.registered_model, number)
    log.progress("checking what the registry holds", 0, 1)
    with registry.files(version, "bundle") as path:
        check_tags(version, {"bundle": load(path, BundleManifest, verify=ALL_FILES).digest})
    with standing_of(registry, version):
        return number


def _record(
    config: PromoteConfig,
    log: StepLog,
    output: Path,
    models: Artifact[BundleManifest],
    standing: Standing,
    version: str,
    judgement: Judgement,
    entry: Entry,
) -> str:
    """Write the Promotion. Returns what the step says at its end."""
    write_atomically(output / AUDIT, canonical_json(entry_json(entry)))
    name, digests = config.registered_model, standing.digests
    seal(
        output,
        PromotionManifest,
        inputs={"bundle": models.digest, **{part: digests[part] for part in ("report", "verdict", "dataset")}},
        config=config,
        registered_model=name,
        version=version,
        alias=config.alias,
        bundle_digest=models.digest,
        verdict_digest=standing.verdict.digest,
        champion=judgement.champion,
        why=judgement.why,
        comparison=judgement.comparison,
        audit_run_id=entry.run_id,
    )
    log.tags({"enginery.champion": str(judgement.champion).lower(), "enginery.why": judgement.why})
    log.artifact(output / AUDIT)
    log.event(
        "promotion",
        registered_model=name,
        version=version,
        alias=config.alias,
        champion=judgement.champion,
        why=judgement.why,
    )
    aliases = f"@{config.alias}" + (f" and @{CHAMPION}" if judgement.champion else "")
    return f"{name} version {version} registered in MLflow as {aliases}: {judgement.why}"


def _made_for(bundle: BundleManifest) -> dict[str, str]:
    """What the plans run on, as tags: one model may have versions for several GPUs. Nothing where there are none."""
    if not bundle.engines:
        return {}
    return {"gpu": bundle.engines[0].gpu_name, "tensorrt": bundle.engines[0].tensorrt_version}


def _check_measured(models: Artifact[BundleManifest], measured: Artifact[ReportManifest]) -> None:
    """Refuse plans that nobody measured: a report on what another runtime did says nothing of them."""
    rows = {row.file: row for row in measured.manifest.accuracy.rows if row.runtime == "tensorrt"}
    unmeasured = [engine.file for engine in models.manifest.engines if engine.file not in rows]
    if unmeasured:
        raise EngineryError(
            f"the report {measured.path} does not measure {', '.join(unmeasured)}: only measured plans are promoted. "
            "Validate with validate.runtime tensorrt on the GPU that they were built for, or build plans for another "
            "GPU with `enginery engines`"
        )
