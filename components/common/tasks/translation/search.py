"""Search for a translation outside of the graph: the likeliest token each time, or several candidates (beams)."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from components.common.tasks.translation.vocabulary import BOS, EOS, PAD

ENCODER_INPUTS, ENCODER_OUTPUTS = ("source",), ("memory", "mask")
STEP_INPUTS, STEP_OUTPUTS = ("tokens", "position", *ENCODER_OUTPUTS, "state"), ("logits", "next_state")
_LENGTH_PENALTY = 0.6  # Wu et al., 2016
_LENGTH_FACTOR, _LENGTH_MARGIN = 3, 10  # tokens of a translation for each of its source, and besides


class Network(Protocol):
    """Runs encoder and step of a network; see networks.py for what they exchange, arrays or tensors of a GPU."""

    runtime: str
    device: str

    def encode(self, source: np.ndarray) -> tuple[Any, ...]:
        """[B, S] int64 -> memory, mask, and an empty state."""
        ...

    def step(self, tokens: np.ndarray, position: int, memory: Any, mask: Any, state: Any) -> tuple[np.ndarray, Any]:
        """Tokens [B] int64 -> logits [B, V] float32, state."""
        ...


def state_shape(sizes: Sequence[int | None], batch: int, num_tokens: int) -> tuple[int, ...]:
    """Shape of a step's state, whose `sizes` are None where they change: see networks.py."""
    return tuple(batch if axis == 1 else num_tokens if size is None else size for axis, size in enumerate(sizes))


def padded(sentences: Sequence[Sequence[int]]) -> np.ndarray:
    """Ids of different length -> [B, longest] int64, PAD behind each end."""
    ids = np.full((len(sentences), max(map(len, sentences), default=0)), PAD, np.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    return ids


def longest_translations(source: np.ndarray, max_tokens: int) -> np.ndarray:
    """[B] tokens at which each translation ends, whatever comes: what repeats itself without end stays short."""
    limits: np.ndarray = np.minimum(_LENGTH_FACTOR * (source != PAD).sum(axis=1) + _LENGTH_MARGIN, max_tokens)
    return limits


def search(network: Network, source: np.ndarray, *, beam_size: int, max_tokens: int) -> list[list[int]]:
    """The best translation of each sentence.

    With beams, the likeliest by log-probability over ((5 + length) / 6)^0.6 of those that were kept.

    Args:
        network: what computes.
        source: [B, S] int64 ids, each sentence with EOS, then PAD.
        beam_size: candidates that are kept of each sentence; 1 takes the likeliest token each time.
        max_tokens: of the longest translation; see `longest_translations` for those of short sentences.

    Returns:
        Ids of each without BOS, EOS and PAD.
    """
    greedy = getattr(network, "greedy", None)  # of a network that does not come back to the host for each token
    if beam_size == 1 and greedy is not None:
        return _without_ends(greedy(source))
    num_sentences = len(source)
    memory, mask, state = network.encode(source)
    if beam_size > 1:
        order = np.arange(num_sentences).repeat(beam_size)
        memory, mask, state = memory[:, order], mask[order], state[:, order]
    rows = np.arange(num_sentences)[:, None] * beam_size  # [B, 1], of each sentence's first beam
    tokens = np.full(num_sentences * beam_size, BOS, np.int64)
    found = np.zeros((num_sentences * beam_size, 0), np.int64)
    # Beams of a sentence begin alike, so only the first counts.
    scores = np.where(np.arange(beam_size) == 0, 0.0, -np.inf)[None].repeat(num_sentences, axis=0)
    lengths = np.zeros((num_sentences, beam_size))
    limits = longest_translations(source, max_tokens).repeat(beam_size)
    for position in range(max_tokens):
        logits, state = network.step(tokens, position, memory, mask, state)
        ended = (found == EOS).any(axis=1) | (limits <= position)
        if beam_size == 1:
            tokens = np.where(ended, PAD, logits.argmax(axis=1))
        else:
            tokens, places, scores, lengths = _next_beams(logits, ended.reshape(scores.shape), scores, lengths)
            places = (rows + places).ravel()
            state, found = state[:, places], found[places]
        found = np.concatenate([found, tokens[:, None]], axis=1)
        if ((found == EOS).any(axis=1) | (limits <= position + 1)).all():
            break
    best = (rows[:, 0] + (scores / _penalty(lengths)).argmax(axis=1)) if beam_size > 1 else rows[:, 0]
    return _without_ends(found[best])


def _without_ends(tokens: np.ndarray) -> list[list[int]]:
    return [list(map(int, takewhile(lambda token: token not in (EOS, PAD), row))) for row in tokens]


def _penalty(lengths: np.ndarray) -> np.ndarray:
    penalty: np.ndarray = ((5 + np.maximum(lengths, 1)) / 6) ** _LENGTH_PENALTY
    return penalty


def _next_beams(
    logits: np.ndarray, ended: np.ndarray, scores: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The best of each sentence's beams, each with each token behind it; what has ended stays as it is.

    logits [B x K, V], ended, scores and lengths [B, K] -> tokens [B x K], and [B, K] each: the beam that a new one
    continues, its log-probability, and its tokens.
    """
    num_sentences, beam_size = scores.shape
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    steps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    steps = steps.reshape(num_sentences, beam_size, -1)
    steps[ended] = -np.inf
    steps[ended, PAD] = 0.0
    lengths = lengths + ~ended
    ranked = ((scores[..., None] + steps) / _penalty(lengths)[..., None]).reshape(num_sentences, -1)
    best = np.argpartition(-ranked, beam_size - 1, axis=1)[:, :beam_size]
    places, tokens = np.divmod(best, steps.shape[2])
    totals = np.take_along_axis((scores[..., None] + steps).reshape(num_sentences, -1), best, axis=1)
    return tokens.ravel(), places, totals, np.take_along_axis(lengths, places, axis=1)
