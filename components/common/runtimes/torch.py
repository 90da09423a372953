"""PyTorch, on a GPU or the CPU: runs an ONNX classifier as its file says, with every inner tensor within reach.

It is the reference on GPUs, and what calibration looks into: `TorchGraph.run` returns any inner tensors. Q/DQ nodes are
simulated in floats, so that the speed of a quantized file says nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx
import torch
from torch import Tensor

from components.common.contracts.environment import cpu_name
from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.runner import BenchmarkOptions, Images, Timing, measure_host
from components.common.runtimes.torch_operators import as_tensor, bind, fake_quantize, why_unsupported

_OPSETS = range(13, 22)


class UnsupportedOperators(EngineryError):
    """The PyTorch runner lacks operators, or attributes of operators, of a model. The message names all of them."""


@dataclass(frozen=True)
class TorchNode:
    """A node that is computed for each batch."""

    id: str
    """Its name in the file, or the name of its first output if it has none: what `placement.node_id` returns."""
    op_type: str
    inputs: tuple[str, ...]
    """Names of the tensors read; "" where an optional one is absent."""
    outputs: tuple[str, ...]
    function: partial[Any]
    """Takes the inputs (None where absent), returns the output, or the outputs in a sequence."""


class TorchGraph:
    """An ONNX classifier as a list of PyTorch calls.

    What doesn't depend on the images is computed once, when the graph is loaded: dequantized weights, shapes. A
    QuantizeLinear read by one DequantizeLinear alone becomes one node with it, of the latter's id; the codes between
    them can't be asked for.

    Attributes:
        input_name, output_name: of the file.
        nodes: what is computed for each batch, in topological order.
        constants: the other tensors they read, by name.
    """

    def __init__(self, model: onnx.ModelProto, device: torch.device | str = "cpu") -> None:
        """Load.

        Args:
            model: opset 13 to 21, with one image input and one output of logits.
            device: where to compute.

        Raises:
            UnsupportedOperators: the message names all that the model needs and this runner lacks.
            EngineryError: the model is not such a classifier.
            RuntimeUnavailable: a CUDA device was asked for, and there is none.
        """
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeUnavailable(
                f"PyTorch {torch.__version__} finds no CUDA GPU here: use the device 'cpu'", code="no-gpu"
            )
        initializers = {tensor.name for tensor in model.graph.initializer}
        inputs = [value.name for value in model.graph.input if value.name not in initializers]
        outputs = [value.name for value in model.graph.output]
        if len(inputs) != 1 or len(outputs) != 1:
            message = f"PyTorch runner: the model has inputs {inputs} and outputs {outputs}, expected one of each"
            raise EngineryError(message, code="not-a-classifier")
        self.input_name, self.output_name = inputs[0], outputs[0]
        opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
        if opset not in _OPSETS:
            message = f"PyTorch runner: opset {opset}, supported are {_OPSETS.start} to {_OPSETS.stop - 1}"
            raise EngineryError(message, code="unsupported-opset")
        constants, nodes = _folded(model.graph)
        self.nodes = _with_fused_pairs(nodes, constants, self.output_name)
        read = {name for node in self.nodes for name in node.inputs}
        self.constants = {name: self._placed(tensor) for name, tensor in constants.items() if name in read}
        self._last_reads = _last_reads(self.nodes, self.output_name)

    @torch.inference_mode()
    def run(self, images: Tensor, keep: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of a batch, and some inner tensors. Every other tensor is freed after its last use.

        Args:
            images: [B, C, H, W] floats, normalized, on any device.
            keep: names of tensors to return.

        Returns:
            [B, classes] on the graph's device, in the file's type; and the kept tensors by name.

        Raises:
            EngineryError: there is no tensor of a name in `keep`, or the images don't fit the model.
        """
        known = {self.input_name, *self.constants, *(name for node in self.nodes for name in node.outputs)}
        if unknown := sorted(set(keep) - known):
            raise EngineryError(f"PyTorch runner: the graph has no tensors named {unknown[:3]}", code="unknown-tensor")
        values = {self.input_name: self._placed(images)}
        logits = self._execute(values, keep=keep)
        return logits, {name: values[name] if name in values else self.constants[name] for name in keep}

    @torch.inference_mode()
    def run_all(self, images: Tensor) -> dict[str, Tensor]:
        """Every tensor of a batch by name, logits and images included, constants not.

        Args:
            images: [B, C, H, W] floats, normalized, on any device.
        """
        values = {self.input_name: self._placed(images)}
        self._execute(values, keep=None)
        return values

    def _execute(self, values: dict[str, Tensor], *, keep: Collection[str] | None) -> Tensor:
        """Compute into `values`, which holds the images, and leave there what is to be kept (None: all).

        Returns the logits.
        """
        with _ieee_float32():
            for index, node in enumerate(self.nodes):
                inputs = [values[name] if name in values else self.constants.get(name) for name in node.inputs]
                values.update(_outputs(node, inputs))
                if keep is not None:
                    for name in self._last_reads[index]:
                        if name not in keep:
                            values.pop(name, None)
        logits = values[self.output_name]
        if keep is not None and self.output_name not in keep:
            del values[self.output_name]
        return logits

    def _placed(self, tensor: Tensor) -> Tensor:
        """Floats on the graph's device, in the layout that its convolutions are fastest in; integers on the CPU."""
        if not tensor.is_floating_point():
            return tensor
        # ResNet-50: channels last takes 0.8 of the time on a CPU and 0.75 on an H200 in FP16, but 1.2 there in FP32.
        channels_last = tensor.dim() == 4 and (self.device.type == "cpu" or tensor.dtype == torch.float16)
        layout = torch.channels_last if channels_last else torch.preserve_format
        return tensor.to(self.device, memory_format=layout)


class TorchRunner:
    """One ONNX file on a GPU or the CPU."""

    runtime = "torch"
    memory_bytes = None

    def __init__(self, onnx_path: Path, shapes: ShapeSpec, device: torch.device | str = "cpu") -> None:
        """Load.

        Raises:
            UserError: the file has other tensors than `shapes` says.
            EngineryError: see TorchGraph.
        """
        self._shapes = shapes
        self._graph = TorchGraph(read_onnx(onnx_path), device)
        names = (self._graph.input_name, self._graph.output_name)
        if names != (shapes.input_name, shapes.output_name):
            raise UserError(
                f"{onnx_path} has the tensors {names}, expected {shapes.input_name!r} and {shapes.output_name!r}: "
                "name the model's own in its shapes",
                code="wrong-tensors",
            )
        on_cpu = self._graph.device.type == "cpu"
        self.device = (
            f"{cpu_name()}, {torch.get_num_threads()} threads"
            if on_cpu
            else torch.cuda.get_device_name(self._graph.device)
        )

    def infer(self, images: Images) -> np.ndarray:
        """See Runner. More than `max_batch` images are run in several batches."""
        expected = self._shapes.input_shape(len(images))
        if images.shape != expected:
            raise UserError(
                f"the model takes images of shape [batch, {expected[1:]}], got {images.shape}", code="wrong-image-shape"
            )
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(np.require(images, np.float32, ["C", "W"]))
        batches = torch.split(images, self._shapes.max_batch)
        return np.concatenate([self._graph.run(batch)[0].float().cpu().numpy() for batch in batches])

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """See Runner. On a GPU, too, a latency is that of the call, which always copies images and logits."""
        return measure_host(self.infer, self._shapes, batch_size, how)

    def close(self) -> None:
        """See Runner."""
        on_gpu = self._graph.device.type == "cuda"
        del self._graph
        if on_gpu:
            torch.cuda.empty_cache()


@torch.no_grad()
def _folded(graph: onnx.GraphProto) -> tuple[dict[str, Tensor], list[TorchNode]]:
    """Tensors that don't depend on the images, computed on the CPU, and the nodes that do."""
    constants = {tensor.name: as_tensor(tensor) for tensor in graph.initializer}
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    nodes: list[TorchNode] = []
    unsupported: set[str] = set()
    for proto in graph.node:
        outputs = tuple(proto.output)
        num_outputs = max((index + 1 for index, name in enumerate(outputs) if name in read), default=0)
        if reason := why_unsupported(proto, num_outputs):
            unsupported.add(reason)
            continue
        node = TorchNode(str(proto.name or outputs[0]), str(proto.op_type), tuple(proto.input), outputs, bind(proto))
        if not unsupported and all(name in constants for name in node.inputs if name):
            constants |= _outputs(node, [constants[name] if name else None for name in node.inputs])
        else:
            nodes.append(node)
    if unsupported:
        raise UnsupportedOperators(
            f"PyTorch runner: operators {', '.join(sorted(unsupported))} are not supported; "
            "ONNX Runtime runs this model on the CPU",
            code="unsupported-operators",
        )
    return constants, nodes


def _with_fused_pairs(nodes: Sequence[TorchNode], constants: Mapping[str, Tensor], output: str) -> list[TorchNode]:
    """The nodes with each QuantizeLinear and the one DequantizeLinear that reads it as one: half the memory traffic."""
    readers: dict[str, list[str]] = {output: [""]}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node.op_type)
    quantizers = {
        node.outputs[0]: node
        for node in nodes
        if node.op_type == "QuantizeLinear" and readers.get(node.outputs[0]) == ["DequantizeLinear"]
    }
    fused: list[TorchNode] = []
    for node in nodes:
        quantizer = quantizers.get(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
        if quantizer is not None and _same_codes(quantizer, node, constants):
            del quantizers[node.inputs[0]]
            fused.remove(quantizer)
            function: partial[Any] = partial(fake_quantize, axis=node.function.keywords.get("axis", 1))
            node = replace(node, op_type="QuantizeDequantizeLinear", inputs=quantizer.inputs, function=function)
        fused.append(node)
    return fused


def _same_codes(quantizer: TorchNode, dequantizer: TorchNode, constants: Mapping[str, Tensor]) -> bool:
    """True if both nodes have the same constant scale, zero point and axis."""
    if quantizer.function.keywords.get("axis", 1) != dequantizer.function.keywords.get("axis", 1):
        return False
    pairs = list(zip_longest(quantizer.inputs[1:], dequantizer.inputs[1:], fillvalue=""))
    if not all(a in constants for a, _ in pairs if a):
        return False
    found = [(constants.get(a), constants.get(b)) for a, b in pairs if a != b]
    return all(a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in found)


def _last_reads(nodes: Sequence[TorchNode], output: str) -> list[list[str]]:
    """Return, for each node, the tensors that no later one reads: its own inputs, and outputs that nobody reads."""
    seen = {"", output}
    last: list[list[str]] = []
    for node in reversed(nodes):
        names = {*node.inputs, *node.outputs} - seen
        seen |= names
        last.append(sorted(names))
    return last[::-1]


def _outputs(node: TorchNode, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Runs a node. Returns its outputs by name."""
    try:
        result = node.function(*inputs)
    except torch.OutOfMemoryError:
        raise  # smaller batches help, which the caller decides
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        shapes = [None if tensor is None else list(tensor.shape) for tensor in inputs]
        message = f"PyTorch runner: {node.op_type} '{node.id}' failed on inputs of shapes {shapes}: {error}"
        raise EngineryError(message, code="operator-failed") from error
    tensors = (result,) if isinstance(result, Tensor) else result
    return dict(zip((name for name in node.outputs if name), tensors, strict=False))


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """FP32 as FP32: no TF32 on GPUs, no BF16 on CPUs, whatever the process has chosen. Its choice is put back."""
    backends: Any = torch.backends  # torch's stubs lack what is set here
    operations = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    chosen = [operation.fp32_precision for operation in operations]
    try:
        # The older switch of the same thing: torch refuses to multiply when the two disagree.
        matmul: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = None  # they do already, because the process used the newer switch alone
    try:
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
        for operation in operations:
            operation.fp32_precision = "ieee"
        yield
    finally:
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision(matmul)
        for operation, precision in zip(operations, chosen, strict=True):
            operation.fp32_precision = precision
