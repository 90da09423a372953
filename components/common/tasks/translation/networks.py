"""Networks that translate: a Transformer (Vaswani et al., 2017) and an LSTM with attention (Luong et al., 2015).

Each trains on whole sentences (`forward`), and translates by `encode` once and `step` for each token, with the tokens
before in its state. Both ways compute the same. What `encode` returns and `step` takes:

- memory [M, B, ...]: what a step reads of the sources, of any kind, the batch in the second axis;
- mask [B, S] float: 0 for tokens, a large negative number behind a sentence's end;

- state [N, B, ...]: what a step knows of the tokens before, zeros before the first one (`empty_state`). The
  Transformer's has room for all tokens of a translation, [N, B, heads, T, width / heads].

A step returns logits and what becomes of the state: all of it, or the entry of the Transformer's at its position, so
that nobody copies the others.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn

from components.common.tasks.translation.vocabulary import PAD

MAX_POSITIONS = 1024  # tokens of a sentence that the Transformer tells apart
_MASKED = -1e4  # added to the attention's scores; FP16 holds it, and its exponential is zero
Encoded = tuple[torch.Tensor, torch.Tensor]  # memory, mask


def _mask(source: torch.Tensor) -> torch.Tensor:
    """[B, S] int64 -> [B, S] float32."""
    return (source == PAD).float() * _MASKED


class _Attention(nn.Module):
    """Scaled dot products of several heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, width] -> keys and values, [2, B, heads, T, width / heads]."""
        return self.key_value(x).reshape(*x.shape[:2], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x: torch.Tensor, read: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[B, T, width] queries from x, `read` as above of R tokens, mask [B or 1, 1, T or 1, R] -> [B, T, width]."""
        queries = self._queries(x)
        found = (queries @ read[0].transpose(2, 3) + mask).softmax(dim=3) @ read[1]  # [B, heads, T, width / heads]
        return self.output(found.transpose(1, 2).flatten(2))

    def one(
        self, x: torch.Tensor, read: torch.Tensor, mask: torch.Tensor, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One query of each sentence, over R tokens and a `last` one: mask [B or 1, 1, R, 1] -> [B, 1, width].

        Keys come first: with queries first TensorRT 8.6 reads the mask of the first sentence alone.
        """
        queries = self._queries(x)
        scores = read[0] @ queries.transpose(2, 3) + mask
        if last is None:
            found = scores.softmax(dim=2).transpose(2, 3) @ read[1]
        else:
            scores = torch.cat([scores, (last[0] * queries).sum(dim=3, keepdim=True)], dim=2)
            shares = scores.softmax(dim=2).transpose(2, 3)
            found = shares[..., :-1] @ read[1] + shares[..., -1:] * last[1]
        return self.output(found.transpose(1, 2).flatten(2))

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, width] -> [B, heads, T, width / heads], scaled."""
        queries = self.query(x).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
        return queries / math.sqrt(queries.shape[3])


class _FeedForward(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4 * width, width))


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(width, num_heads), _FeedForward(width, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """X [B, S, width], mask [B, 1, 1, S]."""
        normed = self.norms[0](x)
        x = x + self.dropout(self.attention(normed, self.attention.read(normed), mask))
        return x + self.dropout(self.feed_forward(self.norms[1](x)))


class _DecoderLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.own, self.source = _Attention(width, num_heads), _Attention(width, num_heads)
        self.feed_forward = _FeedForward(width, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: torch.Tensor, own_mask: torch.Tensor, memory: torch.Tensor, source_mask: torch.Tensor
    ) -> torch.Tensor:
        """X [B, T, width] -> [B, T, width]."""
        normed = self.norms[0](x)
        x = x + self.dropout(self.own(normed, self.own.read(normed), own_mask))
        x = x + self.dropout(self.source(self.norms[1](x), memory, source_mask))
        return x + self.dropout(self.feed_forward(self.norms[2](x)))

    def step(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        before_mask: torch.Tensor,
        memory: torch.Tensor,
        source_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """X [B, 1, width] -> [B, 1, width], and what was read of it; masks as those of _Attention.one."""
        normed = self.norms[0](x)
        read = self.own.read(normed)
        x = x + self.own.one(normed, before, before_mask, read)
        x = x + self.source.one(self.norms[1](x), memory, source_mask)
        return x + self.feed_forward(self.norms[2](x)), read


class Transformer(nn.Module):
    """LayerNorm before each part; one table of embeddings for source, target and output."""

    def __init__(self, num_tokens: int, *, width: int, num_heads: int, num_layers: tuple[int, int], dropout: float):
        """`num_layers` of encoder and decoder."""
        super().__init__()
        self.num_heads, self.scale = num_heads, math.sqrt(width)
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.encoder = nn.ModuleList(_EncoderLayer(width, num_heads, dropout) for _ in range(num_layers[0]))
        self.decoder = nn.ModuleList(_DecoderLayer(width, num_heads, dropout) for _ in range(num_layers[1]))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.positions: torch.Tensor
        self.places: torch.Tensor
        # [MAX_POSITIONS, width]: sines and cosines of wavelengths from 2 pi to 10,000 times as much
        angles = torch.arange(MAX_POSITIONS)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1), persistent=False)
        self.register_buffer("places", torch.arange(MAX_POSITIONS), persistent=False)

    def encode(self, source: torch.Tensor) -> Encoded:
        """[B, S] int64 -> memory [2 x layers, B, heads, S, width / heads], mask."""
        mask = _mask(source)
        x = self.dropout(self.embedding(source) * self.scale + self.positions[: source.shape[1]])
        for layer in self.encoder:
            x = layer(x, mask[:, None, None])
        x = self.norms[0](x)
        return torch.cat([cast(_DecoderLayer, layer).source.read(x) for layer in self.decoder]), mask

    def empty_state(self, memory: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[2 x layers, B, heads, num_tokens, width / heads]: keys and values of the tokens of a translation."""
        return memory.new_zeros(*memory.shape[:3], num_tokens, memory.shape[4])

    def step(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        memory: torch.Tensor,
        mask: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B] int64 at `position` [1] int64 -> logits [B, V] of the next ones, and entries of the state."""
        before_mask = (self.places[: state.shape[3], None] >= position).to(state) * _MASKED  # [T, 1]
        source_mask, found = mask[:, None, :, None], []
        x = self.embedding(tokens[:, None]) * self.scale + self.positions.index_select(0, position)
        for index, layer in enumerate(self.decoder):
            own = slice(2 * index, 2 * index + 2)
            x, read = cast(_DecoderLayer, layer).step(x, state[own], before_mask, memory[own], source_mask)
            found.append(read)
        return nn.functional.linear(self.norms[1](x)[:, 0], self.embedding.weight), torch.cat(found)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """[B, 2, L] int64, sources and the targets' tokens before each -> logits [B, L, V]."""
        memory, mask = self.encode(pairs[:, 0])
        length = pairs.shape[2]
        x = self.dropout(self.embedding(pairs[:, 1]) * self.scale + self.positions[:length])
        later = torch.ones(length, length, device=x.device, dtype=x.dtype).triu(1) * _MASKED
        for index, layer in enumerate(self.decoder):
            x = layer(x, later, memory[2 * index : 2 * index + 2], mask[:, None, None])
        return nn.functional.linear(self.norms[1](x), self.embedding.weight)


class AttentionLstm(nn.Module):
    """An encoder that reads both ways, a decoder, and attention by dot products over what the encoder said."""

    def __init__(self, num_tokens: int, *, width: int, num_layers: int, dropout: float) -> None:
        """`width` of embeddings and of the decoder; each way of the encoder has half."""
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.scale = math.sqrt(width)
        options = {"num_layers": num_layers, "batch_first": True, "dropout": dropout if num_layers > 1 else 0.0}
        self.onward = nn.LSTM(width, width // 2, **options)
        self.backward_ = nn.LSTM(width, width // 2, **options)
        self.decoder = nn.LSTM(width, width, **options)
        self.query = nn.Linear(width, width, bias=False)
        self.joined = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def encode(self, source: torch.Tensor) -> Encoded:
        """[B, S] int64 -> memory [1, B, S, width], mask."""
        mask = _mask(source)
        x = self.dropout(self.embedding(source) * self.scale)
        # Sentences are reversed each within its own length, so that what pads them changes nothing.
        lengths = (source != PAD).sum(dim=1, keepdim=True)
        places = torch.arange(source.shape[1], device=source.device)[None]
        reverse = torch.where(places < lengths, lengths - 1 - places, places)[..., None]
        onward = self.onward(x)[0]
        backward = self.backward_(x.gather(1, reverse.expand_as(x)))[0]
        return torch.cat([onward, backward.gather(1, reverse.expand_as(backward))], dim=2)[None], mask

    def empty_state(self, memory: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[2 x layers, B, width]; it holds any number of tokens."""
        return memory.new_zeros(2 * self.decoder.num_layers, memory.shape[1], memory.shape[3])

    def step(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        memory: torch.Tensor,
        mask: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Transformer.step; the position is in the state."""
        x, lstm = self.embedding(tokens) * self.scale, self.decoder
        states = list(state.to(x.dtype).unbind(0))
        # As matrix products, which can run in INT8; the operator of ONNX can't.
        for layer in range(lstm.num_layers):
            weights = [getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            hidden, cell = states[layer], states[lstm.num_layers + layer]
            gates = nn.functional.linear(x, weights[0], weights[2]) + nn.functional.linear(
                hidden, weights[1], weights[3]
            )
            keep_in, keep, new, out = gates.chunk(4, dim=1)
            cell = keep.sigmoid() * cell + keep_in.sigmoid() * new.tanh()
            x = out.sigmoid() * cell.tanh()
            states[layer], states[lstm.num_layers + layer] = x, cell
        x = self._attend(x[:, None], memory, mask)[:, 0]
        return nn.functional.linear(x, self.embedding.weight), torch.stack(states)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """See Transformer.forward."""
        memory, mask = self.encode(pairs[:, 0])
        x = self.decoder(self.dropout(self.embedding(pairs[:, 1]) * self.scale))[0]
        return nn.functional.linear(self._attend(x, memory, mask), self.embedding.weight)

    def _attend(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[B, T, width] of the decoder -> [B, T, width] with what it read of the source."""
        scores = memory[0] @ self.query(x).transpose(1, 2) + mask[:, :, None]  # [B, S, T]; see _Attention
        found = scores.softmax(dim=1).transpose(1, 2).to(memory.dtype) @ memory[0]
        return self.dropout(torch.tanh(self.joined(torch.cat([x, found], dim=2))))


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "transformer_base": partial(Transformer, width=512, num_heads=8, num_layers=(6, 6), dropout=0.1),
    "transformer_small": partial(Transformer, width=192, num_heads=4, num_layers=(2, 2), dropout=0.1),
    "lstm_base": partial(AttentionLstm, width=1024, num_layers=2, dropout=0.2),
    "lstm_small": partial(AttentionLstm, width=192, num_layers=1, dropout=0.0),
}
