"""The layers of a plan, their precision and what was fused, by TensorRT's engine inspector.

What the inspector writes is not specified and differs by version: 8.6 says "Thirty-two wide channel vectorized row
major Int8 format" where 10 says "Int8". Only what all of them share is relied on: a JSON list of layers with name,
type, inputs, outputs, and the ONNX nodes in the metadata. Where no format is given, kernel and weights show it.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import EngineEntry, EngineLayer, EngineLayers
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.tensorrt import load_tensorrt, open_context

# In the order in which they are looked for: "TF32" and "BF16" would also be found by shorter words.
_FORMATS = (
    ("INT8", r"\bint8\b"),
    ("FP8", r"\bfp8\b"),
    ("BF16", r"\b(bf16|bfloat16)\b"),
    ("FP16", r"\b(fp16|half)\b"),
    ("FP32", r"\b(fp32|float)\b"),
)
_KERNELS = (
    ("INT8", r"i8i8|int8int8|i8f32_i8|imma"),
    ("TF32", r"tf32"),
    ("FP16", r"f16f16|hmma|h884|h16816"),
    ("FP32", r"f32f32|sgemm|scudnn|ffma"),
)
_NO_ARITHMETIC = {"Reformat", "NoOp", "Constant", "Shuffle", "Concat", "Copy"}


class UnreadableLayers(EngineryError):
    """The inspector says something that can't be read. The plan is as good as without."""


def inspect_engine(plan_path: Path, entry: EngineEntry, shapes: ShapeSpec, convolutions: Sequence[str]) -> EngineLayers:
    """Ask the engine inspector about a plan built here, and write what it says beside the plan.

    Args:
        plan_path: The plan. `<precision>.layers.json` is written beside it.
        entry: What is known of the plan.
        shapes: The formats are those of its optimal batch.
        convolutions: Nodes of the ONNX file that are convolutions.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
        UserError: the plan can't be loaded.
        EngineryError: there is no memory to run the plan.
        UnreadableLayers: this TensorRT's inspector writes something else than those that are known.
    """
    layers = parse_layers(_ask(plan_path, entry, shapes))
    file = plan_path.with_name(f"{entry.precision}.layers.json")
    rows = [layer.model_dump(mode="json") for layer in layers]
    write_atomically(file, (json.dumps(rows, indent=1, ensure_ascii=False) + "\n").encode())
    return summarize(layers, convolutions, own=entry.precision.upper(), file=file.name)


def _ask(plan_path: Path, entry: EngineEntry, shapes: ShapeSpec) -> str:
    trt = load_tensorrt()
    runtime, engine, context = open_context(plan_path, entry)
    context.set_input_shape(shapes.input_name, shapes.input_shape(shapes.opt_batch))
    inspector = engine.create_engine_inspector()
    inspector.execution_context = context  # without one, all formats are "N/A due to dynamic shapes"
    text = str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    del inspector, context, engine, runtime  # in this order: each needs the next while it lives
    return text


def parse_layers(text: str) -> list[EngineLayer]:
    """Layers of an engine in the order in which they run.

    Args:
        text: JSON of `EngineInspector.get_engine_information`, of an engine built with detailed verbosity.

    Raises:
        UnreadableLayers: it is not such JSON.
    """
    try:
        entries = json.loads(text, strict=False)["Layers"]  # 8.6 separates ONNX nodes by a raw control character
        return [_layer(entry) for entry in entries if isinstance(entry, dict)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableLayers(
            f"what the engine inspector says can't be read ({error!r}): {text[:100]!r}", code="layers-unreadable"
        ) from error


def _layer(entry: dict[str, Any]) -> EngineLayer:
    kind = str(entry.get("LayerType", ""))
    name = str(entry.get("Name", ""))
    nodes = re.findall(r"\[ONNX Layer: ([^\]]*)\]", str(entry.get("Metadata", "")))
    if kind in _NO_ARITHMETIC:
        return EngineLayer(name=name, kind=kind, precision="", nodes=tuple(dict.fromkeys(nodes)))
    # A fused layer is named by its nodes, joined by " + ".
    return EngineLayer(
        name=name, kind=kind, precision=_precision(entry), nodes=tuple(dict.fromkeys(nodes or name.split(" + ")))
    )


def _precision(entry: dict[str, Any]) -> str:
    """The precision that a layer computes in: the type of its first input, else that of its kernel or its weights.

    8.6 tells no formats of an engine with a dynamic batch. FP32 may be rounded to TF32 by the kernel.
    """
    formats = [str(tensor.get("Format/Datatype", "")) for tensor in entry.get("Inputs", [])]
    by_format = _first_match(_FORMATS, formats[0] if formats else "")
    by_kernel = _first_match(_KERNELS, str(entry.get("TacticName", "")))
    weights = entry.get("Weights") or entry.get("ConvWeights")  # of a convolution, or of one fused with its pooling
    by_weights = _first_match(_FORMATS, str(weights.get("Type", "")) if isinstance(weights, dict) else "")
    if by_format == "FP32" and by_kernel == "TF32":
        return "TF32"
    return by_format or by_kernel or by_weights


def _first_match(patterns: tuple[tuple[str, str], ...], text: str) -> str:
    return next((name for name, pattern in patterns if re.search(pattern, text, re.IGNORECASE)), "")


def summarize(layers: Sequence[EngineLayer], convolutions: Sequence[str], *, own: str, file: str) -> EngineLayers:
    """Count convolutions by precision, and name those that run in another than `own`.

    Args:
        layers: What `parse_layers` gives.
        convolutions: Nodes of the ONNX file that are convolutions.
        own: Precision of the engine, such as "INT8".
        file: Name of the file that holds all layers.
    """
    runs_in: dict[str, str] = {}
    for layer in layers:
        for node in layer.nodes:
            if layer.precision:
                runs_in.setdefault(node, layer.precision)
    # TensorRT's parser calls a node without a name after its first output, as `placement.node_id` does.
    found = {name: runs_in.get(name) or runs_in.get(f"node_of_{name}", "unknown") for name in convolutions}
    return EngineLayers(
        file=file,
        num_layers=len(layers),
        num_reformats=sum(layer.kind == "Reformat" for layer in layers),
        convolutions=dict(Counter(found.values()).most_common()),
        exceptions={name: precision for name, precision in found.items() if precision != own},
    )
