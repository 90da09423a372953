"""Classes against FP32, and two that are swapped in the INT8 graph: the real steps catch and name both."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from components.common.contracts.errors import GateFailed
from components.common.contracts.manifests import BundleManifest, VerdictManifest, load
from components.common.data.evaluation import ClassPredictions
from components.validate.report import _confusion, change, class_changes, class_losses
from components.validate.run import _undefined_note
from components.validate.schema import Report
from tests.conftest import Dataset
from tests.steps import step
from tests.unit.conftest import Proved
from tests.unit.measurements import predictions
from tests.unit.registered import replace_file

GATE: dict[str, Any] = {"max_drop_points": 9.0, "min_relative_score_pct": 90.0, "max_class_drop_points": 30.0}


CLASSES = ("ant", "bee", "cat", "dog")


def test_classes_against_fp32_counted() -> None:
    """6 of 6 lost is p = 2 / 2^6, times the 2 classes that differ; 1 gained is p = 1."""
    fp32 = predictions({"ant": [True] * 10, "bee": [True] * 10, "cat": [False, True], "dog": [True]})
    own = predictions({"ant": [True] * 10, "bee": [True] * 4 + [False] * 6, "cat": [True, True], "dog": [True]})
    changes = {entry.name: entry for entry in class_changes(CLASSES, fp32, own)}
    assert list(changes) == ["bee", "ant", "dog", "cat"]
    bee = changes["bee"]
    assert (bee.num_regressed, bee.num_improved, bee.delta_points, bee.significant) == (6, 0, -60.0, False)
    assert bee.p_corrected == pytest.approx(2 * 2 / 64)
    assert (changes["cat"].num_improved, changes["cat"].p_corrected, changes["dog"].p_corrected) == (1, 1.0, 1.0)
    worse, largest = class_losses(tuple(changes.values()))
    assert worse == ()
    assert largest.name == "bee"
    found = change(fp32, own)
    assert (found.num_images, found.num_regressed, found.num_improved, found.num_differing) == (23, 6, 1, 7)
    assert found.delta_points == pytest.approx(-500 / 23)


def test_a_class_that_gets_better_is_no_loss() -> None:
    right, wrong = ({"ant": [value] * 100, "bee": [True] * 100} for value in (True, False))
    changes = class_changes(CLASSES[:2], predictions(wrong), predictions(right))
    assert [(entry.name, entry.significant) for entry in changes] == [("bee", False), ("ant", True)]
    assert class_losses(changes) == ((), None)
    worse, largest = class_losses(class_changes(CLASSES[:2], predictions(right), predictions(wrong)))
    assert worse == (largest,)


def test_images_without_a_prediction_are_confused_with_nothing() -> None:
    labels = np.array([0, 0, 1, 2], np.int32)
    fp32 = ClassPredictions(top=labels[:, None].astype(np.int16), labels=labels)
    own = ClassPredictions(top=np.array([[0], [-1], [-1], [1]], np.int16), labels=labels)
    found = _confusion(("a", "b", "c"), fp32, own, {})
    assert found.matrix == ((1, 0, 0), (0, 0, 0), (0, 1, 0))
    pairs = [(pair.label, pair.predicted, pair.num_images) for pair in found.pairs]
    assert pairs == [("a", "nothing (NaN or infinity)", 1), ("b", "nothing (NaN or infinity)", 1), ("c", "b", 1)]
    assert _undefined_note(own) == "the logits of 2 of 4 images hold NaN or infinity, which counts as wrong"
    assert _undefined_note(fp32) == ""


def swap(source: Path, output: Path, first: int, second: int) -> Path:
    """The bundle, sealed again, with two rows of the last layer of all INT8 files exchanged: weights, scales, bias."""
    shutil.copytree(source, output)
    manifest = load(source, BundleManifest).manifest
    names = {manifest.models["int8"], manifest.models["int8_fp16"], *(entry.file for entry in manifest.cpu_models)}
    for file in (output / name for name in names):
        model = onnx.load(file)
        rows = {tensor.name: tensor for tensor in model.graph.initializer if tensor.dims[:1] == [10]}
        assert rows, "the last layer has its classes in rows"
        order = np.arange(10)
        order[[first, second]] = second, first
        for tensor in rows.values():
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[order], tensor.name))
        replace_file(output, file.name, model.SerializeToString())
    return output


def judge(bundle: Path, dataset: Path, output: Path) -> tuple[Report, VerdictManifest, str]:
    """The steps validate and gate. The text is what the gate says, passed or not."""
    fast = {"benchmark_seconds": 0.02, "benchmark_warmup_seconds": 0.0, "benchmark_batch_sizes": (1,)}
    settings = {**fast, "runtime": "openvino", "gate": GATE}
    step("validate", output / "report", settings, bundle=bundle, dataset=dataset)
    try:
        said = step("gate", output / "verdict", GATE, report=output / "report")
    except GateFailed as error:
        said = str(error)
    report = Report.model_validate_json((output / "report" / "report.json").read_bytes())
    return report, load(output / "verdict", VerdictManifest).manifest, said


def test_swapped_classes_are_caught_and_named(proved: Proved, digits_dataset: Dataset, tmp_path: Path) -> None:
    bundle = proved.parts["bundle"]
    report, verdict, said = judge(bundle, digits_dataset.path, tmp_path / "as exported")
    assert verdict.passed, said
    assert report.accuracy.row("int8").worse_classes == ()
    # The two classes that the model knows best, so that the swap and nothing else is seen.
    best = sorted(report.class_changes, key=lambda entry: -entry.own_pct)[:2]
    names = sorted(entry.name for entry in best)
    assert min(entry.own_pct for entry in best) > 60
    first, second = (report.model.classes.index(name) for name in names)

    swapped = swap(bundle, tmp_path / "swapped", first, second)
    report, verdict, said = judge(swapped, digits_dataset.path, tmp_path / "judged")
    assert not verdict.passed
    checks = {check.name: check for check in verdict.checks}
    assert (checks["drop_points"].verdict, checks["class_drop_points"].verdict) == ("fail", "fail")
    assert "significantly worse: " in said
    assert all(f"{name} by " in checks["class_drop_points"].explanation for name in names)
    assert checks["class_drop_points"].explanation in said
    assert tuple(verdict.checks) == report.verdict.checks
    assert verdict.recommendation is None
    row = report.accuracy.row("int8")
    assert sorted(entry.name for entry in row.worse_classes) == names
    assert all(entry.p_corrected < 0.05 and entry.num_images == 12 for entry in row.worse_classes)
    assert row.comparison.mcnemar_p < 1e-4
    assert row.comparison.drop_lower_points > 5
    # What they are taken for now, and that the report says so.
    pairs = {(pair.label, pair.predicted) for pair in report.confusion.pairs[:2]}
    assert pairs == {(names[0], names[1]), (names[1], names[0])}
    page = (tmp_path / "judged" / "report" / "report.html").read_text(encoding="utf-8")
    assert "INT8 is significantly worse than FP32 on 2 classes" in page
