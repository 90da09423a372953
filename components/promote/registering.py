"""The upload of what is promoted, in the form in which MLflow loads it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from components.common.artifacts import Artifact, BundleManifest
from components.common.mlflow_models import upload_model
from components.common.records import Precision
from components.common.tracking import StepRun
from components.common.trust import read_statements
from components.promote.packaging import write_model


def upload(
    run: StepRun,
    name: str,
    bundle: Artifact[BundleManifest],
    precision: Precision,
    tags: Mapping[str, str],
    parts: Mapping[str, Path],
    measured_on: Sequence[str],
) -> str:
    """Upload bundle, report and verdict as one LoggedModel that `mlflow.pyfunc.load_model` takes.

    Args:
        run: the step's.
        name: of the model, for people.
        bundle: what runs.
        precision: which of its models.
        tags: of the LoggedModel.
        parts: the three artifacts, by the names of their folders in the model; the bundle's is `packaging.BUNDLE`.
        measured_on: the CPU's instruction sets that the verdict rests on.

    Returns:
        The LoggedModel's id; what it holds lies at `models:/<id>/bundle`, and so on.
    """
    with TemporaryDirectory(prefix="enginery-") as folder:
        files = write_model(bundle, precision, Path(folder), measured_on)
        for file, statement in read_statements(parts["verdict"]).items():
            (files / file).write_bytes(statement)
        return upload_model(run, name, files, parts, tags)
