"""The version that becomes the champion, under which name, what is recorded of it, and what is refused."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from components.common.contracts.environment import environment
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import ChampionComparison, PromotionManifest, ReportManifest, load
from components.common.contracts.records import TrainingRecord, measures
from components.common.contracts.settings import flatten, resolve
from components.common.registry.audit_log import AuditLog, champions, expected_aliases
from components.common.registry.model_registry import Registry
from components.common.registry.version_evaluation import load_evaluation
from components.promote.config import PromoteConfig
from tests.conftest import Dataset
from tests.steps import step
from tests.unit.registered import (
    CHANGED,
    flip,
    make_and_promote,
    make_chain,
    promote_chain,
    refuses,
    register_forged,
    replace_file,
    reseal,
)


def promotion(folder: Path) -> PromotionManifest:
    return load(folder / "promotion", PromotionManifest, verify=("",)).manifest


def comparison(folder: Path) -> ChampionComparison:
    found = promotion(folder).comparison
    assert found is not None
    return found


def test_the_first_version_is_champion(store: str, registry: Registry, tmp_path: Path) -> None:
    """MLflow's pages have what was measured, on which data, and by which settings."""
    said = make_and_promote(store, tmp_path, "a-070", split="one")
    assert said == (
        "m version 1 registered in MLflow as @candidate and @champion: passed its gate, and there was no champion"
    )
    version, made = registry.version("m", "1"), promotion(tmp_path / "a-070")
    shown = {name: version.tags[name] for name in ("verdict", "precision", "score_pct", "validation_split_digest")}
    assert list(shown.values()) == ["pass, not proved", "int8", "70.0000", "val-one"]
    assert version.tags["bundle_digest"] == made.bundle_digest == made.inputs["bundle"]
    assert {f"{name}_digest" for name in ("dataset", "report", "verdict")} <= set(version.tags)
    assert (made.champion, made.comparison) == (True, None)
    audit = json.loads((tmp_path / "a-070/promotion/audit.json").read_text())
    assert audit["mlflow_run_id"] == made.audit_run_id
    assert audit["changes"] == {name: {"before": None, "after": "1"} for name in ("candidate", "champion")}

    logged = registry.client.get_run(version.run_id)
    assert logged.data.metrics["int8_score_pct"] == 70
    report = load(tmp_path / "a-070/report", ReportManifest).manifest
    assert logged.data.metrics == measures(report.accuracy, report.benchmark)
    assert {f"validate.{name}" for name in flatten(report.config)} <= set(logged.data.params)
    (data,) = logged.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("val", "val-one")
    model = registry.client.get_logged_model(version.source.removeprefix("models:/"))
    assert {metric.key: metric.value for metric in model.metrics or ()} == logged.data.metrics
    assert {metric.dataset_digest for metric in model.metrics or ()} == {"val-one"}


@pytest.mark.parametrize(
    ("names", "tolerance", "expected"),
    [
        (("a-050", "b-060", "c-059", "d-060"), 0, ["1", "2", "4"]),  # worse stays candidate, and equal replaces
        (("a-070", "b-067", "c-068"), 2, ["1", "3"]),
    ],
)
def test_no_worse_one_becomes_champion(
    store: str, registry: Registry, tmp_path: Path, names: tuple[str, ...], tolerance: float, expected: list[str]
) -> None:
    said = [make_and_promote(store, tmp_path, name, tolerance_points=tolerance) for name in names]
    entries = AuditLog(registry.client, "m").read()
    assert [entry.number for entry in entries] == list(range(1, len(names) + 1))
    assert champions(entries) == expected
    wanted = {"candidate": str(len(names)), "champion": expected[-1]}
    assert expected_aliases(entries, registry.run_ids("m")) == registry.aliases("m") == wanted
    top1 = {str(number): float(name[-3:]) for number, name in enumerate(names, 1)}
    for before, entry in enumerate(entries[1:], 1):
        compared = entry.change.comparison
        assert compared.champion_version == champions(entries[:before])[-1]
        assert compared.champion_score_pct == top1[compared.champion_version]
        assert ("champion" in entry.change.changes) is compared.not_worse
    if not tolerance:
        assert said[2] == (
            "m version 3 registered in MLflow as @candidate: worse than the champion: top-1 59.00 % (INT8), champion "
            "version 2 60.00 % (INT8) on the same validation split of 100"
        )
        paired = comparison(tmp_path / "c-059").paired
        assert (paired.num_regressed, paired.num_improved, paired.mcnemar_p) == (1, 0, 1.0)


def test_changes_in_the_ui_of_logged_aliases_are_undone(three: str, registry: Registry, tmp_path: Path) -> None:
    registry.client.set_registered_model_alias("m", "champion", "1")
    registry.client.set_registered_model_alias("m", "staging", "2")
    make_and_promote(three, tmp_path, "d-055")  # better than version 1, and compared with version 3
    assert comparison(tmp_path / "d-055").champion_version == "3"
    assert registry.aliases("m") == {"candidate": "4", "champion": "3", "staging": "2"}


@pytest.mark.parametrize("way", ["changed in the store", "measured on other images, and nothing runs it"])
def test_a_champion_that_nothing_can_be_compared_with(store: str, registry: Registry, tmp_path: Path, way: str) -> None:
    make_and_promote(store, tmp_path, "a-050", split="one")
    changed = way.startswith("changed")
    if changed:
        with registry.files(registry.version("m", "1"), "report", "predictions.npz") as file:
            file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = make_and_promote(store, tmp_path, "b-060", split="one" if changed else "two")
    assert "as @candidate: it can't be compared with the champion, version 1:" in said
    assert (CHANGED in said) is changed
    assert "Promote again on a machine that can, or make it champion" in said
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}


@pytest.mark.parametrize(
    ("int8", "labels"),
    [
        (np.zeros((99, 2), np.int16), np.zeros(100, np.int32)),
        (np.zeros((101, 2), np.int16), np.zeros(101, np.int32)),  # than the report says
        (np.zeros(100, np.int16), np.zeros(100, np.int32)),
        (np.zeros((100, 2), np.float32), np.zeros(100, np.int32)),
        (np.zeros((100, 0), np.int16), np.zeros(100, np.int32)),
        (np.zeros((100, 2), np.int16), np.array(0)),
        (np.zeros((100, 1000), np.int32), np.zeros(100, np.int32)),  # more than 5 classes of 8 bytes
    ],
)
def test_predictions_of_another_shape(tmp_path: Path, int8: np.ndarray, labels: np.ndarray) -> None:
    paths = make_chain(tmp_path, 50)
    stream = io.BytesIO()
    np.savez_compressed(stream, int8=int8, labels=labels)
    report = replace_file(paths["report"], "predictions.npz", stream.getvalue())
    reseal(paths["verdict"], lambda record: record["inputs"].update(report=report))
    evaluation = load_evaluation(paths["report"], paths["verdict"])
    with refuses("predictions-damaged"):
        evaluation.measured("it")


def test_a_model_that_was_registered_before_there_was_a_log(store: str, registry: Registry, tmp_path: Path) -> None:
    registry.client.create_registered_model("m")
    registry.client.create_model_version("m", str(tmp_path / "elsewhere"))
    registry.client.set_registered_model_alias("m", "champion", "1")
    make_and_promote(store, tmp_path, "a-050")
    assert registry.aliases("m") == {"candidate": "2", "champion": "2"}


def test_a_model_that_was_deleted_and_made_again(three: str, registry: Registry, tmp_path: Path) -> None:
    """Its log stays, and says nothing of versions that have the same numbers."""
    registry.client.delete_registered_model("m")
    make_and_promote(three, tmp_path, "c-040")
    assert promotion(tmp_path / "c-040").why == "passed its gate, and there was no champion"
    assert registry.aliases("m") == {"candidate": "1", "champion": "1"}


# --- a champion of other images is measured again


@pytest.mark.parametrize(("reported", "becomes"), [(10.0, True), (9.0, False)])
def test_the_number_of_now_counts(
    store: str, registry: Registry, tmp_path: Path, digits_dataset: Dataset, reported: float, becomes: bool
) -> None:
    """The champion claims 99 % on other images; on these it has 10 %: it always says the same of ten classes."""
    old = make_chain(tmp_path / "old", 99.0, data=digits_dataset, favourite=3, split="other")
    register_forged(registry, old, "champion")
    new = make_chain(tmp_path / "new", reported, data=digits_dataset, favourite=4)
    said = promote_chain(store, new, tmp_path / "promotion")
    found = comparison(tmp_path)
    assert found.champion_score_pct == pytest.approx(10.0)
    assert found.measured_again == "openvino"
    assert (found.paired.num_regressed, found.paired.num_improved) == (12, 12)
    assert "(INT8, measured again with openvino) on the same validation split of 120" in said
    assert (registry.aliases("m")["champion"] == "2") is becomes


def test_other_classes_can_not_be_compared(store: str, registry: Registry, tmp_path, digits_dataset: Dataset) -> None:
    old = {"data": digits_dataset, "favourite": 3, "split": "other", "classes": ("a", "b", "c", "d")}
    register_forged(registry, make_chain(tmp_path / "old", 99.0, **old), "champion")
    promote_chain(store, make_chain(tmp_path / "new", 10.0, data=digits_dataset, favourite=4), tmp_path / "promotion")
    assert "its 4 classes are not the 10 of the dataset" in promotion(tmp_path).why
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}


# --- what is refused before anything is registered


@pytest.mark.parametrize(
    ("code", "chain", "changed"),
    [
        ("plans-not-measured", {"planned": ("int8.plan",), "measured": {"int8.onnx": "openvino"}}, ""),
        ("plans-not-measured", {"planned": ("int8.plan",), "measured": {"int8.plan": "openvino"}}, ""),
        ("plans-not-measured", {"planned": ("int8.plan",), "measured": {}}, ""),
        ("plans-not-measured", {"planned": ("fp16.plan", "int8.plan"), "measured": {"int8.plan": "tensorrt"}}, ""),
        ("gate-failed", {"passed": False}, ""),
        ("damaged-artifact", {}, "bundle/int8.onnx"),
        ("damaged-artifact", {}, "report/predictions.npz"),
        ("no-tracking-uri", {}, ""),
    ],
)
def test_what_is_not_promoted(tmp_path: Path, code: str, chain: dict[str, Any], changed: str) -> None:
    paths = make_chain(tmp_path / "a", 90, **chain)
    if changed:
        flip(tmp_path / "a" / changed)
    with refuses(code):
        step("promote", tmp_path / "promotion", **paths)
    assert not (tmp_path / "promotion").exists()


@pytest.mark.parametrize(("part", "code"), [("bundle", "other-bundle"), ("dataset", "other-dataset")])
def test_parts_of_another_chain(store: str, tmp_path: Path, part: str, code: str) -> None:
    paths, other = make_chain(tmp_path / "a", 50), make_chain(tmp_path / "b", 50, split="two")
    with refuses(code):
        promote_chain(store, {**paths, part: other[part]}, tmp_path / "promotion")


def test_measured_plans_are_promoted_and_say_what_they_run_on(store: str, registry: Registry, tmp_path: Path) -> None:
    paths = make_chain(tmp_path / "a", 90, planned=("int8.plan",), measured={"int8.plan": "tensorrt"})
    promote_chain(store, paths, tmp_path / "promotion")
    tags = registry.version("m", "1").tags
    assert (tags["gpu"], tags["tensorrt"]) == ("NVIDIA H200", "8.6.0")
    with registry.files(registry.version("m", "1"), "bundle", "int8.plan") as plan:
        flip(plan)
    with pytest.raises(EngineryError, match=f"int8.plan {CHANGED}"):  # a plan is code
        mlflow.pyfunc.load_model("models:/m/1")


def test_the_alias_of_every_new_version_is_not_champion() -> None:
    with refuses("invalid-setting"):
        resolve(PromoteConfig, "promote", {"alias": "champion"})


# --- names: two models never share one that nobody chose, and one that was chosen holds one model


@pytest.fixture
def promote(store: str, tmp_path: Path) -> Any:
    count = iter(range(9))

    def run_step(source: str, name: str = "", *, settings: Any = None, **model: Any) -> str:
        """Promote a model from a file, better than those before. Returns the closing line."""
        number = next(count)
        paths = make_chain(tmp_path / f"chain {number}", 70 + number, **model)
        output = tmp_path / f"promotion {number}"
        return promote_chain(store, paths, output, name, source=source, **(settings or {}))

    return run_step


TRAINED = {"training": TrainingRecord(history=(), config={}, metrics={}, environment=environment())}


def test_the_name_is_the_file_s_or_the_architecture_s(promote: Any, registry: Registry) -> None:
    for name, source, chosen, model in (
        ("shuffle-net-1-", "/models/shuffle net (1).onnx", "", {"architecture": "shuffle net (1)"}),
        ("best", "s3://bucket/best.pth", "", {}),
        ("timm-vit_tiny", "/runs/7/checkpoint", "", {"architecture": "timm/vit_tiny"}),
        ("resnet18", "", "", TRAINED),
        ("mine", "/models/best.onnx", "mine", {}),
    ):
        assert promote(source, chosen, **model).startswith(f"{name} version 1")
        assert registry.aliases(name)["champion"] == "1"


FILE: tuple[str, dict[str, Any]] = ("/a/resnet18.onnx", {})
ENGINES_OF_A_FILE: tuple[str, dict[str, Any]] = ("", {"digest": "a bundle of another machine"})
TRAINED_HERE: tuple[str, dict[str, Any]] = ("", {"digest": "trained", **TRAINED})


@pytest.mark.parametrize(
    ("name", "first", "other", "said"),
    [
        ("mine", FILE, ("/b/model.onnx", {"architecture": "vgg16"}), "architecture: resnet18 there, vgg16 here)"),
        ("mine", FILE, ("/a/model.onnx", {"classes": ("a", "c")}), "another class list)"),
        ("", FILE, ("/b/resnet18.onnx", {"digest": "other"}), "file: /a/resnet18.onnx there, /b/resnet18.onnx here)"),
        *(("", *two, "") for two in itertools.permutations([FILE, ENGINES_OF_A_FILE, TRAINED_HERE], 2)),
    ],
)
def test_another_model_is_refused(
    promote: Any, registry: Registry, name: str, first: Any, other: Any, said: str
) -> None:
    promote(first[0], name, **first[1])
    with refuses("name-taken", "registered_model", says=said):
        promote(other[0], name, **other[1])
    assert len(registry.versions(name or "resnet18")) == 1


def test_another_model_that_is_allowed_has_a_version_of_its_own_from_then_on(promote: Any) -> None:
    promote("/a/model.onnx", "mine")
    other = {"architecture": "vgg16", "classes": ("a", "c"), "digest": "other"}
    assert "champion" in promote("/b/model.onnx", "mine", settings={"allow_other_model": True}, **other)
    assert "version 3" in promote("/b/model.onnx", "mine", **other)
    assert "version 4" in promote("/a/model.onnx", "mine")


def test_engines_built_again_open_no_name_to_another_source(promote: Any, registry: Registry) -> None:
    """Their version joins by the digest of the bundle, and names no source of its own."""
    promote("/a/resnet18.onnx")
    built = registry.versions("resnet18")[0].tags["bundle_digest"]
    assert "resnet18 version 2" in promote("", digest=built)
    with refuses("name-taken", "registered_model"):
        promote("", digest="trained", **TRAINED)
    assert "resnet18 version 3" in promote("", digest=built)


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("", FILE, [("/moved/resnet18.onnx", {}), ("/a/resnet18.onnx", {"split": "two"})]),
        ("", FILE, [("/a/resnet18.onnx", {"digest": "trained again"})]),
        ("", TRAINED_HERE, [("", {"digest": "a bundle of another machine", **TRAINED})]),
        ("mine", FILE, [("/b/model.onnx", {"digest": "other"})]),
    ],
)
def test_the_same_model_is_a_new_version(promote: Any, name: str, first: Any, others: list[tuple[str, Any]]) -> None:
    promote(first[0], name, **first[1])
    for version, (source, model) in enumerate(others, 2):
        assert f"{name or 'resnet18'} version {version} registered" in promote(source, name, **model)
