"""The FP32 ONNX file: exported from a torch model, or taken over from the user, and verified either way.

Opset 17, IR 8, classic exporter: what TensorRT 8.6's parser reads. Newer runtimes read it too.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, ValueInfoProto, numpy_helper, version_converter

from components.common.contracts.errors import EngineryError, UserError, shortened
from components.common.contracts.manifests import write_atomically
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model, check_image_size
from components.common.runtimes.onnx_files import onnx_content, parse_onnx
from components.common.tasks import TASKS
from components.export.folding import fold_constants
from components.export.lowering import lower
from components.export.placement import attribute, inline_constants, model_opset

OPSET = 17
IR_VERSION = 8
MAX_RELATIVE_ERROR = 1e-3  # of the logits, against the largest logit

_EXPORTER: Any = torch.onnx  # torch's stubs lack what is used of it here
_TRACE_BATCH = 2  # not 1: a batch of one can be confused with a broadcast axis
_USER_OPSETS = range(7, 22)  # from what ONNX Runtime reads on
_PROBE_SEED = 0
_SUM_TOLERANCE = 1e-3  # of the probabilities of an image
_MAX_SIDE = 8192  # pixels; a file may claim any size, and is tried with two images
_MIN_CLASSES = 2
_SHAPE_ONLY = {"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Cast"}  # what may follow a last activation
_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {  # with constants, what may follow it too
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide},
    **{"Neg": np.negative, "Reciprocal": np.reciprocal},
    "Clip": lambda x, low=None, high=None: np.minimum(
        np.maximum(x, -np.inf if low is None else low), np.inf if high is None else high
    ),
}
_LIMITED: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Exp": np.exp, "Tanh": np.tanh}
_PICKS = {"ArgMax", "Equal", "Greater", "GreaterOrEqual", "Hardmax", "Less", "LessOrEqual", "OneHot", "TopK"}
_QUANTIZED = re.compile("Quantize|Integer|NBits|^Q[A-Z]")  # operators of ONNX, and of ONNX Runtime
_LINEAR = {"Add", "Conv", "Gemm", "GlobalAveragePool", "MatMul", "ReduceMean"}  # whose answers may be small by chance
_REEXPORT = (
    "Export it again with a dynamic batch and all else fixed, from torch by torch.onnx.export(model, "
    "torch.zeros(2, 3, height, width), path, dynamo=False, "
    'opset_version=17, input_names=["images"], output_names=["logits"], '
    'dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}}).'
)


def _fix(proto: onnx.ModelProto) -> str:
    """The way to export the model again, by what exported it."""
    size = _dims(proto.graph.input[0]) if proto.graph.input else []
    if proto.producer_name == "tf2onnx" or (len(size) == 4 and size[3] == 3 != size[1]):
        return (
            f"Convert it again by: python -m tf2onnx.convert --saved-model DIR --opset {OPSET} --inputs-as-nchw INPUT "
            "--output FILE.onnx, where Keras' model.export(DIR) writes DIR, and INPUT is its name in TensorFlow, as "
            f"{proto.graph.input[0].name.removesuffix(':0')}:0 (from_keras of tf2onnx takes inputs_as_nchw=[INPUT])."
        )
    return _REEXPORT


@dataclass(frozen=True)
class OnnxClassifier:
    """Facts that a classifier's ONNX file states."""

    shapes: ShapeSpec
    """Names and image size from the file; batch range at its defaults."""
    num_classes: int
    had_softmax: bool = False
    """True if the file ends in a softmax, which is left out."""


def export_onnx(model: torch.nn.Module, path: Path, shapes: ShapeSpec) -> None:
    """Writes `model` in eval mode to `path` (atomically): opset 17, IR 8, dynamic batch, all else static.

    Args:
        model: maps [B, C, H, W] float32 to [B, ...] float32, such as [B, classes]. Left in the mode it came in.
        path: the file to write.
        shapes: names and image size.

    Raises:
        EngineryError: torch can't export the model, or the file isn't as stated above.
    """
    images = torch.zeros(shapes.input_shape(_TRACE_BATCH), device=_device(model))  # [2, C, H, W] float32
    axes = {name: {0: "batch"} for name in (shapes.input_name, shapes.output_name)}
    name = f"{type(model).__name__} as ONNX opset {OPSET} at {shapes.height} x {shapes.width} pixels"
    proto = traced(model, {shapes.input_name: images}, [shapes.output_name], axes, name)
    with _eval_mode(model), torch.no_grad():
        sizes = model(images).shape[1:]  # the exporter loses those of a detector's boxes
    for axis, size in zip(proto.graph.output[0].type.tensor_type.shape.dim[1:], sizes, strict=True):
        axis.dim_value = size
    _verify_export(proto, shapes)
    try:
        folded = fold_constants(proto)
    except UserError as error:  # the exporter wrote what ONNX Runtime can't run
        raise _not_written(name, error.__cause__ or error) from error
    write_atomically(path, folded.SerializeToString())


def check_exportable(architecture: str, image_size: int) -> None:
    """See that a network can be exported for images of this side in pixels, before it is trained.

    Raises:
        UserError: it takes no images of that size, or there is no such network.
        EngineryError: torch can't export it.
    """
    model = build_model(architecture, num_classes=2)
    check_image_size(model, architecture, image_size)
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder, "model.onnx"), ShapeSpec(height=image_size, width=image_size))


def traced(
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    name: str,
) -> onnx.ModelProto:
    """The graph of a model in eval mode, opset 17, IR 8.

    Args:
        model: left in the mode it came in.
        inputs: by name, in its order.
        outputs: their names.
        axes: names of dynamic axes, by input or output and number of the axis.
        name: of what is exported, in messages.

    Raises:
        EngineryError: torch can't export it.
    """
    _EXPORTER.register_custom_op_symbolic("aten::rms_norm", _write_rms_norm, OPSET)
    try:
        with (
            _eval_mode(model),
            _without_options(model),
            _pooling_by_windows(),
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(),
        ):
            # The classic exporter is chosen on purpose: the new one writes opset 18, which TensorRT 8.6 gets wrong.
            warnings.filterwarnings("ignore", "You are using the legacy TorchScript", DeprecationWarning)
            warnings.filterwarnings("ignore", "Converting a tensor to a Python")  # the file is compared with the model
            warnings.filterwarnings("ignore", "Exporting a model to ONNX with a batch_size other than 1")  # likewise
            warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning, r"torch\.onnx")
            torch.onnx.export(
                model,
                tuple(inputs.values()),
                Path(folder, "model.onnx"),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_axes=axes,
            )
            proto = inline_constants(onnx.load(Path(folder, "model.onnx")))
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError) as error:
        raise _not_written(name, error) from error
    proto.ir_version = IR_VERSION
    return proto


def _not_written(name: str, error: BaseException) -> EngineryError:
    return EngineryError(
        f"export: torch can't write {name}: {shortened(_first_line(error), 200).rstrip('.')}. Choose another "
        "architecture, or write its ONNX file yourself and give that as the model",
        code="exporter-failed",
    )


def _write_rms_norm(graph: Any, x: Any, shape: Any, weight: Any, epsilon: Any) -> Any:
    """Write torch.nn.functional.rms_norm, which the exporter lacks: x / sqrt(mean(x * x) + epsilon) * weight."""
    helper = _EXPORTER.symbolic_helper
    num_axes, least = len(helper._get_const(shape, "is", "")), helper._get_const(epsilon, "f", "")
    added = graph.op("Constant", value_t=torch.tensor(torch.finfo(torch.float32).eps if least is None else least))
    mean = graph.op("ReduceMean", graph.op("Mul", x, x), axes_i=list(range(-num_axes, 0)), keepdims_i=1)
    normalized = graph.op("Div", x, graph.op("Sqrt", graph.op("Add", mean, added)))
    return normalized if helper._is_none(weight) else graph.op("Mul", normalized, weight)


def check_against_torch(model: torch.nn.Module, path: Path, shapes: ShapeSpec, images: np.ndarray) -> float:
    """Compares ONNX Runtime with torch in FP32 (TF32 off), at batch 1 and at batch len(images).

    Args:
        model: the exported model.
        path: its ONNX file.
        shapes: names and image size.
        images: [B, C, H, W] float32, normalized as for the model.

    Returns:
        The largest difference between logits, relative to the largest logit.

    Raises:
        EngineryError: it is above `MAX_RELATIVE_ERROR`.
    """
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    with _eval_mode(model), torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for batch in (images[:1], images):
            expected = model(torch.from_numpy(batch).to(_device(model))).float().cpu().numpy()
            actual = session.run([shapes.output_name], {shapes.input_name: batch})[0]
            worst = max(worst, _relative_error(actual, expected))
    if not worst <= MAX_RELATIVE_ERROR:
        raise EngineryError(
            f"export check: logits of {path.name} differ from torch by {worst:.2e} of the largest logit, allowed "
            f"{MAX_RELATIVE_ERROR:.0e}. Does the forward pass depend on Python values, randomness or the batch size?",
            code="export-differs",
        )
    return worst


def check_answers(model: torch.nn.Module, shapes: ShapeSpec, source: Path) -> None:
    """Refuse a model on the CPU whose answers to two random images are not finite, or the same, as read_user_onnx does.

    Raises:
        UserError: they are.
    """
    with _eval_mode(model), torch.inference_mode():
        answers = model(torch.from_numpy(_probe_images(shapes))).numpy()
    _check_finite(answers, source)
    _check_varies(answers, None, source)


def read_user_onnx(source: Path) -> tuple[OnnxClassifier, bytes]:
    """Check a user's classifier, and take it over at opset 17 and IR 8, with logits.

    A file that fits already stays byte for byte; others are converted, or their shapes computed once, and must answer
    as before. Names stay.

    A softmax at its end is left out: all that follows, from the ranking of layers to serving, reads logits. The classes
    keep their order.

    Args:
        source: ONNX classifier of opset 7 to 21 with one [N, 3, H, W] float32 input, dynamic in N alone, and one
            [N, classes] float32 output of logits or of a softmax; without external data.

    Returns:
        What it is, and the file at opset 17 and IR 8.

    Raises:
        UserError: the file can't be used; the message names what was seen and the fix.
    """
    content = onnx_content(source)
    proto = _parse(content, source)
    opset = model_opset(proto)
    if opset not in _USER_OPSETS:
        raise UserError(
            f"{source}: opset {opset}, supported are {_USER_OPSETS.start} to {_USER_OPSETS.stop - 1}. {_fix(proto)}",
            code="unsupported-opset",
        )
    classifier = _describe(proto, source)
    expected, alone = _probe(content, classifier, source)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    fits = opset == OPSET and proto.ir_version <= IR_VERSION and len(proto.opset_import) == 1
    if not fits or any(value.name in initializers for value in proto.graph.input):
        proto = _converted(proto, source)
        content = proto.SerializeToString()
    _check_finite(expected, source)
    folded = fold_constants(proto)
    if folded is not proto:
        proto, content = folded, folded.SerializeToString()
    _check_fp32(proto.graph, source)
    tail = _Tail.of(proto.graph)
    last = tail.last
    _check_varies(expected, last, source)
    is_softmax = last is not None and last.op_type == "Softmax"
    if not is_softmax and tail.is_sigmoid():
        raise UserError(
            f"{source}: ends in a sigmoid or the like, so it says yes or no for each output by itself (multi-label). "
            "Supported are classifiers of which each image has one class. If yours is one, export it without the "
            "sigmoid, with logits as its output",
            code="multi-label",
        )
    sums_to_one = bool(np.allclose(expected.sum(axis=1), 1, atol=_SUM_TOLERANCE))
    if is_softmax and tail.steps:
        raise UserError(
            f"{source}: its outputs are probabilities of a softmax, scaled or changed by "
            f"{', '.join(node.op_type for node in reversed(tail.steps))}. Export it with logits as its output",
            code="probabilities",
        )
    if is_softmax and not sums_to_one:
        raise UserError(
            f"{source}: its softmax is over axis {attribute(last, 'axis', -1)}, which is not the classes', so an "
            "image's answers don't sum to 1. Export it with a softmax over the classes, or with logits as its output",
            code="softmax-axis",
        )
    if not _relative_error(alone, expected) <= MAX_RELATIVE_ERROR:
        raise UserError(
            f"{source}: gives an image other answers in another run, or beside another image (dropout or batch norm in "
            "training mode?): export it after model.eval()",
            code="random-answers",
        )
    actual, _ = _probe(content, classifier, source)
    if not _relative_error(actual, expected) <= MAX_RELATIVE_ERROR:
        message = f"{source}: its answers change when converted from opset {opset} to {OPSET}. {_fix(proto)}"
        raise UserError(message, code="conversion-differs")
    if last is None or last.op_type in _LINEAR:
        sums_to_one = bool(np.allclose(expected.sum(axis=1), 1))  # to 1e-5: a mean of softmaxes, no chance
    if sums_to_one and ((expected >= 0) & (expected <= 1)).all():
        content = _without_softmax(proto, last)
        logits = _probe(content, classifier, source)[0] if content else np.full_like(expected, np.nan)
        if not _relative_error(torch.from_numpy(logits).softmax(dim=1).numpy(), expected) <= MAX_RELATIVE_ERROR:
            raise UserError(
                f"{source}: its outputs are probabilities, and not of one softmax at its end, which could be left out. "
                "Export it with logits as its output",
                code="probabilities",
            )
        classifier = replace(classifier, had_softmax=True)
    return classifier, content


def _parse(content: bytes, path: Path) -> onnx.ModelProto:
    proto = parse_onnx(content, path)
    if any(not node.output or (node.op_type == "Identity" and not node.input) for node in proto.graph.node):
        raise UserError(f"{path}: not an ONNX file, it has a node without an output or input.", code="not-onnx")
    if proto.functions:
        raise UserError(
            f"{path}: defines functions of its own, supported are plain graphs. {_REEXPORT}", code="unsupported-graph"
        )
    operators = {node.op_type for node in proto.graph.node}
    if quantized := sorted(filter(_QUANTIZED.search, operators)):
        raise UserError(f"{path}: is already quantized ({quantized}). Give the FP32 model.", code="already-quantized")
    foreign = sorted(
        {f"{node.domain}.{node.op_type}" for node in proto.graph.node if node.domain not in ("", "ai.onnx")}
    )
    if foreign:
        raise UserError(
            f"{path}: uses the operators {', '.join(foreign)}, which are not ONNX's own and which TensorRT can't read. "
            "Give the model as exported, before any optimizer of another runtime.",
            code="unsupported-operators",
        )
    if found := operators & {"If", "Loop", "Scan"}:
        message = f"{path}: holds control flow ({sorted(found)}), supported are plain graphs. {_REEXPORT}"
        raise UserError(message, code="unsupported-graph")
    for tensor in inline_constants(proto).graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        try:
            is_finite = np.isfinite(onnx.numpy_helper.to_array(tensor)).all()
        except ValueError as error:
            raise UserError(
                f"{path}: the weights '{tensor.name}' are damaged ({error}). {_REEXPORT}", code="weights-damaged"
            ) from None
        if not is_finite:
            message = f"{path}: the weights '{tensor.name}' hold NaN or infinity. Take an earlier checkpoint."
            raise UserError(message, code="weights-not-finite")
    return proto


def _describe(proto: onnx.ModelProto, path: Path) -> OnnxClassifier:
    """The classifier's shapes, from the declared input and output."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in initializers]
    if len(inputs) != 1 or len(proto.graph.output) != 1:
        raise UserError(
            f"{path}: has inputs {[value.name for value in inputs]} and outputs "
            f"{[value.name for value in proto.graph.output]}, expected one image input and one logits output. "
            f"Export the classifier alone, or cut it out: onnx.utils.extract_model('{path.name}', 'single.onnx', "
            "['INPUT'], ['LOGITS']), where these are the names of the input and the output to keep.",
            code="not-a-classifier",
        )
    image, logits = inputs[0], proto.graph.output[0]
    _check_type(image, path, "input", "[N, 3, H, W]")
    last = _Tail.of(proto.graph).last
    if last is not None and last.op_type in _PICKS:
        raise UserError(
            f"{path}: gives classes, not logits: it ends in {last.op_type}. Export the network without it, with the "
            "logits as its output",
            code="classes-not-logits",
        )
    _check_type(logits, path, "output", "[N, classes]")
    size, fix = _dims(image), _fix(proto)
    if len(size) == 4 and size[3] == 3 != size[1]:
        raise UserError(
            f"{path}: input '{image.name}' has shape {size}, channels last, as tf2onnx and Keras write models of "
            f"TensorFlow; expected [N, 3, H, W]. {fix}",
            code="channels-last",
        )
    if len(size) == 4 and (dynamic := [name for name in size[1:] if not isinstance(name, int)]):
        if "?" not in dynamic:
            fix = (
                f"Fix each of {', '.join(dynamic)} at its size in training, one after the other, by: python -m "
                f"onnxruntime.tools.make_dynamic_shape_fixed --dim_param {dynamic[0]} --dim_value SIZE {path.name} "
                "fixed.onnx."
            )
        raise UserError(
            f"{path}: input '{image.name}' has shape {size}, expected [N, 3, H, W], a fixed height and width with only "
            f"the batch dynamic. {fix}",
            code="dynamic-size",
        )
    if len(size) != 4 or size[1] != 3:
        if len(size) == 4 and size[1] == 1:
            fix = (
                "Images come as RGB: export a network that begins with images.mean(1, keepdim=True), and give "
                "export.mean and export.std its own mean and std three times each"
            )
        raise UserError(
            f"{path}: input '{image.name}' has shape {size}, expected [N, 3, H, W]. {fix}", code="wrong-input-shape"
        )
    if isinstance(size[0], int):
        raise UserError(
            f"{path}: input '{image.name}' has the fixed batch {size[0]} (shape {size}), expected a dynamic batch "
            f"axis. {fix}",
            code="fixed-batch",
        )
    height, width = (int(side) for side in size[2:])
    if max(height, width) > _MAX_SIDE:
        message = f"{path}: input '{image.name}' has shape {size}, supported are sides of at most {_MAX_SIDE:,}"
        raise UserError(message, code="image-too-large")
    output_size = _dims(logits) or _dims(onnx.shape_inference.infer_shapes(proto).graph.output[0])
    if len(output_size) > 2 and 1 not in output_size[1:]:
        others = [spec for spec in TASKS.values() if not (spec.classifies or spec.of_text)]
        raise UserError(
            f"{path}: output '{logits.name}' has shape {output_size}, answers for each pixel or place of an image, as "
            f"of a network for {' or '.join(spec.name for spec in others)}. Of ONNX files classifiers are supported, "
            f"with [N, classes]. Train a network of that task instead: "
            f"{' or '.join(f'`enginery run {spec.pipeline}`' for spec in others)}",
            code="other-task",
        )
    if len(output_size) > 2:
        fix = "Export it with torch.nn.Flatten() as its last layer."
    if len(output_size) != 2 or not isinstance(output_size[1], int) or isinstance(output_size[0], int):
        raise UserError(
            f"{path}: output '{logits.name}' has shape {output_size}, expected [N, classes] with a dynamic N and a "
            f"fixed number of classes. {fix}",
            code="wrong-output-shape",
        )
    if output_size[1] < _MIN_CLASSES:
        raise UserError(
            f"{path}: output '{logits.name}' has shape {output_size}, one number for each image, as of a binary "
            "classifier. Supported are classifiers with one output per class: give it two, the logits of no and of yes",
            code="one-output",
        )
    shapes = ShapeSpec(input_name=image.name, output_name=logits.name, channels=3, height=height, width=width)
    return OnnxClassifier(shapes, output_size[1])


@dataclass(frozen=True)
class _Tail:
    """The end of a graph, traced back from its output."""

    last: onnx.NodeProto | None
    """The last operator that does more than reshape its numbers, or change each of them by constants."""
    steps: list[onnx.NodeProto]
    """The operators that change them so, from the output back."""
    constants: dict[str, TensorProto]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> "_Tail":
        constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and [entry.name for entry in node.attribute] == ["value"]:
                constants[node.output[0]] = node.attribute[0].t
            elif node.op_type == "Identity" and node.input[0] in constants:
                constants[node.output[0]] = constants[node.input[0]]
        producers = {name: node for node in graph.node for name in node.output}
        node, steps = producers.get(graph.output[0].name), []
        while node is not None:
            computed = [name for name in node.input if name and name not in constants]
            if node.op_type not in _SHAPE_ONLY:
                if len(computed) != 1 or node.op_type not in (*_ELEMENTWISE, "Gather"):
                    break
                steps.append(node)
            node = producers.pop(computed[0], None) if computed else None  # pop: a damaged graph may be a ring
        return cls(node, steps, constants)

    def is_sigmoid(self) -> bool:
        """True if each output is between 0 and 1 by itself, whatever the network computes, or is that of a sigmoid."""
        kind = "" if self.last is None else self.last.op_type
        if kind in ("Sigmoid", "HardSigmoid"):
            return True
        sizes = np.array([1e-3, 1.0, 1e3, 1e30])
        with np.errstate(all="ignore"):
            values = _LIMITED.get(kind, np.positive)(np.concatenate([-sizes, [0.0], sizes]))
            for node in reversed(self.steps):
                read = [numpy_helper.to_array(self.constants[name]) for name in node.input if name in self.constants]
                if node.op_type not in _ELEMENTWISE or any(array.size != 1 for array in read):
                    return False  # a scale for each class, say
                scalars = iter(read)
                arguments = [
                    None if not name else next(scalars).item() if name in self.constants else values
                    for name in node.input
                ]
                values = _ELEMENTWISE[node.op_type](*arguments)
        return bool(((values >= -_SUM_TOLERANCE) & (values <= 1 + _SUM_TOLERANCE)).all())


def _without_softmax(proto: onnx.ModelProto, last: onnx.NodeProto | None) -> bytes:
    """The model with the softmax at its end left out; empty where there is none that can be."""
    graph = proto.graph
    computed = {name for node in graph.node for name in node.output}
    if last is None or last.op_type != "Softmax" or last.input[0] not in computed:
        return b""
    taken, given = last.input[0], last.output[0]
    graph.node.remove(last)
    for node in graph.node:  # the output keeps its name
        for names in (node.input, node.output):
            names[:] = [given if name == taken else name for name in names]
    kept = [value for value in graph.value_info if value.name != taken]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return proto.SerializeToString()


def _check_type(value: ValueInfoProto, path: Path, role: str, shape: str) -> None:
    element = value.type.tensor_type.elem_type
    if element != TensorProto.FLOAT:
        names = {number: name for name, number in TensorProto.DataType.items()}
        fix = "Export the FP32 model; lower precisions are made from it."
        if element not in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE):
            fix = "Export it with float images, which export.mean and export.std scale, and with logits."
        raise UserError(
            f"{path}: {role} '{value.name}' has type {names.get(element, element)}, expected FLOAT {shape}. {fix}",
            code="wrong-type",
        )


def _dims(value: ValueInfoProto) -> list[int | str]:
    """Axes of a tensor: a number where fixed, a name (or "?") where dynamic."""
    return [
        axis.dim_value if axis.HasField("dim_value") and axis.dim_value > 0 else axis.dim_param or "?"
        for axis in value.type.tensor_type.shape.dim
    ]


def _converted(proto: onnx.ModelProto, source: Path) -> onnx.ModelProto:
    """The model at opset 17 and IR 8, without initializers among its inputs, or imports of operators that it lacks."""
    for index in reversed([i for i, entry in enumerate(proto.opset_import) if entry.domain not in ("", "ai.onnx")]):
        del proto.opset_import[index]
    initializers = {tensor.name for tensor in proto.graph.initializer}
    for index in reversed([i for i, value in enumerate(proto.graph.input) if value.name in initializers]):
        del proto.graph.input[index]
    proto.ir_version = IR_VERSION  # before the conversion: initializers of IR 3 would have to be inputs
    opset = model_opset(proto)
    try:
        if opset > OPSET:
            proto = lower(proto, OPSET)
        elif opset < OPSET:
            proto = version_converter.convert_version(proto, OPSET)
        onnx.checker.check_model(proto, full_check=True)
    except (RuntimeError, version_converter.ConvertError, onnx.checker.ValidationError) as error:
        raise UserError(
            f"{source}: can't be converted from opset {opset} to {OPSET}: {_first_line(error)}. {_REEXPORT}",
            code="conversion-failed",
        ) from error
    return proto


def _probe(content: bytes, classifier: OnnxClassifier, source: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits of ONNX Runtime for two random images, in one batch and each alone. Fails where the batch is fixed."""
    shapes = classifier.shapes
    images = _probe_images(shapes)
    batches = (images, images[:1], images[1:])
    options = ort.SessionOptions()
    options.log_severity_level = 4  # the exception says it all
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it may leave out a dropout
    try:
        session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        answers = [session.run([shapes.output_name], {shapes.input_name: batch})[0] for batch in batches]
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise UserError(
            f"{source}: ONNX Runtime can't run it on two images of {shapes.height} x {shapes.width} pixels, and on one "
            f"of them: {_first_line(error)} {_REEXPORT}",
            code="onnx-does-not-run",
        ) from error
    for batch, logits in zip(batches, answers, strict=True):
        if logits.shape != (expected := (len(batch), classifier.num_classes)):
            raise UserError(
                f"{source}: a batch of {len(batch)} gives output shape {list(logits.shape)}, expected "
                f"{list(expected)}. {_REEXPORT}",
                code="wrong-output-shape",
            )
    return answers[0], np.concatenate(answers[1:])


def _check_fp32(graph: onnx.GraphProto, source: Path) -> None:
    """Refuse a network that casts what it computes to half precision: it would be its own reference."""
    halves = {TensorProto.FLOAT16: "FLOAT16", TensorProto.BFLOAT16: "BFLOAT16"}
    for node in graph.node:
        if node.op_type == "Cast" and (kind := halves.get(attribute(node, "to", 0))):
            raise UserError(
                f"{source}: computes in {kind} (from '{node.name or node.output[0]}' on). Export the FP32 model; lower "
                "precisions are made from it.",
                code="wrong-type",
            )


def _probe_images(shapes: ShapeSpec) -> np.ndarray:
    return np.random.default_rng(_PROBE_SEED).standard_normal(shapes.input_shape(2), dtype=np.float32)


def _check_finite(answers: np.ndarray, source: Path) -> None:
    if not np.isfinite(answers).all():
        message = f"{source}: its answers to two random images hold NaN or infinity. Take an earlier checkpoint."
        raise UserError(message, code="answers-not-finite")


def _check_varies(answers: np.ndarray, last: onnx.NodeProto | None, source: Path) -> None:
    """Refuse a network that does not look at its images. `answers`: [2, classes] float32, to different ones."""
    may_saturate = last is not None and last.op_type in ("Softmax", "Sigmoid", "HardSigmoid")
    if (answers[0] == answers[1]).all() and not (may_saturate and np.isin(answers, (0, 1)).all()):
        raise UserError(
            f"{source}: gives the same answers to different images, so it does not look at them: its training was too "
            "short, its weights were not saved, or a layer's outputs are all zero. Train it longer or export it again.",
            code="constant-answers",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _verify_export(proto: onnx.ModelProto, shapes: ShapeSpec) -> None:
    """Checks what torch.onnx.export was asked for: some versions silently write another opset."""
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineryError(f"export: torch wrote an invalid ONNX model: {error}", code="exporter-failed") from error
    seen = {
        "opset": model_opset(proto),
        "IR": proto.ir_version,
        "inputs": {value.name: _dims(value) for value in proto.graph.input},
        "outputs": [value.name for value in proto.graph.output],
        "output batch": [_dims(value)[0] for value in proto.graph.output],
    }
    expected = {
        "opset": OPSET,
        "IR": IR_VERSION,
        "inputs": {shapes.input_name: ["batch", *shapes.input_shape(1)[1:]]},
        "outputs": [shapes.output_name],
        "output batch": ["batch"],
    }
    if wrong := [f"{key} {seen[key]} (expected {expected[key]})" for key in expected if seen[key] != expected[key]]:
        raise EngineryError(
            f"export: torch {torch.__version__} wrote an ONNX model with {', '.join(wrong)}.", code="exporter-failed"
        )


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference relative to the largest expected magnitude; infinite for NaN or other shapes."""
    if actual.shape != expected.shape or not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode for all modules; each gets its own mode back afterwards (frozen ones may differ from the rest)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _without_options(model: torch.nn.Module) -> Iterator[None]:
    """A forward that takes inputs alone: torch.onnx gives it the defaults of other arguments, flags too, as tensors."""
    forward = model.forward
    vars(model)["forward"] = lambda *inputs: forward(*inputs)
    try:
        yield
    finally:
        del vars(model)["forward"]


@contextmanager
def _pooling_by_windows() -> Iterator[None]:
    """Adaptive pooling by whole factors as pooling of windows: the exporter refuses it where it lost shapes."""
    functional: Any = torch.nn.functional
    adaptive = functional.adaptive_avg_pool2d

    def pool(images: torch.Tensor, output_size: Any) -> torch.Tensor:
        sizes = tuple(output_size) if isinstance(output_size, Sequence) else (output_size, output_size)
        before = [int(size) for size in images.shape[-2:]]  # of a traced tensor they are no ints
        if sizes == (1, 1) or None in sizes or any(a % b for a, b in zip(before, sizes, strict=True)):
            return adaptive(images, output_size)
        return functional.avg_pool2d(images, [a // b for a, b in zip(before, sizes, strict=True)])

    functional.adaptive_avg_pool2d = pool
    try:
        yield
    finally:
        functional.adaptive_avg_pool2d = adaptive


def _device(model: torch.nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
