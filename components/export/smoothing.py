"""SmoothQuant: ranges of channels moved from activations into the weights that multiply them.

A transformer's activations have a few channels that are many times as large as the others, so that one INT8 scale for
the tensor leaves few codes to the rest; its weights have none, and a scale per output channel. Dividing a channel of an
activation and multiplying the weights' row that reads it by the same number changes nothing but the ranges. Where a
LayerNormalization makes the activation, its own scale and bias are divided, so that no operation is added.

G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", ICML 2023.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from components.export.calibration import INT8_MAX, ZERO_TENSOR_SCALE
from components.export.placement import GraphIndex, attribute, inline_constants, replace_nodes, weight_channel_axis

ALPHA = 0.5  # share of the range that goes into the weights: both end up with the same; the paper's usual value

# Operators that keep the channels on the last axis, if it is as long behind them as before, and `_keeps_last_axis`.
_REARRANGING = (
    *("Concat", "Dropout", "Gather", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
)


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Nodes that scale and shift each channel, and the products that alone read the result."""

    tensor: str
    """The result: [..., C] float32."""
    parameters: tuple[tuple[NodeProto, int], ...]
    """Inputs [C] to divide, as node and index: the scale, and the bias if there is one."""
    products: tuple[NodeProto, ...]
    """MatMul and Gemm."""
    sources: tuple[str, ...]
    """The tensors of which the products' activations take their scales: [..., C], with the channels of `tensor`."""
    num_channels: int


def smoothable(model: onnx.ModelProto) -> list[Affine]:
    """All that can be smoothed in an FP32 graph with plain constants (`placement.inline_constants`), in its order."""
    graph = GraphIndex(model.graph)
    shapes = _Shapes(model)
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    outputs = {output.name for output in model.graph.output}
    found = []
    for node in graph.nodes:
        parameters = _parameters(node, graph)
        num_channels = shapes.last_axis(node.output[0])
        if not parameters or not num_channels:
            continue
        if any(list(graph.initializers[reader.input[index]].dims) != [num_channels] for reader, index in parameters):
            continue
        reached, products = {node.output[0]}, []
        waiting = [node.output[0]]
        passed: list[NodeProto] = []
        while waiting and not reached & outputs:
            tensor = waiting.pop()
            for reader in readers.get(tensor, []):
                if reader.input[0] == tensor and reader.op_type in ("MatMul", "Gemm") and reader.input[1] != tensor:
                    products.append(reader)
                elif _keeps_last_axis(reader, graph, shapes, num_channels):
                    passed.append(reader)
                    waiting += [name for name in reader.output if name not in reached]
                    reached.update(reader.output)
                else:
                    products.append(reader)  # which is none: checked below
        whole = all(
            name in reached
            for reader in passed
            for name in (reader.input if reader.op_type == "Concat" else reader.input[:1])
        )
        if (
            products
            and whole
            and not reached & outputs
            and all(_rows(reader, graph) == num_channels for reader in products)
        ):
            sources = dict.fromkeys(graph.scale_source(reader.input[0]) for reader in products)
            if reached.issuperset(sources):
                found.append(
                    Affine(
                        tensor=node.output[0],
                        parameters=tuple(parameters),
                        products=tuple({reader.output[0]: reader for reader in products}.values()),
                        sources=tuple(sources),
                        num_channels=num_channels,
                    )
                )
    return found


def channels(model: onnx.ModelProto) -> dict[str, int]:
    """Number of channels of each tensor whose largest magnitudes by channel `smooth` needs, by name."""
    found = smoothable(inline_constants(model))
    return {source: affine.num_channels for affine in found for source in affine.sources}


def smooth(model: onnx.ModelProto, maxima: Mapping[str, np.ndarray]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Balance the ranges of activations and weights.

    Args:
        model: FP32 graph, without Q/DQ.
        maxima: largest magnitude of each channel of `channels(model)`, by tensor.

    Returns:
        A copy that computes the same up to the rounding of FP32, and the new maxima. Nodes and tensors keep their
        names.
    """
    smoothed = inline_constants(model)
    graph = GraphIndex(smoothed.graph)
    balanced: dict[str, np.ndarray] = {}
    for affine in smoothable(smoothed):
        largest = np.max([maxima[source] for source in affine.sources], axis=0).astype(np.float64)  # [C]
        weights = np.max([_row_maxima(product, graph) for product in affine.products], axis=0)  # [C]
        used = (largest > 0) & (weights > 0)
        factors = np.where(used, largest, 1.0) ** ALPHA / np.where(used, weights, 1.0) ** (1 - ALPHA)
        for node, index in affine.parameters:
            _replace(smoothed.graph, graph, node, index, 1 / factors)
        for product in affine.products:
            _replace(smoothed.graph, graph, product, 1, factors if _reads_rows(product) else factors[:, None])
        for source in affine.sources:
            balanced[source] = maxima[source] / factors
    replace_nodes(smoothed.graph, list(smoothed.graph.node))
    return smoothed, balanced


def smoothed_scales(maxima: Mapping[str, np.ndarray]) -> dict[str, float]:
    """INT8 scales of smoothed tensors, by their largest magnitudes. Their channels are balanced: nothing is clipped."""
    return {name: float(values.max()) / INT8_MAX or ZERO_TENSOR_SCALE for name, values in maxima.items()}


def _parameters(node: NodeProto, graph: GraphIndex) -> list[tuple[NodeProto, int]]:
    """Constant scale and bias of a LayerNormalization, or of a Mul and the Add behind it, by the last of the nodes."""
    if node.op_type == "LayerNormalization":
        given = [(node, index) for index, name in enumerate(node.input) if index and name]
        return given if all(node.input[index] in graph.initializers for _, index in given) else []
    constant = next((index for index, name in enumerate(node.input) if name in graph.initializers), None)
    if node.op_type not in ("Mul", "Add") or constant is None:
        return []
    if node.op_type == "Mul":
        return [(node, constant)]
    before = graph.producer.get(node.input[1 - constant])
    if before is None or before.op_type != "Mul" or graph.num_reads[before.output[0]] != 1:
        return []
    scale = _parameters(before, graph)
    return [*scale, (node, constant)] if scale else []


class _Shapes:
    """Axes of the tensors, as far as the graph tells."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self._axes = {
            value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
            for value in (*inferred.value_info, *inferred.input, *inferred.output)
            if value.type.tensor_type.HasField("shape")
        }

    def rank(self, tensor: str) -> int:
        """Number of axes, 0 where it is unknown."""
        return len(self._axes.get(tensor, []))

    def last_axis(self, tensor: str) -> int:
        """Length of the last axis, 0 where it is unknown."""
        return int((self._axes.get(tensor) or [0])[-1])


def _keeps_last_axis(node: NodeProto, graph: GraphIndex, shapes: _Shapes, num_channels: int) -> bool:
    """True if each channel of what a node reads is the same channel of what it gives."""
    rank = shapes.rank(node.input[0])
    if node.op_type not in _REARRANGING or not rank or shapes.last_axis(node.output[0]) != num_channels:
        return False
    if node.op_type == "Transpose":
        order: list[int] = attribute(node, "perm", list(reversed(range(rank))))
        return order[-1] == rank - 1
    if node.op_type in ("Concat", "Gather"):
        return attribute(node, "axis", 0) % rank != rank - 1
    if node.op_type == "Slice":
        axes = graph.initializers.get(node.input[3]) if len(node.input) > 3 else None
        return axes is not None and rank - 1 not in numpy_helper.to_array(axes) % rank
    if node.op_type == "Pad":
        pads = graph.initializers.get(node.input[1])
        if (
            pads is None
            or attribute(node, "mode", b"constant") != b"constant"
            or (len(node.input) > 2 and node.input[2])
        ):
            return False
        return len(node.input) < 4 and not numpy_helper.to_array(pads).reshape(2, -1)[:, -1].any()
    return True


def _rows(node: NodeProto, graph: GraphIndex) -> int:
    """Number of channels that the constant weights of a product read; 0 for other nodes."""
    if node.op_type == "Conv" or weight_channel_axis(node, graph) is None:
        return 0
    return int(graph.initializers[node.input[1]].dims[1 if _reads_rows(node) else 0])


def _reads_rows(product: NodeProto) -> bool:
    """True if a product's weights are [outputs, C], not [C, outputs]."""
    return bool(attribute(product, "transB", 0))


def _row_maxima(product: NodeProto, graph: GraphIndex) -> np.ndarray:
    weights = np.abs(numpy_helper.to_array(graph.initializers[product.input[1]]))
    maxima: np.ndarray = weights.max(axis=0 if _reads_rows(product) else 1)
    return maxima


def _replace(proto: onnx.GraphProto, graph: GraphIndex, node: NodeProto, index: int, factors: np.ndarray) -> None:
    """Let a node read its constant times `factors`, under a name of its own: equal constants may be shared."""
    tensor = graph.initializers[node.input[index]]
    values = (numpy_helper.to_array(tensor) * factors).astype(np.float32)
    node.input[index] = f"{node.output[0]}_{tensor.name}_smoothed"
    proto.initializer.append(numpy_helper.from_array(values, node.input[index]))
