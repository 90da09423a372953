"""ONNX files of newer opsets at an older one: torch.onnx.export writes 18 or 20 unless told, onnx converts few back."""

import onnx
from onnx import defs, helper, inliner, numpy_helper

from components.export.placement import inline_constants, model_opset


def lower(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """A copy at an older opset.

    Operators that it lacks become the nodes that they are made of, such as Gelu; attributes that it lacks are left out
    where they have their defaults; axes of reductions become attributes. What else is newer, the checker finds.
    """
    newer = model_opset(model)
    functions = [("", kind) for kind in sorted({node.op_type for node in model.graph.node}) if not _known(kind, opset)]
    if functions:
        model = inliner.inline_selected_functions(model, functions, inline_schema_functions=True)
    lowered = inline_constants(model)
    constants = {tensor.name: tensor for tensor in lowered.graph.initializer}
    for node in lowered.graph.node:
        if not (_known(node.op_type, opset) and _known(node.op_type, newer)):
            continue
        old, new = (defs.get_schema(node.op_type, version) for version in (opset, newer))
        for given in list(node.attribute):
            default = new.attributes[given.name].default_value if given.name in new.attributes else None
            is_default = default is not None and helper.get_attribute_value(given) == _value(default)
            # Split in equal parts: the older one takes their number from its outputs.
            if given.name not in old.attributes and (is_default or given.name == "num_outputs"):
                node.attribute.remove(given)
        if "axes" in old.attributes and len(node.input) == 2 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
            del node.input[1]
            node.attribute.append(helper.make_attribute("axes", axes))
    next(entry for entry in lowered.opset_import if entry.domain in ("", "ai.onnx")).version = opset
    return lowered


def _known(kind: str, opset: int) -> bool:
    return bool(defs.has(kind, opset))


def _value(default: onnx.AttributeProto) -> object:
    return helper.get_attribute_value(default) if default.type else None
