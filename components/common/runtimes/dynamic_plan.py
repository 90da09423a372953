"""Plans of networks with several inputs and outputs, whose sizes change from call to call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import EngineEntry
from components.common.runtimes.tensorrt import load_engine, load_tensorrt, tensorrt_logger, torch_dtype

Profile = Mapping[str, tuple[tuple[int, ...], ...]]  # sizes of each input: smallest, tuned for, largest


class DynamicPlan:
    """Runs a plan on the current CUDA device, on torch's current stream. Not for several threads at once.

    Each optimization profile has an execution context of its own; the first profile that takes the inputs is used.
    """

    def __init__(self, plan_path: Path, entry: EngineEntry) -> None:
        """Load a plan; `entry` is what the bundle's manifest says of it.

        Raises:
            RuntimeUnavailable: TensorRT can't be used here.
            UserError: the plan was built for another GPU or TensorRT version.
        """
        trt = load_tensorrt()
        self.path = plan_path
        self._runtime, engine = load_engine(plan_path, entry)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        dtypes = {name: torch_dtype(trt, engine.get_tensor_dtype(name)) for name in names}
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.inputs: Mapping[str, torch.dtype] = {name: dtypes[name] for name in inputs}
        self.outputs: Mapping[str, torch.dtype] = {name: dtypes[name] for name in names if name not in inputs}
        self._contexts: list[Any] = []
        stream = torch.cuda.current_stream()
        for number in range(engine.num_optimization_profiles):
            context = engine.create_execution_context()
            context.set_optimization_profile_async(number, stream.cuda_stream)
            self._contexts.append(context)
        stream.synchronize()
        self.profiles: Sequence[Profile] = [
            {name: tuple(map(tuple, engine.get_tensor_profile_shape(name, number))) for name in inputs}
            for number in range(engine.num_optimization_profiles)
        ]
        self._engine = engine

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        """Enqueue a run, and return its outputs by name.

        Args:
            inputs: on the GPU; those that the plan does not have are left alone.
            outputs: buffers that outputs are written into, each as large as the output or larger, of its type; others
                are allocated.

        Raises:
            UserError: the plan takes no inputs of these sizes.
            EngineryError: TensorRT fails to run it.
        """
        given = {name: inputs[name].to(dtype).contiguous() for name, dtype in self.inputs.items()}
        context = self._context({name: tuple(value.shape) for name, value in given.items()})
        for name, value in given.items():
            context.set_input_shape(name, tuple(value.shape))
            context.set_tensor_address(name, value.data_ptr())
        found = {}
        for name, dtype in self.outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            buffer = outputs.get(name)
            if buffer is None:
                found[name] = torch.empty(shape, dtype=dtype, device="cuda")
            else:
                found[name] = prefix(buffer, shape)
            context.set_tensor_address(name, found[name].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineryError(
                f"TensorRT failed to run {self.path.name}: {tensorrt_logger().take_errors()}", code="enqueue-failed"
            )
        return found

    def _context(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        for context, profile in zip(self._contexts, self.profiles, strict=True):
            if all(
                len(shape) == len(low := profile[name][0])
                and all(a <= size <= b for a, size, b in zip(low, shape, profile[name][2], strict=True))
                for name, shape in shapes.items()
            ):
                return context
        taken = "; ".join(f"{name} {low} to {high}" for name, (low, _, high) in self.profiles[-1].items())
        raise UserError(
            f"the plan {self.path} takes {taken}, got {dict(shapes)}: translate fewer sentences at once, or export "
            "with a larger export.max_batch",
            code="wrong-batches",
        )


def prefix(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The beginning of a buffer's memory in a shape."""
    return buffer.view(-1)[: torch.Size(shape).numel()].view(shape)
