"""What the small differences between our preprocessing and torchvision's cost a trained network: nothing."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.transforms import Interpolation, transform_for
from components.common.data.loader import Loader


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    channels = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_trained_network_is_as_right_on_torchvisions_images(
    digits_dataset: Artifact[DatasetManifest], few_digits: Path, interpolation: Interpolation
) -> None:
    """Digits scaled up from 32 to 73 px and cropped to 64. Seen: top-1 equal, logits within 0.5 % of their spread."""
    spec = transform_for(64, resize_ratio=1.14, interpolation=interpolation)
    network = small_network()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    loader = Loader(digits_dataset, "train", spec, batch_size=60)
    for _ in range(6):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(batch.images), batch.labels).backward()
            optimizer.step()
    network.eval()
    reference = v2.Compose(
        [
            v2.Resize(spec.resize_size, interpolation=v2.InterpolationMode(interpolation), antialias=True),
            v2.CenterCrop(spec.crop_size),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )
    listing = [json.loads(line) for line in digits_dataset.file("val.jsonl").read_text().splitlines()]
    theirs = torch.stack([reference(Image.open(few_digits / entry["path"]).convert("RGB")) for entry in listing])
    labels = torch.tensor([entry["label"] for entry in listing])
    ours = torch.cat([batch.images for batch in Loader(digits_dataset, "val", spec, batch_size=50)])
    with torch.no_grad():
        logits, expected = network(ours), network(theirs)
    top1_pct, expected_pct = (100 * float((x.argmax(dim=1) == labels).float().mean()) for x in (logits, expected))
    print(f"{interpolation}: top-1 {top1_pct:.2f} and {expected_pct:.2f} %, ", end="")
    print(f"logits differ by {float((logits - expected).std() / expected.std()):.5f} of their spread")
    assert expected_pct > 80  # a network that guesses would prove nothing
    assert abs(top1_pct - expected_pct) < 100 / len(labels) + 1e-6
    assert float((logits - expected).std() / expected.std()) < 0.02
