"""The PyTorch runner against ONNX Runtime: whole networks, each of their nodes, inner tensors, memory."""

import functools
import itertools
import weakref

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from components.common.contracts.errors import EngineryError
from components.common.runtimes import torch_operators
from components.common.runtimes.torch import TorchGraph, TorchRunner
from components.export.placement import activation_tensors, node_id
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import insert_qdq
from tests.unit.networks import onnx_model, random_images, shapes_of
from tests.unit.onnx_outputs import relative, run_ort, run_torch
from tests.unit.refusals import refuses

# Quick ones of different kinds; the others are for `make test-all`.
NETWORKS = ["alexnet", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5"]
MORE_NETWORKS = ["convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mobilenet_v2", "regnet_y_400mf"]
MORE_NETWORKS += ["resnet50", "squeezenet1_0", "swin_t", "vgg19"]
EVERY_NETWORK = [*NETWORKS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NETWORKS)]


class Network:
    """A network's ONNX model, images, and scales of max calibration."""

    def __init__(self, name, path):
        self.path, self.model, self.shapes = path, onnx.load(path), shapes_of(name)
        self.images = random_images(self.shapes, 4)
        _, kept = TorchGraph(self.model).run(torch.from_numpy(self.images), keep=activation_tensors(self.model))
        self.scales = {name: max(float(values.abs().max()) / 127, 1e-9) for name, values in kept.items()}


@pytest.fixture(scope="module")
def network(onnx_of):
    """`network("resnet18")`, exported once."""
    return functools.cache(lambda name: Network(name, onnx_of(name)))


def errors_by_node(model, images):
    """Relative error of each node's outputs when it reads what ONNX Runtime computed, by operator."""
    expected = run_ort(model, images, every_tensor=True)
    graph = TorchGraph(model)
    expected[graph.input_name] = images
    known = {name: torch.from_numpy(np.array(value)) for name, value in expected.items()} | graph.constants
    worst = {}
    for node in graph.nodes:
        outputs = node.function(*(known.get(name) for name in node.inputs))  # None where one is absent
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        for name, output in zip(node.outputs, outputs, strict=True):
            error = relative(output.numpy(), expected[name])
            worst[node.op_type] = max(worst.get(node.op_type, 0.0), error)
    return worst


# --- whole networks


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_fp32_networks_answer_as_in_onnxruntime(network, name):
    net = network(name)
    logits = run_torch(net.model, net.images)
    # Sums in another order: a few roundings of 2**-24 each, over up to 100 layers.
    assert relative(logits, run_ort(net.model, net.images)["logits"]) < 1e-5


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_every_node_of_an_int8_network_computes_what_onnxruntime_does(network, name):
    net = network(name)
    errors = errors_by_node(insert_qdq(net.model, net.scales), net.images)
    assert errors.pop("QuantizeDequantizeLinear") == 0.0  # bit for bit
    assert "QuantizeLinear" not in errors
    assert "DequantizeLinear" not in errors  # weights: folded
    assert max(errors.values()) < 1e-5


def test_typed_fp16_networks_run_on_the_cpu(network):
    net = network("resnet18")
    fp16 = to_fp16(net.model)
    assert relative(run_torch(fp16, net.images), run_ort(net.model, net.images)["logits"]) < 1e-2
    errors = errors_by_node(insert_qdq(raise_opset(fp16), net.scales), net.images)
    assert errors.pop("QuantizeDequantizeLinear") == 0.0
    assert max(errors.values()) <= 2**-10  # half a unit in the last place of float16, twice


# --- inner tensors


def test_kept_tensors_are_those_of_the_graph(network):
    net = network("resnet18")
    graph, images = TorchGraph(net.model), torch.from_numpy(net.images)
    names = activation_tensors(net.model)
    logits, kept = graph.run(images, keep=names)
    assert list(kept) == names
    assert {node.id for node in graph.nodes} == {node_id(node) for node in net.model.graph.node}
    expected = run_ort(net.model, net.images, every_tensor=True) | {"images": net.images}
    assert max(relative(kept[name].numpy(), expected[name]) for name in names) < 1e-5
    everything = graph.run_all(images)
    assert set(everything) == set(expected)
    assert torch.equal(everything["logits"], logits)
    with pytest.raises(EngineryError, match="'nothing'") as error:
        graph.run(images, keep=["nothing"])
    assert error.value.code == "unknown-tensor"


# --- the process: memory, flags


def relu_chain(length):
    names = ["images", *[f"t{index}" for index in range(length - 1)], "logits"]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)]
    return onnx_model(nodes, {"images": ["batch", 8]}, {"logits": ["batch", 8]})


def test_run_frees_tensors_after_their_last_use(monkeypatch):
    made, alive = [], []

    def relu(x, /):
        y = torch.relu(x)
        made.append(weakref.ref(y))
        alive.append(sum(reference() is not None for reference in made))
        return y

    monkeypatch.setitem(torch_operators.OPERATORS, "Relu", relu)
    graph = TorchGraph(relu_chain(20))
    graph.run(torch.zeros(1, 8))
    assert max(alive) == 2  # what a node reads and what it writes
    made.clear()
    alive.clear()
    _, kept = graph.run(torch.zeros(1, 8), keep=["t3", "t5"])
    assert set(kept) == {"t3", "t5"}
    assert max(alive) == 4


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fp32_is_fp32_during_a_run_and_the_process_keeps_its_choice(monkeypatch, precision):
    operations = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    seen = []

    def relu(x, /):
        seen.append([operation.fp32_precision for operation in operations])
        assert torch.backends.cuda.matmul.allow_tf32 is False  # the older switch agrees, or torch raises here
        return x

    monkeypatch.setitem(torch_operators.OPERATORS, "Relu", relu)
    graph = TorchGraph(relu_chain(1))
    torch.set_float32_matmul_precision(precision)
    try:
        before = [operation.fp32_precision for operation in operations]
        graph.run(torch.zeros(1, 8))
        assert seen == [["ieee"] * 3]
        assert [operation.fp32_precision for operation in operations] == before
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 is True
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the runner


def test_runner_infers_in_batches_and_measures(network):
    net = network("resnet18")
    shapes = net.shapes.model_copy(update={"opt_batch": 3, "max_batch": 3})
    runner = TorchRunner(net.path, shapes)
    logits = runner.infer(net.images)
    assert logits.dtype == np.float32
    assert relative(logits, run_ort(net.model, net.images)["logits"]) < 1e-5
    timing = runner.measure(2, warmup_s=0, duration_s=0, min_iterations=3)
    assert (timing.batch_size, len(timing.latencies_ms)) == (2, 3)
    assert (runner.runtime, "threads" in runner.device) == ("torch", True)
    with refuses("wrong-image-shape"):
        runner.infer(np.zeros((1, 3, 32, 32), np.float32))
    runner.close()
    with refuses("wrong-tensors"):
        TorchRunner(net.path, shapes.model_copy(update={"output_name": "scores"}))
