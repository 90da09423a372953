"""Plans of networks with several inputs and outputs, whose sizes change from call to call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import EngineEntry
from components.common.runtimes.tensorrt import Contexts, load_engine, load_tensorrt, tensorrt_logger, torch_dtype

Profile = Mapping[str, tuple[tuple[int, ...], ...]]  # sizes of each input: smallest, tuned for, largest


class DynamicPlan:
    """Runs a plan on the current CUDA device, on torch's current stream. Not for several threads at once.

    The first optimization profile that takes the inputs is used.
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
        self.profiles: Sequence[Profile] = [
            {name: tuple(map(tuple, engine.get_tensor_profile_shape(name, number))) for name in inputs}
            for number in range(engine.num_optimization_profiles)
        ]
        self._new_context = Contexts(engine).new
        self._contexts = [self._new_context(number) for number in range(len(self.profiles))]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Enqueue a run, and return its outputs by name.

        Args:
            inputs: on the GPU; those that the plan does not have are left alone.

        Raises:
            UserError: the plan takes no inputs of these sizes.
            EngineryError: TensorRT fails to run it.
        """
        given = self._given(inputs)
        context = self._contexts[self._profile(given)]
        _set_inputs(context, given)
        found = {
            name: torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device="cuda")
            for name, dtype in self.outputs.items()
        }
        self._enqueue(context, found)
        return found

    def bind(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Return what enqueues a run on these very tensors; outputs have the sizes and types that `run` returns.

        It has an execution context of its own, which nothing else changes: a CUDA graph may hold what it enqueues, and
        only so long as the context stays as it was (TensorRT's developer guide on CUDA graphs). Such a graph holds
        addresses alone, so what is returned, which keeps context and tensors, has to live as long.

        Raises:
            UserError: the plan takes no inputs of these sizes.
        """
        given = self._given(inputs)
        context = self._new_context(self._profile(given))
        _set_inputs(context, given)

        def run() -> None:
            for name, own in given.items():
                if own is not inputs[name]:
                    own.copy_(inputs[name])
            self._enqueue(context, outputs)

        return run

    def _given(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: inputs[name].to(dtype).contiguous() for name, dtype in self.inputs.items()}

    def _enqueue(self, context: Any, outputs: Mapping[str, torch.Tensor]) -> None:
        for name in self.outputs:
            context.set_tensor_address(name, outputs[name].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineryError(
                f"TensorRT failed to run {self.path.name}: {tensorrt_logger().take_errors()}", code="enqueue-failed"
            )

    def _profile(self, inputs: Mapping[str, torch.Tensor]) -> int:
        shapes = {name: tuple(value.shape) for name, value in inputs.items()}
        for number, profile in enumerate(self.profiles):
            if all(
                len(shape) == len(low := profile[name][0])
                and all(a <= size <= b for a, size, b in zip(low, shape, profile[name][2], strict=True))
                for name, shape in shapes.items()
            ):
                return number
        taken = "; ".join(f"{name} {low} to {high}" for name, (low, _, high) in self.profiles[-1].items())
        raise UserError(
            f"the plan {self.path} takes {taken}, got {shapes}: translate fewer sentences at once, or export with a "
            "larger export.max_batch",
            code="wrong-batches",
        )


def _set_inputs(context: Any, inputs: Mapping[str, torch.Tensor]) -> None:
    for name, value in inputs.items():
        context.set_input_shape(name, tuple(value.shape))
        context.set_tensor_address(name, value.data_ptr())
