"""Non-maximum suppression outside of the graph, as it is, against ONNX NonMaxSuppression inside of it.

    python -m benchmarks.nms --machine cpu-2core

Networks have random weights; the least score is set so that 20 candidates of an image reach it, as where a server
answers, or 300, as where mAP is measured. On a CPU processor time of one thread counts, in turns, so that other
processes matter little, and both must find the same objects. With TensorRT: RetinaNet in FP16, from images on the GPU
to boxes on the host, each batch alone, and batches in a row, where one thread suppresses what the batch before
returned while the GPU computes, as `evaluation.predict` has it. Either way only the anchors that `detect` looks at
leave the network.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from benchmarks.results import Results, result_options
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model
from components.common.runtimes.tensorrt import (
    TensorRTRunner,
    load_engine,
    load_tensorrt,
    tensorrt_logger,
    why_unavailable,
)
from components.common.tasks.detection.boxes import MAX_CANDIDATES, NMS_IOU, NUM_BOX_VALUES, detect
from components.common.tasks.detection.candidates import keep_candidates
from components.common.tasks.detection.loss import corners
from components.export.engines import Tensors, build_engine
from components.export.onnx_export import export_onnx

_NETWORKS = {
    "detection/fcos_small": (96, 5),
    "detection/fcos_fpn/timm/mobilenetv3_small_050": (160, 80),
}
_NUM_CANDIDATES = (20, 300)
_MAX_PER_CLASS = 100
_NUM_IMAGES = 20
_ON_GPU = ("detection/retinanet_resnet50_fpn", 512, 5)
_BATCH_SIZES = (1, 32)
_NUM_TURNS = 5
_IN_A_ROW = 20  # batches


class _Decoded(nn.Module):
    """Corners and scores in one tensor, as both take them: what the graph would hold more with suppression inside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, at most 1000, 4 + classes]."""
        outputs = self.network(images)
        largest = outputs[..., NUM_BOX_VALUES:].amax(dim=-1)  # [B, A]
        chosen = largest.topk(min(MAX_CANDIDATES, largest.shape[1]), dim=1).indices
        outputs = outputs.gather(1, chosen[..., None].expand(-1, -1, outputs.shape[2]))
        return torch.cat([corners(outputs), outputs[..., NUM_BOX_VALUES:].sigmoid()], dim=-1)


def _export(network: nn.Module, folder: Path, shapes: ShapeSpec) -> None:
    export_onnx(network, folder / "outside.onnx", shapes)
    onnx.save(keep_candidates(onnx.load(folder / "outside.onnx")), folder / "outside.onnx")
    export_onnx(_Decoded(network), folder / "decoded.onnx", shapes)


def _with_suppression(path: Path, least: float) -> onnx.ModelProto:
    model = onnx.load(path)
    graph, decoded = model.graph, model.graph.output[0].name
    constants = {"end": [4], "axis": [2], "start": [0], "last": [1 << 30], "most": [_MAX_PER_CLASS]}
    for name, value in constants.items():
        graph.initializer.append(helper.make_tensor(f"nms_{name}", TensorProto.INT64, [1], value))
    for name, share in (("iou", NMS_IOU), ("score", least)):
        graph.initializer.append(helper.make_tensor(f"nms_{name}", TensorProto.FLOAT, [1], [share]))
    graph.node.extend(
        [
            helper.make_node("Slice", [decoded, "nms_start", "nms_end", "nms_axis"], ["nms_boxes"]),
            helper.make_node("Slice", [decoded, "nms_end", "nms_last", "nms_axis"], ["nms_shares"]),
            helper.make_node("Transpose", ["nms_shares"], ["nms_by_class"], perm=[0, 2, 1]),
            helper.make_node(
                "NonMaxSuppression", ["nms_boxes", "nms_by_class", "nms_most", "nms_iou", "nms_score"], ["chosen"]
            ),
        ]
    )
    graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.INT64, [None, 3]))
    return model


def _seconds(calls: dict[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_NUM_IMAGES):
        for name, call in calls.items():
            started = time.process_time()
            call(number)
            found[name].append(time.process_time() - started)
    return found


def _measured(architecture: str, num_candidates: int, folder: Path) -> dict[str, Any]:
    import openvino  # where there are GPUs, it need not be

    size, num_classes = _NETWORKS[architecture]
    torch.manual_seed(0)
    network = build_model(architecture, num_classes).eval()
    shapes, core = ShapeSpec(height=size, width=size), openvino.Core()
    images = np.random.default_rng(0).normal(size=(_NUM_IMAGES, 1, 3, size, size)).astype(np.float32)
    _export(network, folder, shapes)
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    outside = core.compile_model(folder / "outside.onnx", "CPU", options)
    logits = np.sort(outside(images[0])[0][0, :, NUM_BOX_VALUES:].ravel())
    least = float(1 / (1 + np.exp(-logits[-num_candidates - 1 : -num_candidates + 1].mean())))  # between two
    onnx.save(_with_suppression(folder / "decoded.onnx", least), folder / "inside.onnx")
    inside = core.compile_model(folder / "inside.onnx", "CPU", options)

    def run_outside(number: int) -> Any:
        return detect(outside(images[number])[0][0], min_score=least)

    def run_inside(number: int) -> Any:
        return inside(images[number])[1]

    alike = len(run_inside(0)), len(detect(outside(images[0])[0][0], min_score=least, max_detections=10_000))
    if alike[0] != alike[1]:
        raise SystemExit(f"{architecture}: inside and outside find other numbers of objects, {alike}")
    found = _seconds({"network": lambda number: outside(images[number]), "outside": run_outside, "inside": run_inside})
    medians = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in found.items()}
    return {"network": architecture, "num_candidates": num_candidates, "num_found": alike[0], **medians}


class _Inside:
    """A plan with suppression in it, whose second output is as long as what it finds."""

    def __init__(self, plan: Path, shapes: ShapeSpec, decoded: str) -> None:
        trt = load_tensorrt()
        self._runtime, self._engine = load_engine(plan, None)
        context = self._engine.create_execution_context()
        self._shapes, self._context, self._decoded = shapes, context, decoded
        self._stream = torch.cuda.Stream()
        num_anchors, width = self._engine.get_tensor_shape(decoded)[1:]
        self._outputs = torch.empty((shapes.max_batch, num_anchors, width), device="cuda")
        most = shapes.max_batch * (width - 4) * _MAX_PER_CLASS
        chosen = torch.empty((most, 3), dtype=torch.int32, device="cuda")

        class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]  # tensorrt has no types
            num_found = 0

            def reallocate_output(self, *_: Any) -> int:
                return int(chosen.data_ptr())

            def notify_shape(self, _: str, shape: Any) -> None:
                self.num_found = shape[0]

        self._chosen, self._allocator = chosen, Allocator()
        context.set_output_allocator("chosen", self._allocator)
        context.set_tensor_address(decoded, self._outputs.data_ptr())

    def find(self, images: torch.Tensor) -> np.ndarray:
        """[B, 3, H, W] on the GPU -> [found, 4 + classes] on the host."""
        context, stream = self._context, self._stream
        context.set_input_shape(self._shapes.input_name, tuple(images.shape))
        context.set_tensor_address(self._shapes.input_name, images.data_ptr())
        with torch.cuda.stream(stream):
            if not context.execute_async_v3(stream.cuda_stream):
                raise SystemExit(f"TensorRT failed: {tensorrt_logger().take_errors()}")
            stream.synchronize()
            image, _, anchor = self._chosen[: self._allocator.num_found].long().T
            found: np.ndarray = self._outputs[image, anchor].cpu().numpy()
        return found


def _on_gpu(num_candidates: int, folder: Path) -> list[dict[str, Any]]:
    architecture, size, num_classes = _ON_GPU
    torch.manual_seed(0)
    network = build_model(architecture, num_classes).eval()
    shapes = ShapeSpec(height=size, width=size, max_batch=max(_BATCH_SIZES), opt_batch=max(_BATCH_SIZES))
    _export(network, folder, shapes)
    levels: dict[str, Any] = {"precision": "fp16", "optimization_level": 0}
    if not (folder / "outside.plan").exists():
        build_engine(folder / "outside.onnx", folder / "outside.plan", shapes=shapes, **levels)
    runner = TensorRTRunner(folder / "outside.plan", shapes)
    images = torch.randn((max(_BATCH_SIZES), 3, size, size), device="cuda")
    logits = np.sort(runner.infer(images[:1])[0, :, NUM_BOX_VALUES:].ravel())
    least = float(1 / (1 + np.exp(-logits[-num_candidates - 1 : -num_candidates + 1].mean())))
    model = _with_suppression(folder / "decoded.onnx", least)
    onnx.save(model, folder / "inside.onnx")
    sizes = tuple(shapes.input_shape(batch) for batch in (1, max(_BATCH_SIZES), max(_BATCH_SIZES)))
    outputs = [each.name for each in model.graph.output]
    tensors = Tensors([{shapes.input_name: sizes}], outputs)  # type: ignore[dict-item]
    build_engine(folder / "inside.onnx", folder / "inside.plan", shapes=tensors, **levels)
    inside, rows = _Inside(folder / "inside.plan", shapes, outputs[0]), []

    def suppressed(returned: np.ndarray) -> int:
        return sum(len(detect(each, min_score=least)) for each in returned)

    for batch in _BATCH_SIZES:
        given = images[:batch]
        ways: dict[str, tuple[Callable[[torch.Tensor], np.ndarray], Callable[[np.ndarray], int]]] = {
            "network": (runner.infer, len), "outside": (runner.infer, suppressed), "inside": (inside.find, len)
        }  # fmt: skip
        found = {name: then(first(given)) for name, (first, then) in ways.items() if name != "network"}
        row = {"network": architecture, "batch": batch, "num_candidates": num_candidates, "num_found": found}
        seconds: dict[str, list[float]] = {f"{name}_{how}": [] for how in ("alone", "in_a_row") for name in ways}
        for turn in range(1 + _NUM_TURNS):
            for name, (first, then) in ways.items():
                started = time.perf_counter()
                for _ in range(_IN_A_ROW):
                    then(first(given))
                alone = time.perf_counter()
                with ThreadPoolExecutor(1) as behind:
                    for _ in range(_IN_A_ROW):
                        last = behind.submit(then, first(given))
                    last.result()
                if turn:  # the first one warms up
                    seconds[f"{name}_alone"].append((alone - started) / _IN_A_ROW)
                    seconds[f"{name}_in_a_row"].append((time.perf_counter() - alone) / _IN_A_ROW)
        rows.append(row | {f"{name}_ms": 1e3 * statistics.median(values) for name, values in seconds.items()})
    runner.close()
    return rows


@click.command()
@result_options
def main(results: Results) -> None:
    runs, with_plans = [], why_unavailable() is None
    with tempfile.TemporaryDirectory() as folder:
        for num_candidates in _NUM_CANDIDATES:
            if with_plans:
                runs += _on_gpu(num_candidates, Path(folder))
            else:
                runs += [_measured(architecture, num_candidates, Path(folder)) for architecture in _NETWORKS]
    click.echo(runs)
    measures = {}
    for run in runs:
        name = f"{run['network'].rpartition('/')[2]}_{run['num_candidates']}"
        name += f"_b{run['batch']}" if "batch" in run else ""
        for how in ("_alone", "_in_a_row") if with_plans else ("",):
            measures[f"{name}{how}_inside_over_outside"] = run[f"outside{how}_ms"] / run[f"inside{how}_ms"]
    on_cpu = f"Medians of {_NUM_IMAGES} images, FP32 by OpenVINO; images/s over images/s."
    on_gpu = f"Medians of {_NUM_TURNS} turns of {_IN_A_ROW} batches, FP16, TensorRT at level 0; images/s over images/s."
    results.write("nms", measures=measures, runs=runs, notes=on_gpu if with_plans else on_cpu)


if __name__ == "__main__":
    main()
