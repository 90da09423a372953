"""benchmarks/translation_gpu.py: PyTorch's ways to translate find what the search does, here on a CPU, not compiled."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import translation_gpu
from components.common.runtimes.architectures import build_model
from components.common.tasks.translation.search import padded, search
from components.common.tasks.translation.vocabulary import EOS, PAD

SOURCES = [[5, 6, 7, 8, EOS], [9, EOS], [4, 4, 10, EOS]]  # 25, 16 and 22 tokens at most


class Eager:
    """Step by step, as the search wants it."""

    runtime, device = "torch", "cpu"

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network

    def encode(self, source: np.ndarray) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.float16):
            memory, mask = (each.half() for each in self.network.encode(torch.from_numpy(source)))
        return memory, mask, self.network.empty_state(memory, 40)

    def step(self, tokens: np.ndarray, position: int, *read: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        place, state = torch.tensor([position]), read[-1]
        logits, found = self.network.step(torch.from_numpy(tokens), place, *read)
        translation_gpu.advance(state, found, place)
        return logits.numpy(), state


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_peers_translate_as_the_search_does(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    on_cpu = torch.autocast("cpu", torch.float16)
    monkeypatch.setattr(torch, "autocast", lambda *_: on_cpu)
    torch.manual_seed(1)
    network: Any = build_model("translation/transformer_small", 60).eval().half()
    with torch.inference_mode():
        translate = getattr(translation_gpu, way)(network, 40)
        for sources in (SOURCES, SOURCES[1:]):
            expected = search(Eager(network), padded(sources), beam_size=1, max_tokens=40)
            found = translate(torch.from_numpy(padded(sources)))
            assert [[token for token in row if token not in (EOS, PAD)] for row in found.tolist()] == expected
