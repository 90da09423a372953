"""What each layer costs in INT8: quantize it alone, and see how far the answers of the runtime that serves move."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch

from components.common.records import LayerCost
from components.export.placement import Graph, float_graph, node_id, quantized_reads
from components.export.qdq import Arithmetic, insert_qdq

Logits = Callable[[onnx.ModelProto], np.ndarray]
"""Logits of a model on the same few images, [N, classes] float32, by the runtime that serves."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Layers, the costliest first."""

    layers: tuple[LayerCost, ...]  # fewer than there are when time ran out
    num_images: int


def rank_layers(
    model: onnx.ModelProto,
    scales: Mapping[str, float],
    arithmetic: Arithmetic,
    logits: Logits,
    *,
    deadline: float,
    progress: Callable[[int, int], None],
) -> Ranking:
    """Rank every node that reads through Q/DQ: layers with weights, poolings and residual additions.

    A layer's cost is the Kullback-Leibler divergence between the classes that the float model predicts and those it
    predicts with this layer alone in INT8, in nats, averaged over the images. It needs no labels, and unlike top-1 it
    tells layers apart with few images. An Add runs inside a convolution, which is in INT8 with it.

    Args:
        model: FP32 graph, without Q/DQ.
        scales: of `placement.activation_tensors(model)`.
        arithmetic: of the file that serves.
        logits: runs a model.
        deadline: on the clock of time.monotonic(); no new layer is measured after it, but one always is.
        progress: called with the number of layers done, and of all.
    """
    layers = _layers(model)
    expected = _log_probabilities(logits(model))  # [N, classes], as below
    costs: dict[str, float] = {}
    for name, (_, together) in layers.items():
        if costs and time.monotonic() > deadline:
            break
        alone = insert_qdq(model, scales, exclude=layers.keys() - together, arithmetic=arithmetic)
        actual = _log_probabilities(logits(alone))
        divergence = (expected.exp() * (expected - actual)).sum(dim=1).mean()
        costs[name] = max(float(divergence), 0.0)
        progress(len(costs), len(layers))
    return Ranking(
        layers=tuple(
            LayerCost(name=name, operator=layers[name][0], cost_nats=costs[name])
            for name in sorted(costs, key=lambda name: -costs[name])  # stable: of equals, the earlier layer
        ),
        num_images=len(expected),
    )


def _log_probabilities(logits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(logits).double().log_softmax(dim=1)


def _layers(model: onnx.ModelProto) -> dict[str, tuple[str, frozenset[str]]]:
    """Operator of each node that reads through Q/DQ, and what is in INT8 with it, by the node's id, in graph order."""
    proto = float_graph(model).graph
    graph = Graph(proto)
    layers = {}
    for read in quantized_reads(proto, ()):
        mains = [graph.convolution_into(name) for name in read.node.input] if read.node.op_type == "Add" else []
        together = {node_id(read.node), *(node_id(node) for node in mains if node is not None)}
        layers[node_id(read.node)] = (str(read.node.op_type), frozenset(together))
    return layers
