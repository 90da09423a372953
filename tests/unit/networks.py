"""A network that is small enough to be trained in a test."""

import torch
from torch import nn

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import Loader


def digits_network(dataset: Artifact[DatasetManifest]) -> nn.Module:
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


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())
