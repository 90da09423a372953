"""Sibling convolutions: 1x1 ones that read the same tensor, as in the blocks of Inception networks.

TensorRT merges them into one wide convolution. 8.6.0 fails at that where they are quantized, with an internal error of
its graph optimizer, since each ends in a scale of its own.
"""

import onnx
from onnx import NodeProto, helper


def keep_apart(model: onnx.ModelProto) -> list[str]:
    """Give siblings dilations of their own, in place, so that no two can be merged.

    A kernel of one pixel has nothing to dilate: the model computes the same, bit for bit.

    Args:
        model: A graph with or without Q/DQ. Weights that are stored beside the file need not be loaded.

    Returns:
        Names of the convolutions that were changed: all but the first of each row of siblings, unless they differed.
    """
    before = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }
    kernels = {weights.name: list(weights.dims[2:]) for weights in model.graph.initializer}
    siblings: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        weights = node.input[1]
        while weights in before:
            weights = before[weights]
        kernel = _ints(node, "kernel_shape") or kernels.get(weights, [])
        if set(kernel) == {1}:
            siblings.setdefault(node.input[0], []).append((node, len(kernel)))
    changed = []
    for row in siblings.values():
        for dilation, (node, num_axes) in enumerate(row, start=1):
            dilations = [dilation] * num_axes
            if len(row) > 1 and (_ints(node, "dilations") or [1] * num_axes) != dilations:
                others = [entry for entry in node.attribute if entry.name != "dilations"]
                del node.attribute[:]
                node.attribute.extend([*others, helper.make_attribute("dilations", dilations)])
                changed.append(node.name)
    return changed


def _ints(node: NodeProto, name: str) -> list[int]:
    """An attribute's numbers; none where the node lacks it."""
    return next((list(entry.ints) for entry in node.attribute if entry.name == name), [])
