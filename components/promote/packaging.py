"""A bundle in MLflow's format, what its pages show of it, and the upload."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow.pyfunc
import yaml
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import Array

from components.common.contracts.environment import own_version
from components.common.contracts.manifests import Artifact, BundleManifest, ReportManifest
from components.common.contracts.records import Precision, measures
from components.common.registry.model_registry import patiently
from components.common.registry.tracking import StepRun
from components.common.registry.trust import read_statements
from components.common.tasks import TASKS, TaskName
from components.common.tasks.answers import answers_of
from components.promote import pyfunc

MLMODEL = "MLmodel"
BUNDLE = "bundle"  # folder of the bundle in the model
_REQUIREMENTS = "requirements.txt"
_PYTHON_ENV = "python_env.yaml"


def write_model(
    bundle: Artifact[BundleManifest], precision: Precision, output: Path, measured_on: Sequence[str] = ()
) -> Path:
    """Write the files of an MLflow model into `output`, which holds the bundle as `bundle/`, now or later.

    They name the bundle's digest, so a model loads with this bundle only. Its plans or ONNX files are not touched.

    Args:
        bundle: what runs.
        precision: which of its models.
        output: made if it is new.
        measured_on: the CPU's instruction sets that the verdict rests on.

    Returns:
        `output`.
    """
    output.mkdir(parents=True, exist_ok=True)
    named = {"bundle_digest": bundle.digest, "precision": precision}
    described = {
        "architecture": bundle.manifest.architecture,
        "num_classes": len(bundle.manifest.classes),
        "input": "sentences"
        if bundle.manifest.text is not None
        else "image files (bytes, base64 text, paths) or uint8 arrays [height, width, 3]",
    }
    model = Model(signature=_signature(bundle.manifest.task), metadata={**named, **described})
    mlflow.pyfunc.add_to_model(
        model,
        loader_module=pyfunc.__name__,
        data=BUNDLE,
        python_env=_PYTHON_ENV,
        model_config={**named, "runtime": "auto", "measured_on": list(measured_on)},
    )
    version = own_version()  # this package brings all that a model needs to run
    (output / _REQUIREMENTS).write_text(f"enginery=={version}\n" if version else "enginery\n", encoding="utf-8")
    environment = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "build_dependencies": [],
        "dependencies": [f"-r {_REQUIREMENTS}"],
    }
    (output / _PYTHON_ENV).write_text(yaml.safe_dump(environment, sort_keys=False), encoding="utf-8")
    model.save(str(output / MLMODEL))
    return output


_TYPES: dict[str, Any] = {
    "text": DataType.string,
    "texts": Array(DataType.string),
    "integers": Array(DataType.long),
    "numbers": Array(DataType.double),
    "lists": Array(Array(DataType.double)),
}


def _signature(task: TaskName) -> ModelSignature:
    """Outputs of a model, and the parameter of a classifier.

    No input schema: with one, MLflow would turn everything into a table before the model sees it, which no list of
    pixel arrays survives.
    """
    if TASKS[task].of_text:
        params = ParamSchema([ParamSpec("beam_size", DataType.long, 1)])
        return ModelSignature(outputs=Schema([ColSpec(DataType.string, "translation")]), params=params)
    if not TASKS[task].classifies:
        return ModelSignature(
            outputs=Schema([ColSpec(_TYPES[kind], name) for name, kind in answers_of(task).columns.items()])
        )
    outputs = [
        ColSpec(DataType.string, "label"),
        ColSpec(DataType.double, "probability"),
        ColSpec(Array(DataType.string), "labels"),
        ColSpec(Array(DataType.double), "probabilities"),
    ]
    params = ParamSchema([ParamSpec("top_k", DataType.long, pyfunc.DEFAULT_TOP_K)])
    return ModelSignature(outputs=Schema(outputs), params=params)


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

    It becomes READY when all is there, and the file that makes it loadable comes last.

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
    client = run.client
    logged = client.create_logged_model(
        run.experiment_id,
        name=name.replace(".", "_"),  # which MLflow refuses in the name of a LoggedModel
        source_run_id=run.run_id,
        tags=dict(tags),
        model_type="translator" if bundle.manifest.text is not None else "classifier",
    )
    for part, path in parts.items():
        client.log_model_artifacts(logged.model_id, str(path), part)
    with TemporaryDirectory(prefix="enginery-") as folder:
        files = write_model(bundle, precision, Path(folder), measured_on)
        for file, statement in read_statements(parts["verdict"]).items():
            (files / file).write_bytes(statement)
        description = Model.load(str(files / MLMODEL))
        description.model_id, description.run_id = logged.model_id, run.run_id
        description.save(str(files / MLMODEL))
        client.log_model_artifacts(logged.model_id, folder)
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    client.log_outputs(run.run_id, [LoggedModelOutput(model_id=logged.model_id, step=0)])
    return str(logged.model_id)


def log_measured(run: StepRun, model_id: str, bundle: BundleManifest, report: ReportManifest) -> None:
    """Log what was measured on the validation split as metrics of a run and its LoggedModel, settings as parameters."""
    found = measures(report.accuracy, report.benchmark)
    patiently(lambda: run.log_model_metrics(model_id, found, report.accuracy.split_digest))
    training = {"train": bundle.training.config} if bundle.training is not None else {}
    for step, values in {**training, "export": bundle.config, "validate": report.config}.items():
        patiently(partial(run.log_params, {step: values}))  # one request for each: MLflow takes 100 parameters in it
