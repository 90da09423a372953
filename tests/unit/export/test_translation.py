"""Translators as ONNX: both graphs compute what torch does, also in OpenVINO and INT8; the worst layers are found."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import BundleManifest, CheckpointManifest, DatasetManifest, load
from components.common.contracts.records import EngineEntry, LayerCost, Precision
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.common.runtimes.architectures import build_model, load_weights
from components.common.tasks.translation.runners import OpenVinoNetwork, Translator
from components.common.tasks.translation.search import padded, search
from components.common.tasks.translation.vocabulary import EOS, Vocabulary, train_vocabulary
from components.export import translation
from components.export.config import ExportConfig
from components.export.engines import Tensors
from components.export.placement import quantizable_layers
from components.export.selection import Budget
from components.export.translation import (
    Graphs,
    OnnxNetwork,
    _costliest,
    _graphs,
    _in_fp16,
    _PlanBuilder,
    _Search,
    _split,
    teacher_forced,
)
from enginery.datasets.phrases import phrase_pair
from tests.unit.measurements import engine_entry
from tests.unit.refusals import refuses
from tests.unit.shapes import Chain

NUM_TOKENS = 400
SOURCES = [[5, 6, 7, 8, 9, EOS], [5, EOS], [7, 7, 7, EOS]]
TARGETS = [[9, 8, EOS], [4, 5, 6, 7, EOS], [EOS]]
BUDGET = Budget(max_drop_points=0.5, min_relative_score_pct=99)


@pytest.fixture(scope="module", params=["transformer_small", "lstm_small"])
def graphs(request: pytest.FixtureRequest) -> Graphs:
    torch.manual_seed(0)
    return _graphs(build_model(f"translation/{request.param}", NUM_TOKENS))


def in_openvino(graphs: Graphs, folder: Path) -> OpenVinoNetwork:
    for graph, name in zip(graphs, ("encoder.onnx", "step.onnx"), strict=True):
        onnx.save(graph, folder / name)
    return OpenVinoNetwork(folder / "encoder.onnx", folder / "step.onnx")


def quantizer(graphs: Graphs, vocabulary: Vocabulary | None = None) -> _Search:
    config = resolve(ExportConfig, "export", {})
    made = {"vocabulary": vocabulary, "translator": partial(dict), "language": "de", "budget": BUDGET}
    return _Search(config=config, log=StepLog("test"), fp32=graphs, **made)


def logits(network: OnnxNetwork | OpenVinoNetwork) -> np.ndarray:
    return np.concatenate(list(teacher_forced(network, SOURCES, TARGETS)))


def test_any_batch_and_length_in_both_runtimes(graphs: Graphs, tmp_path: Path) -> None:
    expected = logits(OnnxNetwork(graphs))
    assert expected.shape == (3 + 2 + 2 + 1 + 1, NUM_TOKENS)
    np.testing.assert_allclose(logits(in_openvino(graphs, tmp_path)), expected, atol=1e-4)
    for beam_size in (1, 4):
        found = [
            search(network, padded(SOURCES), beam_size=beam_size, max_tokens=9)
            for network in (OnnxNetwork(graphs), in_openvino(graphs, tmp_path))
        ]
        assert found[0] == found[1]


def test_fp16_in_openvino_which_serves_it_where_plans_need_a_gpu(graphs: Graphs, tmp_path: Path) -> None:
    expected = logits(OnnxNetwork(graphs))
    found = logits(in_openvino(_in_fp16(graphs), tmp_path))
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


def test_int8_in_openvino_is_what_the_file_says(graphs: Graphs, tmp_path: Path) -> None:
    quantized = quantizer(graphs)
    observed = quantized._histograms(SOURCES, TARGETS)
    scales = {name: max(each.max_abs, 1e-6) / 127 for own in observed for name, each in own.items()}
    int8 = quantized._int8(scales, ())
    num_layers = sum(len(quantizable_layers(graph)) for graph in graphs)
    codes = [node for graph in int8 for node in graph.graph.node if node.op_type == "DequantizeLinear"]
    assert len(codes) > num_layers > 4  # weights and activations
    expected = logits(OnnxNetwork(int8))
    error = np.abs(expected - logits(OnnxNetwork(graphs))).max() / np.abs(expected).max()
    assert 0 < error < 0.1
    np.testing.assert_allclose(logits(in_openvino(int8, tmp_path)), expected, atol=0.02 * np.abs(expected).max())


def test_the_layer_that_suffers_is_ranked_first(graphs: Graphs, tmp_path: Path) -> None:
    pairs = list({phrase_pair(np.random.default_rng(seed)) for seed in range(60)})
    train_vocabulary((line for pair in pairs for line in pair), NUM_TOKENS, tmp_path / "vocabulary.model")
    quantized = quantizer(graphs, Vocabulary.read(tmp_path / "vocabulary.model"))
    encode = quantized.vocabulary.encode
    observed = quantized._histograms(*(encode([pair[side] for pair in pairs[:8]]) for side in (0, 1)))
    scales = {name: max(each.max_abs, 1e-6) / 127 for own in observed for name, each in own.items()}
    layer = quantizable_layers(graphs[1])[-1]
    (read,) = [node.input[0] for node in graphs[1].graph.node if node.name == layer]
    ranking = quantized._ranking({**scales, read: 1e-7}, pairs[:4])
    assert ranking[0].name == layer
    assert len(ranking) == sum(len(quantizable_layers(graph)) for graph in graphs)


def test_layers_leave_int8_until_the_others_cost_little() -> None:
    costs = {"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 1.0}
    ranking = [LayerCost(name=name, operator="MatMul", cost_nats=cost) for name, cost in costs.items()]
    assert list(map("".join, _costliest(ranking, 0.5))) == ["a", "ab", "abc", "abcd"]
    assert next(_costliest(ranking, 0.13)) == ("a", "b", "c")
    assert next(_costliest(ranking, 0.0)) == tuple("abcde")


@pytest.mark.parametrize(
    ("opt_batch", "max_batch", "fixed", "others"),
    [(4, 8, [8, 4, 1], (2, 4, 8)), (8, 8, [8, 1], (2, 8, 8)), (1, 8, [8, 1], (2, 2, 8)), (1, 1, [1], None)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_profile_takes_one_number_of_sentences_where_that_builds(
    graphs: Graphs, monkeypatch, tmp_path: Path, opt_batch: int, max_batch: int, fixed, others, fails: bool
) -> None:
    tried = []

    def build(file: Path, plan: Path, *, shapes: Tensors, precision: Precision, **_: Any) -> EngineEntry:
        batches = [profile["tokens" if file.name == "int8.onnx" else "source"] for profile in shapes.profiles]
        tried.append((file.name, [tuple(limit[0] for limit in limits) for limits in batches]))
        if fails and len(tried) == 1:
            raise EngineryError(f"TensorRT can't build {file}", code="build-failed")
        return engine_entry(precision, file=plan.name)

    monkeypatch.setattr(tensorrt, "why_unavailable", lambda: None)
    monkeypatch.setattr(translation, "check_options", lambda options: None)
    monkeypatch.setattr(translation, "is_strongly_typed", lambda: False)
    monkeypatch.setattr(translation, "build_engine", build)
    config = resolve(ExportConfig, "export", {"opt_batch": opt_batch, "max_batch": max_batch})
    network = build_model("translation/transformer_small", NUM_TOKENS)
    builder = _PlanBuilder.of(config, StepLog("test"), network, 24, SOURCES)
    files, each = [tmp_path / "int8_encoder.onnx", tmp_path / "int8.onnx"], [(batch, batch, batch) for batch in fixed]
    if fails and others is None:
        with refuses("build-failed"):
            builder.build(graphs, files, "int8")
        return
    step, encoder = builder.build(graphs, files, "int8")
    retried = [("int8.onnx", [others, (1, 1, 1)])] if fails else []
    assert tried == [("int8.onnx", each), *retried, ("int8_encoder.onnx", each)]
    assert [step.weights, encoder.weights] == ["qdq", "qdq"]
    assert [len(step.failed_forms), len(encoder.failed_forms)] == [int(fails), 0]
    assert not any(str(tmp_path) in form for form in step.failed_forms)


def test_candidates_of_plans_are_judged_by_what_their_file_says(translator: Chain) -> None:
    data, bundle = load(translator.dataset, DatasetManifest), load(translator.bundle, BundleManifest)
    vocabulary, text = Vocabulary.read(data.file("vocabulary.model")), data.manifest.text_spec
    network = build_model(bundle.manifest.architecture, text.num_tokens)
    load_weights(network, load_file(load(translator.checkpoint, CheckpointManifest).file("weights.safetensors")), "")
    served = bundle.manifest.calibration.selection
    settings = {"num_calibration_images": 32, "num_selection_images": 64, "calibration_method": "max"}
    config = resolve(ExportConfig, "export", {**settings, "fallback": False})
    search = _Search(
        config=config,
        log=StepLog("test"),
        fp32=_graphs(network),
        vocabulary=vocabulary,
        translator=partial(Translator, vocabulary=vocabulary, text=text, files=()),
        language=text.target_language,
        budget=BUDGET,
        plan_weights="qdq",
    )
    found, _ = search.run(*_split(config, data, search.log))
    assert found.selection.runtime == "onnxruntime"
    assert served.runtime == "openvino"
    assert found.selection.fp32_score_pct == pytest.approx(served.fp32_score_pct, abs=0.1)
    assert found.selection.trials[0].activations == "signed"
    assert found.selection.trials[0].score_pct == pytest.approx(served.trials[0].score_pct, abs=3)


def test_more_selection_sentences_than_are_taken_are_noted(translator: Chain, capsys) -> None:
    data = load(translator.dataset, DatasetManifest)
    for given, noted in (({}, False), ({"num_selection_images": 2000}, False), ({"num_selection_images": 2001}, True)):
        _split(ExportConfig(**given), data, StepLog("test"))
        assert ("export.num_selection_images" in capsys.readouterr().err) == noted
