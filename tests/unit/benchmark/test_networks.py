"""Networks with random weights: valid files whose INT8 form is really quantized."""

import numpy as np
import onnx
import pytest

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from enginery.benchmark.measuring import check_networks, write_network

SHAPES = ShapeSpec(height=64, width=64, max_batch=4, opt_batch=4)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resnet18")
    assert len(write_network("resnet18", SHAPES, folder)) == 20
    return folder


def test_files(written):
    graph = onnx.load(written / "int8.onnx").graph
    assert sum(node.op_type == "DequantizeLinear" for node in graph.node) > 20
    images = np.random.default_rng(1).standard_normal(SHAPES.input_shape(4), dtype=np.float32)
    answers = {}
    for name in ("fp32", "fp16", "int8", "int8_fp16"):
        runner = OnnxRuntimeRunner(written / f"{name}.onnx", SHAPES)
        answers[name] = runner.infer(images)
        runner.close()
    largest = np.abs(answers["fp32"]).max()
    assert answers["fp32"].shape == (4, 1000)
    assert answers["fp32"].std(axis=0).max() > 0.01 * largest  # every block does something
    assert 0 < np.abs(answers["int8"] - answers["fp32"]).max() < 0.3 * largest
    for file in written.glob("*.onnx"):
        onnx.checker.check_model(onnx.load(file))


def test_no_convolution_is_all_zero(written):
    """As a fresh ResNet has them: nothing to measure, and TensorRT 8.6.0 failed to build such a network in INT8."""
    graph = onnx.load(written / "fp32.onnx").graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Conv":
            assert np.abs(weights[node.input[1]]).max() > 0


@pytest.mark.parametrize("architecture", ["googlenet", "regnet_y_400mf", "swin_t", "timm/efficientnet_b0"])
def test_networks_of_every_kind_take_the_default_size(architecture):
    check_networks([architecture], 224)
