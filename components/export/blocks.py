"""Blocks of a network: what runs in INT8 or in float as a whole, their measured times, and the faster of both.

Between two blocks one tensor alone passes: behind the residual addition of a ResNet, of an inverted bottleneck, of an
attention layer or an MLP, behind the concatenation of an Inception module. Only there a change of precision costs one
conversion.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import NodeProto

from components.export.placement import (
    SPATIAL_POOLS,
    GraphIndex,
    attribute,
    float_graph,
    is_spatial_mean,
    node_id,
    quantized_reads,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive nodes of a graph, in graph order. `gates` are those of squeeze-and-excitation branches."""

    name: str
    kind: str  # "attention", "depthwise", "convolution" or "product"
    nodes: tuple[str, ...]  # ids
    layers: tuple[str, ...]  # of these: what reads through Q/DQ
    gates: tuple[str, ...]
    tensor: str  # the one that passes into it

    @property
    def ungated_layers(self) -> tuple[str, ...]:
        """Its layers but for those of gates."""
        return tuple(name for name in self.layers if name not in self.gates)

    @property
    def excluded_gates(self) -> tuple[str, ...]:
        """The layers that are left out of INT8 where the block's gates are."""
        return tuple(name for name in self.layers if name in self.gates)


def find_blocks(model: onnx.ModelProto) -> list[Block]:
    """Split a graph at every tensor through which alone everything behind it is reached.

    Pieces without a weighted layer join the one before them, and a depthwise convolution is never parted from what
    follows it. A gate is what runs on globally pooled features and multiplies others, as in squeeze-and-excitation.

    Args:
        model: FP32 graph, without Q/DQ.
    """
    proto = float_graph(model).graph
    graph = GraphIndex(proto)
    reads = quantized_reads(proto, ())
    weighted = {node_id(read.node) for read in reads if read.axis is not None}
    readers = {node_id(read.node) for read in reads}
    inputs = [entry.name for entry in proto.input if entry.name not in graph.initializers]
    pieces: list[list[NodeProto]] = []
    for piece in _pieces(graph, inputs):
        has_weights = any(node_id(node) in weighted for node in piece)
        if pieces and (not has_weights or _ends_depthwise(pieces[-1], graph)):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    if len(pieces) > 1 and not any(node_id(node) in weighted for node in pieces[0]):
        pieces[:2] = [pieces[0] + pieces[1]]
    blocks, tensor = [], inputs[0]
    for piece in pieces:
        ids = tuple(node_id(node) for node in piece)
        layers = tuple(name for name in ids if name in readers)
        names = [name for name in ids if name in weighted] or list(ids)
        blocks.append(
            Block(
                name=_common_name(names),
                kind=_kind(piece, graph),
                nodes=ids,
                layers=layers,
                gates=tuple(_gates(piece, graph)),
                tensor=tensor,
            )
        )
        inside = {name for node in piece for name in node.input}
        outputs = [name for node in piece for name in node.output if name not in inside and graph.num_reads.get(name)]
        tensor = outputs[-1] if outputs else str(piece[-1].output[0])
    return _with_unique_names(blocks)


def _pieces(graph: GraphIndex, inputs: Sequence[str]) -> Iterable[list[NodeProto]]:
    """Nodes between two cuts. What is computed from shapes and constants alone passes nothing on."""
    data = set(inputs)
    for node in graph.nodes:
        if node.op_type != "Shape" and any(name in data for name in node.input):
            data.update(node.output)
    left = dict.fromkeys(data, 0)
    for node in graph.nodes:
        for name in node.input:
            if name in data and node.op_type != "Shape":
                left[name] += 1
    waiting = {name for name in inputs if left[name]}
    piece: list[NodeProto] = []
    for node in graph.nodes:
        piece.append(node)
        if node.op_type == "Shape" or not any(name in data for name in node.input):
            continue
        for name in node.input:
            if name in data:
                left[name] -= 1
                if not left[name]:
                    waiting.discard(name)
        waiting.update(name for name in node.output if left.get(name))
        if len(waiting) == 1:
            yield piece
            piece = []
    if piece:
        yield piece


def _ends_depthwise(piece: Sequence[NodeProto], graph: GraphIndex) -> bool:
    """True if the last layer with weights is a depthwise convolution."""
    convolutions = [node for node in piece if node.op_type in ("Conv", "Gemm", "MatMul")]
    return bool(convolutions) and _is_depthwise(convolutions[-1], graph)


def _is_depthwise(node: NodeProto, graph: GraphIndex) -> bool:
    weights = graph.initializers.get(node.input[1]) if node.op_type == "Conv" else None
    return weights is not None and attribute(node, "group", 1) > 1 and weights.dims[1] == 1


def _kind(piece: Sequence[NodeProto], graph: GraphIndex) -> str:
    operators = {node.op_type for node in piece}
    if "Softmax" in operators and "MatMul" in operators:
        return "attention"
    if any(_is_depthwise(node, graph) for node in piece):
        return "depthwise"
    return "convolution" if "Conv" in operators else "product"


def _gates(piece: Sequence[NodeProto], graph: GraphIndex) -> list[str]:
    """Nodes on globally pooled features, from the pooling on, that end in a product with features not pooled."""
    pooled: set[str] = set()
    gates: list[str] = []
    multiplies = False
    for node in piece:
        inputs = [name for name in node.input if name and not graph.is_constant(name)]
        pools = node.op_type in SPATIAL_POOLS or is_spatial_mean(node, graph)
        if pools or (inputs and all(name in pooled for name in inputs)):
            pooled.update(node.output)
            gates.append(node_id(node))
        elif node.op_type == "Mul" and any(name in pooled for name in inputs):
            multiplies = True
    return gates if multiplies else []


def _common_name(names: Sequence[str]) -> str:
    """The module that layers share by their names; the first layer's name where they share none."""
    parts = [re.split(r"(?<=[/])", name) for name in names]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return "".join(shared).rstrip("/") or names[0]


def _with_unique_names(blocks: list[Block]) -> list[Block]:
    names = [block.name for block in blocks]
    return [
        replace(block, name=f"{block.name} ({block.layers[0]})")
        if names.count(block.name) > 1 and block.layers
        else block
        for block in blocks
    ]


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Milliseconds of a block's layers, and apart from them those of its gates."""

    block: float = 0.0
    gates: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.block + self.gates


def attribute_times(
    blocks: Sequence[Block], model: onnx.ModelProto, profile: Sequence[tuple[str, Sequence[str], float]]
) -> tuple[list[BlockTime], set[tuple[int, int]]]:
    """The time of each block, by a runtime's profile of its layers.

    A layer's nodes tell its block: those that it was fused from, else those that its name holds, and of a Q/DQ node
    what reads or makes its tensor. A layer that spans several blocks counts for the first of them.

    Args:
        blocks: of the FP32 graph.
        model: the graph that was compiled, with Q/DQ or without.
        profile: name, nodes and milliseconds of each layer.

    Returns:
        The times, and the first and last block of every layer that spans several.
    """
    where = _where(blocks, model)
    times = [BlockTime() for _ in blocks]
    spans: set[tuple[int, int]] = set()
    previous = 0
    for name, nodes, milliseconds in profile:
        found = [where[node] for node in (*nodes, *_names_in(name)) if node in where]
        numbers = sorted({number for number, _ in found})
        number = numbers[0] if numbers else previous
        if len(numbers) > 1:
            spans.add((numbers[0], numbers[-1]))
        is_gate = bool(found) and all(gate for _, gate in found)
        old = times[number]
        times[number] = BlockTime(
            block=old.block + (0 if is_gate else milliseconds), gates=old.gates + (milliseconds if is_gate else 0)
        )
        previous = number
    return times, spans


def _where(blocks: Sequence[Block], model: onnx.ModelProto) -> dict[str, tuple[int, bool]]:
    """Number of the block, and whether it is in a gate, of every node and tensor of a graph."""
    where = {name: (number, name in block.gates) for number, block in enumerate(blocks) for name in block.nodes}
    for _ in range(3):  # Q/DQ pairs and their weights, from what reads them, then from what makes their tensor
        for node in reversed(model.graph.node):
            known = where.get(node_id(node))
            if known is not None:
                for name in node.input:
                    where.setdefault(name, known)
            else:
                reader = next((where[name] for name in node.output if name in where), None)
                if reader is not None:
                    where[node_id(node)] = reader
    for node in model.graph.node:
        for name in node.output:
            if node_id(node) in where:
                where.setdefault(name, where[node_id(node)])
    return where


def _names_in(layer: str) -> list[str]:
    """Names of nodes and tensors in the name that a runtime gives a layer, such as "PWN(a, b) + c"."""
    parts = re.split(r" \+ | to |\.\.\.|[(){}\[\],|]", layer)
    return [part.strip() for part in parts if part.strip()]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The blocks in INT8, and what that leaves out."""

    int8: tuple[bool, ...]  # by block
    excluded: tuple[str, ...]  # node ids: all layers of the others, and all gates


def fastest(
    blocks: Sequence[Block],
    float_times: Sequence[BlockTime],
    int8_times: Sequence[BlockTime],
    conversion_ms: Callable[[str, bool], float],
    fixed: Mapping[int, bool],
) -> tuple[Plan, float]:
    """The blocks to run in INT8, by their times in engines that are all float and all INT8, and what that will take.

    A path through the blocks of the least time, by dynamic programming: each in INT8 or float, with a conversion where
    that changes. Gates stay in float.

    Args:
        blocks: of the graph, in order.
        float_times: of each block.
        int8_times: of each block.
        conversion_ms: of a tensor, to INT8 or from it.
        fixed: blocks whose precision is given: True for INT8.

    Returns:
        The plan and its time in milliseconds, conversions included.
    """
    best: dict[bool, tuple[float, tuple[bool, ...]]] = {True: (0.0, ()), False: (0.0, ())}
    for number, (block, own, other) in enumerate(zip(blocks, float_times, int8_times, strict=True)):
        row: dict[bool, tuple[float, tuple[bool, ...]]] = {}
        for in_int8 in (True, False):
            if (in_int8 and not block.layers) or fixed.get(number, in_int8) != in_int8:
                continue
            milliseconds = (other.block if in_int8 else own.block) + own.gates
            options = []
            for before, (total, path) in best.items():
                change = 0.0
                if number and before != in_int8:
                    change = conversion_ms(block.tensor, in_int8)
                options.append((total + change + milliseconds, (*path, in_int8)))
            row[in_int8] = min(options)
        best = row
    total, path = min(best.values())
    return plan_of(blocks, path), total


def plan_of(blocks: Sequence[Block], int8: Sequence[bool]) -> Plan:
    """The plan with these blocks in INT8."""
    excluded: list[str] = []
    for block, in_int8 in zip(blocks, int8, strict=True):
        excluded += block.excluded_gates if in_int8 else block.layers
    return Plan(int8=tuple(int8), excluded=tuple(excluded))


def without_losing_runs(
    blocks: Sequence[Block], plan: Plan, float_times: Sequence[BlockTime], mixed_times: Sequence[BlockTime]
) -> Plan:
    """The plan without those runs of INT8 blocks that take longer than in float, their conversions included.

    A conversion from INT8 may count for the block behind the run, which is compared with it.
    """
    int8 = list(plan.int8)
    number = 0
    while number < len(blocks):
        end = number
        while end < len(blocks) and plan.int8[end]:
            end += 1
        if end > number:
            rows = range(number, min(end + 1, len(blocks)))
            mixed = sum(mixed_times[row].total for row in rows)
            if mixed >= sum(float_times[row].total for row in rows):
                int8[number:end] = [False] * (end - number)
        number = max(end, number + 1)
    return plan_of(blocks, int8)
