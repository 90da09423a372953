"""MLflow's format of a model: the file MLmodel and what lies beside it. No pickle of anything."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from mlflow import pyfunc
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import Array
from mlflow.utils.time import get_current_time_millis

from components.common.registry import patiently
from components.common.tracking import StepRun, short_digest

MLMODEL = "MLmodel"
_REQUIREMENTS = "requirements.txt"
_PYTHON_ENV = "python_env.yaml"


def classifier_signature(default_top_k: int) -> ModelSignature:
    """What an image classifier returns, and its parameter.

    No input schema: with one, MLflow would turn everything into a table before the model sees it, which no list of
    pixel arrays survives.
    """
    outputs = [
        ColSpec(DataType.string, "label"),
        ColSpec(DataType.double, "probability"),
        ColSpec(Array(DataType.string), "labels"),
        ColSpec(Array(DataType.double), "probabilities"),
    ]
    params = ParamSchema([ParamSpec("top_k", DataType.long, default_top_k)])
    return ModelSignature(outputs=Schema(outputs), params=params)


def write_mlmodel(
    output: Path,
    *,
    loader_module: str,
    data: str,
    config: Mapping[str, Any],
    signature: ModelSignature,
    requirements: Sequence[str],
    metadata: Mapping[str, Any],
) -> None:
    """Make a directory a model of MLflow.

    Args:
        output: the directory.
        loader_module: has `_load_pyfunc(data_path, model_config)`.
        data: path inside the directory, handed to that function.
        config: handed to it, too; a caller may replace single values.
        signature: what the model takes and returns.
        requirements: for pip.
        metadata: about the model, for people and programs.
    """
    model = Model(signature=signature, metadata=dict(metadata))
    pyfunc.add_to_model(
        model, loader_module=loader_module, data=data, python_env=_PYTHON_ENV, model_config=dict(config)
    )
    (output / _REQUIREMENTS).write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    environment = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "build_dependencies": [],
        "dependencies": [f"-r {_REQUIREMENTS}"],
    }
    (output / _PYTHON_ENV).write_text(yaml.safe_dump(environment, sort_keys=False), encoding="utf-8")
    model.save(str(output / MLMODEL))


def upload_model(run: StepRun, name: str, folder: Path, parts: Mapping[str, Path], tags: Mapping[str, str]) -> str:
    """Upload a model as a LoggedModel of a run. `models:/<its id>` is where it then lies.

    It becomes READY when all is there, and the file that makes it loadable comes last.

    Args:
        run: the step's.
        name: for people.
        folder: what `write_mlmodel` wrote. Its MLmodel file is given the ids of model and run.
        parts: directories that lie beside these files in the model, by name.
        tags: of the LoggedModel.

    Returns:
        The LoggedModel's id.
    """
    client = run.client
    logged = client.create_logged_model(
        run.experiment_id,
        name=name.replace(".", "_"),  # which MLflow refuses in the name of a LoggedModel
        source_run_id=run.run_id,
        tags=dict(tags),
        model_type="classifier",
    )
    for part, path in parts.items():
        client.log_model_artifacts(logged.model_id, str(path), part)
    description = Model.load(str(folder / MLMODEL))
    description.model_id, description.run_id = logged.model_id, run.run_id
    description.save(str(folder / MLMODEL))
    client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    client.log_outputs(run.run_id, [LoggedModelOutput(model_id=logged.model_id, step=0)])
    return str(logged.model_id)


def log_measured(
    run: StepRun,
    model_id: str,
    metrics: Mapping[str, float],
    settings: Mapping[str, Mapping[str, Any]],
    *,
    split_digest: str,
) -> None:
    """Log what was measured of a model on the validation split, as metrics of its run and of its LoggedModel.

    Args:
        run: that uploaded the model.
        model_id: of the LoggedModel.
        metrics: by name.
        settings: parameters of the run, by step.
        split_digest: of the validation split.
    """
    now, place = get_current_time_millis(), {"dataset_name": "val", "dataset_digest": short_digest(split_digest)}
    entries = [Metric(key, value, now, 0, model_id=model_id, **place) for key, value in metrics.items()]
    patiently(lambda: run.client.log_batch(run.run_id, metrics=entries))
    for step, values in settings.items():
        patiently(
            partial(run.log_params, {step: values})
        )  # one request for each: MLflow takes up to 100 parameters in it
