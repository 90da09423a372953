"""MLflow, and nothing else imports it. Metric names carry their unit: `val_score_pct`, `p50_ms`, `images_per_s`.

A step finds its run by the contract of KFP's MLflow plugin: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_ID and
MLFLOW_RUN_ID. A local run knows its steps only as they start, so there the parent passes its own run in
ENGINERY_PARENT_RUN_ID and the step makes its nested run itself. On KFP without that plugin the first step makes the
pipeline's run, too, and the others find it by the KFP run's id.
"""

import getpass
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import mlflow
import requests  # type: ignore[import-untyped]
from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, LoggedModelStatus, Metric, Param, Run
from mlflow.exceptions import MlflowException, RestException
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository
from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.time import get_current_time_millis

from components.common.contracts.environment import EXPERIMENT_VARIABLE, KFP_RUN_VARIABLE
from components.common.contracts.errors import EXIT_INTERRUPTED, EngineryError
from components.common.contracts.records import AccuracyRow, BenchmarkRow
from components.common.contracts.settings import flatten
from components.common.process.disk import explain
from components.common.registry.store import (
    beside_database,
    database_is_gone,
    database_problem,
    prepare_sqlite,
    quiet_mlflow,
    sqlite_file,
    try_database,
    without_credentials,
)

PARENT_RUN_VARIABLE = "ENGINERY_PARENT_RUN_ID"
RUN_TAG = "enginery.run"  # the local or KFP run's id, by which its runs in MLflow are found again
_STEP_TAG, _ADOPTED_TAG, _PIPELINE_TAG = "enginery.step", "enginery.adopted", "enginery.pipeline"
_MAX_PARAM_LENGTH = 500
_LAST_STEPS = ("promote", "analyze")
_RACE_S = 3.0  # steps that begin together have all made a run of their pipeline by then; the oldest is kept
VIEW = "accuracy and verdict"
# How long one request may take: MLflow's own defaults try for many minutes in silence. The steps inherit these.
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
# Of artifacts from anywhere: a redirect may lead into an inner network.
DOWNLOAD_LIMITS = {**REQUEST_LIMITS, "MLFLOW_ALLOW_HTTP_REDIRECTS": "false"}
_FIRST_REQUESTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
_LAST_REQUESTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
ARTIFACT_SERVER_VARIABLE = "ENGINERY_ARTIFACT_SERVER"  # HOST:PORT that may have the tracking server's credentials
OF_SERVERS = ("http", "https", "mlflow-artifacts")  # which MLflow's client sends the tracking server's token to
_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "REQUEST_LIMIT_EXCEEDED")


def is_unreachable(error: Exception) -> bool:
    """True if a store's server is gone, overloaded or refuses access; False if the request was wrong."""
    if database_is_gone(error):
        return True
    if isinstance(error, RestException):
        return error.get_http_status_code() >= 500 or error.error_code in _REFUSALS
    if isinstance(error, MlflowException):
        return str(error).startswith("API request to ")  # how MLflow tells whatever happens to a request
    # The first is of uploads; the second of an answer that MLflow would not give, so another server gives it.
    return isinstance(error, requests.RequestException | ParseError)


@contextmanager
def request_limits(limits: Mapping[str, str]) -> Iterator[None]:
    """Limits of MLflow's requests; what the user set wins."""
    own = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)  # another thread may have been first


def underlying(uri: str, tracking_uri: str) -> str:
    """Return the address of the files of a model or run of MLflow."""
    if ModelsArtifactRepository.is_models_uri(uri):
        uri = str(ModelsArtifactRepository.get_underlying_uri(uri))
    if RunsArtifactRepository.is_runs_uri(uri):
        uri = RunsArtifactRepository.get_underlying_uri(uri, tracking_uri)
    return uri


def leads_elsewhere(uri: str, tracking_uri: str, schemes: Collection[str]) -> bool:
    """True for a URI of one of the schemes that is not of the tracking server, nor of `ARTIFACT_SERVER_VARIABLE`.

    Hosts are compared to the letter: what parsers of addresses make of "@" and a backslash differs.
    """
    place, server = urlparse(uri), urlparse(tracking_uri)
    own = os.environ.get(ARTIFACT_SERVER_VARIABLE) or server.netloc
    hosts = (server.netloc, server.netloc.rpartition("@")[2], own)
    if place.scheme == "mlflow-artifacts":
        return place.netloc not in ("", *hosts)
    return place.scheme in schemes and (place.scheme != server.scheme or place.netloc not in hosts)


def check_credentials(uri: str) -> None:
    """Refuse to ask a server that would get the tracking server's credentials.

    Raises:
        EngineryError: it is another server, and there are credentials.
    """
    tracking_uri = mlflow.get_tracking_uri()
    known = get_default_host_creds(uri)
    secrets = (known.token, known.username, known.password, known.auth, known.aws_sigv4, known.client_cert_path)
    if any(secrets) and leads_elsewhere(underlying(uri, tracking_uri), tracking_uri, OF_SERVERS):
        raise EngineryError(
            f"{without_credentials(uri)} is not of MLflow at {without_credentials(tracking_uri)}, whose credentials "
            "would be sent there. Set MLFLOW_TRACKING_URI to the server that is asked, or unset MLFLOW_TRACKING_TOKEN, "
            f"MLFLOW_TRACKING_USERNAME and the like. If it may have them, set {ARTIFACT_SERVER_VARIABLE} to its "
            "HOST:PORT",
            code="other-server",
            setting="MLFLOW_TRACKING_URI",
        )


def short_digest(digest: str) -> str:
    """A dataset's digest as MLflow keeps it. Metrics and inputs must agree on it for the UI to connect them."""
    return digest.removeprefix("sha256:")[:36]  # MLflow's longest


class StepRun:
    """The MLflow run of one step."""

    def __init__(
        self, client: MlflowClient, run_id: str, experiment_id: str, prefix: str = "", pipeline: "StepRun | None" = None
    ) -> None:
        """`prefix` is of parameters, `pipeline` the run that this one is nested in, if KFP's plugin made that."""
        self.client = client
        self.run_id = run_id
        self.experiment_id = experiment_id
        self._prefix = prefix
        self._pipeline = pipeline
        self._live: threading.Thread | None = None

    @classmethod
    def nowhere(cls) -> "StepRun":
        """The run of a step that could not get one."""
        return cls(MlflowClient(), "", "")

    @property
    def uri(self) -> str:
        """Address of the run's store, for a person."""
        return without_credentials(str(self.client.tracking_uri))

    def is_unreachable(self, error: Exception) -> bool:
        """True if the server is what failed."""
        return is_unreachable(error)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log parameters, nested mappings flattened with dots."""
        flat = flatten(values, self._prefix)
        params = [Param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in flat.items()]
        self.client.log_batch(self.run_id, params=params)

    def log_metrics(self, values: Mapping[str, float], position: int) -> None:
        """Log metrics at one position of their x axis."""
        now = get_current_time_millis()
        self.client.log_batch(self.run_id, metrics=[Metric(key, value, now, position) for key, value in values.items()])

    def log_live(self, values: Mapping[str, float], position: int) -> None:
        """Log metrics of this moment without waiting; while earlier ones are under way, these are left out."""
        if self._live is None or not self._live.is_alive():
            self._live = threading.Thread(target=self._send_live, args=(values, position), daemon=True)
            self._live.start()

    def _send_live(self, values: Mapping[str, float], position: int) -> None:
        with suppress(Exception):  # whatever it is, the next request that somebody waits for has it, too
            self.log_metrics(values, position)

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run."""
        for key, value in values.items():
            self.client.set_tag(self.run_id, key, value)

    def log_artifact(self, path: Path, directory: str = "") -> None:
        """Upload a file, or a directory with all it holds."""
        upload = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        upload(self.run_id, str(path), directory or None)

    def log_result(self, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Log a part of the pipeline's result to its run. `enginery run` does so itself, at its end."""
        if self._pipeline is not None:
            self._pipeline.log_metrics(metrics, 0)
            self._pipeline.set_tags(tags)
            for path in artifacts:
                self._pipeline.log_artifact(path)

    def log_dataset(self, name: str, digest: str, num_images: int, context: Literal["training", "validation"]) -> None:
        """Record a split as an input of this run: `name` is "train" or "val", `digest` that of its listing."""
        profile = json.dumps({"num_images": num_images})
        source = json.dumps({"digest": digest})
        dataset = Dataset(name, short_digest(digest), source_type="enginery", source=source, profile=profile)
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])]
        try:
            self.client.log_inputs(self.run_id, datasets=inputs)
        except MlflowException as error:
            if is_unreachable(error):
                raise
            self.client.log_inputs(self.run_id, datasets=inputs)  # another run made the same entry at the same moment

    def log_model(
        self, accuracy: AccuracyRow, benchmark: list[BenchmarkRow], tags: Mapping[str, str], *, dataset_digest: str
    ) -> str:
        """One LoggedModel per precision, its metrics tied to the data they were measured on. Returns the model's id."""
        model = self.client.create_logged_model(
            self.experiment_id,
            name=f"{tags['architecture'].replace('/', '_')}-{accuracy.precision}",
            source_run_id=self.run_id,
            tags={"precision": accuracy.precision, "runtime": accuracy.runtime, **tags},
            params={"file": accuracy.file, "size_bytes": str(accuracy.size_bytes), "device": accuracy.device},
            model_type="classifier",
        )
        metrics = {name: getattr(accuracy, name) for name in ("score_pct", "top5_pct", "delta_points")}
        for row in benchmark:
            suffix = f"b{row.batch_size}"
            if not row.is_plain:
                suffix += f"_streams{row.num_streams}" if row.num_streams > 1 else "_no_transfers"
            metrics[f"p50_ms_{suffix}"] = row.p50_ms
            metrics[f"p99_ms_{suffix}"] = row.p99_ms
            metrics[f"images_per_s_{suffix}"] = row.images_per_s
            metrics[f"images_per_s_per_w_{suffix}"] = row.images_per_s_per_w
        known = {key: value for key, value in metrics.items() if value is not None}
        self.log_model_metrics(model.model_id, known, dataset_digest)
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id=model.model_id, step=0)])
        self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return str(model.model_id)

    def log_model_metrics(self, model_id: str, metrics: Mapping[str, float], dataset_digest: str) -> None:
        """Log what was measured on the validation split as metrics of this run and of a LoggedModel of it."""
        now, data = get_current_time_millis(), {"dataset_name": "val", "dataset_digest": short_digest(dataset_digest)}
        entries = [Metric(key, value, now, 0, model_id=model_id, **data) for key, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=entries)  # one request: MLflow takes up to 1,000 metrics in it


@contextmanager
def step_run(step: str) -> Iterator[StepRun]:
    """The run of a step: the one that KFP's plugin made, or a new one nested in the pipeline's run.

    The run ends FINISHED, FAILED or, on an interrupt, KILLED.

    Raises:
        EngineryError: the store is a database server that can't be reached.
    """
    quiet_mlflow()
    uri = mlflow.get_tracking_uri()
    try:
        try_database(uri)
    except Exception as error:  # of its driver
        raise _unusable(uri, error, Path.cwd()) from error
    client = MlflowClient()
    if run_id := os.environ.get("MLFLOW_RUN_ID"):
        with _adopted(client, run_id, step) as run:
            yield run
        return
    name = os.environ.get(EXPERIMENT_VARIABLE) or "enginery"
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") or _experiment(client, name)
    _check_place(client, experiment_id)
    kfp_run = os.environ.get(KFP_RUN_VARIABLE, "")
    pipeline = KfpPipelineRun(client, experiment_id, name, kfp_run) if kfp_run else None
    parent = pipeline.run_id if pipeline else os.environ.get(PARENT_RUN_VARIABLE, "")
    run = _new_step_run(client, experiment_id, step, parent, pipeline)
    status = "FAILED"
    message = ""
    try:
        yield run
        status = "FINISHED"
    except Exception as error:
        message = _message(error)
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        _end_step_run(client, run.run_id, status, message)
        if pipeline is not None:
            with suppress(Exception):  # what the step did or died of counts
                pipeline.step_ended(step, status, message)


def user_name() -> str:
    """Return the name of the user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an arbitrary UID in a container has no name
        return str(os.getuid())


def _new_step_run(
    client: MlflowClient, experiment_id: str, step: str, parent_run_id: str, pipeline: StepRun | None = None
) -> StepRun:
    tags = {_STEP_TAG: step, "mlflow.source.name": f"components.{step}", "mlflow.user": user_name()}
    if parent_run_id:
        tags["mlflow.parentRunId"] = parent_run_id
    if kfp_run := os.environ.get(KFP_RUN_VARIABLE):
        tags[RUN_TAG] = kfp_run
    run = client.create_run(experiment_id, run_name=step, tags=tags)
    return StepRun(client, run.info.run_id, experiment_id, pipeline=pipeline)


class KfpPipelineRun(StepRun):
    """The run of a pipeline on KFP without its plugin: the first step makes it, and the others find it by its tags."""

    def __init__(self, client: MlflowClient, experiment_id: str, name: str, kfp_run: str) -> None:
        """Find or make it, and set it to RUNNING: it may have ended with a step that is now tried again."""
        runs = self._find(client, experiment_id, kfp_run)
        if not runs:
            tags = {RUN_TAG: kfp_run, _PIPELINE_TAG: name, "mlflow.source.name": name, "mlflow.user": user_name()}
            made = client.create_run(experiment_id, run_name=f"{name} {kfp_run[:8]}", tags=tags)
            time.sleep(_RACE_S)
            runs = self._find(client, experiment_id, kfp_run)
            if runs[0].info.run_id != made.info.run_id:  # a step beside this one was faster
                client.delete_run(made.info.run_id)
        super().__init__(client, runs[0].info.run_id, experiment_id)
        if runs[0].info.status != "RUNNING":
            client.update_run(self.run_id, status="RUNNING")
            self.set_tags({"enginery.message": ""})

    @staticmethod
    def _find(client: MlflowClient, experiment_id: str, kfp_run: str) -> list[Run]:
        """Oldest first; the same order for all who ask."""
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{kfp_run}' and tags.`{_PIPELINE_TAG}` != ''")
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    def step_ended(self, step: str, status: str, message: str) -> None:
        """End with a step that failed, or with the last one, which also ends runs of steps that were killed."""
        if status == "FINISHED" and step not in _LAST_STEPS:
            return
        if status == "FINISHED":
            close_nested(self.client, self.experiment_id, self.run_id, "KILLED")
        self.set_tags(
            {"enginery.status": "done" if status == "FINISHED" else status.lower(), "enginery.message": message}
        )
        self.client.set_terminated(self.run_id, status=status)


@contextmanager
def _adopted(client: MlflowClient, run_id: str, step: str) -> Iterator[StepRun]:
    """The run that somebody else made for this step, and ends: KFP's plugin, or the pod that started a TrainJob.

    At its end the plugin logs the step's inputs by their plain names and as JSON, and MLflow refuses a second value of
    a parameter. So ours are then named after the step, too.
    """
    run = client.get_run(run_id)
    check_credentials(run.info.artifact_uri)
    is_foreign = _STEP_TAG not in run.data.tags or _ADOPTED_TAG in run.data.tags
    if is_foreign:
        StepRun(client, run_id, run.info.experiment_id).set_tags({_STEP_TAG: step, _ADOPTED_TAG: "true"})
    experiment_id, parent = run.info.experiment_id, run.data.tags.get("mlflow.parentRunId")
    pipeline = StepRun(client, parent, experiment_id) if is_foreign and parent else None
    if pipeline is not None:
        check_credentials(client.get_run(pipeline.run_id).info.artifact_uri)
    try:
        yield StepRun(client, run_id, experiment_id, f"{step}." if is_foreign else "", pipeline)
    except Exception as error:
        with suppress(Exception):  # what the step died of counts
            client.set_tag(run_id, "enginery.message", _message(error))
        raise


def _message(error: Exception) -> str:
    problem = error if isinstance(error, EngineryError) else explain(error, Path.cwd()) or error
    return str(problem)[:5000]


def _end_step_run(client: MlflowClient, run_id: str, status: str, message: str) -> None:
    """Tell MLflow. Where that fails, what the step did or died of counts, and the pipeline's run closes this one."""
    try:
        if message:
            client.set_tag(run_id, "enginery.message", message)
        client.set_terminated(run_id, status=status)
    except Exception as error:
        if status == "FINISHED" and not is_unreachable(error):
            raise


def _check_place(client: MlflowClient, experiment_id: str) -> None:
    """Refuse an experiment that uploads to a server which would get the tracking server's credentials."""
    check_credentials(client.get_experiment(experiment_id).artifact_location)  # which whoever made it chose


def _experiment(client: MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        for key, value in _saved_view().items():
            if key not in found.tags:  # made by another tool, or before there was a view
                client.set_experiment_tag(found.experiment_id, key, value)
        return str(found.experiment_id)
    root = beside_database(mlflow.get_tracking_uri())
    # The kind makes the UI open on training runs and models instead of traces of language models.
    tags = {"mlflow.experimentKind": "custom_model_development", **_saved_view()}
    try:
        return str(client.create_experiment(name, artifact_location=root, tags=tags))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return str(client.get_experiment_by_name(name).experiment_id)  # another process was faster


def _saved_view() -> dict[str, str]:
    """A view of the experiment's runs in MLflow's UI, under *Views*: without it they have no metrics as columns."""
    measures = ("fp32_score_pct", "int8_score_pct", "int8_delta_points", "int8_speedup")
    columns = ["tags.`enginery.verdict`", *(f"metrics.`{name}`" for name in measures)]
    now = get_current_time_millis()
    view = {"name": VIEW, "createdAt": now, "updatedAt": now, "state": json.dumps({"selectedColumns": columns})}
    return {"mlflow.sharedViewState.enginery": json.dumps(view)}


def _relayed_model(run: StepRun, accuracy: Any, benchmark: Any, tags: Mapping[str, str], dataset_digest: str) -> None:
    rows = [BenchmarkRow.model_validate(row) for row in benchmark]
    run.log_model(AccuracyRow.model_validate(accuracy), rows, tags, dataset_digest=dataset_digest)


# What a step may ask of its run.
_RELAYED: Mapping[str, Callable[..., Any]] = {
    "log_params": StepRun.log_params,
    "log_metrics": StepRun.log_metrics,
    "log_live": StepRun.log_metrics,  # nobody waits for the parent
    "set_tags": StepRun.set_tags,
    "log_artifact": lambda run, path, directory: run.log_artifact(Path(path), directory),
    "log_dataset": StepRun.log_dataset,
    "log_model": _relayed_model,
}


class PipelineRun:
    """The parent run of one pipeline run; the steps' runs are nested in it."""

    def __init__(
        self, tracking_uri: str, experiment: str, name: str, *, source: str, params: Mapping[str, Any], place: Path
    ) -> None:
        """Open the tracking store (creating a fresh SQLite file before any step can) and start the run.

        Args:
            tracking_uri: where MLflow tracks.
            experiment: name of the experiment, made if it is new.
            name: of the run.
            source: the pipeline file, shown as the run's source.
            params: what the run was started with.
            place: where a local store writes.

        Raises:
            EngineryError: the store can't be reached, does not answer in time or refuses.
        """
        quiet_mlflow()
        mlflow.set_tracking_uri(tracking_uri)
        try:
            with request_limits(_FIRST_REQUESTS):
                # MLflow makes the tables when it is first asked something.
                prepare_sqlite(tracking_uri, lambda uri: MlflowClient(uri).search_experiments(max_results=1))
                try_database(tracking_uri)
                self.client = MlflowClient()
                self.experiment_id = _experiment(self.client, experiment)
                _check_place(self.client, self.experiment_id)
                tags = {"mlflow.source.name": source, "mlflow.source.type": "LOCAL", "mlflow.user": user_name()}
                run = self.client.create_run(self.experiment_id, run_name=name, tags={**tags, RUN_TAG: name})
                self.run_id = run.info.run_id
                self.step_run = StepRun(self.client, self.run_id, self.experiment_id)
                self.step_run.log_params(params)
                self._step_runs: dict[str, StepRun] = {}  # of running steps, by name
        except EngineryError:
            raise
        except Exception as error:  # of MLflow, its HTTP client, its database's driver, or the disk
            raise _unusable(tracking_uri, error, place) from error

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which the steps find this run."""
        return {
            "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
            "MLFLOW_EXPERIMENT_ID": self.experiment_id,
            PARENT_RUN_VARIABLE: self.run_id,
            **{name: os.environ.get(name, value) for name, value in REQUEST_LIMITS.items()},
        }

    def relay(self, event: Mapping[str, Any]) -> None:
        """Do what a step asks of its run, or end the run with the step. See `steplog.RelayedRun`.

        Args:
            event: "track", "finished" or "failed", of a step.
        """
        step = event["step"]
        if event["event"] == "track":
            if step not in self._step_runs:
                self._step_runs[step] = _new_step_run(self.client, self.experiment_id, step, self.run_id)
            _RELAYED[event["call"]](self._step_runs[step], *event["arguments"])
        elif (run := self._step_runs.pop(step, None)) is not None:
            failed = "KILLED" if event.get("exit_code") == EXIT_INTERRUPTED else "FAILED"
            status, message = ("FINISHED", "") if event["event"] == "finished" else (failed, event["message"])
            _end_step_run(self.client, run.run_id, status, "" if status == "KILLED" else message[:5000])

    def finish(
        self, status: str, tags: Mapping[str, str], metrics: Mapping[str, float], artifacts: Sequence[Path]
    ) -> None:
        """End the run as "FINISHED", "FAILED" or "KILLED", and steps' runs that could not end themselves.

        What takes room comes last, so that a full disk keeps the run from nothing else.
        """
        with request_limits(_LAST_REQUESTS if status == "KILLED" else REQUEST_LIMITS):
            self._close(self.run_id, status, tags)
            if metrics:
                self.step_run.log_metrics(metrics, 0)
            for path in artifacts:
                self.step_run.log_artifact(path)

    def close_abandoned(self, name: str, status: str, message: str) -> None:
        """End the run of another process that could not, if this store has it: by the local run's id."""
        experiments = [entry.experiment_id for entry in self.client.search_experiments()]
        for run in self.client.search_runs(experiments, f"tags.`{RUN_TAG}` = '{name}'"):
            if run.info.status == "RUNNING":
                self._close(run.info.run_id, status, {"enginery.status": status.lower(), "enginery.message": message})

    def _close(self, run_id: str, status: str, tags: Mapping[str, str]) -> None:
        experiment_id = self.client.get_run(run_id).info.experiment_id
        close_nested(self.client, experiment_id, run_id, status, tags.get("enginery.message", ""))
        StepRun(self.client, run_id, experiment_id).set_tags(tags)
        self.client.set_terminated(run_id, status=status)


def close_nested(client: MlflowClient, experiment_id: str, run_id: str, status: str, message: str = "") -> None:
    """End the steps' runs that could not end themselves."""
    nested = f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment_id], nested):
        if message:
            client.set_tag(run.info.run_id, "enginery.message", message)
        client.set_terminated(run.info.run_id, status=status)


def check_store(uri: str) -> None:
    """Ask a tracking store for something small, for a command.

    Raises:
        EngineryError: it can't be reached, does not answer in time or refuses.
    """
    quiet_mlflow()
    try:
        with request_limits(_FIRST_REQUESTS):
            try_database(uri)
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Exception as error:  # of MLflow, its HTTP client, its database's driver, or the disk
        raise _unusable(uri, error, sqlite_file(uri) or Path.cwd()) from error


def _unusable(uri: str, error: Exception, place: Path) -> EngineryError:
    """Return the error for a tracking store that does not open."""
    shown = without_credentials(uri)
    if uri.startswith("sqlite:"):
        if known := explain(error, place):
            return known
        fix = "Move the file away if it is no MLflow database, or close what holds it"
    elif isinstance(error, ModuleNotFoundError):
        fix = "Install the driver of that database, such as psycopg[binary] for PostgreSQL"
    else:
        fix = "Start the server, or unset MLFLOW_TRACKING_URI to track in a local SQLite file"
    system = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))  # such as "Connection refused", deep in a chain
    if "timed out" in str(error):
        seconds = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", _FIRST_REQUESTS["MLFLOW_HTTP_REQUEST_TIMEOUT"])
        reason = f"it did not answer within {seconds} s (MLFLOW_HTTP_REQUEST_TIMEOUT)"
    else:
        reason = system[1] if system else database_problem(str(error)).replace(uri, shown)
    return EngineryError(
        f"MLflow at {shown} can't be used: {reason.rstrip('.')}. {fix}",
        code="store-unusable",
        setting="MLFLOW_TRACKING_URI",
    )
