"""Sibling convolutions: 1x1 ones that read the same tensor, as in the blocks of Inception networks.

TensorRT merges them into one wide convolution. 8.6.0 fails at that where they are quantized, with an internal error of
its graph optimizer, since each ends in a scale of its own.
"""

from typing import Any

import onnx
from onnx import NodeProto, helper


def keep_apart(model: onnx.ModelProto) -> list[str]:
    """Give siblings dilations of their own, in place, so that no two can be merged.

    A kernel of one pixel has nothing to dilate: the model computes the same, bit for bit.

    Args:
        model: A graph with or without Q/DQ.

    Returns:
        Names of the convolutions that were changed: all but the first of each row of siblings.
    """
    siblings: dict[tuple[Any, ...], list[NodeProto]] = {}
    for node in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Conv" and set(attributes.get("kernel_shape", [0])) == {1}:
            siblings.setdefault((node.input[0], str(sorted(attributes.items()))), []).append(node)
    changed = []
    for row in siblings.values():
        for dilation, node in enumerate(row[1:], start=2):
            kept = [entry for entry in node.attribute if entry.name != "dilations"]
            size = next(len(entry.ints) for entry in kept if entry.name == "kernel_shape")
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("dilations", [dilation] * size)])
            changed.append(node.name)
    return changed
