"""Grad-CAM and activation maps of inner layers of an ONNX classifier, FP32 or Q/DQ.

Grad-CAM: R. Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV
2017. The gradient is PyTorch's, taken through the very graph that the bundle ships. Rounding has none, so it counts as
the identity within the range of the codes and as a constant beyond it: the straight-through estimator of Y. Bengio et
al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation", 2013, as fake
quantization is trained with.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.torch import TorchGraph, TorchNode
from components.common.runtimes.torch_operators import fake_quantize
from components.validate.charts import short_names

MapKind = Literal["gradcam", "activation"]

_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
_QDQ = ("QuantizeLinear", "DequantizeLinear", "QuantizeDequantizeLinear")
# What mixes or moves the axes: its output need not be [B, C, H, W], whatever went in.
_REARRANGING = ("Transpose", "Reshape", "MatMul", "Gemm", "Einsum", "Gather", "Expand")
_NUM_DEFAULT = 3
_NUM_SUGGESTED = 3


@dataclass(frozen=True, kw_only=True)
class FeatureLayer:
    """A node whose output is a stack of feature maps of more than one pixel."""

    name: str
    """Short, as the report has it."""
    id: str
    """Name of the node in the ONNX files."""
    op_type: str
    height: int
    width: int


def feature_layers(graph: TorchGraph, shapes: ShapeSpec) -> list[FeatureLayer]:
    """The layers of the FP32 graph that maps can be made of, in the order in which they are computed."""
    values = graph.run_all(torch.zeros(shapes.input_shape(1)))
    maps = {graph.input_name}
    nodes = []
    for node in graph.nodes:
        if _makes_maps(node, values, maps):
            maps.add(node.outputs[0])
            if node.op_type not in _QDQ and math.prod(values[node.outputs[0]].shape[2:]) > 1:
                nodes.append(node)
    names = _names(graph, nodes)
    return [
        FeatureLayer(name=names[node.id], id=node.id, op_type=node.op_type, height=height, width=width)
        for node in nodes
        for height, width in [values[node.outputs[0]].shape[2:]]
    ]


def _makes_maps(node: TorchNode, values: Mapping[str, Tensor], maps: set[str]) -> bool:
    """True if the output is [B, C, H, W]: other tensors of four axes are attention, or have their channels last."""
    output = values.get(node.outputs[0])
    if output is None or output.dim() != 4 or not output.is_floating_point():
        return False
    read = [name for name in node.inputs if name in maps]
    if node.op_type == "Conv" or node.op_type in _POOLS:
        return bool(read) or node.op_type == "Conv"
    return node.op_type not in _REARRANGING and any(values[name].shape[2:] == output.shape[2:] for name in read)


def _names(graph: TorchGraph, nodes: Sequence[TorchNode]) -> dict[str, str]:
    """Short names by id. The report names the nodes with weights, and so they are named among themselves, here too."""
    weighted = [node.id for node in graph.nodes if _is_weighted(node, graph.constants)]
    others = [node.id for node in nodes if node.id not in set(weighted)]
    names = dict(zip(weighted, short_names(weighted), strict=True))
    taken = set(names.values())
    for node_id, name in zip(others, short_names(others), strict=True):
        names[node_id] = node_id if name in taken else name
    return names


def _is_weighted(node: TorchNode, constants: Mapping[str, Tensor]) -> bool:
    if node.op_type not in ("Conv", "Gemm", "MatMul") or node.inputs[1] not in constants:
        return False
    return node.op_type != "MatMul" or constants[node.inputs[1]].dim() == 2


def default_layers(layers: Sequence[FeatureLayer]) -> list[FeatureLayer]:
    """The last feature maps of each of the three smallest sizes: the last one is what the classifier's head reads.

    Pooled maps are left out where there are others: their pixels are chosen, not computed.
    """
    last = {(layer.height, layer.width): layer for layer in layers if layer.op_type not in _POOLS}
    if not last:
        last = {(layer.height, layer.width): layer for layer in layers}
    order = {layer.id: position for position, layer in enumerate(layers)}
    return sorted(last.values(), key=lambda layer: order[layer.id])[-_NUM_DEFAULT:]


def chosen_layers(layers: Sequence[FeatureLayer], asked: Sequence[str]) -> list[FeatureLayer]:
    """The layers of these names, or `default_layers` for none.

    A layer may be called by its short name, that without the operator behind it, or its name in the ONNX file.

    Raises:
        UserError: a name is unknown or could mean several layers; or the model has no feature maps.
    """
    if not layers:
        message = "the model has no feature maps of more than one pixel, so that there is nothing to look into"
        raise UserError(message, code="no-feature-maps")
    if not asked:
        return default_layers(layers)
    found = [_layer_called(name, layers) for name in asked]
    return list(dict.fromkeys(found))


def _layer_called(asked: str, layers: Sequence[FeatureLayer]) -> FeatureLayer:
    exact = [layer for layer in layers if asked in (layer.name, layer.id)]
    matching = exact or [layer for layer in layers if layer.name.rpartition(" ")[0] == asked]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(repr(layer.name) for layer in matching)
        message = f"{len(matching)} layers are called {asked!r}: {names}. Name one of them in full"
        raise UserError(message, code="ambiguous-layer", setting="--layers")
    known = {layer.name: layer.name for layer in layers} | {layer.id: layer.name for layer in layers}
    near = [known[match] for match in difflib.get_close_matches(asked, known, n=2 * _NUM_SUGGESTED, cutoff=0.4)]
    nearest = f"the nearest are {', '.join(map(repr, list(dict.fromkeys(near))[:_NUM_SUGGESTED]))}"
    if not near:
        nearest = f"they go from {layers[0].name!r} to {layers[-1].name!r}"
    message = f"there is no layer {asked!r} among the {len(layers)} with feature maps; {nearest}"
    raise UserError(message, code="no-layer", setting="--layers")


def layer_maps(
    graph: TorchGraph, image: np.ndarray, layers: Sequence[FeatureLayer], kind: MapKind, class_index: int
) -> list[np.ndarray]:
    """One map per layer.

    Args:
        graph: FP32 or Q/DQ.
        image: [1, C, H, W] float32, normalized.
        layers: of the FP32 graph; the Q/DQ graph has them under the same ids.
        kind: "gradcam": what speaks for the class, never negative. "activation": mean absolute activation.
        class_index: the class that Grad-CAM explains; activations depend on none. Its score is the logit, also where
            the graph ends in a softmax: near certainty a probability has no gradient left.

    Returns:
        [height, width] float32 each, of the layer's own size, not scaled.

    Raises:
        EngineryError: the graph lacks a layer.
    """
    outputs = {node.id: node.outputs[0] for node in graph.nodes}
    if missing := [layer.name for layer in layers if layer.id not in outputs]:
        message = f"the INT8 graph has no nodes {', '.join(missing[:3])}, which the FP32 graph has"
        raise EngineryError(message, code="graphs-differ")
    tensors = [outputs[layer.id] for layer in layers]
    pixels = torch.from_numpy(np.ascontiguousarray(image))
    if kind == "activation":
        _, kept = graph.run(pixels, keep=tensors)
        return [kept[name][0].float().abs().mean(0).numpy() for name in tensors]
    values = _run_with_gradient(graph, pixels)
    last = next(node for node in graph.nodes if graph.output_name in node.outputs)
    score = values[last.inputs[0] if last.op_type == "Softmax" else graph.output_name][0, class_index]
    features = [values[name] for name in tensors]
    # A feature that the score does not depend on has no gradient: its map is empty.
    gradients = torch.autograd.grad(score, features, allow_unused=True, materialize_grads=True)
    return [_grad_cam(*pair) for pair in zip(features, gradients, strict=True)]


def _grad_cam(features: Tensor, gradient: Tensor) -> np.ndarray:
    """relu(sum over channels k of A_k times the mean of its gradient), equations 1 and 2. Both: [1, C, H, W]."""
    with torch.no_grad():
        weights = gradient.float().mean((2, 3), keepdim=True)  # [1, C, 1, 1]
        cam: np.ndarray = (weights * features.float()).sum(1)[0].relu().numpy()
    return cam


def _run_with_gradient(graph: TorchGraph, image: Tensor) -> dict[str, Tensor]:
    """Every tensor of a batch by name, as `TorchGraph.run_all` gives them, to the bit, and with a gradient.

    Args:
        graph: on the CPU.
        image: [B, C, H, W] float32, normalized.
    """
    pixels = image.contiguous(memory_format=torch.channels_last)  # as the graph has them on a CPU
    values = {graph.input_name: pixels.clone().requires_grad_()}
    with torch.enable_grad():
        for node in graph.nodes:
            function = node.function
            if node.op_type == "QuantizeDequantizeLinear":
                function = partial(_quantized_straight_through, **function.keywords)
            result = function(*(values.get(name, graph.constants.get(name)) for name in node.inputs))
            tensors = (result,) if isinstance(result, Tensor) else result
            values.update(zip((name for name in node.outputs if name), tensors, strict=False))
    return values


def _quantized_straight_through(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1) -> Tensor:
    """`fake_quantize` with the gradient of a clamp to the range of its codes."""
    with torch.no_grad():
        quantized = fake_quantize(x, scale, zero_point, axis=axis)
        low, high = (
            fake_quantize(torch.full_like(x, end), scale, zero_point, axis=axis) for end in (-math.inf, math.inf)
        )
    clamped = torch.clamp(x, low, high)
    return quantized + (clamped - clamped.detach())  # the difference is zero: the value stays what quantization made


def similarity(a: np.ndarray, b: np.ndarray) -> float | None:
    """Cosine between two maps: 1 where they differ by a factor alone; None where one of them is empty."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / norms if norms > 0 else None
