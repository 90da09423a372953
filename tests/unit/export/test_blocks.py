"""Blocks of networks, the times that profiles give them, and the fastest choice."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from components.common.contracts.transforms import ShapeSpec
from components.export.blocks import (
    Block,
    BlockTime,
    attribute_times,
    fastest,
    find_blocks,
    plan_of,
    without_losing_runs,
)
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, with_names
from components.export.qdq import insert_qdq


class Gate(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(features, 1)
        return features * torch.sigmoid(self.fc2(torch.relu(self.fc1(pooled))))


class Attention(nn.Module):
    """Self-attention and an MLP, each with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [B, T, width]
        query, key, value = self.qkv(self.norm(tokens)).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(1, 2) / 4.0, dim=-1)
        tokens = tokens + self.out(weights @ value)
        return tokens + self.mlp(tokens)


class Network(nn.Module):
    """One of each kind of block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.expand, self.depthwise = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.gate, self.project = Gate(16), nn.Conv2d(16, 8, 1)
        self.dense = nn.Conv2d(8, 8, 3, 1, 1)
        self.attention, self.head = Attention(16), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        features = features + self.project(self.gate(torch.relu(self.depthwise(torch.relu(self.expand(features))))))
        features = torch.cat([features, self.dense(features)], dim=1)
        return self.head(self.attention(features.flatten(2).transpose(1, 2)).mean(dim=1))


SHAPES = ShapeSpec(height=16, width=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("blocks") / "fp32.onnx"
    torch.manual_seed(0)
    export_onnx(Network().eval(), path, SHAPES)
    return with_names(onnx.load(path))


def test_each_kind_of_block_is_found_with_its_gates(model):
    blocks = find_blocks(model)
    kinds = [block.kind for block in blocks]
    assert kinds == ["convolution", "depthwise", "convolution", "attention", "product", "product"]
    assert sorted(itertools.chain.from_iterable(block.nodes for block in blocks)) == sorted(
        node.name for node in model.graph.node
    )
    gates = [name for block in blocks for name in block.excluded_gates]
    assert [name for name in gates if "fc" in name] == ["/gate/fc1/Conv", "/gate/fc2/Conv"]
    assert {block.kind for block in blocks if block.gates} == {"depthwise"}
    assert all(set(block.layers) == {*block.ungated_layers, *block.excluded_gates} for block in blocks)


def test_all_that_a_block_reads_from_before_it_is_one_tensor(model):
    made = {name: node.name for node in model.graph.node for name in node.output}
    inputs = {entry.name for entry in model.graph.input}
    constant = {name for name in made if "Constant" in made[name] or "Shape" in made[name]}
    for block in find_blocks(model):
        read = {name for node in model.graph.node if node.name in block.nodes for name in node.input}
        outside = {name for name in read if name in inputs or (name in made and made[name] not in block.nodes)}
        assert outside - constant == {block.tensor}


def test_a_networks_own_blocks_are_its_blocks(resnet18):
    _, model, _, _ = resnet18
    stages = [f"/layer{stage}/layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [block.name for block in find_blocks(model)] == ["/conv1/Conv", *stages, "/fc/Gemm"]


def test_times_go_to_the_block_of_the_nodes_that_a_layer_was_fused_from(model):
    blocks = find_blocks(model)
    quantized = insert_qdq(model, dict.fromkeys(activation_tensors(model), 0.1))
    depthwise, attention = 1, 3
    dense = next(node for node in quantized.graph.node if node.name == "/dense/Conv")
    times, spans = attribute_times(
        blocks,
        quantized,
        [
            ("a", ("/stem/stem.0/Conv",), 1.0),
            ("Reformatting CopyNode for Input Tensor 0 to /expand/Conv + PWN(/Relu)", (), 2.0),
            ("/gate/fc1/Conv + /gate/Relu", (), 4.0),
            ("gate.fc2.weight_DequantizeLinear", (), 8.0),
            ("a layer that says nothing", (), 16.0),
            (dense.input[0].replace("_dequantized", "_QuantizeLinear"), (), 32.0),
            ("{ForeignNode[/attention/qkv/MatMul.../head/Gemm]}", (), 64.0),
        ],
    )
    assert times[0].total == 1.0
    assert (times[depthwise].block, times[depthwise].gates) == (2.0 + 16.0, 12.0)
    assert times[2].total == 32.0
    assert times[attention].total == 64.0
    assert spans == {(attention, len(blocks) - 1)}


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_fastest_of_all(seed):
    rng = np.random.default_rng(seed)
    blocks = [
        Block(name=str(n), kind="convolution", nodes=(f"{n}",), layers=(f"{n}",), gates=(), tensor=f"t{n}")
        for n in range(7)
    ]
    in_float, in_int8, change = rng.uniform(0, 1, 7), rng.uniform(0, 1, 7), rng.uniform(0, 0.6, (7, 2))
    fixed = {int(rng.integers(7)): bool(rng.integers(2))}

    def total(path: tuple[bool, ...]) -> float:
        changes = [change[n, int(path[n])] for n in range(1, 7) if path[n] != path[n - 1]]
        return sum(in_int8[n] if path[n] else in_float[n] for n in range(7)) + sum(changes)

    times = ([BlockTime(block=value) for value in values] for values in (in_float, in_int8))
    plan, milliseconds = fastest(blocks, *times, lambda tensor, to_int8: change[int(tensor[1:]), int(to_int8)], fixed)
    paths = itertools.product((False, True), repeat=7)
    best = min((path for path in paths if all(path[n] == value for n, value in fixed.items())), key=total)
    assert plan.int8 == best
    assert milliseconds == pytest.approx(total(best))
    assert plan.excluded == tuple(str(n) for n in range(7) if not best[n])


def test_a_run_of_blocks_whose_conversions_eat_its_gain_goes_back_to_float(model):
    blocks = find_blocks(model)
    plan = plan_of(blocks, (True, False, True, True, False, True))
    in_float = [BlockTime(block=1.0)] * 6
    # The first gains nothing, the next two lose by a conversion that counts for the block behind them, the last gains.
    mixed = [BlockTime(block=value) for value in (1.0, 1.0, 0.8, 0.9, 1.4, 0.7)]
    assert without_losing_runs(blocks, plan, in_float, mixed).int8 == (False, False, False, False, False, True)
