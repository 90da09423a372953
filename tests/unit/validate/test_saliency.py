"""Maps of inner layers: Grad-CAM against hooks in plain PyTorch, Q/DQ gradients, which layers there are."""

from copy import deepcopy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from components.common.contracts.errors import UserError
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.torch import TorchGraph
from components.common.runtimes.torch_operators import fake_quantize
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, quantizable_layers, with_names
from components.export.qdq import insert_qdq
from components.validate.charts import short_names
from components.validate.saliency import (
    FeatureLayer,
    _quantized_straight_through,
    _run_with_gradient,
    chosen_layers,
    default_layers,
    feature_layers,
    layer_maps,
    similarity,
)

SHAPES = ShapeSpec(height=40, width=32)


class Block(nn.Module):
    """A residual block, and one with its channels last, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.mix = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.GELU())
        self.back = nn.Linear(4 * channels, channels)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        return self.relu(x + y + self.back(self.mix(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2))


class Net(nn.Module):
    """[B, 3, 40, 32] to [B, 5], with maps of 20 x 16 and 10 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = Block(8)
        self.down = nn.Conv2d(8, 12, 3, 2, 1)
        self.pool = nn.MaxPool2d(2)
        self.last = Block(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(images))
        return self.fc(self.pool(self.last(self.down(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(3)
    made = Net()
    with torch.no_grad():
        made(torch.randn(16, 3, 40, 32) * 2)  # statistics that are not 0 and 1
    return made.eval()


@pytest.fixture(scope="module")
def model(net: Net, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("net") / "fp32.onnx"
    export_onnx(net, path, SHAPES)
    return with_names(onnx.load(path))


@pytest.fixture(scope="module")
def int8(model: onnx.ModelProto) -> onnx.ModelProto:
    images = torch.from_numpy(np.concatenate([image(seed) for seed in range(4)]))
    _, kept = TorchGraph(model).run(images, keep=activation_tensors(model))
    return insert_qdq(model, {name: float(values.abs().max()) / 127 for name, values in kept.items()})


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPES.input_shape(1), dtype=np.float32)


def layer_called(graph: TorchGraph, name: str) -> FeatureLayer:
    (found,) = chosen_layers(feature_layers(graph, SHAPES), [name])
    return found


def hooked_grad_cam(net: Net, module: nn.Module, pixels: np.ndarray, class_index: int) -> tuple[np.ndarray, float]:
    """Grad-CAM as everybody writes it, from the module's output and the gradient there; and the size of its terms."""
    seen: dict[str, torch.Tensor] = {}

    def keep(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.retain_grad()
        seen["features"] = output

    handle = module.register_forward_hook(keep)
    net.zero_grad()
    net(torch.from_numpy(pixels))[0, class_index].backward()
    handle.remove()
    features = seen["features"]
    weights = features.grad.mean((2, 3), keepdim=True)
    terms = (weights * features).detach()
    return torch.relu(terms.sum(1))[0].numpy(), float(terms.abs().sum(1).max())


@pytest.mark.parametrize(
    ("name", "module", "size"),
    [
        ("last.relu Relu", "last.relu", (10, 8)),
        ("block.relu", "block.relu", (20, 16)),
        ("down", "down", (10, 8)),
        ("last.conv Conv", "last.norm", (10, 8)),  # the exporter folds the normalization into the convolution
        ("stem.2", "stem.2", (20, 16)),
        ("pool MaxPool", "pool", (5, 4)),
    ],
)
def test_grad_cam_is_that_of_hooks_in_the_module(net, model, name, module, size):
    graph = TorchGraph(model)
    layer = layer_called(graph, name)
    assert (layer.height, layer.width) == size
    for class_index in range(5):
        (own,) = layer_maps(graph, image(7), [layer], "gradcam", class_index)
        expected, magnitude = hooked_grad_cam(net, net.get_submodule(module), image(7), class_index)
        assert own.shape == size
        assert own.min() >= 0
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5 * magnitude)


def test_maps_of_several_layers_are_those_of_each(model):
    graph = TorchGraph(model)
    layers = default_layers(feature_layers(graph, SHAPES))
    together = layer_maps(graph, image(1), layers, "gradcam", 2)
    assert max(values.max() for values in together) > 0
    for layer, values in zip(layers, together, strict=True):
        np.testing.assert_array_equal(layer_maps(graph, image(1), [layer], "gradcam", 2)[0], values)


def test_activation_maps_are_the_mean_magnitude_of_the_channels(net, model):
    graph = TorchGraph(model)
    (own,) = layer_maps(graph, image(2), [layer_called(graph, "down")], "activation", 0)
    with torch.no_grad():
        features = net.down(net.block(net.stem(torch.from_numpy(image(2)))))
    np.testing.assert_allclose(own, features.abs().mean(1)[0].numpy(), rtol=1e-4, atol=1e-6)


# --- INT8


def test_running_with_a_gradient_changes_no_value(model, int8):
    for proto in (model, int8):
        graph = TorchGraph(proto)
        pixels = torch.from_numpy(image(4))
        expected, own = graph.run_all(pixels), _run_with_gradient(graph, pixels)
        assert own.keys() == expected.keys()
        assert [name for name in own if not torch.equal(own[name], expected[name])] == []


@pytest.mark.parametrize("quantized", [False, True])
def test_a_softmax_at_the_end_does_not_hide_the_logit(model, int8, quantized):
    plain = int8 if quantized else model
    softmax = deepcopy(plain)
    output = softmax.graph.output[0].name
    for node in softmax.graph.node:
        node.output[:] = ["scores" if name == output else name for name in node.output]
    softmax.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], [output], axis=1))
    layers = default_layers(feature_layers(TorchGraph(model), SHAPES))
    expected = layer_maps(TorchGraph(plain), image(3), layers, "gradcam", 2)
    for found, wanted in zip(layer_maps(TorchGraph(softmax), image(3), layers, "gradcam", 2), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_rounding_passes_the_gradient_and_saturation_stops_it():
    x = torch.linspace(-3, 3, 1001, requires_grad=True)
    scale, zero = torch.tensor(0.017), torch.tensor(0, dtype=torch.int8)
    quantized = _quantized_straight_through(x, scale, zero)
    assert torch.equal(quantized, fake_quantize(x.detach(), scale, zero))
    quantized.sum().backward()
    inside = (x >= -128 * scale) & (x <= 127 * scale)
    assert 0 < int(inside.sum()) < len(x)
    assert torch.equal(x.grad, inside.float())


def test_scales_per_channel_pass_the_gradient_too():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    scale, zero = torch.tensor([0.001, 1.0, 0.01]), torch.zeros(3, dtype=torch.int8)
    quantized = _quantized_straight_through(x, scale, zero, axis=1)
    quantized.sum().backward()
    assert torch.equal(quantized, fake_quantize(x.detach(), scale, zero, axis=1))
    assert bool((x.grad[:, 1] == 1).all())
    assert bool((x.grad[:, 0] == 0).any())


@pytest.mark.parametrize("kind", ["gradcam", "activation"])
def test_int8_has_the_layers_of_fp32_and_maps_like_them(model, int8, kind):
    fp32_graph, int8_graph = TorchGraph(model), TorchGraph(int8)
    layers = feature_layers(fp32_graph, SHAPES)
    alike = []
    for seed in range(3):
        pairs = [layer_maps(graph, image(seed), layers, kind, 1) for graph in (fp32_graph, int8_graph)]
        for a, b in zip(*pairs, strict=True):
            assert a.shape == b.shape
            assert not np.array_equal(a, b)
            alike.append(similarity(a, b))
    assert np.median([value for value in alike if value is not None]) > 0.95


def test_similarity():
    a = np.array([[1.0, 2.0], [0.0, 0.5]])
    assert similarity(a, 3 * a) == pytest.approx(1.0)
    assert similarity(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])) == 0
    assert similarity(a, 0 * a) is None


# --- names


def test_layers_have_their_channels_first_and_the_names_of_the_report(model):
    layers = feature_layers(TorchGraph(model), SHAPES)
    assert {(layer.height, layer.width) for layer in layers} == {(20, 16), (10, 8), (5, 4)}
    assert not any(layer.op_type in ("Transpose", "MatMul", "Gemm", "LayerNormalization", "Erf") for layer in layers)
    weighted = quantizable_layers(model)
    report = dict(zip(weighted, short_names(weighted), strict=True))
    convolutions = {layer.id: layer.name for layer in layers if layer.op_type == "Conv"}
    assert convolutions == {node: report[node] for node in convolutions}
    assert list(convolutions.values()) == ["stem.0 Conv", "block.conv Conv", "down Conv", "last.conv Conv"]
    assert len({layer.name for layer in layers}) == len(layers)


def test_the_default_is_the_last_map_of_each_size_before_the_pooling(model):
    layers = feature_layers(TorchGraph(model), SHAPES)
    assert [layer.name for layer in default_layers(layers)] == ["block.relu Relu", "last.relu Relu"]
    assert chosen_layers(layers, []) == default_layers(layers)


def test_layers_are_called_by_short_name_module_or_node(model):
    layers = feature_layers(TorchGraph(model), SHAPES)
    down = next(layer for layer in layers if layer.name == "down Conv")
    assert chosen_layers(layers, ["down Conv", down.id, "down"]) == [down]
    ambiguous = [FeatureLayer(name=f"a {op}", id=op, op_type=op, height=2, width=2) for op in ("Add", "Relu")]
    for among, asked, code, said in (
        (layers, "dwn Conv", "no-layer", "the nearest are 'down Conv'"),
        (layers, "last.rellu", "no-layer", "the nearest are 'last.relu Relu'"),
        (layers, "§§§", "no-layer", "they go from 'stem.0 Conv' to 'pool MaxPool'"),
        (ambiguous, "a", "ambiguous-layer", "'a Add', 'a Relu'"),
        ([], "", "no-feature-maps", ""),
    ):
        with pytest.raises(UserError, match=said or None) as refused:
            chosen_layers(among, [asked])
        assert refused.value.code == code
