"""The report of a translator: scores of what was translated, speed in turns and by length, and the gate's verdict."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu

from components.common.contracts.errors import GateFailed, UserError
from components.common.contracts.manifests import BundleManifest, DatasetManifest, ReportManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.common.tasks.translation import evaluation
from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.runners import Translator
from components.common.tasks.translation.vocabulary import VOCABULARY, Vocabulary
from components.validate.config import ValidateConfig
from components.validate.schema import Report
from components.validate.translation import SentenceRunner, _row, by_length, measure
from tests.steps import step
from tests.unit.refusals import refuses
from tests.unit.sentences import HOSTILE
from tests.unit.shapes import Chain

QUICK: dict[str, Any] = {"benchmark_seconds": 0.01, "benchmark_warmup_seconds": 0.0, "benchmark_sentences": 8}
QUICK |= {"benchmark_repeats": 2}


def settings(**values: Any) -> ValidateConfig:
    return resolve(ValidateConfig, "validate", {**QUICK, **values})


def test_report_and_verdict_of_a_translator(translator: Chain, tmp_path: Path) -> None:
    num_val = load(translator.dataset, DatasetManifest).manifest.splits["val"].num_images
    lenient = {"require_above_chance": False}
    chosen = {**QUICK, "latency_budget": "10s", "benchmark_batch_sizes": (1, 4), "gate": lenient}
    said = step("validate", tmp_path / "report", chosen, bundle=translator.bundle, dataset=translator.dataset)
    assert f"BLEU on {num_val} sentences: FP32" in said
    assert "within 10000 ms" in said
    report = load(tmp_path / "report", ReportManifest)
    lines = [json.loads(line) for line in report.file("predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy, benchmark = report.manifest.accuracy, report.manifest.benchmark
    assert lines[0]["source"] == HOSTILE
    references = [line["reference"] for line in lines]
    for precision in ("fp32", "int8"):
        row = accuracy.row(precision)
        bleu = sacrebleu.corpus_bleu([line[precision] for line in lines], [references], force=True)
        assert row.score_pct == pytest.approx(bleu.score, abs=1e-9)
        assert row.chrf_pct == pytest.approx(sacrebleu.corpus_chrf([x[precision] for x in lines], [references]).score)
        assert row.num_images == num_val
        assert row.size_bytes > 100_000
    same = sum(line["fp32"] == line["int8"] for line in lines)
    int8 = accuracy.row("int8")
    assert int8.agreement_pct == pytest.approx(100 * same / num_val)
    assert int8.comparison.mcnemar_test == "bootstrap"
    assert accuracy.row("fp16").runtime == "n/a"
    untranslated = sacrebleu.corpus_bleu([line["source"] for line in lines], [references], force=True).score
    assert accuracy.most_frequent_pct == pytest.approx(untranslated, abs=1e-9)
    assert accuracy.signatures["BLEU"].endswith(f"tok:13a|smooth:exp|version:{sacrebleu.__version__}")
    assert accuracy.signatures["chrF"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")
    assert {(row.precision, row.batch_size) for row in benchmark.rows} == {
        (p, b) for p in ("fp32", "int8") for b in (1, 4)
    }
    assert all(row.tokens_per_s > row.images_per_s for row in benchmark.rows)
    assert all(row.num_iterations >= 2 * 8 // row.batch_size for row in benchmark.rows)  # every sentence in each turn
    assert benchmark.latency_budget is not None
    assert sum(row.num_sentences for row in benchmark.lengths if row.precision == "int8") == 8
    text = load(translator.bundle, BundleManifest).manifest.text
    shown = Report.model_validate_json(report.file("report.json").read_bytes())
    assert (shown.model.text, shown.confusion, shown.class_changes) == (text, None, ())
    page = report.file("report.html").read_text(encoding="utf-8")
    assert HOSTILE not in page
    assert len(shown.disagreements) == min(num_val - same, 24)
    with pytest.raises(GateFailed, match=f"{num_val} validation sentences, at least 100"):
        step("gate", tmp_path / "verdict", lenient, report=report.path)


def test_data_of_other_languages_are_refused(translator: Chain, tmp_path: Path) -> None:
    models, data = load(translator.bundle, BundleManifest), load(translator.dataset, DatasetManifest)
    other = SimpleNamespace(text_spec=models.manifest.text_spec.model_copy(update={"source_language": "fr"}))
    with refuses("other-languages"):
        measure(settings(), StepLog("validate"), models, SimpleNamespace(path=data.path, manifest=other), tmp_path)


def test_a_search_that_servers_do_not_make_is_said() -> None:
    bundle = SimpleNamespace(files={"fp32.onnx": SimpleNamespace(size_bytes=1)})
    translator = SimpleNamespace(runtime="openvino", device="CPU", files=[Path("fp32.onnx")], note="")
    found = {"fp32": TextPredictions.of_texts(["one"], ["one"], "en")}
    notes = [_row(bundle, "fp32", translator, found, beam_size).note for beam_size in (1, 4)]
    assert notes == ["", "measured with 4 beams, and a server's search is greedy: set validate.beam_size to 1"]


class Recorder:
    runtime = "openvino"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def translate(self, sentences: list[str], *, beam_size: int, batch_size: int) -> list[str]:
        assert batch_size == len(sentences)
        self.calls.append(sentences)
        return sentences


def test_every_turn_times_every_sentence_as_often() -> None:
    recorder: Any = Recorder()
    runner = SentenceRunner(translator=recorder, sentences=["a", "b", "c", "d", "e"], beam_size=1)
    timing = runner.measure(2, warmup_s=0.0, duration_s=0.0, min_iterations=1)
    assert recorder.calls == [["a", "b"], ["c", "d"], ["e", "a"]]
    assert len(timing.latencies_ms) == 3
    assert runner.alone_ms == []
    runner.measure(1, warmup_s=0.0, duration_s=0.0, min_iterations=6)
    assert runner.alone_ms[0].shape == (2, 5)
    assert recorder.calls[3:] == 2 * [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_latency_by_length_tells_long_sentences_from_short_ones() -> None:
    lengths = np.array([3, 9, 4, 40, 3, 5])
    found = by_length("int8", lengths, np.array([[1, 5, 1, 90, 1, 2], [1, 7, 1, 110, 1, 2]], float))
    assert [(row.min_tokens, row.max_tokens, row.num_sentences) for row in found] == [
        (3, 3, 2),
        (4, 4, 1),
        (5, 5, 1),
        (9, 9, 1),
        (40, 40, 1),
    ]
    assert [row.p50_ms for row in found] == [1.0, 1.0, 2.0, 6.0, 100.0]
    many = by_length("fp32", np.arange(1, 801), np.ones((1, 800)))
    assert len(many) == 8
    assert sum(row.num_sentences for row in many) == 800
    assert all(99 <= row.num_sentences <= 101 for row in many)


class Upper(Translator):
    """Translates nothing of more than three characters."""

    def __init__(self) -> None:
        pass

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        if any(len(sentence) > 3 for sentence in sentences):
            raise UserError("sentence 1 has too many tokens", code="sentence-too-long")
        return [list(sentence.encode()) for sentence in sentences]

    def translate_tokens(self, ids: Sequence[Sequence[int]], **_: int) -> list[str]:
        return [bytes(one).decode().upper() for one in ids]


def test_all_sentences_are_translated_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_AT_ONCE", 3)
    seen: list[tuple[int, int]] = []
    found = evaluation.translate_all(Upper(), list("abcdefg"), lambda *at: seen.append(at))
    assert found == list("ABCDEFG")
    assert seen == [(0, 7), (3, 7), (6, 7), (7, 7)]


def test_a_sentence_that_is_too_long_for_the_model_has_no_translation() -> None:
    assert evaluation.translate_all(Upper(), ["a", "abcd", "b"], lambda *_: None) == ["A", "", "B"]
    with refuses("sentence-too-long"):
        evaluation.translate_all(Upper(), ["abcd", "efgh"], lambda *_: None)


def test_sentences_that_are_too_long_are_said_and_not_timed(translator: Chain, tmp_path: Path) -> None:
    models, data = load(translator.bundle, BundleManifest), load(translator.dataset, DatasetManifest)
    sources = [source for source, _ in evaluation.read_pairs(data, "val")]
    lengths = [len(ids) for ids in Vocabulary.read(models.file(VOCABULARY)).encode(sources)]
    most = int(np.median(lengths))
    text = models.manifest.text_spec.model_copy(update={"max_tokens": most})
    shorter = replace(models, manifest=models.manifest.model_copy(update={"text": text}))
    report, _ = measure(settings(benchmark_batch_sizes=(1,)), StepLog("validate"), shorter, data, tmp_path)
    num_long = sum(length > most for length in lengths)
    assert num_long
    row = report.accuracy.row("int8")
    assert row.num_images == len(sources)
    num_empty = int(row.note.split("translations of ")[1].split(" ")[0])
    assert num_empty >= num_long
    assert max(one.max_tokens for one in report.benchmark.lengths) <= most
