"""Sibling convolutions: those that read one tensor with the same kernel, as in the blocks of Inception networks.

TensorRT merges them into one wide convolution. 8.6.0 fails at that where they are quantized, with an internal error of
its graph optimizer (`chooseHigherPrecision`), since each ends in a scale of its own.
"""

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper


def keep_apart(model: onnx.ModelProto, how: str = "dilation") -> list[str]:
    """Change siblings in place so that no two can be merged; what they compute stays the same, bit for bit.

    Args:
        model: A graph with or without Q/DQ.
        how: "dilation" or "clip".

    Returns:
        Names of the convolutions that were changed.
    """
    siblings: dict[tuple[Any, ...], list[NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "Conv":
            attributes = sorted((entry.name, str(helper.get_attribute_value(entry))) for entry in node.attribute)
            siblings.setdefault((node.input[0], *attributes), []).append(node)
    changed = []
    for row in siblings.values():
        for number, node in enumerate(row[1:], start=1):
            if _set_apart(model, node, number, how):
                changed.append(node.name)
    return changed


def _set_apart(model: onnx.ModelProto, node: NodeProto, number: int, how: str) -> bool:
    if how == "dilation":
        kernel = next(helper.get_attribute_value(entry) for entry in node.attribute if entry.name == "kernel_shape")
        if any(size != 1 for size in kernel):
            return False
        kept = [entry for entry in node.attribute if entry.name != "dilations"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("dilations", [number + 1] * len(kernel))])
        return True
    readers = [other for other in model.graph.node if node.output[0] in other.input]
    if len(readers) != 1 or readers[0].op_type != "Relu":
        return False
    relu = readers[0]
    names = [f"{relu.output[0]}_{end}" for end in ("min", "max")]
    for name, value in zip(names, (0.0, 2.0 ** (100 + number)), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    relu.op_type = "Clip"
    relu.input.extend(names)
    return True
