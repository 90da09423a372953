"""Search on a device, on the CPU here: buffers of its steps, and batches that are filled up, change no translation."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from components.common.contracts.errors import UserError
from components.common.runtimes.architectures import build_model
from components.common.runtimes.dynamic_plan import DynamicPlan, Profile
from components.common.tasks.translation.gpu import GpuNetwork
from components.common.tasks.translation.search import (
    ENCODER_INPUTS,
    ENCODER_OUTPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    padded,
    search,
)
from components.common.tasks.translation.vocabulary import BOS, EOS
from components.export.translation import _axes
from tests.unit.refusals import refuses

NUM_TOKENS, MAX_TOKENS = 300, 21
SOURCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, EOS], [5, EOS], [7, 7, 7, EOS]]
Batches = tuple[tuple[int, int], ...]  # smallest and largest of each profile
ANY: Batches = ((1, 1), (1, 16))  # where plans for one number of sentences can not be built
FIXED: Batches = ((1, 1), (4, 4), (16, 16))


class TorchGraph:
    """Encoder or step of a network, as plans run: those that are bound write into the buffers that are given."""

    def __init__(
        self,
        call: Callable[..., Any],
        names: tuple[str, ...],
        outputs: tuple[str, ...],
        batches: Batches,
        state: Sequence[str | int],
    ) -> None:
        self.call, self.names, self.output_names, self.batches = call, names, outputs, batches
        self.bound: list[weakref.ref[Callable[[], None]]] = []
        self.inputs: Mapping[str, torch.dtype] = {**dict.fromkeys(names, torch.int64), "state": torch.float32}
        low, high = (tuple(own if isinstance(size, str) else size for size in state) for own in (1, 99))
        self.profiles: Sequence[Profile] = [
            {names[0]: ((small,), (large,), (large,)), "state": (low, high, high)} for small, large in batches
        ]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = len(inputs[self.names[0]])
        if not any(low <= batch <= high for low, high in self.batches):
            raise UserError(f"no profile takes {batch} sentences", code="wrong-batches")
        with torch.no_grad():
            return dict(zip(self.output_names, self.call(*(inputs[name] for name in self.names)), strict=True))

    def bind(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for name, found in self.run(inputs).items():
                assert found.shape == outputs[name].shape
                outputs[name].copy_(found)

        self.bound.append(weakref.ref(run))
        return run


@pytest.fixture(params=["transformer_small", "lstm_small"])
def module(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(1)
    return build_model(f"translation/{request.param}", NUM_TOKENS).eval()


@pytest.fixture(params=[ANY, FIXED], ids=["any", "fixed"])
def network(request: pytest.FixtureRequest, module: nn.Module) -> GpuNetwork:
    return on_cpu(module, request.param)


def on_cpu(module: nn.Module, batches: Batches) -> GpuNetwork:
    state = _axes(module)["state"]
    encoder = TorchGraph(module.encode, ENCODER_INPUTS, ENCODER_OUTPUTS, batches, state)
    step = TorchGraph(module.step, STEP_INPUTS, STEP_OUTPUTS, batches, state)
    return GpuNetwork(encoder, step, max_tokens=MAX_TOKENS, device=torch.device("cpu"))


class WithoutGreedy:
    """The same network for the search outside of it."""

    runtime, device = "torch", "cpu"

    def __init__(self, network: GpuNetwork) -> None:
        self.encode, self.step = network.encode, network.step


def test_greedy_on_the_device_is_the_search_outside(network: GpuNetwork, module: nn.Module) -> None:
    outside = WithoutGreedy(on_cpu(module, ANY))
    everything = [SOURCES, SOURCES[1:], [[9, 8, EOS]], SOURCES]  # sizes that come again, too
    for sources in everything:
        found = search(network, padded(sources), beam_size=1, max_tokens=MAX_TOKENS)
        assert found == search(outside, padded(sources), beam_size=1, max_tokens=MAX_TOKENS)
    assert list(map(len, found)) == [21, 16, 21]  # untrained, so that none ends before it has to


def test_beams_keep_their_state_on_the_device(network: GpuNetwork, module: nn.Module) -> None:
    def beams(network: GpuNetwork, sources: list[list[int]]) -> list[list[int]]:
        return search(network, padded(sources), beam_size=3, max_tokens=MAX_TOKENS)

    alone = [beams(on_cpu(module, ANY), [source])[0] for source in SOURCES]
    assert beams(network, SOURCES) == alone
    assert beams(network, SOURCES[:1]) == alone[:1]
    memory, mask, state = network.encode(padded(SOURCES))
    logits, after = network.step(np.full(3, BOS), 0, memory, mask, state)
    assert all(isinstance(each, torch.Tensor) for each in (memory, mask, state, after))
    assert {memory.shape[1], len(mask), state.shape[1], len(logits), after.shape[1]} == {3}


def test_rows_that_fill_a_batch_do_not_delay_its_end(network: GpuNetwork) -> None:
    assert network.greedy(padded([SOURCES[2]] * 3)).shape == (3, 24)  # 21, and whole graphs
    assert network.greedy(padded([SOURCES[1]] * 2)).shape == (2, 16)  # where the third row was, no sentence is


def test_more_sentences_than_a_profile_takes_are_refused(network: GpuNetwork) -> None:
    for beam_size in (1, 2):
        with refuses("wrong-batches"):
            search(network, padded(SOURCES * 6), beam_size=beam_size, max_tokens=MAX_TOKENS)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pools of what was captured: a graph that holds nothing, as CUDA's; of the pool "broken" none is made."""
    pools: list[Any] = []

    def graph(graph: Any, *, pool: Any, capture_error_mode: str) -> nullcontext[None]:
        pools.append(pool)
        if pool == "broken":
            raise RuntimeError("operation not permitted when stream is capturing")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return pools


def test_what_graphs_refer_to_lives_as_long_as_they_do(module: nn.Module, captures: list[Any]) -> None:
    network = on_cpu(module, FIXED)
    network.pool = (0, 1)
    network.greedy(padded(SOURCES))
    bound = [reference for plan in (network.encoder, network.step_graph) for reference in plan.bound]
    assert captures == [(0, 1)] * 2
    assert len(bound) == 2
    assert all(reference() is not None for reference in bound)
    del network  # and no longer: their memory comes back at once
    assert all(reference() is None for reference in bound)


def test_a_capture_that_broke_off_leaves_its_pool_to_no_other(module: nn.Module, captures: list[Any]) -> None:
    network = on_cpu(module, FIXED)
    network.pool = "broken"
    network.greedy(padded(SOURCES))
    assert captures[0] == "broken" != captures[1]
    assert network.uncapturable == {"encoder"}


def test_what_a_plan_is_bound_to_stays() -> None:
    context = SimpleNamespace(set_input_shape=lambda *_: None, set_tensor_address=lambda *_: None)
    plan = DynamicPlan.__new__(DynamicPlan)
    plan._new_context = lambda profile=0: context
    plan.inputs = {"source": torch.int32, "memory": torch.float32}  # 8.6 has no int64
    plan.profiles = [dict.fromkeys(plan.inputs, ((1,), (3,), (3,)))]
    tensors = [torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    run = plan.bind({"source": tensors[0], "memory": tensors[1]}, {"logits": tensors[2]})
    del tensors
    assert all(reference() is not None for reference in kept)
    del run
    assert all(reference() is None for reference in kept)


def test_axes_that_change_are_named(module: nn.Module) -> None:
    axes = _axes(module)
    assert axes["source"] == ["batch", "source"] == axes["mask"]
    assert axes["tokens"] == ["batch"]
    assert axes["position"] == [1]
    heads_and_width = [axis for axis in axes["memory"] if not isinstance(axis, str)]
    assert "target" not in axes["memory"]
    assert np.prod(heads_and_width) > 100
    assert ("target" in axes["state"]) == (len(axes["state"]) == 5)
