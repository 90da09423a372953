"""The chain on images with masks, step by step: from shards to a verdict on INT8, and who refuses the bundle."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import (
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    ReportManifest,
    load,
)
from components.common.runtimes.selection import select_runtime
from components.common.tasks.segmentation.answers import mask_of
from components.export.sources import check_model
from components.promote.packaging import write_model
from components.validate.inspect import inspect, load_input
from enginery.datasets.shapes import CLASSES
from tests.steps import step
from tests.unit.refusals import refuses
from tests.unit.registered import enginery
from tests.unit.shapes import Chain


@pytest.fixture
def chain(segmentation_chain: Chain) -> Chain:
    return segmentation_chain


def test_every_artifact_says_what_it_is_of(chain: Chain) -> None:
    for name, kind in (("dataset", DatasetManifest), ("checkpoint", CheckpointManifest), ("bundle", BundleManifest)):
        assert load(chain.folder / name, kind).manifest.task == "segmentation", name
    checkpoint = load(chain.checkpoint, CheckpointManifest).manifest
    assert checkpoint.classes == CLASSES
    assert (checkpoint.task, checkpoint.score_name) == ("segmentation", "mIoU")
    assert checkpoint.history[-1].train_loss < checkpoint.history[0].train_loss


def test_the_report_is_on_miou_with_a_bootstrap_interval(chain: Chain) -> None:
    accuracy = load(chain.report, ReportManifest).manifest.accuracy
    assert accuracy.score_name == "mIoU"
    fp32, int8 = accuracy.row("fp32"), accuracy.row("int8")
    assert fp32.num_images == int8.num_images == 48
    checkpoint = load(chain.checkpoint, CheckpointManifest).manifest
    assert fp32.score_pct == pytest.approx(checkpoint.metrics["val_score_pct"], abs=0.5)  # of PyTorch, in training
    compared = int8.comparison
    assert compared.mcnemar_test == "bootstrap"
    assert compared.drop_lower_points <= -compared.delta_points <= compared.drop_upper_points
    assert int8.top5_pct is int8.ece_pct is None
    assert len(int8.corrupted) == 15
    assert accuracy.most_frequent_class == "background"
    pixels = np.load(chain.report / "predictions.npz")["int8"]  # from which the score follows
    right, predicted, labelled = pixels.sum(axis=0, dtype=np.int64).T
    assert 100 * np.mean(right / (predicted + labelled - right)) == pytest.approx(int8.score_pct)


def test_the_page_speaks_of_pixels_and_shows_masks(chain: Chain) -> None:
    page, card = ((chain.report / "report.html").read_text(), (chain.report / "model_card.md").read_text())
    report = json.loads((chain.report / "report.json").read_text())
    assert page.count("<img ") == len(report["disagreements"]) > 0
    for text in (page, card):
        assert "mIoU %" in text
        assert "Giving each pixel of an image one of 6 classes" in text
        for wrong in ("top-1", "top-5", "ECE", "McNemar", "right on"):
            assert wrong not in text, wrong
    assert "the image, the label, FP32, INT8" in page
    assert report["confusion"] is None
    assert {entry["name"] for entry in report["class_changes"]} == set(CLASSES)


def test_maps_of_layers_are_of_classifiers(chain: Chain) -> None:
    with refuses("other-task"):
        inspect(load(chain.bundle, BundleManifest), [])


def sent_images(chain: Chain, tmp_path: Path) -> list[Path]:
    """One as it is, one wider, one turned by its EXIF data."""
    plain = sorted((chain.data / "val" / "images").iterdir())[0]
    wide, turned = tmp_path / "wide.png", tmp_path / "turned.jpg"
    image = Image.open(plain)
    whole = Image.new("RGB", (128, 64))
    whole.paste(image, (32, 0))
    whole.save(wide)
    exif = whole.getexif()
    exif[0x0112] = 6
    whole.save(turned, exif=exif)
    return [plain, wide, turned]


def test_the_python_model_answers_with_masks(chain: Chain, tmp_path: Path) -> None:
    files = sent_images(chain, tmp_path)
    write_model(load(chain.bundle, BundleManifest), "int8", tmp_path / "model")
    shutil.copytree(chain.bundle, tmp_path / "model" / "bundle")
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    found = model.predict([file.read_bytes() for file in files])
    assert list(found.columns) == [entry.name for entry in model.metadata.get_output_schema().inputs]
    plain, wide, turned = (row for _, row in found.iterrows())
    assert (plain.region, wide.region, turned.region) == ([0, 0, 64, 64], [32, 0, 96, 64], [0, 32, 64, 96])
    assert wide["mask"] == plain["mask"]  # of the same square
    mask = mask_of(plain)
    assert mask.shape == (64, 64)
    by_share = [CLASSES[index] for index in np.argsort(-np.bincount(mask.ravel()), kind="stable")]
    assert plain.classes == by_share[: len(plain.classes)]
    assert sum(plain.shares) == pytest.approx(1, abs=1e-5)
    runner = select_runtime(load(chain.bundle, BundleManifest), "int8", "auto").runner
    transform = load(chain.bundle, BundleManifest).manifest.transform
    assert np.array_equal(mask, runner.infer(load_input(files[0], transform))[0].argmax(axis=0))
    runner.close()


def test_inspect_shows_masks_of_every_precision(chain: Chain, tmp_path: Path) -> None:
    files, output = [str(file) for file in sent_images(chain, tmp_path)], tmp_path / "picture.png"
    options = ["--bundle", str(chain.bundle), "--output", str(output)]
    results = json.loads(enginery("inspect", *files, *options, "--json").output)["results"]
    assert [entry["precision"] for entry in results] == 3 * ["fp32", "fp16", "int8"]
    assert {len(entry.get("mask", "")) > 100 for entry in results if entry["precision"] != "fp16"} == {True}
    width, height = Image.open(output).size
    assert (width, height) == (3 * 328 + 8, 3 * 344 + 8)
    assert "background" in enginery("inspect", *files, *options).output
    with refuses("other-task"):
        enginery("inspect", *files, *options, "--layers", "conv")


def test_steps_refuse_what_is_of_another_task(chain: Chain, tmp_path: Path, digits_dataset: SimpleNamespace) -> None:
    with refuses("other-task"):
        step("train", tmp_path / "checkpoint", {"architecture": "resnet18"}, dataset=chain.dataset)
    off = {"tensorrt": "off"}
    with refuses("other-task"):
        step("export", tmp_path / "bundle", off, model=chain.checkpoint, dataset=digits_dataset.path)
    for model in (chain.checkpoint, chain.bundle, chain.bundle / "fp32.onnx"):  # before a run
        with refuses("other-task"):
            check_model(model, "", None, 64)
    with refuses("other-task"):
        enginery("predict", chain.bundle, sent_images(chain, tmp_path)[0])
    with refuses("other-task"):  # own ONNX files are classifiers
        step("export", tmp_path / "own", off, model=chain.bundle / "fp32.onnx", dataset=chain.dataset)
