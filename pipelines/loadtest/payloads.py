"""What the requests of a load test hold."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from components.common.errors import UserError
from pipelines.client.addresses import Address
from pipelines.client.image_files import images_in
from pipelines.client.models import NetworkModel
from pipelines.loadtest.sending import prepare

_NUM_DISTINCT = 64  # requests that are sent in turn


@dataclass(frozen=True)
class Payload:
    """Requests ready to be sent, and what they are, for people."""

    requests: Sequence[bytes]
    description: str


def tensors(address: Address, network: NetworkModel, images_per_request: int) -> Payload:
    """Random normalized images for the network."""
    rng = np.random.default_rng(0)
    shape = (images_per_request, *network.shape)
    _check_batch(network, images_per_request)
    drawn = (rng.standard_normal(shape, dtype=np.float32) for _ in range(min(_NUM_DISTINCT, 8)))
    requests = [prepare(address, network.name, {network.input: images}) for images in drawn]
    return Payload(requests, f"random tensors of {' x '.join(map(str, shape))} in FP32")


def images(
    address: Address, model: str, image_input: str, network: NetworkModel, folder: Path | None, images_per_request: int
) -> Payload:
    """Image files of a folder, or random ones of the network's size as JPEG."""
    _check_batch(network, images_per_request)
    files = random_images(_NUM_DISTINCT, *network.shape[-2:]) if folder is None else _images_in(folder)
    requests = []
    for start in range(0, max(len(files) - images_per_request + 1, 1), images_per_request):
        chosen = [files[(start + index) % len(files)] for index in range(images_per_request)]
        values = np.empty((images_per_request, 1), dtype=np.object_)
        values[:, 0] = chosen
        requests.append(prepare(address, model, {image_input: values}))
    size = float(np.mean([len(file) for file in files]))
    source = f"of {folder}" if folder else "of noise"
    each = "one image" if images_per_request == 1 else f"{images_per_request} images"
    return Payload(requests, f"{each} {source} per request, {size / 1000:.1f} kB on average")


def _check_batch(network: NetworkModel, images_per_request: int) -> None:
    if images_per_request > max(network.max_batch_size, 1):
        raise UserError(
            f"--batch-size {images_per_request}: the model {network.name} takes up to {network.max_batch_size} images"
        )


def random_images(number: int, height: int, width: int) -> list[bytes]:
    """JPEG files of noise, the same each time."""
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(number):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def _images_in(folder: Path) -> list[bytes]:
    if not folder.is_dir():
        raise UserError(f"--data {folder}: there is no such folder; name one of images")
    files = images_in(folder)
    every = max(1, len(files) // _NUM_DISTINCT)  # from all over the folder, not only of its first class
    return [file.read_bytes() for file in files[::every][:_NUM_DISTINCT]]
