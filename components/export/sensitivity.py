"""What each layer costs in INT8: quantize it alone, and see how far the model's answers move."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx
import torch

from components.common.records import LayerCost
from components.common.runners.torch import TorchGraph
from components.common.runners.torch_layers import fake_quantize
from components.export.calibration import INT8_MAX
from components.export.placement import Graph, QuantizedRead, float_graph, node_id, quantized_reads
from components.export.qdq import MIN_SCALE

# Images at a time. Every tensor of the float model is kept for the batch: 45 MB an image for ResNet-50 at 224 px.
BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Layers, the costliest first."""

    layers: tuple[LayerCost, ...]
    num_images: int  # fewer than asked for when time ran out


def rank_layers(
    model: onnx.ModelProto,
    scales: dict[str, float],
    batches: Iterable[torch.Tensor],
    *,
    device: torch.device,
    deadline: float,
    progress: Callable[[int], None],
) -> Ranking:
    """Rank every node that reads through Q/DQ: layers with weights, poolings and residual additions.

    A layer's cost is the Kullback-Leibler divergence between the classes that the float model predicts and those it
    predicts with this layer alone in INT8 (inputs and weights), in nats, averaged over the images. It needs no labels,
    and unlike top-1 it tells layers apart with few images. Only what depends on the layer is computed again.

    Args:
        model: FP32 graph, without Q/DQ.
        scales: of `placement.activation_tensors(model)`.
        batches: [B, C, H, W] float32, normalized as for the model; at most `BATCH_SIZE` images each.
        device: what the graph runs on.
        deadline: on the clock of time.monotonic(); no new batch is begun after it, but one is always ranked.
        progress: called with the number of images done, after every batch.

    Raises:
        UnsupportedOperators: PyTorch has no counterpart for an operator of the graph.
    """
    plain = float_graph(model)
    graph = Graph(plain.graph)
    runner = TorchGraph(plain, device)
    reads = _reads_by_layer(plain.graph)
    weights = _weights_in_int8(reads, runner.constants)
    costs = dict.fromkeys(reads, 0.0)
    num_images = 0
    for images in batches:
        if num_images and time.monotonic() > deadline:
            break
        values = runner.run_all(images.to(device))
        expected = values[runner.output_name].log_softmax(dim=1)
        for name, own in reads.items():
            replaced = {
                (name, read.index): weights[read.tensor]
                if read.axis is not None
                else _quantized(values[read.tensor], scales[graph.scale_source(read.tensor)])
                for read in own
            }
            actual = runner.rerun(values, replaced).log_softmax(dim=1)
            costs[name] += float((expected.exp() * (expected - actual)).sum())
        num_images += len(images)
        progress(num_images)
    ranked = sorted(reads, key=lambda name: -costs[name])  # stable: of equals, the earlier layer
    return Ranking(
        layers=tuple(
            LayerCost(name=name, operator=reads[name][0].node.op_type, cost_nats=max(costs[name], 0.0) / num_images)
            for name in ranked
        ),
        num_images=num_images,
    )


def _reads_by_layer(graph: onnx.GraphProto) -> dict[str, list[QuantizedRead]]:
    """What each layer reads through Q/DQ, by the layer's node id, in the graph's order."""
    reads: dict[str, list[QuantizedRead]] = {}
    for read in quantized_reads(graph, ()):
        reads.setdefault(node_id(read.node), []).append(read)
    return reads


def _weights_in_int8(
    reads: Mapping[str, list[QuantizedRead]], constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights among what is read, after Q/DQ, by name."""
    return {
        read.tensor: _quantized_weights(constants[read.tensor], read.axis)
        for own in reads.values()
        for read in own
        if read.axis is not None
    }


def _quantized(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """An activation after Q/DQ."""
    zero = torch.zeros((), dtype=torch.int8, device=tensor.device)
    return fake_quantize(tensor, torch.tensor(scale, dtype=tensor.dtype, device=tensor.device), zero)


def _quantized_weights(weights: torch.Tensor, axis: int) -> torch.Tensor:
    """Weights after Q/DQ, one scale per output channel."""
    others = [dim for dim in range(weights.dim()) if dim != axis]
    scales = (weights.abs().amax(dim=others) / INT8_MAX).clamp_min(MIN_SCALE)  # [channels]
    return fake_quantize(weights, scales, torch.zeros_like(scales, dtype=torch.int8), axis=axis)
