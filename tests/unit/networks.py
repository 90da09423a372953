"""Networks for tests: one that is small enough to be trained, torchvision's with random weights, graphs of nodes."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torchvision
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torchvision.models import VisionTransformer

from components.common.contracts.transforms import ShapeSpec, TransformSpec
from components.common.data.loader import Loader
from tests.conftest import Dataset


def digits_network(dataset: Dataset) -> nn.Module:
    """One that has learned some digits of 32 by 32 pixels, in evaluation mode."""
    torch.manual_seed(0)
    net = nn.Sequential(_stage(3, 8), _stage(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    spec = TransformSpec(resize_size=32, crop_size=32)
    batch = next(iter(Loader(dataset, "train", spec, batch_size=240, num_threads=1)))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(30):
        loss = nn.functional.cross_entropy(net(batch.images), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2.0  # of 2.3 for one that knows nothing
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # its averages lag behind weights that change so fast
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        net(batch.images)
    return net.eval()


def small_vit(image_size: int = 32, seed: int = 0) -> VisionTransformer:
    """A ViT of two blocks, 64 wide, with random weights, also where torchvision starts with zeros."""
    torch.manual_seed(seed)
    vit = VisionTransformer(image_size, image_size // 4, 2, 4, hidden_dim=64, mlp_dim=128, num_classes=10)
    nn.init.normal_(vit.heads.head.weight, std=0.1)
    return vit.eval()


def with_outliers(vit: VisionTransformer, factor: float) -> VisionTransformer:
    """The same function, with two channels of each normalized tensor `factor` times as large."""
    with torch.no_grad():
        for block in vit.encoder.layers:
            pairs = ((block.ln_1, block.self_attention.in_proj_weight), (block.ln_2, block.mlp[0].weight))
            for norm, weights in pairs:
                norm.weight[[3, 50]] *= factor
                norm.bias[[3, 50]] *= factor
                weights[:, [3, 50]] /= factor
    return vit


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())


# Image size in pixels, where 64 won't do: adaptive pooling of alexnet and vgg can be exported at 224 only.
SIZES = {"alexnet": 224, "vgg19": 224}


def build(name: str) -> torch.nn.Module:
    """A torchvision model with random weights and, where the original's is huge, a narrow classifier."""
    torch.manual_seed(0)
    options = {"googlenet": {"aux_logits": False, "init_weights": False}, "vgg19": {"init_weights": False}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The wide classifiers of alexnet and vgg are replaced before any memory is touched.
        with torch.device("meta" if name in SIZES else "cpu"):
            model = torchvision.models.get_model(name, weights=None, num_classes=10, **options.get(name, {}))
    if name in SIZES:
        model.classifier = torch.nn.Sequential(
            torch.nn.Dropout(),
            torch.nn.Linear(model.classifier[1 if name == "alexnet" else 0].in_features, 32),
            torch.nn.ReLU(),
            torch.nn.Dropout(),
            torch.nn.Linear(32, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 10),
        )
        model = model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.reset_parameters()
    if name == "resnet18":
        _narrow(model, 4)
    return model.eval()


def _narrow(model: nn.Module, factor: int) -> None:
    """Divide the channels between layers: the same graph in a fraction of the time."""
    for name, module in list(model.named_modules()):
        new: nn.Module
        if isinstance(module, nn.Conv2d):
            inputs = module.in_channels if module.in_channels == 3 else module.in_channels // factor
            shape: Any = (module.kernel_size, module.stride, module.padding)
            new = nn.Conv2d(inputs, module.out_channels // factor, *shape, bias=False)
        elif isinstance(module, nn.BatchNorm2d):
            new = nn.BatchNorm2d(module.num_features // factor)
        elif isinstance(module, nn.Linear):
            new = nn.Linear(module.in_features // factor, module.out_features)
        else:
            continue
        model.set_submodule(name, new)


def shapes_of(name: str) -> ShapeSpec:
    size = SIZES.get(name, 64)
    return ShapeSpec(height=size, width=size)


Shapes = Mapping[str, Sequence[Any] | None]


def onnx_model(
    nodes: Iterable[onnx.NodeProto],
    inputs: Shapes,
    outputs: Shapes,
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
) -> onnx.ModelProto:
    """A graph of nodes between float32 tensors of these shapes, with the initializers `constants`."""
    float32 = TensorProto.FLOAT
    read, written = (
        [helper.make_tensor_value_info(name, float32, shape) for name, shape in tensors.items()]
        for tensors in (inputs, outputs)
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "test", read, written, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def written_by_torch(module: nn.Module, path: Path, shapes: ShapeSpec, opset: int = 17) -> onnx.ModelProto:
    """The module in a file as torch's own exporter writes it."""
    images = torch.zeros(shapes.input_shape(2))
    axes = {name: {0: "batch"} for name in ("images", "logits")}
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_axes": axes}
    torch.onnx.export(module, (images,), path, dynamo=False, opset_version=opset, **names)
    return onnx.load(path)


def random_images(shapes: ShapeSpec, batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shapes.input_shape(batch), dtype=np.float32)
