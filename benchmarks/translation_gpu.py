"""A Transformer of base size on one GPU: trained on phrases, exported, validated, and its plans beside PyTorch.

    enginery data phrases DIR --num-pairs 200000
    python -m benchmarks.translation_gpu --data DIR --work WORK --machine h200

Every step is the command that users run, and is left out where it was run before. PyTorch translates with the same
weights in FP16: eager; and, after results without it are written, by torch.compile with CUDA graphs. Nothing else may
use the GPU.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.networks import run_step
from benchmarks.results import Results, current_commit, result_options
from components.common.contracts.manifests import (
    MANIFEST,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    ReportManifest,
    load,
)
from components.common.runtimes.architectures import build_model, load_weights
from components.common.tasks.translation.evaluation import read_pairs
from components.common.tasks.translation.gpu import advance, room
from components.common.tasks.translation.networks import MAX_POSITIONS, Transformer
from components.common.tasks.translation.runners import batches_by_length, open_translator
from components.common.tasks.translation.search import longest_translations, padded
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD

_TURNS = 5
_NUM_SENTENCES = {1: 32, 32: 512}
_LENGTHS = 16  # sources of PyTorch are padded to multiples, each of which torch.compile compiles for a time
Greedy = Callable[[torch.Tensor], torch.Tensor]


def _greedy(source: torch.Tensor, max_tokens: int, step: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Tokens [B, T]; `step` says the next ones, [B], from those before and their position."""
    tokens = torch.full((len(source),), BOS, device=source.device)
    longest = longest_translations(source.cpu().numpy(), max_tokens)
    limits, ended, found = torch.from_numpy(longest).to(source.device), torch.zeros_like(tokens, dtype=torch.bool), []
    for position in range(int(longest.max())):  # states have room for no more
        tokens = torch.where(ended, PAD, step(tokens, position))
        ended |= (tokens == EOS) | (limits <= position + 1)
        found.append(tokens)
        if position % 4 == 3 and bool(ended.all()):
            break
    return torch.stack(found, 1)


def eager(network: Transformer, max_tokens: int) -> Greedy:
    """Translate [B, S] to [B, T], token by token."""

    def translate(source: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            memory, mask = (each.half() for each in network.encode(source))
        longest = int(longest_translations(source.cpu().numpy(), max_tokens).max())
        state = network.empty_state(memory, longest)

        def step(tokens: torch.Tensor, position: int) -> torch.Tensor:
            place = torch.full((1,), position, device=source.device)
            logits, found = network.step(tokens, place, memory, mask, state)
            advance(state, found, place)
            return logits.argmax(1)

        return _greedy(source, max_tokens, step)

    return translate


def compiled(network: Transformer, max_tokens: int) -> Greedy:
    """The same by torch.compile with CUDA graphs: each step writes one place of a state with the room of plans."""

    def attend(attention: Any, x: torch.Tensor, read: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        queries = attention._queries(x)
        scores = queries @ read[0].transpose(2, 3) + mask
        return attention.output((scores.softmax(dim=3) @ read[1]).transpose(1, 2).flatten(2))

    def step(
        tokens: torch.Tensor, place: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        x = network.embedding(tokens[:, None]) * network.scale + network.positions.index_select(0, place)
        later = torch.arange(state.shape[3], device=place.device) > place
        own_mask = later.to(x.dtype)[None, None, None] * -1e4  # [1, 1, 1, T], as Inductor wants it
        for index, layer in enumerate(network.decoder):
            own = slice(2 * index, 2 * index + 2)
            normed = layer.norms[0](x)
            state[own].index_copy_(3, place, layer.own.read(normed))
            x = x + attend(layer.own, normed, state[own], own_mask)
            x = x + attend(layer.source, layer.norms[1](x), memory[own], mask[:, None, None])
            x = x + layer.feed_forward(layer.norms[2](x))
        return torch.nn.functional.linear(network.norms[1](x[:, 0]), network.embedding.weight).argmax(1)

    fast = torch.compile(step, mode="reduce-overhead", dynamic=False)
    encode = torch.compile(network.encode, mode="reduce-overhead", dynamic=False)
    places = [torch.full((1,), position, device=network.positions.device) for position in range(max_tokens)]
    states: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}  # addresses stay, as graphs want it

    def translate(source: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            encoded = encode(source)
        key = tuple(source.shape)
        if key not in states:
            memory, mask = encoded[0].half().clone(), encoded[1].half().clone()
            states[key] = memory, mask, network.empty_state(memory, room(source.shape[1], max_tokens))
            for each in states[key]:  # else torch copies them for each step, and captures none that writes one
                torch._dynamo.mark_static_address(each)
        memory, mask, state = states[key]
        memory.copy_(encoded[0])
        mask.copy_(encoded[1])
        state.zero_()
        return _greedy(source, max_tokens, lambda tokens, position: fast(tokens, places[position], memory, mask, state))

    return translate


@click.command()
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path), help="From enginery data phrases.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Directory of what is made.")
@click.option("--architecture", default="translation/transformer_base", show_default=True)
@click.option("--epochs", default=3, show_default=True, help="Of the training.")
@click.option("--optimization-level", default=1, show_default=True, help="0 builds fastest, 5 runs fastest.")
@result_options
def main(data: Path, work: Path, architecture: str, epochs: int, optimization_level: int, results: Results) -> None:
    work.mkdir(parents=True, exist_ok=True)
    dataset, checkpoint, bundle, report = (work / name for name in ("dataset", "checkpoint", "bundle", "report"))
    seconds = {}
    if not (dataset / MANIFEST).exists():
        split = ("--task", "translation", "--val-fraction", "0.02")  # 4,000 of 200,000 tell BLEU well enough
        seconds["preprocess"] = run_step("preprocess", None, dataset, "--data", str(data), *split)
    training = ("--architecture", architecture, "--epochs", str(epochs), "--optimizer", "adamw")
    training += ("--learning-rate", "0.0005", "--global-batch-size", "256", "--warmup-fraction", "0.2")
    if not (checkpoint / MANIFEST).exists():
        seconds["train"] = run_step("train", dataset, checkpoint, *training)
    plans = ("--tensorrt", "on", "--optimization-level", str(optimization_level), "--max-batch", "32")
    plans += ("--num-selection-images", "500", "--num-ranking-images", "16")  # ranked if layers have to stay in float
    if not (bundle / MANIFEST).exists():
        seconds["export"] = run_step("export", dataset, bundle, "--model", str(checkpoint), *plans)
    speeds = ("--benchmark-batch-sizes", "[1, 32]", "--benchmark-seconds", "2")
    if not (report / MANIFEST).exists():
        seconds["validate"] = run_step("validate", dataset, report, "--bundle", str(bundle), *speeds)

    models, text = load(bundle, BundleManifest), load(bundle, BundleManifest).manifest.text_spec
    accuracy = load(report, ReportManifest).manifest.accuracy
    sentences = [source for source, _ in read_pairs(load(dataset, DatasetManifest), "val")]
    translators = {precision: open_translator(models, precision) for precision in ("fp32", "fp16", "int8")}
    record = load(checkpoint, CheckpointManifest)
    network = build_model(record.manifest.architecture, text.num_tokens)
    load_weights(network, load_file(record.file("weights.safetensors")), str(checkpoint))
    assert isinstance(network, Transformer)
    assert text.max_tokens <= MAX_POSITIONS
    network = network.half().cuda().eval()
    peers = {"eager": eager(network, text.max_tokens), "compiled": compiled(network, text.max_tokens)}
    measures = {f"score_pct_{row.precision}": row.score_pct for row in accuracy.rows}
    runs: list[dict[str, Any]] = [{"commit": current_commit(), "seconds": seconds}]
    for name, peer in peers.items():
        for batch, number in _NUM_SENTENCES.items():
            ids = translators["fp16"].tokens(sentences[:number])
            sources = [padded([ids[place] for place in places]) for places in batches_by_length(ids, batch)]
            ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
                f"tensorrt_{precision}": translator._network.greedy for precision, translator in translators.items()
            }
            rates = _tokens_per_s({**ways, f"torch_{name}": _on_gpu(peer)}, sources)
            medians = {way: statistics.median(own) for way, own in rates.items()}
            measures |= {f"tokens_per_s_{way}_b{batch}": value for way, value in medians.items()}
            for precision in ("fp16", "int8"):
                ratio = medians[f"tensorrt_{precision}"] / medians[f"torch_{name}"]
                measures[f"{precision}_over_{name}_b{batch}"] = ratio
            runs.append({"peer": name, "batch": batch, "tokens_per_s": rates})
            print({way: round(value) for way, value in medians.items()}, flush=True)
        results.write(
            f"translation_{architecture.partition('/')[2]}",
            measures=measures,
            runs=runs,
            notes="Greedy search, tokens of translations with their ends per second, medians of turns over the same "
            f"sentences ({_NUM_SENTENCES[1]} one by one, {_NUM_SENTENCES[32]} by 32, those of similar length "
            "together), source to tokens on the host; plans take turns with one way of PyTorch after the other. "
            "PyTorch in FP16: eager; compiled is torch.compile with CUDA graphs and states with the room of plans.",
        )


@torch.inference_mode()
def _tokens_per_s(
    ways: dict[str, Callable[[np.ndarray], np.ndarray]], sources: list[np.ndarray]
) -> dict[str, list[float]]:
    """Tokens per second of each way in each turn, with the ends of sentences and without what pads."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS + 3):  # three to compile and to capture
        for name, translate in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            tokens = sum(int((translate(source) != PAD).sum()) for source in sources)
            if turn >= 3:
                rates[name].append(tokens / (time.perf_counter() - began))
    return rates


def _on_gpu(translate: Greedy) -> Callable[[np.ndarray], np.ndarray]:
    def run(source: np.ndarray) -> np.ndarray:
        length = -(-source.shape[1] // _LENGTHS) * _LENGTHS
        filled = np.full((len(source), length), PAD)
        filled[:, : source.shape[1]] = source
        return translate(torch.from_numpy(filled).cuda()).cpu().numpy()

    return run


if __name__ == "__main__":
    main()
