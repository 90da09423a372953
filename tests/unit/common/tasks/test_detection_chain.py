"""The chain on images with boxes: from shards to a verdict on INT8 by mAP, and the boxes that it answers with."""

import io
import json
from pathlib import Path

import mlflow
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from components.common.contracts.manifests import (
    BundleManifest,
    CheckpointManifest,
    ReportManifest,
    VerdictManifest,
    load,
)
from components.common.runtimes.architectures import build_model
from components.common.tasks.answers import View, answers_of
from components.common.tasks.detection.boxes import MAX_CANDIDATES
from components.export.quantization import ArithmeticSearch, first_arithmetic
from components.promote.pyfunc import BundleModel
from enginery.datasets.shapes import CLASSES
from tests.steps import step
from tests.unit.onnx_outputs import check_candidates
from tests.unit.registered import enginery
from tests.unit.shapes import THRESHOLDS, Chain


@pytest.fixture
def chain(detection_chain: Chain) -> Chain:
    return detection_chain


def test_the_report_is_on_map(chain: Chain, tmp_path: Path) -> None:
    checkpoint = load(chain.checkpoint, CheckpointManifest).manifest
    assert (checkpoint.task, checkpoint.score_name) == ("detection", "mAP")
    assert checkpoint.classes == CLASSES[1:]
    assert checkpoint.history[-1].train_loss < checkpoint.history[0].train_loss
    accuracy = load(chain.report, ReportManifest).manifest.accuracy
    fp32, int8 = accuracy.row("fp32"), accuracy.row("int8")
    assert fp32.num_images == int8.num_images == 48
    assert fp32.score50_pct >= fp32.score_pct
    assert fp32.score_pct == pytest.approx(checkpoint.metrics["val_score_pct"], abs=1.0)  # of PyTorch, in training
    compared = int8.comparison
    assert compared.mcnemar_test == "bootstrap"
    page, card = (chain.report / "report.html").read_text(), (chain.report / "model_card.md").read_text()
    assert len(fp32.precision_by_recall_pct) == 101
    assert np.mean(fp32.precision_by_recall_pct) == pytest.approx(fp32.score50_pct, abs=0.01)
    assert ">recall in %<" in page
    for text in (page, card):
        assert "Finding objects of 5 classes" in text
        for wrong in ("top-1", "top-5", "ECE", "McNemar", "right on", "mIoU"):
            assert wrong not in text, wrong


def test_the_gate_judges_map_and_a_release_answers_with_boxes(chain: Chain, tmp_path: Path) -> None:
    step("gate", tmp_path / "verdict", THRESHOLDS, report=chain.report)
    assert "mAP drop" in load(tmp_path / "verdict", VerdictManifest).manifest.checks[0].explanation
    parts = {"bundle": chain.bundle, "report": chain.report, "verdict": tmp_path / "verdict"}
    enginery("release", tmp_path / "out", *(word for name, path in parts.items() for word in (f"--{name}", path)))
    subject = json.loads((tmp_path / "out" / "inputs.cdx.json").read_text())["metadata"]["component"]
    assert subject["modelCard"]["modelParameters"]["task"] == "detection"
    model = mlflow.pyfunc.load_model(str(tmp_path / "out"))
    found = model.predict(sorted((chain.data / "val" / "images").iterdir())[:2])
    assert list(found.columns) == ["classes", "labels", "scores", "boxes"]


def test_boxes_are_in_pixels_of_the_image_that_was_sent(chain: Chain, tmp_path: Path) -> None:
    plain = sorted((chain.data / "val" / "images").iterdir())[0]
    image = Image.open(plain).convert("RGB")
    wide, encoded = Image.new("RGB", (192, 128)), io.BytesIO()
    wide.paste(image.resize((128, 128), Image.Resampling.NEAREST), (32, 0))  # twice as large, in the middle
    wide.save(encoded, "PNG")
    model = BundleModel(load(chain.bundle, BundleManifest), "fp32", "auto")
    found = model.predict([plain.read_bytes(), encoded.getvalue()])
    assert list(found.columns) == ["classes", "labels", "scores", "boxes"]
    answers = answers_of("detection")
    output = np.full((1, 8 + 5), -9.0, np.float32)
    output[0, :8] = 10, 20, 30, 40, 0.5, 0.5, 0.5, 0.5  # an anchor that is its object
    output[0, 9] = 3.0
    transform = load(chain.bundle, BundleManifest).manifest.transform
    said = answers.answer(output, CLASSES[1:], View.of((192, 128), transform))
    assert said == {"classes": ["square"], "labels": [1], "scores": [0.952574], "boxes": [[52.0, 40.0, 92.0, 80.0]]}
    assert answers.summary(said) == "square 0.95"
    picture = np.asarray(answers.drawn(wide, said))
    assert not np.array_equal(picture[40, 52:92], np.asarray(wide)[40, 52:92])
    assert np.array_equal(picture[81:], np.asarray(wide)[81:])


def test_inspect_lists_objects(chain: Chain, tmp_path: Path) -> None:
    file = str(sorted((chain.data / "val" / "images").iterdir())[0])
    options = ["--bundle", str(chain.bundle), "--output", str(tmp_path / "picture.png"), "--json"]
    fp32, fp16, int8 = json.loads(enginery("inspect", file, *options).output)["results"]
    assert {"classes", "labels", "scores", "boxes"} <= fp32.keys() & int8.keys()
    assert fp16["runtime"] == "n/a"


def test_a_detector_on_a_backbone_of_timm_becomes_int8(chain: Chain, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ArithmeticSearch, "choose", lambda search: first_arithmetic(search.fp32))  # of files for CPUs
    architecture = "detection/retinanet_fpn/timm/mobilenetv3_small_050"
    torch.manual_seed(0)
    network = build_model(architecture, len(CLASSES) - 1).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    settings = {"architecture": architecture, "image_size": 96, "resize_ratio": 1.0, "tensorrt": "off"}
    settings |= {"num_ranking_images": 0, "mixed_engines": 0, "num_calibration_images": 16}
    step("export", tmp_path / "bundle", settings, model=tmp_path / "weights.safetensors", dataset=chain.dataset)
    images = np.random.default_rng(0).normal(size=(2, 3, 96, 96)).astype(np.float32)
    with torch.no_grad():
        every = network(torch.from_numpy(images)).numpy()
    files = sorted((tmp_path / "bundle").glob("*.onnx"))
    assert len(files) == 6
    for file in files:
        model = onnx.load(file)
        model.graph.output.append(onnx.ValueInfoProto(name="logits.all"))
        kept, own = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"images": images})
        assert kept.shape == (2, MAX_CANDIDATES, 8 + 5)
        check_candidates(kept, own, 0)
        if file.name == "fp32.onnx":
            np.testing.assert_allclose(own, every, rtol=0, atol=1e-3)
        assert np.corrcoef(own[..., 8:].ravel(), every[..., 8:].ravel())[0, 1] > 0.9
    nodes = onnx.load(tmp_path / "bundle" / "int8.onnx").graph.node
    dequantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    quantized = [node for node in convolutions if set(node.input[:2]) <= dequantized]
    assert len(quantized) > 0.9 * len(convolutions) > 40
