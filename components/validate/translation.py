"""Translations of the validation sentences by every precision: BLEU and chrF, and speed by batch and by length."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Unpack

import numpy as np

from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, write_atomically
from components.common.contracts.records import (
    PRECISIONS,
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    LengthRow,
    Precision,
)
from components.common.process.steplog import StepLog
from components.common.runtimes import RUNTIMES
from components.common.runtimes.runner import BenchmarkOptions, Timing, time_calls
from components.common.tasks.translation.evaluation import read_pairs, translate_all
from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.runners import Translator, open_translator
from components.common.tasks.translation.scores import signatures
from components.common.tasks.translation.vocabulary import Vocabulary
from components.validate.config import ValidateConfig
from components.validate.report import gather_report
from components.validate.schema import Report
from components.validate.speed import measure_speed, within_budget

_MAX_BATCH = 128
_MAX_BUCKETS = 8  # of lengths
_SEED = 7


def measure(
    config: ValidateConfig,
    log: StepLog,
    models: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    output: Path,
) -> tuple[Report, dict[int, str]]:
    """Report on translations, without pictures; the translations are written into `output`.

    Raises:
        UserError: bundle and dataset are of different languages.
    """
    text, other = models.manifest.text_spec, data.manifest.text_spec
    if text.languages != other.languages:
        raise UserError(
            f"the bundle {models.path} translates from {text.languages}, and the dataset {data.path} is from "
            f"{other.languages}; name one of the bundle's languages",
            code="other-languages",
        )
    split = data.manifest.splits["val"]
    pairs = read_pairs(data, "val")
    sentences, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tokens = Vocabulary.read(models.file(text.vocabulary))
    with ExitStack() as stack:
        translators: dict[Precision, Translator] = {}
        notes: dict[Precision, str] = {}
        for precision in PRECISIONS:
            try:
                translators[precision] = open_translator(models, precision, config.runtime)
                stack.callback(translators[precision].close)
            except RuntimeUnavailable as error:
                notes[precision] = str(error)
        predictions: dict[str, TextPredictions] = {
            precision: TextPredictions.of_texts(
                translate_all(
                    translator,
                    sentences,
                    partial(log.progress, f"translating by {precision}", unit="sentences"),
                    beam_size=config.beam_size,
                    batch_size=config.batch_size,
                ),
                references,
                text.target_language,
            )
            for precision, translator in translators.items()
        }
        accuracy = AccuracyReport(
            dataset_digest=data.digest,
            split_digest=split.digest,
            bundle_digest=models.digest,
            task=models.manifest.task,
            rows=tuple(
                _row(models.manifest, precision, translators[precision], predictions, config.beam_size)
                if precision in translators
                else AccuracyRow(precision=precision, runtime="n/a", note=notes[precision])
                for precision in PRECISIONS
            ),
            signatures=signatures(text.target_language),
            most_frequent_pct=TextPredictions.of_texts(sentences, references, text.target_language).score_pct,
        )
        benchmark = _benchmark(config, log, models, accuracy, translators, predictions, sentences, tokens)
    lines = [
        {"source": source, "reference": reference, **{name: own.hypotheses[index] for name, own in predictions.items()}}
        for index, (source, reference) in enumerate(pairs)
    ]
    written = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    write_atomically(output / "predictions.jsonl", written.encode())
    log.progress("writing the report", 0, 1)
    return gather_report(config, models, data, predictions, accuracy, benchmark, sentences), {}


def _row(
    bundle: BundleManifest,
    precision: Precision,
    translator: Translator,
    predictions: Mapping[str, TextPredictions],
    beam_size: int,
) -> AccuracyRow:
    own, fp32 = predictions[precision], predictions.get("fp32")
    beams = f"measured with {beam_size} beams, and a server's search is greedy: set validate.beam_size to 1"
    empty = f"the translations of {own.num_undefined:,} of {own.num_images:,} sentences are empty"
    notes = translator.note, beams if beam_size > 1 else "", empty if own.num_undefined else ""
    return AccuracyRow(
        precision=precision,
        runtime=translator.runtime,
        device=translator.device,
        instruction_set=instruction_set() if RUNTIMES[translator.runtime].depends_on_instruction_set else "",
        file=translator.files[-1].name,
        size_bytes=sum(bundle.files[file.name].size_bytes for file in translator.files),
        num_images=own.num_images,
        score_pct=own.score_pct,
        score_low_pct=own.score_low_pct,
        **own.measures(),
        delta_points=own.score_pct - fp32.score_pct if fp32 else None,
        agreement_pct=own.agreement_pct(fp32) if fp32 else None,
        comparison=own.comparison(fp32) if fp32 and precision != "fp32" else None,
        note=". ".join(filter(None, notes)),
    )


@dataclass(kw_only=True)
class SentenceRunner:
    """A translator, as `measure_speed` times a runner: a batch is the next sentences of some, all of them in turn."""

    translator: Translator
    sentences: Sequence[str]
    beam_size: int
    memory_bytes: int | None = None
    alone_ms: list[np.ndarray] = field(default_factory=list)  # [passes, sentences] each, of batches of one

    @property
    def runtime(self) -> str:
        """See Runner."""
        return self.translator.runtime

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """See Runner; the last batch of a pass is filled up with the first sentences."""
        starts = range(0, len(self.sentences), batch_size)
        batches = [list(islice(cycle(self.sentences), start, start + batch_size)) for start in starts]
        translate = self.translator.translate
        found = time_calls(
            lambda index: translate(batches[index], beam_size=self.beam_size, batch_size=batch_size),
            len(batches),
            batch_size,
            how,
        )
        if batch_size == 1:
            self.alone_ms.append(found.latencies_ms.reshape(-1, len(batches)))
        return found


def _benchmark(
    config: ValidateConfig,
    log: StepLog,
    models: Artifact[BundleManifest],
    accuracy: AccuracyReport,
    translators: Mapping[Precision, Translator],
    predictions: Mapping[str, TextPredictions],
    sentences: Sequence[str],
    vocabulary: Vocabulary,
) -> BenchmarkReport:
    """Speed on some sentences of every length that the model takes."""
    lengths = np.array([len(ids) for ids in vocabulary.encode(sentences)])
    order = np.argsort(lengths, kind="stable")[: (lengths <= models.manifest.text_spec.max_tokens).sum()]
    places = order[np.unique(np.linspace(0, len(order) - 1, config.benchmark_sentences).round().astype(int))]
    places = np.random.default_rng(_SEED).permutation(places)  # batches of all lengths, as requests come
    chosen = [sentences[place] for place in places.tolist()]
    runners = {
        precision: SentenceRunner(translator=translator, sentences=chosen, beam_size=config.beam_size)
        for precision, translator in translators.items()
        if RUNTIMES[translator.runtime].measures_speed
    }
    alone = config.model_copy(update={"benchmark_streams": (1,), "benchmark_no_transfer_batch_sizes": ()})
    rows = measure_speed(alone, list(runners.items()), _MAX_BATCH, partial(log.progress, "measuring speed"))
    num_tokens = {
        name: np.mean([len(ids) for ids in vocabulary.encode([own.hypotheses[place] for place in places.tolist()])])
        for name, own in predictions.items()
    }
    rows = tuple(
        row.model_copy(update={"tokens_per_s": float(row.images_per_s * num_tokens[row.precision])}) for row in rows
    )
    budget_ms = config.latency_budget_ms
    budget = within_budget(budget_ms, rows, accuracy, config.gate) if budget_ms is not None else None
    return BenchmarkReport(
        bundle_digest=models.digest,
        rows=rows,
        latency_budget=budget,
        lengths=tuple(
            row
            for precision, runner in runners.items()
            if runner.alone_ms
            for row in by_length(precision, lengths[places], np.concatenate(runner.alone_ms))
        ),
    )


def by_length(precision: Precision, lengths: np.ndarray, latencies_ms: np.ndarray) -> list[LengthRow]:
    """Latency of sentences by their length, in groups of about as many sentences.

    Args:
        precision: of the model.
        lengths: [sentences] tokens.
        latencies_ms: [passes, sentences]
    """
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _MAX_BUCKETS + 1)[1:], method="higher"))  # last of each
    groups = np.searchsorted(edges, lengths)  # [sentences]
    found = []
    for group in np.unique(groups).tolist():
        own = groups == group
        p50_ms, p99_ms = np.percentile(latencies_ms[:, own], [50, 99]).tolist()
        found.append(
            LengthRow(
                precision=precision,
                min_tokens=int(lengths[own].min()),
                max_tokens=int(lengths[own].max()),
                num_sentences=int(own.sum()),
                p50_ms=p50_ms,
                p99_ms=p99_ms,
            )
        )
    return found
