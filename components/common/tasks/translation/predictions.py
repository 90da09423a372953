"""Predictions of translations: the sentences, and what BLEU counts of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from components.common.tasks.predictions import ByDraws, draws
from components.common.tasks.translation.scores import bleu_pct, bleu_statistics, chrf_pct

_MAX_SHOWN = 500  # characters


@dataclass(frozen=True, kw_only=True)
class TextPredictions(ByDraws):
    """Translations and their references, in the order of the data; compared by BLEU as Koehn does (2004)."""

    hypotheses: tuple[str, ...]
    references: tuple[str, ...]
    language: str  # of both
    statistics: np.ndarray  # [N, 10] int64: see `bleu_statistics`

    @classmethod
    def of_texts(cls, hypotheses: Sequence[str], references: Sequence[str], language: str) -> Self:
        """Count words of as many references as hypotheses."""
        if len(hypotheses) != len(references):
            raise ValueError(f"{len(hypotheses)} translations of {len(references)} sentences")
        return cls(
            hypotheses=tuple(hypotheses),
            references=tuple(references),
            language=language,
            statistics=bleu_statistics(hypotheses, references, language),
        )

    @property
    def num_images(self) -> int:
        """Sentences."""
        return len(self.hypotheses)

    @property
    def num_undefined(self) -> int:
        """Sentences whose translation is empty."""
        return sum(not hypothesis.strip() for hypothesis in self.hypotheses)

    @property
    def score_pct(self) -> float:
        """BLEU of all sentences together."""
        return float(bleu_pct(self.statistics.sum(axis=0)[None])[0])

    @cached_property
    def scores_by_draw(self) -> np.ndarray:
        """See ByDraws."""
        counted = self.statistics.astype(np.float32)
        sums = [self.statistics.sum(axis=0)[None], *(weights @ counted for weights in draws(self.num_images))]
        return bleu_pct(np.concatenate(sums))

    @cached_property
    def per_image(self) -> np.ndarray:
        """[N] BLEU of each sentence alone."""
        return bleu_pct(self.statistics, of_sentences=True)

    def measures(self) -> dict[str, float | tuple[float, ...] | None]:
        """See Predictions."""
        return {"chrf_pct": chrf_pct(self.hypotheses, self.references)}

    def num_unseen(self, num_classes: int) -> int:
        """See Predictions: there are no classes."""
        return 0

    def agreement_pct(self, other: Self) -> float:
        """Share of sentences with the same translation, in per cent."""
        return 100.0 * (1 - self.num_differing(other) / max(self.num_images, 1))

    def num_differing(self, other: Self) -> int:
        """Sentences with another translation."""
        return int(self._differs(other).sum())

    def differing(self, other: Self, most: int) -> np.ndarray:
        """See Predictions: those that differ most in BLEU."""
        return self.most_different(other, self._differs(other), most)

    def described(self, place: int, classes: tuple[str, ...]) -> tuple[str, str]:
        """See Predictions: the reference and the translation, cut where they are long."""
        return _cut(self.references[place]), _cut(self.hypotheses[place])

    def select(self, which: "slice | np.ndarray") -> Self:
        """See Predictions."""
        places = np.arange(self.num_images)[which].tolist()
        return type(self)(
            hypotheses=tuple(self.hypotheses[place] for place in places),
            references=tuple(self.references[place] for place in places),
            language=self.language,
            statistics=self.statistics[places],
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """See Predictions: [N, 10] int64, of which BLEU and its interval follow."""
        return {"": self.statistics}

    def _differs(self, other: Self) -> np.ndarray:
        """[N] int64: 1 where the two translations are not the same."""
        return np.array([a != b for a, b in zip(self.hypotheses, other.hypotheses, strict=True)], np.int64)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
