"""Which version becomes the champion, and what is recorded of it."""

import json
from pathlib import Path

import pytest
from mlflow.entities import DatasetInput
from mlflow.exceptions import MlflowException

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import PromotionManifest, ReportManifest, load
from components.common.registry.alias_changes import champions, explained
from components.common.registry.audit_log import AuditLog
from components.common.registry.model_registry import Registry
from components.common.registry.tracking import StepRun
from enginery.registry.models import version_summary

from .chains import make_and_promote, make_chain, promote_chain


def test_the_first_version_is_champion(uri: str, registry: Registry, tmp_path: Path) -> None:
    told = make_and_promote(uri, tmp_path, "a-070")
    assert told == (
        "m version 1 registered in MLflow as @candidate and @champion: passed its gate, and there was no champion"
    )
    assert registry.aliases("m") == {"candidate": "1", "champion": "1"}
    version = registry.version("m", "1")
    promotion = load(tmp_path / "a-070/promotion", PromotionManifest, verify=("",)).manifest
    assert version.tags["verdict"] == "pass, not proved"
    assert version.tags["precision"] == "int8"
    assert version.tags["top1_pct"] == "70.0000"
    assert version.tags["validation_split_digest"] == "val-one"
    assert version.tags["bundle_digest"] == promotion.bundle_digest == promotion.inputs["bundle"]
    assert {f"{name}_digest" for name in ("dataset", "report", "verdict")} <= set(version.tags)
    assert (promotion.champion, promotion.comparison) == (True, None)
    audit = json.loads((tmp_path / "a-070/promotion/audit.json").read_text())
    assert audit["mlflow_run_id"] == promotion.audit_run_id
    assert audit["changes"] == {name: {"before": None, "after": "1"} for name in ("candidate", "champion")}


def test_what_mlflow_s_pages_compare(uri: str, registry: Registry, tmp_path: Path) -> None:
    """The run of a version and its LoggedModel have what was measured, on which data, and by which settings."""
    make_and_promote(uri, tmp_path, "a-070")
    version = registry.version("m", "1")
    run = registry.client.get_run(version.run_id)
    assert run.data.metrics["int8_top1_pct"] == 70
    assert run.data.metrics == version_summary(registry, "m/1").headline()
    report = load(tmp_path / "a-070/report", ReportManifest).manifest
    assert {f"validate.{name}" for name in report.config} <= set(run.data.params)
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("val", "val-one")
    model = registry.client.get_logged_model(version.source.removeprefix("models:/"))
    assert {metric.key: metric.value for metric in model.metrics or ()} == run.data.metrics
    assert {metric.dataset_digest for metric in model.metrics or ()} == {"val-one"}


def test_two_log_the_same_data_set_at_the_same_moment(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow looks whether it knows a data set and then adds it; of two, one meets the database's constraint."""
    client = registry.client
    experiment = client.create_experiment("both")
    first, second = (StepRun(client, client.create_run(experiment).info.run_id, experiment) for _ in range(2))
    log_inputs, refused = client.log_inputs, []

    def meet(run_id: str, datasets: list[DatasetInput]) -> None:
        log_inputs(run_id, datasets=datasets)
        if run_id == second.run_id and not refused:
            refused.append(run_id)
            raise MlflowException('duplicate key value violates unique constraint "dataset_pk"')

    monkeypatch.setattr(client, "log_inputs", meet)
    for run in (first, second):
        run.log_dataset("val", "sha256:1", 100, "validation")
        assert len(client.get_run(run.run_id).inputs.dataset_inputs) == 1
    assert refused


def test_worse_stays_candidate_and_equal_replaces(uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-070")
    told = make_and_promote(uri, tmp_path, "b-069")
    assert told == (
        "m version 2 registered in MLflow as @candidate: worse than the champion: top-1 69.00 % (INT8), champion "
        "version 1 70.00 % (INT8) on the same 100 images"
    )
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}
    comparison = load(tmp_path / "b-069/promotion", PromotionManifest).manifest.comparison
    assert comparison is not None
    assert comparison.paired is not None
    assert (comparison.paired.num_lost, comparison.paired.num_gained, comparison.paired.mcnemar_p) == (1, 0, 1.0)
    make_and_promote(uri, tmp_path, "c-070")
    assert registry.aliases("m") == {"candidate": "3", "champion": "3"}


def test_a_tolerance_lets_a_slightly_worse_one_in(uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-070")
    make_and_promote(uri, tmp_path, "b-067", tolerance_points=2)
    assert registry.aliases("m")["champion"] == "1"
    make_and_promote(uri, tmp_path, "c-068", tolerance_points=2)
    assert registry.aliases("m")["champion"] == "3"


def test_the_log_explains_every_alias(uri: str, registry: Registry, tmp_path: Path) -> None:
    for name in ("a-050", "b-060", "c-055", "d-061"):
        make_and_promote(uri, tmp_path, name)
    entries = AuditLog(registry.client, "m").read()
    assert [entry.number for entry in entries] == [1, 2, 3, 4]
    assert explained(entries, registry.run_ids("m")) == registry.aliases("m") == {"candidate": "4", "champion": "4"}
    assert champions(entries) == ["1", "2", "4"]
    assert "worse than the champion" in entries[2].change.why
    assert entries[3].change.comparison is not None
    assert entries[3].change.comparison.champion_version == "2"


def test_a_change_in_the_ui_is_undone_where_the_log_has_named_the_alias(
    uri: str, registry: Registry, tmp_path: Path
) -> None:
    make_and_promote(uri, tmp_path, "a-050")
    make_and_promote(uri, tmp_path, "b-060")
    registry.client.set_registered_model_alias("m", "champion", "1")
    registry.client.set_registered_model_alias("m", "staging", "2")
    told = make_and_promote(uri, tmp_path, "c-055")  # better than version 1, and compared with version 2
    assert "worse than the champion: top-1 55.00 % (INT8), champion version 2" in told
    assert registry.aliases("m") == {"candidate": "3", "champion": "2", "staging": "2"}


def test_a_champion_that_was_changed_in_the_store(uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-050")
    with registry.files(registry.version("m", "1"), "report", "predictions.npz") as file:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    told = make_and_promote(uri, tmp_path, "b-060")
    assert "as @candidate: it can't be compared with the champion, version 1:" in told
    assert "was changed after it was sealed" in told
    assert "enginery promote m 2 --to champion --force --why TEXT" in told
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}


def test_a_champion_measured_on_other_images_that_nothing_runs(uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-050", split="one")
    told = make_and_promote(uri, tmp_path, "b-060", split="two")
    assert "as @candidate: it can't be compared with the champion, version 1:" in told
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}


def test_another_data_set_than_validate_had(uri: str, tmp_path: Path) -> None:
    paths = make_chain(tmp_path / "a", 50)
    other = make_chain(tmp_path / "b", 50, split="two")
    with pytest.raises(EngineryError, match="was measured on other images than the validation split of"):
        promote_chain(uri, {**paths, "dataset": other["dataset"]}, tmp_path / "promotion")


def test_a_model_that_was_registered_before_there_was_a_log(uri: str, registry: Registry, tmp_path: Path) -> None:
    registry.client.create_registered_model("m")
    registry.client.create_model_version("m", str(tmp_path / "elsewhere"))
    registry.client.set_registered_model_alias("m", "champion", "1")
    told = make_and_promote(uri, tmp_path, "a-050")
    assert "@candidate and @champion: passed its gate, and there was no champion" in told
    assert registry.aliases("m") == {"candidate": "2", "champion": "2"}


def test_a_model_that_was_deleted_and_made_again(uri: str, registry: Registry, tmp_path: Path) -> None:
    """Its log stays, and says nothing of versions that have the same numbers."""
    for name in ("a-050", "b-060"):
        make_and_promote(uri, tmp_path, name)
    registry.client.delete_registered_model("m")
    told = make_and_promote(uri, tmp_path, "c-040")
    assert "m version 1 registered in MLflow as @candidate and @champion: passed its gate, and there was no" in told
    assert registry.aliases("m") == {"candidate": "1", "champion": "1"}
