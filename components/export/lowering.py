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
    kinds = sorted({node.op_type for node in model.graph.node})
    functions = [("", kind) for kind in kinds if not defs.has(kind, opset)]
    lowered = inline_constants(inliner.inline_selected_functions(model, functions, inline_schema_functions=True))
    constants = {tensor.name: tensor for tensor in lowered.graph.initializer}
    for node in lowered.graph.node:
        if not defs.has(node.op_type, opset):
            continue
        old, new = (defs.get_schema(node.op_type, version) for version in (opset, newer))
        for given in [given for given in node.attribute if given.name not in old.attributes]:
            declared = new.attributes.get(given.name)  # None in a damaged file
            is_default = declared is not None and given == declared.default_value
            # The older Split takes the number of its equal parts from its outputs.
            if is_default or given.name == "num_outputs":
                node.attribute.remove(given)
        if "axes" in old.attributes and len(node.input) == 2 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input.pop()]).tolist()
            node.attribute.append(helper.make_attribute("axes", axes))
    next(entry for entry in lowered.opset_import if entry.domain in ("", "ai.onnx")).version = opset
    return lowered
