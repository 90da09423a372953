"""Operations, parameters and memory of networks, beside published figures, PyTorch's own counter and measurements."""

import pytest
import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import advise
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.counting import count_model, count_onnx, training_memory
from enginery.benchmark.measuring import write_network
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
    """Within 10 % of every training on one GPU in benchmarks/results."""
    measured = [row for row in advise.measured_rows() if row.memory_gb]
    assert len(measured) >= 10
    for row in measured:
        memory = training_memory(row.network, row.image_size, half=row.precision != "fp32")
        assert memory.needed_bytes(row.batch) / 1e9 == pytest.approx(row.memory_gb, rel=0.1)
        assert memory.largest_batch(memory.needed_bytes(row.batch)) == row.batch


@pytest.mark.parametrize("architecture", ["detection/fcos_small", "segmentation/fpn_small"])
def test_memory_of_other_tasks_is_that_of_their_maps_and_losses(architecture: str) -> None:
    maps = [layer.output_values for layer in count_model(architecture, 96).layers if layer.operator == "Conv"]
    memory, of_few = (training_memory(architecture, 96, num_classes=number) for number in (0, 3))
    assert 2 < memory.per_image_bytes / (4 * sum(maps)) < 6  # a map, normalized, rectified; the loss
    assert memory.per_image_bytes > of_few.per_image_bytes


def test_sizes_that_a_model_does_not_take() -> None:
    with refuses("not-countable", "image_size"):
        count_model("vit_b_16", 160)
