"""Greedy translation without leaving the GPU: encoder and step as plans, replayed as CUDA graphs where they can be."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from components.common.contracts.errors import EngineryError
from components.common.runtimes.dynamic_plan import Profile
from components.common.tasks.translation.search import ENCODER_OUTPUTS, STEP_INPUTS, longest_translations, state_shape
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD

_log = logging.getLogger(__name__)
_LENGTHS = 8  # sources are padded to multiples of it, so that graphs fit more of them
_MOST_SIZES = 64  # of batches whose graphs are kept, the latest
STEPS = 4  # in a graph; behind them the host waits, to see whether all sentences have ended


class Graph(Protocol):
    """Encoder or step, on tensors of one device."""

    inputs: Mapping[str, torch.dtype]
    profiles: Sequence[Profile]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See DynamicPlan."""
        ...

    def bind(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """See DynamicPlan."""
        ...


class GpuNetwork:
    """Encoder and step on one device; see Network. What is read of sentences and known of tokens stays there.

    Batches that no profile takes are filled up to the next size that one does, and only the rows asked for returned.
    """

    runtime = "tensorrt"

    def __init__(self, encoder: Graph, step: Graph, *, max_tokens: int, device: torch.device) -> None:
        """`max_tokens` of a sentence, of source and translation each."""
        self.encoder, self.step_graph, self.max_tokens = encoder, step, max_tokens
        self.torch_device = device
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.uncapturable: set[str] = set()  # of "encoder" and "step", those that no graph can hold
        limits = [profile["source"] for profile in encoder.profiles]
        self._sizes = [(low[0], high[0]) for low, _, high in limits]  # of batches, smallest and largest
        low, _, high = step.profiles[0]["state"]
        self._state_sizes = [a if a == b else None for a, b in zip(low, high, strict=True)]
        self._batches: dict[tuple[int, int], _Batch] = {}

    def encode(self, source: np.ndarray) -> tuple[torch.Tensor, ...]:
        """See Network; on the device. The state has room for the longest translation."""
        num_rows, rows = len(source), self._rows(len(source))
        found = self.encoder.run({"source": torch.from_numpy(source[rows]).to(self.torch_device)})
        memory, mask = (found[name] for name in ENCODER_OUTPUTS)
        return memory[:, :num_rows], mask[:num_rows], self.empty_state(num_rows, source.shape[1])

    def empty_state(self, batch: int, length: int) -> torch.Tensor:
        """Return a state with room for the translations of `batch` sentences of so many tokens."""
        shape = state_shape(self._state_sizes, batch, room(length, self.max_tokens))
        return torch.zeros(shape, dtype=self.step_graph.inputs["state"], device=self.torch_device)

    def step(
        self, tokens: np.ndarray, position: int, memory: torch.Tensor, mask: torch.Tensor, state: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor]:
        """See Network; the state on the device."""
        num_rows, rows = len(tokens), self._rows(len(tokens))
        numbers = (torch.from_numpy(tokens[rows]), torch.tensor([position]))
        values = (*(number.to(self.torch_device) for number in numbers), memory[:, rows], mask[rows], state[:, rows])
        found = self.step_graph.run(dict(zip(STEP_INPUTS, values, strict=True)))
        advance(state, found["next_state"][:, :num_rows], values[1])
        return found["logits"][:num_rows].float().cpu().numpy(), state

    def greedy(self, source: np.ndarray) -> np.ndarray:
        """The likeliest token each time, until all sentences have ended: [B, S] int64 -> [B, T] int64 with PAD behind.

        Raises:
            UserError: more sentences, or longer ones, than the plans take.
        """
        length = min(-(-source.shape[1] // _LENGTHS) * _LENGTHS, max(self.max_tokens, source.shape[1]))
        size = self._size(len(source)), length
        batch = self._batches.pop(size, None) or _Batch(self, *size)
        self._batches[size] = batch  # the latest at the end
        if len(self._batches) > _MOST_SIZES:
            del self._batches[next(iter(self._batches))]
        return batch.translate(source)

    def capture(self, name: str, work: Callable[[], None]) -> Callable[[], None] | None:
        """Do the work, and return its replay as a CUDA graph; None where TensorRT can't capture the plan `name`.

        What the work refers to has to live as long as the replay.
        """
        if self.pool is None or name in self.uncapturable:
            return None
        work()  # TensorRT wants one run of a context before it is captured
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        except (EngineryError, RuntimeError) as error:  # such as loops, or kernels of 8.6 for sizes that change
            _log.warning("no CUDA graph of the %s, its kernels are launched one by one: %s", name, error)
            self.uncapturable.add(name)
            self.pool = torch.cuda.graph_pool_handle()  # torch may take the other one for in use from now on
            return None
        return graph.replay

    def _size(self, num_rows: int) -> int:
        """Rows of the smallest batch that a profile takes and that holds so many; as many, where there is none."""
        return min((max(low, num_rows) for low, high in self._sizes if num_rows <= high), default=num_rows)

    def _rows(self, num_rows: int) -> slice | np.ndarray:
        """An index of so many rows, which come again until the batch is full."""
        size = self._size(num_rows)
        return np.arange(size) % num_rows if size > num_rows else slice(None)


def advance(state: torch.Tensor, found: torch.Tensor, position: torch.Tensor) -> None:
    """Write what a step returned into its state, at `position` [1] of one with room for tokens."""
    if state.shape == found.shape:
        state.copy_(found)
    else:
        state.index_copy_(3, position, found)


def room(length: int, max_tokens: int) -> int:
    """Tokens that whole graphs find of sentences of so many tokens, a few more than the longest translation has."""
    (longest,) = longest_translations(np.full((1, length), BOS), max_tokens)
    return -(-int(longest) // STEPS) * STEPS


class _Batch:
    """Buffers of so many sentences of one length, with the encoder and some steps as CUDA graphs on them."""

    def __init__(self, network: GpuNetwork, batch: int, length: int) -> None:
        device, self._max_tokens = network.torch_device, network.max_tokens
        self._source = torch.full((batch, length), PAD, device=device)
        self._num_tokens = room(length, self._max_tokens)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.full((batch,), BOS, device=device)
        self._found = torch.full((self._num_tokens, batch), PAD, device=device)
        self._ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self._limits = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens of the longest translations
        encoded = network.encoder.run({"source": self._source})
        self._state = network.empty_state(batch, length)
        read = (self._tokens, self._place, *(encoded[name] for name in ENCODER_OUTPUTS), self._state)
        inputs = dict(zip(STEP_INPUTS, read, strict=True))
        self._outputs = network.step_graph.run(inputs)
        self._step = network.step_graph.bind(inputs, self._outputs)
        self._encode = network.encoder.bind({"source": self._source}, encoded)
        self._replay_encode = network.capture("encoder", self._encode)
        self._replay_steps = network.capture("step", self._some_steps)

    def translate(self, source: np.ndarray) -> np.ndarray:
        """See GpuNetwork.greedy; of so many sentences or fewer. Rows behind them are PAD, and ended from the start."""
        num_rows, done = len(source), 0
        self._source.fill_(PAD)
        self._source[:num_rows, : source.shape[1]] = torch.from_numpy(source).to(self._source)
        self._ended.fill_(True)
        self._ended[:num_rows] = False
        self._limits[:num_rows] = torch.from_numpy(longest_translations(source, self._max_tokens))
        self._place.zero_()
        self._tokens.fill_(BOS)
        self._state.zero_()
        (self._replay_encode or self._encode)()
        while done < self._num_tokens:
            (self._replay_steps or self._some_steps)()
            done += STEPS
            if bool(self._ended.all()):
                break
        return self._found[:done, :num_rows].T.cpu().numpy()

    def _some_steps(self) -> None:
        for _ in range(STEPS):
            self._step()
            advance(self._state, self._outputs["next_state"], self._place)
            tokens = torch.where(self._ended, PAD, self._outputs["logits"].argmax(dim=1))
            self._found.index_copy_(0, self._place, tokens[None])
            self._tokens.copy_(tokens)
            self._place += 1
            self._ended |= (tokens == EOS) | (self._limits <= self._place)
