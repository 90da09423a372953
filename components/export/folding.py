"""Computes once what does not depend on the images: shapes, masks, position tables, transposed weights."""

from collections.abc import Iterable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, helper, numpy_helper

from components.common.contracts.errors import UserError
from components.export.placement import inline_constants, replace_nodes

# Their outputs have shapes, or values, that a run with other images does not repeat.
_UNPREDICTABLE = (
    *("Bernoulli", "Compress", "Multinomial", "NonMaxSuppression", "NonZero", "Optional", "RandomNormal"),
    *("RandomNormalLike", "RandomUniform", "RandomUniformLike", "Unique"),
)
_BATCHES = (2, 3)  # not 1, which could be confused with an axis that is broadcast


def fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace what is computed from constants and shapes alone by constants; the batch stays dynamic.

    Exporters write every shape as a computation, since any axis might be dynamic: half of the nodes of a ViT and five
    of six of a Swin. The model runs at two batch sizes; a value that is the same in both is a constant. A Reshape of
    which one axis differs gets -1 for it.

    Args:
        model: with one image input that is dynamic in its first axis alone.

    Returns:
        A copy, in which nodes keep their names; `model` itself where there is nothing to compute.

    Raises:
        UserError: ONNX Runtime can't run the model.
    """
    if any(node.op_type in _UNPREDICTABLE or _has_subgraph(node) for node in model.graph.node):
        return model
    if not any(node.op_type not in ("Constant", "Identity") for node in _known_nodes(model.graph)):
        return model
    folded = inline_constants(model)
    graph = folded.graph
    inner = {name for node in _known_nodes(graph) for name in node.output}
    readers = [node for node in graph.node if not inner.issuperset(node.output)]
    edges = {name for node in readers for name in node.input if name in inner}
    reshapes = [node for node in readers if node.op_type == "Reshape" and node.input[1] in inner]
    first, second = (_evaluated(folded, edges, [node.output[0] for node in reshapes], size) for size in _BATCHES)
    for name in edges:
        if np.array_equal(first[name], second[name]):
            graph.initializer.append(numpy_helper.from_array(first[name], name))
            inner.remove(name)
    for node in reshapes:
        shape = first[_shape_of(node.output[0])]
        differs = shape != second[_shape_of(node.output[0])]
        if node.input[1] in inner and differs.sum() == 1:
            node.input[1] = f"static shape of {node.output[0]}"
            graph.initializer.append(numpy_helper.from_array(np.where(differs, -1, shape), node.input[1]))
    _bypass_empty_pads(graph)
    replace_nodes(graph, _needed(graph))
    del graph.value_info[:]  # it may name tensors that are gone
    return folded


def _has_subgraph(node: NodeProto) -> bool:
    return any(
        attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for attribute in node.attribute
    )


def _known_nodes(graph: onnx.GraphProto) -> list[NodeProto]:
    """Nodes that compute from constants and shapes alone."""
    known = {"", *(tensor.name for tensor in graph.initializer)}
    nodes = []
    for node in graph.node:
        if node.op_type == "Shape" or known.issuperset(node.input):
            known.update(node.output)
            nodes.append(node)
    return nodes


def _shape_of(tensor: str) -> str:
    return f"shape of {tensor}"


def _evaluated(
    model: onnx.ModelProto, tensors: Iterable[str], reshaped: Iterable[str], batch: int
) -> dict[str, np.ndarray]:
    """Values of some tensors, and shapes of others, by name, for a batch of black images."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    shapes = [helper.make_node("Shape", [name], [_shape_of(name)]) for name in dict.fromkeys(reshaped)]
    probe.graph.node.extend(shapes)
    names = [*tensors, *(node.output[0] for node in shapes)]
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # the exception says it all
    try:
        session = ort.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (images,) = session.get_inputs()
        black = np.zeros([batch, *images.shape[1:]], np.float32)
        return dict(zip(names, session.run(names, {images.name: black}), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise UserError(
            f"export: ONNX Runtime can't run the model on {batch} images: {error}. Any number must do: export "
            "it with a dynamic batch",
            code="onnx-does-not-run",
        ) from error


def _bypass_empty_pads(graph: onnx.GraphProto) -> None:
    """Let what follows a Pad of no elements read what the Pad reads: Swin has two in each block at its usual size."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {output.name for output in graph.output}
    same: dict[str, str] = {}
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        pads = constants.get(node.input[1]) if node.op_type == "Pad" else None
        if pads is not None and not numpy_helper.to_array(pads).any() and node.output[0] not in outputs:
            same[node.output[0]] = node.input[0]


def _needed(graph: onnx.GraphProto) -> list[NodeProto]:
    """The nodes that the outputs depend on, in their order; those whose tensors are constants now are not."""
    constant = {tensor.name for tensor in graph.initializer}
    wanted = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output) and not constant.issuperset(node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]
