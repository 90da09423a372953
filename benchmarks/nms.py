"""Non-maximum suppression outside of the graph, as it is, against ONNX NonMaxSuppression inside of it, on a CPU.

    python -m benchmarks.nms --machine cpu-2core

Networks have random weights; the least score is set so that 20 candidates of an image reach it, as where a server
answers, or 300, as where mAP is measured. Processor time of one thread counts, in turns, so that other processes matter
little. Both must find the same objects.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import openvino
import torch
from onnx import TensorProto, helper
from torch import nn

from benchmarks.results import Results, result_options
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model
from components.common.tasks.detection.boxes import NMS_IOU, NUM_BOX_VALUES, detect
from components.common.tasks.detection.loss import corners
from components.export.onnx_export import export_onnx

_NETWORKS = {
    "detection/fcos_small": (96, 5),
    "detection/fcos_fpn/timm/mobilenetv3_small_050": (160, 80),
}
_NUM_CANDIDATES = (20, 300)
_MAX_PER_CLASS = 100
_NUM_IMAGES = 20


class _Decoded(nn.Module):
    """Corners and scores in one tensor, as both take them: what the graph would hold more with suppression inside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, A, 4 + classes]."""
        outputs = self.network(images)
        return torch.cat([corners(outputs), outputs[..., NUM_BOX_VALUES:].sigmoid()], dim=-1)


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
    size, num_classes = _NETWORKS[architecture]
    torch.manual_seed(0)
    network = build_model(architecture, num_classes).eval()
    shapes, core = ShapeSpec(height=size, width=size), openvino.Core()
    images = np.random.default_rng(0).normal(size=(_NUM_IMAGES, 1, 3, size, size)).astype(np.float32)
    export_onnx(network, folder / "outside.onnx", shapes)
    export_onnx(_Decoded(network), folder / "decoded.onnx", shapes)
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


@click.command()
@result_options
def main(results: Results) -> None:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for architecture, num_candidates in product(_NETWORKS, _NUM_CANDIDATES):
            runs.append(_measured(architecture, num_candidates, Path(folder)))
            click.echo(runs[-1])
    names = [f"{run['network'].rpartition('/')[2]}_{run['num_candidates']}" for run in runs]
    pairs = zip(names, runs, strict=True)
    measures = {f"{name}_inside_over_outside": run["outside_ms"] / run["inside_ms"] for name, run in pairs}
    notes = "Medians of 20 images, FP32 by OpenVINO; images/s over images/s."
    results.write("nms", measures=measures, runs=runs, notes=notes)


if __name__ == "__main__":
    main()
