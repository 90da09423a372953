"""Greedy translation without leaving the GPU: encoder and step as plans, replayed as CUDA graphs where they can be."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from components.common.contracts.errors import EngineryError
from components.common.runtimes.dynamic_plan import Profile, prefix
from components.common.tasks.translation.runners import ENCODER_OUTPUTS, STEP_INPUTS, STEP_OUTPUTS
from components.common.tasks.translation.search import longest_translations
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD

_LENGTHS = 8  # sources are padded to multiples of it, so that graphs fit more of them
_MOST_SIZES = 64  # of batches whose graphs are kept, the latest
_STEPS_BETWEEN = 4  # looks at whether all sentences have ended, for each of which the host waits


class Graph(Protocol):
    """Encoder or step, on tensors of one device."""

    inputs: Mapping[str, torch.dtype]
    profiles: Sequence[Profile]

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor] = ...
    ) -> dict[str, torch.Tensor]:
        """See DynamicPlan.run."""
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
        self.uncapturable: set[int] = set()  # of encoder and steps, -1 and 0, those that no graph can hold
        limits = [profile["source"] for profile in encoder.profiles]
        self._sizes = [(low[0], high[0]) for low, _, high in limits]  # of batches, smallest and largest
        self._batches: dict[tuple[int, int], _Batch] = {}

    def encode(self, source: np.ndarray) -> tuple[torch.Tensor, ...]:
        """See Network; on the device."""
        num_rows, rows = len(source), self._rows(len(source))
        found = self.encoder.run({"source": torch.from_numpy(source[rows]).to(self.torch_device)})
        memory, mask, state = (found[name] for name in ENCODER_OUTPUTS)
        return memory[:, :num_rows], mask[:num_rows], state[:, :num_rows]

    def step(
        self, tokens: np.ndarray, position: int, memory: torch.Tensor, mask: torch.Tensor, state: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor]:
        """See Network; the state on the device."""
        num_rows, rows = len(tokens), self._rows(len(tokens))
        numbers = (torch.from_numpy(tokens[rows]), torch.tensor([position]))
        values = (*(number.to(self.torch_device) for number in numbers), memory[:, rows], mask[rows], state[:, rows])
        found = self.step_graph.run(dict(zip(STEP_INPUTS, values, strict=True)))
        return found["logits"][:num_rows].float().cpu().numpy(), found["next_state"][:, :num_rows]

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

    def _size(self, num_rows: int) -> int:
        """Rows of the smallest batch that a profile takes and that holds so many; as many, where there is none."""
        return min((max(low, num_rows) for low, high in self._sizes if num_rows <= high), default=num_rows)

    def _rows(self, num_rows: int) -> slice | np.ndarray:
        """An index of so many rows, which come again until the batch is full."""
        size = self._size(num_rows)
        return np.arange(size) % num_rows if size > num_rows else slice(None)


class _Batch:
    """Buffers of so many sentences of one length, and a graph of the encoder and of each step."""

    def __init__(self, network: GpuNetwork, batch: int, length: int) -> None:
        self._network, device = network, network.torch_device
        number = network.encoder.inputs["source"]
        self._source = torch.full((batch, length), PAD, dtype=number, device=device)
        encoded = network.encoder.run({"source": self._source})
        self._memory, self._mask, first = (encoded[name] for name in ENCODER_OUTPUTS)
        self._positions = torch.arange(network.max_tokens, device=device)
        self._found = torch.full((network.max_tokens + 1, batch), BOS, device=device)  # [0] is what each begins with
        self._ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self._limits = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens of the longest translations
        self._first_shape = tuple(first.shape)
        second = self._run_step(0, first)
        self._growth = tuple(b - a for a, b in zip(first.shape, second["next_state"].shape, strict=True))
        largest = max(torch.Size(self._state_shape(tokens)).numel() for tokens in (0, network.max_tokens))
        self._states = [torch.empty(largest, dtype=first.dtype, device=device) for _ in range(2)]
        self._logits = second["logits"]
        self._ran: set[int] = set()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def translate(self, source: np.ndarray) -> np.ndarray:
        """See GpuNetwork.greedy; of so many sentences or fewer. Rows behind them are PAD, and ended from the start."""
        num_rows = len(source)
        self._source.fill_(PAD)
        self._source[:num_rows, : source.shape[1]] = torch.from_numpy(source).to(self._source)
        self._ended.fill_(True)
        self._ended[:num_rows] = False
        self._limits[:num_rows] = torch.from_numpy(longest_translations(source, self._network.max_tokens))
        self._do(-1, self._encode)
        position = 0
        for position in range(self._network.max_tokens):
            self._do(position, partial(self._step, position))
            if position % _STEPS_BETWEEN == _STEPS_BETWEEN - 1 and bool(self._ended.all()):
                break
        return self._found[1 : position + 2, :num_rows].T.cpu().numpy()

    def _state_shape(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(a + num_tokens * more for a, more in zip(self._first_shape, self._growth, strict=True))

    def _encode(self) -> None:
        buffers = (self._memory, self._mask, self._states[0])
        self._network.encoder.run({"source": self._source}, dict(zip(ENCODER_OUTPUTS, buffers, strict=True)))

    def _step(self, position: int) -> None:
        state = prefix(self._states[position % 2], self._state_shape(position))
        buffers = (self._logits, self._states[(position + 1) % 2])
        found = self._run_step(position, state, dict(zip(STEP_OUTPUTS, buffers, strict=True)))
        tokens = torch.where(self._ended, PAD, found["logits"].argmax(dim=1))
        self._found[position + 1] = tokens
        self._ended |= (tokens == EOS) | (self._limits <= position + 1)

    def _run_step(
        self, position: int, state: torch.Tensor, outputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        place = self._positions[position : position + 1]
        values = (self._found[position], place, self._memory, self._mask, state)
        return self._network.step_graph.run(dict(zip(STEP_INPUTS, values, strict=True)), outputs or {})

    def _do(self, key: int, work: Callable[[], None]) -> None:
        """Do work at once, and from its third time on by its graph, where TensorRT lets the plan be captured."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # TensorRT wants one run of a size before it can be captured
        if key in self._ran and self._network.pool is not None and min(key, 0) not in self._network.uncapturable:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._network.pool, capture_error_mode="thread_local"):
                    work()
                self._graphs[key] = graph
            except (EngineryError, RuntimeError):  # such as loops, or kernels of 8.6 for sizes that change
                self._network.uncapturable.add(min(key, 0))
        self._ran.add(key)
