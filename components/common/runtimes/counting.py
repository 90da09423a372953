"""Operations, parameters, bytes and memory of a network, counted from its graph: nothing is computed.

PyTorch models run once on fake tensors, which have shapes and no numbers; of ONNX files the shapes are inferred.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import NodeProto, shape_inference
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from components.common.contracts.errors import UserError, shortened
from components.common.runtimes.architectures import build_model
from components.common.runtimes.onnx_files import read_onnx
from components.common.tasks import TASKS, load_task, task_of
from components.common.tasks.task import Task

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.convolution.default: "Conv",
    _ATEN.addmm.default: "MatMul",
    _ATEN.mm.default: "MatMul",
    _ATEN.bmm.default: "MatMul",
    _ATEN.baddbmm.default: "MatMul",
}
_MIN_TRACED = 2  # BatchNorm can't train on a single number per channel
# Parts of names of operations that write where they read: an engine computes them inside of the one before.
_IN_PLACE = (
    "norm",
    "relu",
    "hardtanh",
    "clip",
    "clamp",
    "add",
    "mul",
    "swish",
    "sigmoid",
    "silu",
    "gelu",
    "erf",
    "div",
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operation of the graph, for one image."""

    name: str
    operator: str
    """Conv or MatMul for products; else the operation as its graph names it."""
    macs: int
    """Multiply-accumulates; half of the FLOPs. 0 for what is no product."""
    groups: int
    """Groups of a convolution; 1 for others."""
    num_parameters: int
    input_values: int
    """Numbers read that are no parameters."""
    output_values: int


@dataclass(frozen=True, kw_only=True)
class Count:
    """All of a network, for one image of its size."""

    layers: tuple[Layer, ...]
    num_parameters: int
    image_values: int
    """Numbers of the input, as it is copied to the device."""
    live_values: int
    """Most numbers of tensors that live at once between operations, without parameters and images."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        return sum(layer.macs for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of a training step on one device, in bytes: what backward needs of forward, weights, and the optimizer."""

    per_image_bytes: int
    fixed_bytes: int

    def needed_bytes(self, batch_size: int) -> int:
        """Peak of a step on `batch_size` images, without what the allocator, libraries and other steps hold."""
        return self.fixed_bytes + batch_size * self.per_image_bytes

    def largest_batch(self, memory_bytes: int) -> int:
        """Most images at once that fit; 0 if none does."""
        return max(0, (memory_bytes - self.fixed_bytes) // self.per_image_bytes)


def count_model(architecture: str, image_size: int, num_classes: int = 0) -> Count:
    """Count inference of a PyTorch model, for one image; with as many classes as its task usually has for 0.

    Raises:
        UserError: no such architecture, or it takes no images of this size.
    """
    model = build_model(architecture, num_classes or _usual_num_classes(architecture)).eval()
    recorder = _Recorder()
    with (
        _translate_errors(architecture, image_size),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FakeTensorMode() as mode,
    ):
        state = _fake_state(model, mode)
        images = torch.empty(1, 3, image_size, image_size)
        recorder.parameters, recorder.variables = {_storage(tensor) for tensor in state.values()}, {_storage(images)}
        with recorder:
            functional_call(model, state, (images,))
    return Count(
        layers=tuple(recorder.layers),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        image_values=3 * image_size**2,
        live_values=_most_alive(recorder.steps),
    )


@dataclass(frozen=True)
class _Operation:
    """An operation as its tensors' lives see it; tensors are numbers."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    values: int
    """Numbers of what it writes; 0 where it writes into what it reads."""
    in_place: bool


def _most_alive(steps: Sequence[_Operation]) -> int:
    """Largest sum of numbers of tensors that are written and not yet read for the last time."""
    last = {tensor: index for index, step in enumerate(steps) for tensor in (*step.reads, *step.writes)}
    alive: dict[int, int] = {}
    most = 0
    for index, step in enumerate(steps):
        if step.values:
            dying = [each for each in step.reads if last[each] == index and alive.get(each, 0) >= step.values]
            if step.in_place and dying:
                del alive[dying[0]]
            alive[step.writes[0]] = step.values
        most = max(most, sum(alive.values()))
        for tensor in (*step.reads, *step.writes):
            if last[tensor] == index:
                alive.pop(tensor, None)
    return most


def _is_in_place(operator: str) -> bool:
    return "layer_norm" not in operator.lower() and any(part in operator.lower() for part in _IN_PLACE)


def training_memory(
    architecture: str,
    image_size: int,
    *,
    num_classes: int = 0,
    half: bool = False,
    num_moments: int = 1,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> TrainingMemory:
    """Memory of a training step, counted with the tensors that autograd keeps.

    Args:
        architecture: see `build_model`.
        image_size: side, in pixels; of text the tokens of a sentence.
        num_classes: outputs of the last layer, of text the vocabulary's tokens; 0 for as many as the task usually has.
        half: autocast to 16 bits; weights stay FP32.
        num_moments: numbers that the optimizer keeps for each weight: SGD with momentum 1, AdamW and LAMB 2.
        prepare: called with the model, to freeze parameters.

    Raises:
        UserError: no such architecture, or it takes no images of this size.
    """
    model = build_model(architecture, num_classes or _usual_num_classes(architecture)).train()
    name = task_of(architecture)
    task = load_task(name)
    prepare(model)
    with _translate_errors(architecture, image_size):
        kept, more = (
            _kept_bytes(model, task, image_size, batch_size, half, of_text=TASKS[name].of_text)
            for batch_size in (_MIN_TRACED, 2 * _MIN_TRACED)  # 16-bit copies of weights and anchors don't grow
        )
    per_image = (more - kept) // _MIN_TRACED
    all_bytes = sum(each.nbytes for each in model.state_dict().values())
    trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    fixed = kept - _MIN_TRACED * per_image + all_bytes + (1 + num_moments) * trained_bytes
    return TrainingMemory(per_image_bytes=max(per_image, 1), fixed_bytes=fixed)


def _usual_num_classes(architecture: str) -> int:
    return TASKS[task_of(architecture)].usual_num_classes


def _kept_bytes(model: nn.Module, task: Task, image_size: int, batch_size: int, half: bool, *, of_text: bool) -> int:
    """Bytes of what autograd keeps of a forward pass and the images, each storage once, without weights."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode() as mode:
        state = _fake_state(model, mode)
        dtype = torch.bfloat16 if half else torch.float32
        images = torch.empty(batch_size, 3, image_size, image_size, dtype=dtype)
        if of_text:
            images = torch.ones(batch_size, 2, image_size, dtype=torch.int64)  # sources and targets
        kept[_storage(images)] = images.untyped_storage().nbytes()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = functional_call(model, state, (images,))
            loss = task.loss(0.0)(outputs, task.blank_labels(outputs))
        weights = {_storage(tensor) for tensor in state.values()}
        del loss
    return sum(num_bytes for storage, num_bytes in kept.items() if storage not in weights)


def _fake_state(model: nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    return {name: mode.from_tensor(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _translate_errors(architecture: str, image_size: int) -> Iterator[None]:
    """Turn whatever a model raises on images of a wrong size into an error that says so."""
    fast, log = torch.backends.mha.get_fastpath_enabled(), logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # a traceback of what the error says
    torch.backends.mha.set_fastpath_enabled(False)  # one operation that hides its products
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{architecture} can't be counted at {image_size} px ({shortened(error)}); give the image size that it "
            "takes, or its ONNX file",
            code="not-countable",
            setting="image_size",
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        log.disabled = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation of one image."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Layer] = []
        self.parameters: set[int] = set()
        self.variables: set[int] = set()  # storages that depend on the images; engines compute others when built
        self.steps: list[_Operation] = []
        self._next = itertools.count()
        self._numbers: dict[int, int] = {}  # of storages that were written; one may be freed and its place used again

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = [each for each in _tensors(result) if each.is_floating_point()]
        inputs = [each for each in _tensors(args) if each.is_floating_point()]
        read, given = ({_storage(each) for each in own} for own in (inputs, _tensors(args)))
        # Of integers, too: the address may be that of a tensor that is gone.
        made = {_storage(each) for each in _tensors(result)} - given
        depends = bool(self.variables & given)
        self.variables = self.variables | made if depends else self.variables - made
        self.parameters = self.parameters - made if depends else self.parameters | made
        fresh = [each for each in outputs if _storage(each) not in read]
        is_view = not fresh and function not in _PRODUCTS and function._opname[-1:] != "_"
        if is_view or not depends:
            return result
        weights = [each for each in inputs if _storage(each) in self.parameters]
        values = sum(each.numel() for each in inputs if _storage(each) not in self.parameters)
        written = sum(each.numel() for each in outputs[:1])
        operator = _PRODUCTS.get(function, str(function._opname).removeprefix("_"))
        self.layers.append(
            Layer(
                name=f"{operator}_{len(self.layers)}",
                operator=operator,
                macs=_macs(function, args, outputs[0]) if function in _PRODUCTS else 0,
                groups=args[8] if operator == "Conv" else 1,
                num_parameters=sum(each.numel() for each in weights),
                input_values=values,
                output_values=written,
            )
        )
        reads = tuple(self._numbers[storage] for storage in read if storage in self._numbers)
        for each in fresh:
            self._numbers[_storage(each)] = next(self._next)
        writes = tuple(self._numbers[_storage(each)] for each in fresh[:1])
        self.steps.append(_Operation(reads, writes, written if fresh else 0, _is_in_place(operator)))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _macs(function: Any, args: Sequence[Any], output: Tensor) -> int:
    if function is _ATEN.convolution.default:
        weight = args[1]  # [out, in / groups, height, width]; [in, out / groups, ...] where it is transposed
        if args[6]:
            return int(args[0].numel() * prod(weight.shape[1:]))
        return int(output.numel() * prod(weight.shape[1:]))
    first = args[1] if function in (_ATEN.addmm.default, _ATEN.baddbmm.default) else args[0]
    return int(output.numel() * first.shape[-1])


def count_onnx(path: Path) -> Count:
    """Count inference of an ONNX file, for one image: Q/DQ pairs count as nothing.

    Raises:
        UserError: it can't be read, its shapes can't be inferred, or an operation lacks what it reads or writes.
    """
    graph, batch_size = _with_shapes(read_onnx(path), path)
    try:
        return _count_graph(graph, batch_size, path)
    except IndexError:
        text = f"{path}: an operation has too few inputs, outputs or dimensions; export the model again"
        raise UserError(text, code="not-onnx") from None


def _count_graph(graph: onnx.GraphProto, batch_size: int, path: Path) -> Count:
    shapes = {
        value.name: tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if all(dimension.dim_value > 0 for dimension in value.type.tensor_type.shape.dim)  # 0 for one that is open
    }
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:  # weights behind Q/DQ, or as constants
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = tuple(node.attribute[0].t.dims)
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Cast", "Identity") and node.input[0] in constants:
            constants[node.output[0]] = constants[node.input[0]]
    known = shapes | constants
    images = [value.name for value in graph.input if value.name not in constants]
    layers, steps, sizes = [], [], {name: prod(shape) for name, shape in known.items()}
    numbers: dict[str, int] = {}  # of tensors; a view has that of what it views
    for node in graph.node:
        if all(name in constants for name in node.output):
            continue
        if node.op_type in _FREE:
            numbers |= {name: numbers[node.input[0]] for name in node.output if node.input and node.input[0] in numbers}
            continue
        unknown = [name for name in node.output if name and name not in shapes]
        if unknown and node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            raise UserError(
                f"{path}: the shape of {unknown[0]!r} can't be inferred; export the model with a fixed batch and size",
                code="shapes-unknown",
            )
        weights = [name for name in node.input if name in constants]
        values = [name for name in node.input if name and name not in constants]
        operator = "MatMul" if node.op_type == "Gemm" else node.op_type
        layers.append(
            Layer(
                name=node.name or node.output[0],
                operator=operator,
                macs=_onnx_macs(node, known) // batch_size,
                groups=_attribute(node, "group", 1) if operator == "Conv" else 1,
                num_parameters=sum(sizes[name] for name in weights),
                input_values=sum(sizes.get(name, 0) for name in values) // batch_size,
                output_values=sum(sizes.get(name, 0) for name in node.output) // batch_size,
            )
        )
        reads = tuple(numbers[name] for name in values if name in numbers)
        writes = [name for name in node.output if name]
        numbers |= {name: len(numbers) + index for index, name in enumerate(writes)}
        written = layers[-1].output_values
        steps.append(_Operation(reads, tuple(numbers[name] for name in writes), written, _is_in_place(operator)))
    return Count(
        layers=tuple(layers),
        num_parameters=sum(prod(tensor.dims) for tensor in graph.initializer),
        image_values=sum(sizes.get(name, 0) for name in images) // batch_size,
        live_values=_most_alive(steps),
    )


# What an engine does while it reads or writes, or what is no work at all.
_FREE = {"Cast", "Constant", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Shape"}
_FREE |= {"Squeeze", "Unsqueeze"}


def _with_shapes(model: onnx.ModelProto, path: Path) -> tuple[onnx.GraphProto, int]:
    """The graph with inferred shapes, and the images of its batch: 1 where the file leaves it open."""
    sizes = []
    for value in model.graph.input:
        for dimension in value.type.tensor_type.shape.dim[:1]:
            dimension.dim_value = max(1, dimension.dim_value)
            sizes.append(dimension.dim_value)
    batch_size = sizes[0] if sizes else 1
    del model.graph.value_info[:]  # of another batch, maybe
    try:
        return shape_inference.infer_shapes(model, strict_mode=False, data_prop=True).graph, batch_size
    except Exception as error:  # whatever the C++ code raises on a hostile file
        raise UserError(f"{path}: its shapes can't be inferred ({shortened(error)})", code="shapes-unknown") from None


def _onnx_macs(node: NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int:
    if node.op_type in ("Conv", "ConvTranspose"):
        counted = shapes.get(node.output[0] if node.op_type == "Conv" else node.input[0], ())
        return prod(counted) * prod(shapes.get(node.input[1], (0,))[1:])
    if node.op_type in ("Gemm", "MatMul"):
        first = shapes.get(node.input[0], (0,))
        inner = first[0] if node.op_type == "Gemm" and _attribute(node, "transA", 0) else first[-1]
        return prod(shapes.get(node.output[0], (0,))) * inner
    return 0


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)
