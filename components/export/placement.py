"""Q/DQ placement: where INT8 goes in the ONNX graph, so that TensorRT and OpenVINO fuse every pair."""

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from components.common.contracts.errors import EngineryError


def keep_apart(model: onnx.ModelProto) -> list[str]:
    """Make convolutions that share an input different, in place, so that no two can be merged.

    The model computes the same, bit for bit: a kernel of one pixel gets a dilation of its own, of which it has nothing,
    and the ReLU behind a larger kernel becomes a Clip at 0 and at more than any value.

    Args:
        model: A graph with or without Q/DQ. Weights that are stored beside the file need not be loaded.

    Returns:
        Names of the convolutions that were changed: all but the first of each input, unless they differed or, with
        larger kernels, have no ReLU to themselves.
    """
    before = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }
    kernels = {weights.name: list(weights.dims[2:]) for weights in model.graph.initializer}
    sharing: dict[str, list[tuple[NodeProto, int]]] = {}
    larger: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        weights = node.input[1]
        while weights in before:
            weights = before[weights]
        kernel = attribute(node, "kernel_shape", []) or kernels.get(weights, [])
        if set(kernel) == {1}:
            sharing.setdefault(node.input[0], []).append((node, len(kernel)))
        else:
            larger.setdefault(node.input[0], []).append(node)
    changed = _clip(model, larger.values())
    for row in sharing.values():
        for dilation, (node, num_axes) in enumerate(row, start=1):
            dilations = [dilation] * num_axes
            if len(row) > 1 and attribute(node, "dilations", [1] * num_axes) != dilations:
                others = [entry for entry in node.attribute if entry.name != "dilations"]
                del node.attribute[:]
                node.attribute.extend([*others, helper.make_attribute("dilations", dilations)])
                changed.append(node.name)
    return changed


def _clip(model: onnx.ModelProto, rows: Iterable[list[NodeProto]]) -> list[str]:
    """Replace the ReLUs of convolutions by Clips, but for the first of each row. Returns names of the convolutions."""
    readers: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    types = {each.name: each.data_type for each in model.graph.initializer}
    changed = []
    for row in rows:
        behind = [(node, readers.get(node.output[0], [])) for node in row]
        relus = [(node, found[0]) for node, found in behind if [each.op_type for each in found] == ["Relu"]]
        for number, (node, relu) in enumerate(relus[1:]):
            # The bias, or else the weights, have the type of the output.
            largest = np.finfo(helper.tensor_dtype_to_np_dtype(types.get(node.input[-1], TensorProto.FLOAT))).max
            names = [f"{relu.name or relu.output[0]}/{end}" for end in ("min", "max")]
            for name, value in zip(names, (0, largest / 2**number), strict=True):
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, largest.dtype), name))
            relu.op_type = "Clip"
            relu.input.extend(names)
            changed.append(node.name)
    return changed


_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
SPATIAL_POOLS = ("GlobalAveragePool", "GlobalMaxPool")
# Operators that pass values through unchanged (or a selection of them): what comes out keeps the scale of what went
# in, so that requantizing after them loses nothing and TensorRT can move the Q/DQ across.
_VALUE_PRESERVING = (
    "MaxPool",
    "Flatten",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Cast",
    "Dropout",
)
_NONNEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs")
_BEFORE_SOFTMAX = ("Add", "Cast", "Div", "Mul", "Reshape", "Where")  # scales, masks and biases of attention scores
_KEEPS_SIGN = (*_VALUE_PRESERVING, "AveragePool", "GlobalAveragePool", "ReduceMean", "Pad", "Slice", "Split")


@dataclass(frozen=True)
class QuantizedRead:
    """Input number `index` of `node` reads its tensor through Q/DQ; `axis` is the weights' channel axis."""

    node: NodeProto
    index: int
    axis: int | None = None

    @property
    def tensor(self) -> str:
        """Name of the float tensor that is read."""
        return str(self.node.input[self.index])


class GraphIndex:
    """Lookups over a graph: producer and consumers of each tensor, and which tensors are constant."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.num_reads: dict[str, int] = {}
        for name in [name for node in self.nodes for name in node.input] + [output.name for output in graph.output]:
            self.num_reads[name] = self.num_reads.get(name, 0) + 1
        # Convolutions on the longest path to each tensor. Nodes of an ONNX graph are in topological order.
        self.conv_depth: dict[str, int] = {}
        for node in self.nodes:
            deepest = max((self.conv_depth.get(name, 0) for name in node.input), default=0)
            self.conv_depth.update(dict.fromkeys(node.output, deepest + (node.op_type == "Conv")))

    def op_type(self, tensor: str) -> str:
        """Operator that makes `tensor`, or "" for graph inputs and initializers."""
        return self.producer[tensor].op_type if tensor in self.producer else ""

    def is_constant(self, tensor: str) -> bool:
        """True if `tensor` is known without any input."""
        return tensor in self.initializers or self.op_type(tensor) == "Constant"

    def scale_source(self, tensor: str) -> str:
        """The tensor whose scale `tensor` takes: itself, or what came before value-preserving operators but a Pad."""
        while self.op_type(tensor) in _VALUE_PRESERVING and self.op_type(self.producer[tensor].input[0]) != "Pad":
            tensor = self.producer[tensor].input[0]
        return tensor

    def is_nonnegative(self, tensor: str) -> bool:
        """True if no image can make `tensor` negative, by the operators that make it."""
        node = self.producer.get(tensor)
        if node is None:
            return False
        if node.op_type in _NONNEGATIVE:
            return True
        if node.op_type == "Clip":
            low = attribute(node, "min", None)  # before opset 11; an input since
            if len(node.input) > 1 and node.input[1] in self.initializers:
                low = numpy_helper.to_array(self.initializers[node.input[1]])
            return low is not None and float(low) >= 0
        if node.op_type in _KEEPS_SIGN:
            return self.is_nonnegative(node.input[0])
        if node.op_type in ("Add", "Concat", "Mul"):
            return all(self.is_nonnegative(name) for name in node.input)
        return False

    def is_concatenated(self, tensor: str) -> bool:
        """True if `tensor` is several others, perhaps behind what OpenVINO leaves out or fuses with Q/DQ."""
        node = self.producer.get(tensor)
        while node is not None and node.op_type in ("Dropout", "Identity", "Relu", "Reshape"):
            node = self.producer.get(node.input[0])
        return node is not None and node.op_type == "Concat"

    def score_products(self) -> set[str]:
        """Attention scores: the outputs of matrix products of two activations that go into a softmax."""
        found = set()
        tensors = [node.input[0] for node in self.nodes if node.op_type == "Softmax"]
        while tensors:
            node = self.producer.get(tensors.pop())
            if node is not None and node.op_type == "MatMul":
                found |= set(node.output) if not any(map(self.is_constant, node.input)) else set()
            elif node is not None and node.op_type in _BEFORE_SOFTMAX:
                tensors += node.input
        return found

    def convolution_into(self, tensor: str) -> NodeProto | None:
        """The Conv (or Conv and BatchNormalization) that makes `tensor` for a single consumer, if one does."""
        node = self.producer.get(tensor)
        if node is None or self.num_reads[tensor] != 1:
            return None
        if node.op_type == "BatchNormalization":
            return self.convolution_into(node.input[0])
        return node if node.op_type == "Conv" else None


def model_opset(model: onnx.ModelProto) -> int:
    """Version of the standard operator set that the model imports, 0 if it imports none."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def node_id(node: NodeProto) -> str:
    """A node's name in `exclude`: its own, or the name of its first output if it has none."""
    return str(node.name or node.output[0])


def with_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node has a name, its `node_id`, which stays when other passes rename tensors."""
    named = deepcopy(model)
    for node in named.graph.node:
        node.name = node_id(node)
    return named


def quantizable_layers(model: onnx.ModelProto) -> list[str]:
    """Ids of the weighted nodes (Conv, Gemm, MatMul) that `insert_qdq` runs in INT8, in graph order."""
    return [node_id(read.node) for read in quantized_reads(float_graph(model).graph, ()) if read.axis is not None]


def activation_tensors(
    model: onnx.ModelProto, exclude: Collection[str] = frozenset(), *, scores: bool = False
) -> list[str]:
    """Names of the tensors that need an activation scale, in graph order.

    Args:
        model: FP32 graph, without Q/DQ.
        exclude: ids of nodes to keep out of INT8.
        scores: with those of attention scores.

    Raises:
        EngineryError: the model is already quantized.
    """
    prepared = float_graph(model)
    graph = GraphIndex(prepared.graph)
    reads = quantized_reads(prepared.graph, exclude, scores=scores)
    return list(dict.fromkeys(graph.scale_source(read.tensor) for read in reads if read.axis is None))


def has_unsigned_activations(model: onnx.ModelProto) -> bool:
    """True if a tensor that is read in INT8 is never negative."""
    prepared = float_graph(model)
    graph = GraphIndex(prepared.graph)
    return any(read.axis is None and graph.is_nonnegative(read.tensor) for read in quantized_reads(prepared.graph, ()))


def inline_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy in which nodes read initializers directly, not through Identity or Constant nodes.

    torch.onnx.export shares equal initializers through Identity nodes; TensorRT 8.6 fuses a bias into its convolution
    only if it is an initializer.
    """
    copy = deepcopy(model)
    graph = copy.graph
    constants = {tensor.name: tensor.name for tensor in graph.initializer}
    kept = []
    outputs = {output.name for output in graph.output}
    for node in graph.node:
        value = attribute(node, "value", None)
        if node.op_type == "Constant" and value is not None and node.output[0] not in outputs:
            constants[node.output[0]] = node.output[0]
            graph.initializer.add().CopyFrom(value)
            graph.initializer[-1].name = node.output[0]
        elif node.op_type == "Identity" and node.input[0] in constants and node.output[0] not in outputs:
            constants[node.output[0]] = constants[node.input[0]]
        else:
            kept.append(node)
            for index, name in enumerate(node.input):
                node.input[index] = constants.get(name, name)
    replace_nodes(graph, kept)
    return copy


def float_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with plain constants, after checking that it holds no Q/DQ yet."""
    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.node):
        raise EngineryError(
            "quantization: the model already holds Q/DQ nodes. Give the float model instead.", code="already-quantized"
        )
    return inline_constants(model)


def quantized_reads(proto: onnx.GraphProto, exclude: Collection[str], *, scores: bool = False) -> list[QuantizedRead]:
    """Every input that reads through Q/DQ, in graph order: the whole placement policy; of attention scores if asked."""
    graph = GraphIndex(proto)
    products = graph.score_products() if scores else set()
    reads: list[QuantizedRead] = []
    quantized_convs: set[str] = set()
    for node in graph.nodes:
        if node_id(node) in exclude:
            continue
        axis = weight_channel_axis(node, graph)
        if axis is not None:
            reads += [QuantizedRead(node, 0), QuantizedRead(node, 1, axis)]
            if node.op_type == "Conv":
                quantized_convs.add(node.output[0])
        elif node.output[0] in products:
            reads += [QuantizedRead(node, 0), QuantizedRead(node, 1)]
        elif node.op_type == "MaxPool" and graph.op_type(node.input[0]) == "Pad":
            continue  # perhaps with minus infinity
        elif node.op_type in _POOLS or is_spatial_mean(node, graph):
            reads.append(QuantizedRead(node, 0))
        elif node.op_type == "Add":
            shortcut = _shortcut_index(node, graph, quantized_convs)
            if shortcut is not None:
                reads.append(QuantizedRead(node, shortcut))
    return reads


def weight_channel_axis(node: NodeProto, graph: GraphIndex) -> int | None:
    """Output-channel axis of the node's constant weights (input 1), or None if it has none."""
    if len(node.input) < 2 or node.input[1] not in graph.initializers:
        return None
    rank = len(graph.initializers[node.input[1]].dims)
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm" and not attribute(node, "transA", 0):
        return 0 if attribute(node, "transB", 0) else 1
    if node.op_type == "MatMul" and rank == 2:
        return 1
    return None


def is_spatial_mean(node: NodeProto, graph: GraphIndex) -> bool:
    """True if the node is a ReduceMean over height and width, which some exporters write for global pooling."""
    return node.op_type == "ReduceMean" and sorted(reduced_axes(node, graph)) in ([2, 3], [-2, -1])


def reduced_axes(node: NodeProto, graph: GraphIndex) -> list[int]:
    """Axes of a Reduce operator; empty where it gives none that are constant."""
    if len(node.input) > 1 and node.input[1] in graph.initializers:  # opset 18 and newer
        return numpy_helper.to_array(graph.initializers[node.input[1]]).tolist()
    return list(attribute(node, "axes", []))


def _shortcut_index(node: NodeProto, graph: GraphIndex, quantized_convs: set[str]) -> int | None:
    """The index of a residual Add's shortcut among its inputs, or None if the Add can't run inside an INT8 convolution.

    The main branch ends in a Conv that feeds only this Add. If both inputs do (a downsampling shortcut), the main
    branch is the one behind more convolutions; equally deep branches leave the first input as the shortcut.
    """
    if len(set(node.input)) != 2 or any(graph.is_constant(name) for name in node.input):
        return None
    convs = {index: graph.convolution_into(name) for index, name in enumerate(node.input)}
    branches = [(graph.conv_depth[node.input[index]], index) for index, conv in convs.items() if conv is not None]
    if not branches:
        return None
    main = max(branches)[1]
    main_conv = convs[main]
    return 1 - main if main_conv is not None and main_conv.output[0] in quantized_convs else None


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Value of an attribute, or `default`."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def replace_nodes(graph: onnx.GraphProto, nodes: list[NodeProto]) -> None:
    """Sets the graph's nodes and drops the initializers that none of them reads."""
    nodes = [deepcopy(node) for node in nodes]  # the originals die with the field that holds them
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    unread = [index for index, tensor in enumerate(graph.initializer) if tensor.name not in read]
    for index in reversed(unread):
        del graph.initializer[index]
