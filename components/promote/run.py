"""promote: Bundle + Report + Verdict -> MLflow model version."""

from pathlib import Path

from components.common.artifacts import (
    ALL_FILES,
    Artifact,
    BundleManifest,
    PromotionManifest,
    ReportManifest,
    VerdictManifest,
    load,
    prepare_directory,
    seal,
)
from components.common.errors import EngineryError, GateFailed, UserError
from components.common.steplog import StepLog
from components.promote.config import PromoteConfig
from components.promote.registering import upload


def run(config: PromoteConfig, log: StepLog, *, bundle: Path, report: Path, verdict: Path, output: Path) -> str:
    """Check that the three belong together, upload and register. See the package's docstring.

    Raises:
        GateFailed: the verdict is not a pass.
        EngineryError: report or verdict are of another bundle.
        UserError: no MLflow is configured.
    """
    models = load(bundle, BundleManifest, verify=ALL_FILES)
    measured = load(report, ReportManifest, verify=ALL_FILES)
    decision = load(verdict, VerdictManifest, verify=ALL_FILES)
    if not decision.manifest.passed:
        raise GateFailed(f"the verdict {verdict} is not a pass; only a bundle that passed its gate is promoted")
    if measured.manifest.inputs["bundle"] != models.digest:
        raise EngineryError(f"the report {report} was measured on another bundle than {bundle}; validate this one")
    if decision.manifest.inputs["report"] != measured.digest:
        raise EngineryError(f"the verdict {verdict} is on another report than {report}; run the gate on this one")
    _check_measured(models, measured)
    if log.run is None:
        raise UserError("promote registers in MLflow: set MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db")
    prepare_directory(output)
    num_bytes = sum(entry.size_bytes for entry in models.manifest.files.values())
    log.progress("uploading", 0, 1, f"{num_bytes / 1e6:.0f} MB")
    precision = decision.manifest.served_precision
    tags = {
        "bundle_digest": models.digest,
        "report_digest": measured.digest,
        "verdict_digest": decision.digest,
        "precision": precision,
        "architecture": models.manifest.architecture,
        **_made_for(models.manifest),
    }
    model_id = upload(log, config.registered_model, models, precision, tags, report=report, verdict=verdict)
    version = log.register(config.registered_model, model_id, config.alias, tags)
    seal(
        output,
        PromotionManifest,
        inputs={"bundle": models.digest, "report": measured.digest, "verdict": decision.digest},
        config=config,
        registered_model=config.registered_model,
        version=version,
        alias=config.alias,
        bundle_digest=models.digest,
        verdict_digest=decision.digest,
    )
    log.event("promotion", registered_model=config.registered_model, version=version, alias=config.alias)
    return f"{config.registered_model} version {version} registered in MLflow as @{config.alias}"


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
