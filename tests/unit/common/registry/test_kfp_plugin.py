"""KFP's MLflow plugin and ours in one store: the plugin makes a run per pipeline and a nested one per step, sets three
variables in the step's container, and at its end logs the step's inputs and closes the run (its handler.go)."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Param, Run

from components.common.contracts.environment import EXPERIMENT_VARIABLE, KFP_RUN_VARIABLE
from components.common.contracts.errors import UserError
from components.common.process.steplog import StepLog
from components.common.registry.store import prepare_sqlite
from components.common.registry.tracking import KfpPipelineRun, StepRun, step_run
from components.train.__main__ import STEP
from tests.conftest import Dataset

INPUTS = {"architecture": "squeezenet1_1", "epochs": 1, "image_size": 32, "seed": 0, "settings": {"tf32": True}}


class Plugin:
    """Do as KFP does around a step."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        prepare_sqlite(self.uri, lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment_id = self.client.create_experiment("kfp", artifact_location=str(folder / "files"))
        self.parent = self.client.create_run(self.experiment_id, run_name="resnet50 run").info.run_id

    def start(self, step: str, monkeypatch: pytest.MonkeyPatch) -> str:
        """The step's nested run, in whose container this process is now."""
        tags = {"mlflow.parentRunId": self.parent}
        run_id: str = self.client.create_run(self.experiment_id, run_name=step, tags=tags).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", self.uri)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", self.experiment_id)
        return run_id

    def end(self, run_id: str, inputs: dict[str, Any], status: str) -> Run:
        """One batch, which MLflow takes as a whole or not at all."""
        self.client.log_batch(run_id, params=[Param(name, json.dumps(value)) for name, value in inputs.items()])
        self.client.set_terminated(run_id, status=status)
        return self.client.get_run(run_id)


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def test_steps_log_into_the_plugins_run_and_leave_its_end(
    plugin: Plugin, digits_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = plugin.start("train", monkeypatch)
    settings = {"architecture": "squeezenet1_1", "epochs": 1, "image_size": 32, "global_batch_size": 64}
    inputs = {"dataset": digits_dataset.path}
    STEP._execute(StepLog("train"), {**settings, "warmup_fraction": 0}, tmp_path / "out", inputs)
    runs = plugin.client.search_runs([plugin.experiment_id])
    assert {run.info.run_id for run in runs} == {run_id, plugin.parent}  # none beside them
    assert len(plugin.client.search_experiments()) == 2  # with MLflow's own "Default"
    assert plugin.client.get_run(run_id).info.status == "RUNNING"
    run = plugin.end(run_id, INPUTS, "FINISHED")  # raises where a parameter has another value
    assert run.data.tags["mlflow.parentRunId"] == plugin.parent
    assert run.data.tags["enginery.step"] == "train"
    assert run.data.tags["enginery.manifest_digest"].startswith("sha256:")
    assert run.data.params["architecture"] == '"squeezenet1_1"'  # the plugin's
    assert run.data.params["train.architecture"] == "squeezenet1_1"
    assert run.data.params["train.world_size"] == "1"
    assert "val_score_pct" in run.data.metrics
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["train", "val"]


def _fail(step: str, before: Callable[[StepRun], None]) -> None:
    with step_run(step) as run:
        before(run)
        raise UserError("no model 'resnet51'")


def test_a_step_that_fails_says_why_and_leaves_the_end_to_the_plugin(plugin: Plugin, monkeypatch) -> None:
    run_id = plugin.start("train", monkeypatch)
    with pytest.raises(UserError):
        _fail("train", lambda run: run.log_params({"architecture": "resnet51"}))
    found = plugin.client.get_run(run_id)
    assert found.info.status == "RUNNING"
    assert found.data.tags["enginery.message"] == "no model 'resnet51'"
    assert plugin.end(run_id, {**INPUTS, "architecture": "resnet51"}, "FAILED").info.status == "FAILED"


@pytest.fixture
def kfp(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """A run on KFP without its plugin, as a settings file has the steps' variables."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", plugin.uri)
    monkeypatch.setenv(KFP_RUN_VARIABLE, "0f5c4a1e-82a7")
    monkeypatch.setenv(EXPERIMENT_VARIABLE, "resnet50")
    return plugin


def runs_of(plugin: Plugin) -> tuple[Run, list[Run]]:
    """The pipeline's run, and the steps' in the order in which they began."""
    experiment = plugin.client.get_experiment_by_name("resnet50")
    found = plugin.client.search_runs([experiment.experiment_id], "tags.`enginery.run` = '0f5c4a1e-82a7'")
    (parent,) = (run for run in found if "mlflow.parentRunId" not in run.data.tags)
    steps = [run for run in found if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in steps} <= {parent.info.run_id}
    return parent, sorted(steps, key=lambda run: int(run.info.start_time))


def test_without_the_plugin_steps_share_a_run_of_their_pipeline_as_locally(kfp: Plugin, tmp_path, monkeypatch) -> None:
    with step_run("train") as own:
        own.log_params({"architecture": "resnet18"})
    parent, (train,) = runs_of(kfp)
    assert (train.info.run_name, train.info.status) == ("train", "FINISHED")
    assert train.data.params["architecture"] == "resnet18"
    assert (parent.info.run_name, parent.info.status) == ("resnet50 0f5c4a1e", "RUNNING")

    page = tmp_path / "report.html"
    page.write_text("<p>")
    with pytest.raises(UserError):
        _fail("validate", lambda run: run.log_result({"int8_score_pct": 98.5}, {"enginery.verdict": "fail"}, [page]))
    parent, _ = runs_of(kfp)
    assert parent.info.status == "FAILED"
    assert parent.data.tags["enginery.message"] == "no model 'resnet51'"
    assert parent.data.metrics == {"int8_score_pct": 98.5}
    assert [file.path for file in kfp.client.list_artifacts(parent.info.run_id)] == ["report.html"]

    lost = step_run("validate")  # another try, whose process is killed
    lost.__enter__()
    parent, _ = runs_of(kfp)
    assert (parent.info.status, parent.data.tags["enginery.message"]) == ("RUNNING", "")
    with step_run("promote"):
        pass
    parent, steps = runs_of(kfp)
    assert (parent.info.status, parent.data.tags["enginery.status"]) == ("FINISHED", "done")
    assert [run.info.status for run in steps] == ["FINISHED", "FAILED", "KILLED", "FINISHED"]

    # A TrainJob's rank 0 goes on in the run of the pod that started it, and names parameters as that did.
    monkeypatch.setenv("MLFLOW_RUN_ID", train.info.run_id)
    with step_run("train") as same:
        same.log_params({"architecture": "resnet18", "world_size": 8})
    assert kfp.client.get_run(train.info.run_id).data.params == {"architecture": "resnet18", "world_size": "8"}


def test_steps_that_begin_at_the_same_moment_agree_on_their_pipelines_run(kfp: Plugin) -> None:
    with step_run("preprocess"):  # the experiment is there
        experiment_id = runs_of(kfp)[0].info.experiment_id
    asked = threading.Barrier(4)

    class Slow(MlflowClient):
        """Looks before any other has made a run."""

        def search_runs(self, *arguments: Any, **options: Any) -> Any:
            found = super().search_runs(*arguments, **options)
            if not found:
                asked.wait(300)
            return found

    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda _: KfpPipelineRun(Slow(kfp.uri), experiment_id, "resnet50", "another").run_id, range(4))
        assert len(set(made)) == 1
    (run,) = kfp.client.search_runs([experiment_id], "tags.`enginery.run` = 'another'")
    assert run.info.status == "RUNNING"
