"""The anchors that an exported detector returns: those that `detect` looks at, of many that find nothing."""

from copy import deepcopy
from typing import Any

import onnx
from onnx import TensorProto, helper

from components.common.tasks.detection.boxes import MAX_CANDIDATES, NUM_BOX_VALUES


def keep_candidates(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let a graph return the anchors of the largest logits, as many as `detect` takes pairs of anchor and class.

    It finds the same: the anchor of one of the surest 1000 pairs has one of the surest 1000 maxima over classes, since
    each that is surer belongs to another of these pairs. Anchors keep their order, in which it takes boxes of equal
    scores; of equals at the last place a runtime may take others. NaN, which it passes over, a runtime may take for a
    large number or not; where all logits are NaN, so are those that are left.

    Indices are sorted as floats, since TensorRT 8.6 sorts no integers; were they rounded, the order alone would suffer.

    Args:
        model: opset 13 to 17, with one output, [B, A, 8 + classes] float32.

    Returns:
        A copy with an output of the same name, [B, 1000, 8 + classes]; `model` itself where it has no more anchors.
    """
    axes = model.graph.output[0].type.tensor_type.shape.dim
    if axes[1].dim_value <= MAX_CANDIDATES:
        return model
    kept = deepcopy(model)
    graph, name, width = kept.graph, kept.graph.output[0].name, axes[2].dim_value

    def named(words: str) -> list[str]:
        return [name if word == "output" else f"{name}.{word}" for word in words.split()]

    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}.all" if each == name else each for each in names]
    constants = {"start": [NUM_BOX_VALUES], "end": [width], "axis": [2], "number": [MAX_CANDIDATES]}
    for word, values in (constants | {"repeats": [1, 1, width]}).items():
        graph.initializer.append(helper.make_tensor(*named(word), TensorProto.INT64, [len(values)], values))
    steps: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("Slice", "all start end axis", "classes", {}),
        ("ReduceMax", "classes", "maxima", {"axes": [2], "keepdims": 0}),  # [B, A]
        ("TopK", "maxima number", "largest places", {"axis": 1}),
        ("Cast", "places", "keys", {"to": TensorProto.FLOAT}),
        ("TopK", "keys number", "ascending order", {"axis": 1, "largest": 0}),
        ("GatherElements", "places order", "anchors", {"axis": 1}),  # [B, 1000]
        ("Unsqueeze", "anchors axis", "column", {}),
        ("Tile", "column repeats", "rows", {}),  # not Expand, whose shape depends on that of the batch
        ("GatherElements", "all rows", "output", {"axis": 1}),
    )
    graph.node.extend(helper.make_node(kind, named(read), named(given), **more) for kind, read, given, more in steps)
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = MAX_CANDIDATES
    return kept
