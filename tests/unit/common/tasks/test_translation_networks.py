"""Networks that translate: a step at a time computes what the whole sentence does; the search finds the best."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from components.common.runtimes.architectures import build_model
from components.common.tasks.translation.networks import MAX_POSITIONS
from components.common.tasks.translation.runners import advanced
from components.common.tasks.translation.search import padded, search
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD
from components.preprocess.config import PreprocessConfig

ARCHITECTURES = ("translation/transformer_small", "translation/lstm_small")
SOURCES = [[5, 6, 7, 8, EOS], [9, EOS], [4, 4, 10, EOS]]
TARGETS = [[BOS, 7, 6], [BOS, 8, 11], [BOS, 5, 5]]


class Torch:
    """A network as the search takes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def encode(self, source: np.ndarray) -> tuple[np.ndarray, ...]:
        memory, mask = self.model.encode(torch.from_numpy(source))
        return tuple(each.numpy() for each in (memory, mask, self.model.empty_state(memory, 24)))

    @torch.no_grad()
    def step(self, tokens: np.ndarray, position: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        tensors = [torch.from_numpy(each) for each in (tokens, np.array([position]), *arrays)]
        logits, found = (each.numpy() for each in self.model.step(*tensors))
        return logits, advanced(arrays[-1], found, position)


@pytest.fixture(params=ARCHITECTURES)
def network(request: pytest.FixtureRequest) -> Torch:
    torch.manual_seed(0)
    return Torch(build_model(request.param, 12))


def whole(network: Torch, sources: list[list[int]], targets: list[list[int]]) -> np.ndarray:
    """[B, L, V] logits of whole sentences."""
    length = max(map(len, sources + targets))
    pairs = np.full((len(sources), 2, length), PAD)
    for pair, source, target in zip(pairs, sources, targets, strict=True):
        pair[0, : len(source)], pair[1, : len(target)] = source, target
    with torch.no_grad():
        return network.model(torch.from_numpy(pairs)).numpy()


def test_steps_compute_what_the_whole_sentence_does(network: Torch) -> None:
    expected = whole(network, SOURCES, TARGETS)
    memory, mask, state = network.encode(padded(SOURCES))
    for position in range(3):
        tokens = np.array([target[position] for target in TARGETS])
        logits, state = network.step(tokens, position, memory, mask, state)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-5)


def test_a_sentence_is_translated_alike_alone_and_beside_longer_ones(network: Torch) -> None:
    together = whole(network, SOURCES, TARGETS)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        np.testing.assert_allclose(whole(network, [source], [target])[0, :3], together[row, :3], atol=1e-5)
    alone = [search(network, padded([source]), beam_size=3, max_tokens=6)[0] for source in SOURCES]
    assert search(network, padded(SOURCES), beam_size=3, max_tokens=6) == alone


def test_preprocess_lets_no_sentence_through_that_is_too_long_for_a_transformer() -> None:
    PreprocessConfig(data=".", max_tokens=MAX_POSITIONS)
    with pytest.raises(ValidationError, match="max_tokens"):
        PreprocessConfig(data=".", max_tokens=MAX_POSITIONS + 1)


class Table:
    """Probabilities of the next token by those before it, of one source."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.table = table

    def encode(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.zeros((1, len(source), 1)), np.zeros((len(source), 1)), np.full((8, len(source)), -1)

    def step(self, tokens: np.ndarray, position: int, memory, mask, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        state = state.copy()
        state[position] = tokens
        logits = np.full((len(tokens), 8), -50.0)
        for row, before in enumerate(state[1 : position + 1].T):
            for token, probability in self.table.get(tuple(map(int, before)), {EOS: 1.0}).items():
                logits[row, token] = np.log(probability)
        return logits, state


def test_beams_find_what_greed_misses() -> None:
    network = Table({(): {4: 0.6, 5: 0.4}, (4,): {6: 0.4, 7: 0.3, EOS: 0.3}, (5,): {7: 1.0}})
    source = padded([[4, EOS], [5, EOS]])
    assert search(network, source, beam_size=1, max_tokens=8) == [[4, 6]] * 2
    assert search(network, source, beam_size=2, max_tokens=8) == [[5, 7]] * 2
    assert search(network, source, beam_size=1, max_tokens=1) == [[4]] * 2
