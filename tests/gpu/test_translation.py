"""Translators as plans translate as their ONNX files do, by graphs, too. Fails, never skips, without TensorRT."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from components.common.contracts.records import Precision
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.common.runtimes.tensorrt import why_unavailable
from components.common.tasks.translation.gpu import GpuNetwork
from components.common.tasks.translation.runners import ENCODER, open_plans
from components.common.tasks.translation.search import padded, search
from components.common.tasks.translation.vocabulary import EOS
from components.export.config import ExportConfig
from components.export.translation import OnnxNetwork, _graphs, _PlanBuilder, teacher_forced
from tests.unit.refusals import refuses

NUM_TOKENS, MAX_TOKENS = 300, 24
SOURCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, EOS], [5, EOS], [7, 7, 7, EOS]]
TARGETS = [[9, 8, EOS], [4, 5, 6, 7, EOS], [EOS]]


@pytest.mark.parametrize(
    ("architecture", "precision", "form"),
    [
        ("transformer_small", "fp32", 0),
        ("transformer_small", "fp16", 0),
        ("transformer_small", "fp16", 1),
        ("lstm_small", "fp32", 0),
        ("lstm_small", "fp16", 0),
    ],
)
def test_plans_translate_as_their_files(architecture: str, precision: Precision, form: int, tmp_path: Path) -> None:
    assert why_unavailable() is None
    torch.manual_seed(0)
    network = build_model(f"translation/{architecture}", NUM_TOKENS)
    graphs = _graphs(network)
    config = resolve(ExportConfig, "export", {"max_batch": 8, "optimization_level": 1})
    builder = _PlanBuilder.of(config, StepLog("export"), network, MAX_TOKENS, SOURCES)
    builder.forms = builder.forms[form:]
    files = [tmp_path / f"{name.format(precision)}.onnx" for name in (ENCODER, "{}")]
    for graph, file in zip(graphs, files, strict=True):
        onnx.save(graph, file)
    entries = builder.build(graphs, files, precision)
    plans = open_plans([file.with_suffix(".plan") for file in files], entries, MAX_TOKENS)
    assert isinstance(plans, GpuNetwork)
    assert plans.step_graph.inputs["state"] == (torch.float32 if precision == "fp32" else torch.float16)
    expected = np.concatenate(list(teacher_forced(OnnxNetwork(graphs), SOURCES, TARGETS)))
    logits = np.concatenate(list(teacher_forced(plans, SOURCES, TARGETS)))
    tolerance = {"fp32": 1e-3, "fp16": 2e-2}[precision]
    np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max())
    outside = SimpleNamespace(encode=plans.encode, step=plans.step)  # step by step, without graphs
    for beam_size in (1, 2):
        expected = [translated(outside, own, beam_size) for own in (SOURCES, SOURCES[1:])]
        for _ in range(3):  # graphs of several sizes by turns
            assert [translated(plans, own, beam_size) for own in (SOURCES, SOURCES[1:])] == expected
        if precision == "fp32":
            assert expected[0] == translated(OnnxNetwork(graphs), SOURCES, beam_size)
    # The encoder of an LSTM is a loop, which 8.6 does not capture, as profiles of several sizes.
    assert plans.uncapturable <= ({"encoder", "step"} if form else {"encoder"} if "lstm" in architecture else set())
    with refuses("wrong-batches"):
        translated(plans, SOURCES * 3, 1)


def translated(network: Any, sources: list[list[int]], beam_size: int) -> list[list[int]]:
    return search(network, padded(sources), beam_size=beam_size, max_tokens=MAX_TOKENS)
