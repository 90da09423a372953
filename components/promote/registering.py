"""The upload of what is promoted, in the form in which MLflow loads it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from components.common.artifacts import Artifact, BundleManifest
from components.common.records import Precision
from components.common.steplog import StepLog
from components.promote.packaging import BUNDLE, write_model


def upload(
    log: StepLog,
    name: str,
    bundle: Artifact[BundleManifest],
    precision: Precision,
    tags: dict[str, str],
    *,
    report: Path,
    verdict: Path,
) -> str:
    """Upload bundle, report and verdict as one LoggedModel that `mlflow.pyfunc.load_model` takes.

    Returns:
        The LoggedModel's id; what it holds lies at `models:/<id>/bundle`, `.../report` and `.../verdict`.
    """
    parts = {BUNDLE: bundle.path, "report": report, "verdict": verdict}
    with TemporaryDirectory(prefix="enginery-") as folder:
        return log.upload_model(name, write_model(bundle, precision, Path(folder)), parts, tags)
