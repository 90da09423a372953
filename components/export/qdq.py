"""Q/DQ pairs and INT8 weights, inserted into an ONNX graph from given scales where `placement` says.

The pass works on FP32 graphs (opset 13 or newer) and on typed FP16 graphs (opset 19 or newer).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from components.common.contracts.errors import EngineryError
from components.common.contracts.records import Int8Form
from components.export.calibration import INT8_MAX
from components.export.placement import (
    GraphIndex,
    attribute,
    float_graph,
    is_spatial_mean,
    model_opset,
    node_id,
    quantized_reads,
    reduced_axes,
    replace_nodes,
    weight_channel_axis,
)

# How quantized weights are stored. "dq": int8 weights and DequantizeLinear, a quarter of the size; TensorRT 8.6 builds
# it (the H200 results were made so), newer versions and OpenVINO document it.
# "qdq": float weights, QuantizeLinear, DequantizeLinear, for what refuses constants of type int8: TensorRT 8.6 in
# transformers, which it hands to Myelin.
WeightStorage = Literal["qdq", "dq"]

UINT8_MAX = 255
_MATRIX_AXES = 2
_FAR = 1e38  # beyond any activation

# A scale below the smallest normal number is flushed to zero on some devices, and its reciprocal overflows in FP16.
MIN_SCALE = 2.0**-60
_MIN_SCALES = {TensorProto.FLOAT: MIN_SCALE, TensorProto.FLOAT16: 2.0**-14}


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Errors of a runtime's INT8 kernels, around which a graph for it is written."""

    rounds_averages: bool = False
    """Means are rounded to the codes of their input."""
    rounds_concatenated: bool = False
    """Concatenated int8 tensors that convolutions read are rounded to whole numbers; uint8 around 128 is not."""
    scales_twice: bool = False
    """Outputs of convolutions without a bias are scaled twice where several nodes read them."""
    mixes_up_channels: bool = False
    """Scales of wrong channels are taken behind a Reduce that drops its axes."""
    splits_channels: bool = False
    """A Reshape that gives a matrix more axes can't be compiled behind scales per channel."""


_KERNELS = {
    "tensorrt": _Kernels(),  # takes symmetric zero points only
    "openvino": _Kernels(  # 2026.4
        rounds_averages=True,
        rounds_concatenated=True,
        scales_twice=True,
        mixes_up_channels=True,
        splits_channels=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The form in which a graph writes INT8: what its target multiplies fast, and without saturation."""

    weight_bits: Literal[7, 8] = 8  # +-63 or +-127
    activations: Literal["signed", "unsigned"] = "signed"  # unsigned: 0..255 where a tensor is never negative
    # Of layers that read signed activations; None for `weight_bits`. Without VNNI oneDNN adds 128 to these, so that
    # about half of the range multiplies each weight, and sums saturate that do not behind a ReLU.
    signed_weight_bits: Literal[7, 8] | None = None
    scores: Literal["float", "int8"] = "float"  # products of queries and keys, which OpenVINO computes either way
    runtime: Literal["tensorrt", "openvino"] = "tensorrt"

    @classmethod
    def of(cls, record: Int8Form) -> Self:
        """Return what a record says of a file."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})

    @property
    def kernels(self) -> _Kernels:
        """Errors of the runtime's kernels."""
        return _KERNELS[self.runtime]

    def largest_weight(self, *, reads_signed: bool) -> int:
        """Return the largest code of a weight."""
        bits = self.signed_weight_bits if reads_signed and self.signed_weight_bits else self.weight_bits
        return INT8_MAX if bits == 8 else INT8_MAX >> 1


TENSORRT = Arithmetic()


def scales_below_fp16(scales: Mapping[str, float]) -> list[str]:
    """Tensors whose scale a typed FP16 graph can't hold: it is raised to 2**-14 there, which costs resolution."""
    return [name for name, scale in scales.items() if scale < _MIN_SCALES[TensorProto.FLOAT16]]


def insert_qdq(
    model: onnx.ModelProto,
    scales: Mapping[str, float],
    *,
    exclude: Collection[str] = frozenset(),
    weights: WeightStorage = "dq",
    arithmetic: Arithmetic = TENSORRT,
) -> onnx.ModelProto:
    """Returns a copy of `model` with Q/DQ pairs inserted.

    Args:
        model: FP32 graph, or typed FP16 graph of opset 19 or newer; at most 2 GiB.
        scales: real value of INT8 code 1 for each of `activation_tensors(model, exclude)`; others are ignored.
        exclude: ids of nodes to keep out of INT8.
        weights: how quantized weights are stored.
        arithmetic: how INT8 is written. The scales are the same for each: unsigned codes divide the same range finer.

    Raises:
        EngineryError: a scale is missing or not positive, a name in `exclude` is unknown, the model is already
            quantized, or its opset is too old for its type.
    """
    quantized = float_graph(model)
    graph = GraphIndex(quantized.graph)
    if unknown := set(exclude) - {node_id(node) for node in graph.nodes}:
        raise EngineryError(f"quantization: exclude names unknown nodes {sorted(unknown)[:3]}.", code="unknown-layer")
    reads = quantized_reads(quantized.graph, exclude, scores=arithmetic.scores == "int8")
    if arithmetic.kernels.rounds_averages:
        in_int8 = {read.tensor for read in reads}
        reads = [read for read in reads if read.node.op_type != "AveragePool" or read.node.output[0] in in_int8]
    float_type = _float_type(quantized, graph)
    inserter = _Inserter(quantized.graph, float_type, weights, arithmetic)
    weighted = [read for read in reads if read.axis is not None]
    beside_signed = {read.tensor for read in weighted if not graph.is_nonnegative(read.node.input[0])}
    for read in reads:
        if read.axis is not None:
            largest = arithmetic.largest_weight(reads_signed=read.tensor in beside_signed)
            inserter.quantize_weights(graph.initializers[read.tensor], read.axis, largest)
            if arithmetic.kernels.scales_twice and read.node.op_type == "Conv":
                inserter.add_bias(read.node, graph)
        else:
            scale = _checked_scale(scales, graph.scale_source(read.tensor))
            inserter.quantize_activation(read.tensor, scale, graph)
    for read in reads:
        read.node.input[read.index] = _dequantized(read.tensor)
    inserter.write_nodes()
    if arithmetic.kernels.mixes_up_channels:
        _squeeze_reductions(quantized.graph)
    if arithmetic.kernels.splits_channels:
        _clip_matrices(quantized)
    return quantized


def _squeeze_reductions(graph: onnx.GraphProto) -> None:
    """Makes Reduce operators keep their axes, but spatial means, and puts a Squeeze behind each.

    OpenVINO 2026.4 fuses a quantizer with the Reduce before it, and with what scales its channels in between, and takes
    scales of wrong channels where the axes are gone.
    """
    lookup, nodes = GraphIndex(graph), []
    for node in graph.node:
        nodes.append(node)
        axes = reduced_axes(node, lookup) if node.op_type.startswith("Reduce") else []
        if axes and not attribute(node, "keepdims", 1) and not is_spatial_mean(node, lookup):
            output, kept, name = node.output[0], f"{node.output[0]}_kept", f"{node.output[0]}_axes"
            next(entry for entry in node.attribute if entry.name == "keepdims").i = 1
            node.output[0] = kept
            graph.initializer.append(numpy_helper.from_array(np.asarray(axes, np.int64), name))
            nodes.append(helper.make_node("Squeeze", [kept, name], [output], f"{output}_Squeeze"))
    replace_nodes(graph, nodes)


def _clip_matrices(model: onnx.ModelProto) -> None:
    """Puts a Clip that clips nothing before each Reshape that makes more axes of a matrix.

    OpenVINO 2026.4 moves scales of columns behind the Reshape as if its second axis were made of the columns. Where
    that is tokens, it can't compile the model. It does not move them behind a Clip, which runs inside the product.
    """
    lookup, nodes = GraphIndex(model.graph), []
    axes = {
        node.output[0]: lookup.initializers[node.input[1]].dims[0]
        for node in lookup.nodes
        if node.op_type == "Reshape" and node.input[1] in lookup.initializers
    }
    known = onnx.shape_inference.infer_shapes(model).graph.value_info if axes else ()
    num_axes = {value.name: len(value.type.tensor_type.shape.dim) for value in known}
    for node in model.graph.node:
        if num_axes.get(node.input[0] if node.input else "") == _MATRIX_AXES < axes.get(node.output[0], 0):
            output = f"{node.output[0]}_clipped"
            limits = {f"{output}_{end}": value for end, value in (("min", -_FAR), ("max", _FAR))}
            for name, value in limits.items():
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
            nodes.append(helper.make_node("Clip", [node.input[0], *limits], [output], output))
            node.input[0] = output
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _float_type(model: onnx.ModelProto, graph: GraphIndex) -> int:
    """TensorProto.FLOAT or FLOAT16: the type of all weights, checked against the opset."""
    weighted = [node for node in graph.nodes if weight_channel_axis(node, graph) is not None]
    types = {graph.initializers[node.input[1]].data_type for node in weighted}
    if len(types) != 1 or not types <= set(_MIN_SCALES):
        names = [TensorProto.DataType.Name(data_type) for data_type in sorted(types)]
        raise EngineryError(
            f"quantization: the weights of Conv, Gemm and MatMul nodes have types {names}, "
            "expected all FLOAT or all FLOAT16. Give the FP32 file, or the typed FP16 file made from it.",
            code="wrong-type",
        )
    opset = model_opset(model)
    needed = 13 if types == {TensorProto.FLOAT} else 19
    if opset < needed:
        raise EngineryError(
            f"quantization: the model has opset {opset}, but Q/DQ on these types needs {needed}. "
            "Raise it first (precision.raise_opset).",
            code="unsupported-opset",
        )
    return int(types.pop())


def _checked_scale(scales: Mapping[str, float], tensor: str) -> float:
    scale = scales.get(tensor)
    if scale is None:
        raise EngineryError(
            f"quantization: no scale for tensor '{tensor}'. Calibrate with activation_tensors().", code="scale-missing"
        )
    if not (np.isfinite(scale) and scale > 0):
        raise EngineryError(
            f"quantization: the scale of '{tensor}' is {scale}, expected a finite positive number.", code="wrong-scale"
        )
    return scale


class _Inserter:
    """Adds Q/DQ nodes and their constants to a graph, once per tensor."""

    def __init__(self, graph: onnx.GraphProto, float_type: int, weights: WeightStorage, arithmetic: Arithmetic) -> None:
        self.graph, self.arithmetic = graph, arithmetic
        self.dtype: np.dtype = helper.tensor_dtype_to_np_dtype(float_type)
        self.min_scale = _MIN_SCALES[float_type]
        self.weights = weights
        self.pairs: dict[str, list[NodeProto]] = {}  # by the tensor that they read

    def quantize_activation(self, tensor: str, scale: float, graph: GraphIndex) -> None:
        if tensor in self.pairs:
            return
        if self.arithmetic.activations == "unsigned" and graph.is_nonnegative(tensor):
            self._add_pair(tensor, np.asarray(scale * INT8_MAX / UINT8_MAX), axis=None, zero=0)
        elif self.arithmetic.kernels.rounds_concatenated and graph.is_concatenated(tensor):
            self._add_pair(tensor, np.asarray(scale), axis=None, zero=INT8_MAX + 1)
        else:
            self._add_pair(tensor, np.asarray(scale), axis=None)

    def quantize_weights(self, tensor: TensorProto, axis: int, largest: int) -> None:
        """Per-channel scales max|w| / `largest` code. Weights shared by several nodes are quantized once."""
        if tensor.name in self.pairs:
            return
        values = numpy_helper.to_array(tensor).astype(np.float32)
        others = tuple(dim for dim in range(values.ndim) if dim != axis)
        scales = np.abs(values).max(axis=others) / largest  # [channels]
        self._add_pair(tensor.name, scales, axis)
        if self.weights == "dq":
            shape = [-1 if dim == axis else 1 for dim in range(values.ndim)]
            stored = self._stored_scale(scales).astype(np.float32).reshape(shape)
            codes = np.clip(np.rint(values / stored), -largest, largest).astype(np.int8)
            self.graph.initializer.append(numpy_helper.from_array(codes, f"{tensor.name}_quantized"))
            del self.pairs[tensor.name][0]

    def add_bias(self, conv: NodeProto, graph: GraphIndex) -> None:
        """A bias too small to change a result, where there is none but zeros, which OpenVINO leaves out."""
        own = conv.input[2] if len(conv.input) > 2 else ""
        if own and (own not in graph.initializers or numpy_helper.to_array(graph.initializers[own]).any()):
            return
        bias = np.full(graph.initializers[conv.input[1]].dims[0], MIN_SCALE, self.dtype)
        self.graph.initializer.append(numpy_helper.from_array(bias, f"{conv.output[0]}_bias"))
        del conv.input[2:]
        conv.input.append(f"{conv.output[0]}_bias")

    def _stored_scale(self, scale: np.ndarray) -> np.ndarray:
        stored: np.ndarray = np.maximum(scale, self.min_scale).astype(self.dtype)
        return stored

    def _add_pair(self, tensor: str, scale: np.ndarray, axis: int | None, zero: int | None = None) -> None:
        """Pairs of int8, or of uint8 where a code of zero is given."""
        zeros = np.zeros(scale.shape, np.int8) if zero is None else np.full(scale.shape, zero, np.uint8)
        constants = [
            numpy_helper.from_array(self._stored_scale(scale), f"{tensor}_scale"),
            numpy_helper.from_array(zeros, f"{tensor}_zero_point"),
        ]
        self.graph.initializer.extend(constants)
        names = [constant.name for constant in constants]
        code = f"{tensor}_quantized"
        attributes = {} if axis is None else {"axis": axis}
        self.pairs[tensor] = [
            helper.make_node("QuantizeLinear", [tensor, *names], [code], f"{tensor}_QuantizeLinear", **attributes),
            helper.make_node(
                "DequantizeLinear", [code, *names], [_dequantized(tensor)], f"{tensor}_DequantizeLinear", **attributes
            ),
        ]

    def write_nodes(self) -> None:
        """Puts each pair right behind the node that makes its tensor, and drops initializers no longer read."""
        nodes = list(self.graph.node)
        produced = {name for node in nodes for name in node.output}
        ordered = [node for name, pair in self.pairs.items() if name not in produced for node in pair]
        for node in nodes:
            ordered.append(node)
            for name in node.output:
                ordered.extend(self.pairs.get(name, []))
        replace_nodes(self.graph, ordered)


def _dequantized(tensor: str) -> str:
    return f"{tensor}_dequantized"
