"""Anchors that an exported detector returns: `detect` finds in them what it finds in all."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import Runner
from components.common.runtimes.torch import TorchRunner
from components.common.tasks.detection.boxes import MAX_CANDIDATES, detect
from components.common.tasks.detection.candidates import keep_candidates
from components.common.tasks.detection.networks import FcosSmall
from components.export.onnx_export import export_onnx
from components.export.precision import raise_opset, to_fp16

from ...networks import onnx_model
from ...onnx_outputs import check_candidates
from .test_boxes import output

SHAPES = ShapeSpec(height=288, width=288)
NUM_ANCHORS = 36 * 36 + 18 * 18 + 9 * 9


@pytest.mark.parametrize("runner", [OnnxRuntimeRunner, OpenVINORunner, TorchRunner])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16 at opset 19"])
def test_a_file_returns_the_surest_anchors_in_their_order(runner: type[Runner], precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = FcosSmall(3).eval()
    torch.nn.init.normal_(network.heads[0].logits.weight, std=0.1)
    export_onnx(network, tmp_path / "model.onnx", SHAPES)
    model = onnx.load(tmp_path / "model.onnx")
    kept = keep_candidates(model if precision == "fp32" else to_fp16(model))
    onnx.checker.check_model(kept, full_check=True)
    onnx.save(raise_opset(kept) if "19" in precision else kept, tmp_path / "kept.onnx")
    (result,) = kept.graph.output
    sizes = [axis.dim_param or axis.dim_value for axis in result.type.tensor_type.shape.dim]
    assert (result.name, sizes) == ("logits", ["batch", MAX_CANDIDATES, 8 + 3])  # a server is configured with them
    images = np.random.default_rng(0).normal(size=(3, 3, 288, 288)).astype(np.float32)
    with torch.no_grad():
        every = network(torch.from_numpy(images)).numpy()
    assert every.shape[1] == NUM_ANCHORS
    opened = runner(tmp_path / "kept.onnx", SHAPES)
    check_candidates(opened.infer(images), every, 1e-3 if precision == "fp32" else 0.05)
    opened.close()


@pytest.mark.parametrize("steps", [None, 8])  # of logits: with 8 in one, hundreds share the last place
@pytest.mark.parametrize("min_score", [0.05, 0.6])  # more pairs than candidates, and fewer
def test_the_same_boxes_are_found(steps: int | None, min_score: float) -> None:
    every = np.stack([output(seed, 3000) for seed in range(3)])
    if steps:
        every[..., 8:] = np.round(every[..., 8:] * steps) / steps
    every[2] = np.nan
    shape = ["batch", *every.shape[1:]]
    model = onnx_model([helper.make_node("Identity", ["outputs"], ["logits"])], {"outputs": shape}, {"logits": shape})
    session = onnxruntime.InferenceSession(keep_candidates(model).SerializeToString())
    (kept,) = session.run(None, {"outputs": every})
    assert kept.shape == (3, MAX_CANDIDATES, 8 + 3)
    assert np.isnan(kept[2]).all()
    for own, others in zip(kept[:2], every[:2], strict=True):
        found, expected = (detect(each, min_score=min_score) for each in (own, others))
        assert len(expected) > 50
        np.testing.assert_array_equal(found.boxes, expected.boxes)
        np.testing.assert_array_equal(found.scores, expected.scores)
        np.testing.assert_array_equal(found.classes, expected.classes)
