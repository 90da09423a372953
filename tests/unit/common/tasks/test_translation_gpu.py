"""Greedy search on a device, on the CPU here: the buffers of its steps hold what the search outside of graphs does."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from components.common.runtimes.architectures import build_model
from components.common.runtimes.dynamic_plan import prefix
from components.common.tasks.translation.gpu import GpuNetwork
from components.common.tasks.translation.runners import ENCODER_INPUTS, ENCODER_OUTPUTS, STEP_INPUTS, STEP_OUTPUTS
from components.common.tasks.translation.search import padded, search
from components.common.tasks.translation.vocabulary import EOS
from components.export.translation import _axes

NUM_TOKENS, MAX_TOKENS = 300, 21
SOURCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, EOS], [5, EOS], [7, 7, 7, EOS]]


class TorchGraph:
    """Encoder or step of a network, as plans run: outputs are written into the buffers that are given."""

    def __init__(self, network: nn.Module, which: str, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        self.call, self.names, self.output_names = getattr(network, which), names, outputs
        self.inputs = dict.fromkeys(names, torch.int64)

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found = dict(zip(self.output_names, self.call(*(inputs[name] for name in self.names)), strict=True))
        for name, buffer in outputs.items():
            found[name] = prefix(buffer, tuple(found[name].shape)).copy_(found[name])
        return found


@pytest.fixture(params=["transformer_small", "lstm_small"])
def network(request: pytest.FixtureRequest) -> GpuNetwork:
    torch.manual_seed(1)
    module = build_model(f"translation/{request.param}", NUM_TOKENS).eval()
    encoder = TorchGraph(module, "encode", ENCODER_INPUTS, ENCODER_OUTPUTS)
    step = TorchGraph(module, "step", STEP_INPUTS, STEP_OUTPUTS)
    return GpuNetwork(encoder, step, max_tokens=MAX_TOKENS, device=torch.device("cpu"))


class WithoutGreedy:
    """The same network for the search outside of it."""

    runtime, device = "torch", "cpu"

    def __init__(self, network: GpuNetwork) -> None:
        self.encode, self.step = network.encode, network.step


def test_greedy_on_the_device_is_the_search_outside(network: GpuNetwork) -> None:
    everything = [SOURCES, SOURCES[1:], [[9, 8, EOS]], SOURCES]  # sizes that come again, too
    for sources in everything:
        found = search(network, padded(sources), beam_size=1, max_tokens=MAX_TOKENS)
        expected = search(WithoutGreedy(network), padded(sources), beam_size=1, max_tokens=MAX_TOKENS)
        assert found == expected
    assert list(map(len, found)) == [21, 16, 21]  # untrained, so that none ends before it has to


def test_beams_keep_their_state_on_the_device(network: GpuNetwork) -> None:
    one = search(network, padded(SOURCES[:1]), beam_size=3, max_tokens=MAX_TOKENS)
    assert search(network, padded(SOURCES), beam_size=3, max_tokens=MAX_TOKENS)[:1] == one
    assert isinstance(network.encode(padded(SOURCES))[2], torch.Tensor)


def test_axes_that_change_are_named(network: GpuNetwork) -> None:
    axes = _axes(network.encoder.call.__self__)  # type: ignore[attr-defined]
    assert axes["source"] == ["batch", "source"] == axes["mask"]
    assert axes["tokens"] == ["batch"]
    assert axes["position"] == [1]
    heads_and_width = [axis for axis in axes["memory"] if not isinstance(axis, str)]
    assert "target" not in axes["memory"]
    assert np.prod(heads_and_width) > 100
    assert ("target" in axes["state"]) == (len(axes["state"]) == 5)
