"""Operations, parameters and memory of networks, beside published figures, PyTorch's own counter and measurements."""

import json
from functools import cache

import numpy as np
import onnx
import pytest
import torch
import torchvision
from onnx import helper
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import advise
from benchmarks.results import RESULTS
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.counting import count_model, count_onnx, training_memory
from enginery.benchmark.measuring import write_network
from enginery.local.preflight import _REST_BYTES
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses

# torchvision's documents: GFLOPS of its table (multiply-accumulates), and parameters.
PUBLISHED = {
    "resnet18": (1.81, 11_689_512),
    "resnet50": (4.09, 25_557_032),
    "mobilenet_v2": (0.30, 3_504_872),
    "efficientnet_b0": (0.39, 5_288_548),
    "vit_b_16": (17.56, 86_567_656),
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_counts(architecture: str) -> None:
    count = count_model(architecture, 224)
    giga_macs, num_parameters = PUBLISHED[architecture]
    assert count.macs / 1e9 == pytest.approx(giga_macs, abs=0.006)
    assert count.num_parameters == num_parameters


def test_count_is_that_of_pytorchs_counter() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnext50_32x4d().eval()
        images = torch.empty(1, 3, 160, 160)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert 2 * count_model("resnext50_32x4d", 160).macs == counter.get_total_flops()


def test_onnx_files_count_as_their_model_and_in_int8(tmp_path) -> None:
    write_network("resnet18", ShapeSpec(height=64, width=64, max_batch=4, opt_batch=4), tmp_path)
    model = count_model("resnet18", 64)
    for name in ("fp32", "int8", "int8_fp16"):
        count = count_onnx(tmp_path / f"{name}.onnx")
        assert count.macs == model.macs
        assert sum(layer.operator == "Conv" for layer in count.layers) == 20


def test_memory_is_what_was_measured() -> None:
    """Within 10 % of every training in benchmarks/results, also of those on several GPUs and of JPEG files."""
    measured, memory_of = advise.measured_memory(), cache(training_memory)
    assert len(measured) >= 21
    for architecture, image_size, precision, batch_size, memory_gb in measured:
        memory = memory_of(architecture, image_size, half=precision != "fp32")
        assert memory.needed_bytes(batch_size) / 1e9 == pytest.approx(memory_gb, rel=0.1)
        assert memory.largest_batch(memory.needed_bytes(batch_size)) == batch_size


@pytest.mark.parametrize(("task", "num_classes"), [("detection", 5), ("segmentation", 6)])
def test_memory_in_use_is_that_of_the_training_and_of_what_is_beside_it(task: str, num_classes: int) -> None:
    """Within 10 % of what a GPU had in use, with PyTorch's and DALI's own."""
    (run,) = json.loads((RESULTS / f"h200/tasks_{task}.json").read_text())["runs"]
    name, side = f"{task}/{run['network']}", run["image_size"]
    memory = training_memory(name, side, num_classes=num_classes, half=True, num_moments=2)
    in_use = max(epoch["gpu_memory_bytes"] for epoch in run["history"])
    assert memory.needed_bytes(32) + _REST_BYTES == pytest.approx(in_use, rel=0.1)


def test_memory_of_other_tasks_counts_their_loss() -> None:
    """A mask's classes are kept for each pixel in FP32, several times; more classes take more."""
    few, many = (training_memory("segmentation/fpn_small", 64, num_classes=number) for number in (2, 22))
    assert many.per_image_bytes - few.per_image_bytes >= 20 * 4 * 64**2 * 2
    few, many = (training_memory("detection/fcos_small", 64, num_classes=number) for number in (3, 103))
    assert many.per_image_bytes - few.per_image_bytes >= 100 * 4 * (8**2 + 4**2 + 2**2) * 2  # by the cells of a pyramid
    name = "translation/transformer_small"
    few, many = (training_memory(name, 16, num_classes=number) for number in (100, 1100))
    assert many.per_image_bytes - few.per_image_bytes >= 1000 * 4 * 16  # for each token
    assert training_memory(name, 32, num_classes=100).per_image_bytes > 2 * few.per_image_bytes  # attention's scores


def test_live_memory_is_what_lives_at_once() -> None:
    """A block's input waits for its sum while the two convolutions in between take a tensor each."""
    side = 56**2 * 64
    # ResNet-18 at 224 px: the stem's 112 x 112 x 64 beside what pooling makes of it is the most.
    assert count_model("resnet18", 224).live_values == 112**2 * 64 + side
    assert count_model("vgg19", 224).live_values == 2 * 224**2 * 64


def _reshaping(batch: int | str, size: tuple[int, int] = (8, 8)) -> onnx.ModelProto:
    shape = np.array([batch if isinstance(batch, int) else -1, 3 * size[0] * size[1]])
    nodes = [
        helper.make_node("Reshape", ["images", "shape"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weight"], ["logits"]),
    ]
    weights = {"shape": shape, "weight": np.zeros((shape[1], 4), np.float32)}
    return onnx_model(nodes, {"images": [batch, 3, *size]}, {"logits": [batch, 4]}, weights)


def test_a_file_of_a_fixed_batch_counts_one_image(tmp_path) -> None:
    for name, batch in (("one", 1), ("eight", 8), ("any", "batch")):
        onnx.save(_reshaping(batch), tmp_path / f"{name}.onnx")
        count = count_onnx(tmp_path / f"{name}.onnx")
        assert (count.macs, count.image_values, count.live_values) == (4 * 192, 192, 4)
    onnx.save(_reshaping(1, (8, 16)), tmp_path / "wide.onnx")  # images need not be square
    assert count_onnx(tmp_path / "wide.onnx").image_values == 3 * 8 * 16


@pytest.mark.parametrize(
    ("operator", "inputs", "side", "code"),
    [
        ("Conv", ["images", "weight"], "height", "shapes-unknown"),  # not counted as nothing
        ("Conv", ["images", "weight"], 0, "shapes-unknown"),
        ("Conv", ["images"], 8, "not-onnx"),
        ("Cast", [], 8, "not-onnx"),
    ],
)
def test_files_that_say_too_little_are_refused(tmp_path, operator, inputs, side, code) -> None:
    shapes = {"images": [1, 3, side, side]}, {"logits": [1, 4, side, side]}
    weights = {"weight": np.zeros((4, 3, 1, 1), np.float32)}
    model = onnx_model([helper.make_node(operator, inputs, ["logits"])], *shapes, weights)
    onnx.save(model, tmp_path / "model.onnx")
    with refuses(code):
        count_onnx(tmp_path / "model.onnx")
    with refuses("onnx-missing"):  # a folder
        count_onnx(tmp_path)


@pytest.mark.parametrize("architecture", ["detection/fcos_small", "segmentation/fpn_small"])
def test_memory_of_other_tasks_is_that_of_their_maps_and_losses(architecture: str) -> None:
    maps = [layer.output_values for layer in count_model(architecture, 96).layers if layer.operator == "Conv"]
    memory, of_few = (training_memory(architecture, 96, num_classes=number) for number in (0, 3))
    assert 2 < memory.per_image_bytes / (4 * sum(maps)) < 6  # a map, normalized, rectified; the loss
    assert memory.per_image_bytes > of_few.per_image_bytes


@pytest.mark.parametrize("architecture", ["vit_b_16", "timm/levit_128s"])
def test_sizes_that_a_model_does_not_take(architecture: str, capfd: pytest.CaptureFixture[str]) -> None:
    with refuses("not-countable", "image_size"):
        count_model(architecture, 160)
    assert not capfd.readouterr().err  # torch logs a traceback


def test_a_model_is_counted_the_same_each_time() -> None:
    counts = [count_model("detection/fcos_small", 64, 10) for _ in range(4)]  # anchors depend on no image
    assert counts.count(counts[0]) == 4
