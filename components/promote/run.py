"""promote: Bundle + Report + Verdict -> MLflow model version, and perhaps the champion."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from components.common.contracts.digests import canonical_json, digest_json
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
from components.common.registry.audit_log import Entry, change_aliases, entry_json
from components.common.registry.model_registry import PARTS, Registry
from components.common.registry.promotions import CHAMPION
from components.common.registry.trust import check_chain, read_statements
from components.common.registry.version_evaluation import VersionEvaluation, check_tags, evaluation_of, load_evaluation
from components.common.runtimes import measured_plans
from components.promote.champion import Decision, Judgement
from components.promote.config import PromoteConfig
from components.promote.packaging import log_measured, upload

AUDIT = "audit.json"
_FILES = (".onnx", ".safetensors", ".pt", ".pth")
_WORDS = {"architecture": "architecture", "classes_digest": "class list", "source": "source file"}


def run(
    config: PromoteConfig, log: StepLog, *, bundle: Path, report: Path, verdict: Path, dataset: Path, output: Path
) -> str:
    """Check that the inputs belong together, upload, register, and compare with the champion. See the package.

    Raises:
        GateFailed: the verdict is not a pass.
        EngineryError: report or verdict are of another bundle or dataset, no key of the machine's policy signed the
            verdict, or MLflow's server went away.
        UserError: no MLflow is configured, or the name belongs to another model.
    """
    models = load(bundle, BundleManifest, verify=ALL_FILES)
    evaluation = load_evaluation(report, verdict)
    if not evaluation.passed:
        raise GateFailed(
            f"the verdict {verdict} is not a pass; only a bundle that passed its gate is promoted", code="gate-failed"
        )
    if evaluation.report.manifest.inputs["bundle"] != models.digest:
        raise EngineryError(
            f"the report {report} was measured on another bundle than {bundle}; validate this one", code="other-bundle"
        )
    _check_measured(models, evaluation.report)
    digests: dict[str, str] = {part: evaluation.digests[part] for part in PARTS}
    check_chain(f"the bundle {bundle}", digests, read_statements(verdict), environment="", say=log.note)
    data = load(dataset, DatasetManifest)
    if data.manifest.splits["val"].digest != evaluation.split_digest:
        raise EngineryError(
            f"the report {report} was measured on another validation split than that of {dataset}; name the "
            "dataset that was given to validate, or validate again",
            code="other-dataset",
        )
    if log.run is None:
        message = "promote registers in MLflow: set MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db"
        raise UserError(message, code="no-tracking-uri", setting="MLFLOW_TRACKING_URI")
    registry, name = Registry(log.run.client), model_name(config, models.manifest)
    if log.tracking_lost:
        raise registry.lost(f"{name} is not registered")
    with registry.reached(f"{name} is not registered"):
        check_name(config, registry, name, identity(config, models.manifest))
    config = config.model_copy(update={"registered_model": name})
    prepare_directory(output)
    log.dataset("val", evaluation.split_digest, data.manifest.splits["val"].num_images, "validation")
    with registry.reached(f"{name} is not registered"):
        version = _register(config, log, registry, models, evaluation)
    decision = Decision(config, registry, version, evaluation, data, log)
    with registry.reached(f"{name} version {version} is registered, and its aliases may not be set"):
        entry = change_aliases(registry, name, decision.propose, run_id=log.run.run_id)
    return _record(config, log, output, models, evaluation, version, decision.judgement, entry)


def _register(
    config: PromoteConfig,
    log: StepLog,
    registry: Registry,
    models: Artifact[BundleManifest],
    evaluation: VersionEvaluation,
) -> str:
    """Upload what was measured and register it as a version without an alias yet. Returns the version's number."""
    assert log.run is not None
    num_bytes = sum(entry.size_bytes for entry in models.manifest.files.values())
    log.progress("uploading", 0, 1, f"{num_bytes / 1e6:.0f} MB")
    tags = {**evaluation.tags, **identity(config, models.manifest), **_made_for(models.manifest)}
    name, run = config.registered_model, log.run
    parts = {"bundle": models.path, "report": evaluation.report.path, "verdict": evaluation.verdict.path}
    measured = evaluation.report.manifest
    measured_on = measured.accuracy.measured_on(evaluation.precision)
    model_id = upload(run, name, models, evaluation.precision, tags, parts, measured_on)
    log_measured(run, model_id, models.manifest, measured)
    number = registry.create_version(name, run.run_id, tags, model_id=model_id)
    version = registry.version(config.registered_model, number)
    log.progress("checking what the registry holds", 0, 1)
    with registry.files(version, "bundle") as path:
        check_tags(version, {"bundle": load(path, BundleManifest, verify=ALL_FILES).digest})
    with evaluation_of(registry, version):
        return number


def _record(
    config: PromoteConfig,
    log: StepLog,
    output: Path,
    models: Artifact[BundleManifest],
    evaluation: VersionEvaluation,
    version: str,
    judgement: Judgement,
    entry: Entry,
) -> str:
    """Write the Promotion. Returns what the step says at its end."""
    write_atomically(output / AUDIT, canonical_json(entry_json(entry)))
    name, digests = config.registered_model, evaluation.digests
    seal(
        output,
        PromotionManifest,
        inputs={"bundle": models.digest, **{part: digests[part] for part in ("report", "verdict", "dataset")}},
        config=config,
        registered_model=name,
        version=version,
        alias=config.alias,
        bundle_digest=models.digest,
        verdict_digest=evaluation.verdict.digest,
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
    """Return GPU and TensorRT of the plans as tags: a model may have versions for several GPUs. Empty without plans."""
    if not bundle.engines:
        return {}
    return {"gpu": bundle.engines[0].gpu_name, "tensorrt": bundle.engines[0].tensorrt_version}


def _check_measured(models: Artifact[BundleManifest], measured: Artifact[ReportManifest]) -> None:
    """Refuse plans that nobody measured: a report on what another runtime did says nothing of them."""
    seen = measured_plans(measured.manifest.accuracy)
    unmeasured = [engine.file for engine in models.manifest.engines if engine.file not in seen]
    if unmeasured:
        raise EngineryError(
            f"the report {measured.path} does not measure {', '.join(unmeasured)}: only measured plans are promoted. "
            "Validate with validate.runtime tensorrt on the GPU that they were built for, or build plans for another "
            "GPU with `enginery engines`",
            code="plans-not-measured",
        )


def model_name(config: PromoteConfig, bundle: BundleManifest) -> str:
    """The configured name; else that of the user's model file; else that of the architecture."""
    if config.registered_model:
        return config.registered_model
    file = PurePosixPath(config.source)
    return re.sub(r"[^\w.-]+", "-", file.stem if file.suffix.lower() in _FILES else bundle.architecture)


def identity(config: PromoteConfig, bundle: BundleManifest) -> dict[str, str]:
    """Tags of a version that say which model it is of.

    Engines of a bundle name no source: if it was not trained by a chain, the bundle stands for the file that it is of.
    """
    built_of = "" if bundle.training else bundle.inputs.get("model", "")
    tags = {
        "architecture": bundle.architecture,
        "classes_digest": digest_json(list(bundle.classes)),
        "model_digest": bundle.inputs.get("model", ""),
        "source": config.source or built_of,
    }
    return {name: value for name, value in tags.items() if value}


def _differs(key: str, own: Mapping[str, str], tags: Mapping[str, str]) -> bool:
    if key == "source" and "model_digest" in tags:
        return own.get(key, "") != tags.get(key, "")
    return key in own and own[key] != tags.get(key, own[key])


def check_name(config: PromoteConfig, registry: Registry, name: str, own: Mapping[str, str]) -> None:
    """Refuse a name whose versions are all of another model.

    Another model is one of another architecture or class list. Under a name that nobody chose it is also one of another
    source file, or of a file where this one was trained, unless that file is the same to the byte or the other's
    engines were built again. What a version of an earlier release does not tell is taken as equal.

    Raises:
        UserError: the name belongs to another model.
    """
    if config.allow_other_model or name not in registry.names():
        return
    asked = ("architecture", "classes_digest") if config.registered_model else tuple(_WORDS)
    # Engines that were built again of a version are that version's model, and don't tell its source.
    bundles = {version.tags.get("bundle_digest") for version in registry.versions(name)}
    versions = [entry for entry in registry.versions(name) if entry.tags.get("model_digest") not in bundles]
    differences = [[key for key in asked if _differs(key, own, version.tags)] for version in versions]
    for version, different in zip(versions, differences, strict=True):
        same = version.tags.get("model_digest"), version.tags.get("bundle_digest")
        if different == ["source"] and own.get("model_digest") in same:
            return  # the same file in another place, or built for another GPU
    if not differences or [] in differences:
        return
    version, key = versions[0], differences[0][0]
    there, here = (tags.get(key, "none") for tags in (version.tags, own))
    values = "" if key == "classes_digest" else f": {there} there, {here} here"
    raise UserError(
        f"{version.label} is of another model than this one (another {_WORDS[key]}{values}), and one would replace the "
        "other as champion. Give this one a name of its own (--registered-model NAME), or put it there all the same "
        "(--set promote.allow_other_model=true)",
        code="name-taken",
        setting="registered_model",
    )
