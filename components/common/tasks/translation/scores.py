"""BLEU and chrF by sacrebleu, from what is counted of each sentence, so that those of any sentences are sums of it."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from components.common.tasks.translation.sentences import BLEU_TOKENIZERS, base_language


def bleu_statistics(hypotheses: Sequence[str], references: Sequence[str], language: str) -> np.ndarray:
    """Counts of BLEU for each translation, with one reference each.

    Returns:
        [N, 10] int64: words of the hypothesis, and of the reference; matches of 1 to 4 words; groups of 1 to 4 words in
        the hypothesis.
    """
    found = _bleu(language)._extract_corpus_statistics(hypotheses, [references]) if hypotheses else []
    return np.array(found, np.int64).reshape(-1, 10)


def bleu_pct(sums: np.ndarray, *, of_sentences: bool = False) -> np.ndarray:
    """BLEU of sets of sentences, 0 to 100, from the sums of their statistics. [R, 10] -> [R] float64.

    As sacrebleu has it, with its "exp" smoothing (Chen and Cherry, 2014), of thousands of sets at once. Of single
    sentences it is over the groups that are as long as they can be (`of_sentences`): else a translation of fewer than
    four words would have none.
    """
    length, reference = (sums[:, place].astype(np.float64) for place in range(2))
    matches, totals = sums[:, 2:6].astype(np.float64), sums[:, 6:].astype(np.float64)  # [R, 4]
    missing = (matches == 0) & (totals > 0)
    found = np.where(missing, 0.5 ** np.cumsum(missing, axis=1), matches)
    known = found > 0
    logs = np.where(
        known, np.log(np.where(known, found, 1.0) / np.maximum(totals, 1.0)), 0.0 if of_sentences else -np.inf
    )
    orders = np.maximum(known.sum(axis=1), 1) if of_sentences else 4
    brevity = np.minimum(1 - reference / np.maximum(length, 1e-9), 0.0)
    score: np.ndarray = np.where(matches.any(axis=1), 100 * np.exp(logs.sum(axis=1) / orders + brevity), 0.0)
    return score


def chrf_pct(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """chrF2 of all sentences together, 0 to 100 (Popovic, 2015)."""
    return float(_chrf().corpus_score(hypotheses, [references]).score) if hypotheses else 0.0


def signatures(language: str) -> dict[str, str]:
    """Sacrebleu's signatures of BLEU and chrF, by the name of the score."""
    found = {}
    for name, metric in (("BLEU", _bleu(language)), ("chrF", _chrf())):
        metric.num_refs = 1
        found[name] = metric.get_signature().format()
    return found


@cache
def _bleu(language: str) -> BLEU:
    # forced: without warnings of text that looks tokenized
    return BLEU(tokenize=BLEU_TOKENIZERS.get(base_language(language), "13a"), force=True)


@cache
def _chrf() -> CHRF:
    return CHRF()
