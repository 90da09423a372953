"""Encoded images in, what the network takes out: the first model of the ensemble."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb
from PIL import Image

from components.common.contracts.errors import UserError
from components.common.data.baseline import baseline_file, image_statistics
from components.common.data.dali_pipelines import ImageBatches, LoadedImage
from components.common.data.image_files import encode_image, upright_size
from components.common.tasks import TASKS
from components.serve.admission_control import PendingRequests, refusal
from components.serve.repository_check import SIZES_TENSOR, STATISTICS_TENSOR, open_from
from components.serve.shadow import KEYS, Sampler

MAX_IMAGE_BYTES = 64 << 20  # of one encoded image; what newer Tritons take of a whole HTTP request
_MOST_DECODED = 32  # images in one batch of the decoder, as in validation on a CPU


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the repository and decode a first image, so that the first request need not wait for it."""
        # Pillow warns of images that it decodes all the same; it refuses those of twice that size.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        repository = open_from(Path(args["model_repository"]))
        manifest = repository.manifest
        self._sampler = Sampler.of(repository)
        self._output = manifest.image_shapes.input_name
        self._transform = manifest.image_transform
        self._sends_sizes = not TASKS[manifest.task].classifies
        self._counts = baseline_file(manifest.precision) in manifest.files
        self._images = ImageBatches(manifest.image_transform, min(_MOST_DECODED, manifest.image_shapes.max_batch))
        self._images.load_each([encode_image(Image.new("RGB", (64, 64), "white"), "JPEG")], ["warm-up"])
        name = args["model_name"]
        network = name.removesuffix("_preprocess") + "_model"
        self._pending = PendingRequests([name, network], args["model_config"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; one with a bad image is refused, and the others are not touched."""
        admitted, refused = self._pending.admit(requests)
        return [*self._answer(admitted), *refused]

    def _answer(self, requests: Sequence[Any]) -> list[Any]:
        sent = [_encoded(pb.get_input_tensor_by_name(request, "IMAGE").as_numpy()) for request in requests]
        flat = [data for images in sent for data in images]
        names = [f"image {index}" for images in sent for index in range(len(images))]
        decoded = iter(self._images.load_each(flat, names, max_bytes=MAX_IMAGE_BYTES))
        each = [[next(decoded) for _ in images] for images in sent]
        return [self._response(*parts) for parts in zip(requests, sent, each, strict=True)]

    def _response(self, request: Any, sent: Sequence[bytes], images: Sequence[LoadedImage | UserError]) -> Any:
        if wrong := [image for image in images if isinstance(image, UserError)]:
            return refusal(str(wrong[0]))
        loaded = cast("Sequence[LoadedImage]", images)
        batch = np.stack([image.pixels for image in loaded])  # [B, 3, H, W] float32, normalized
        tensors = [pb.Tensor(self._output, batch)]
        if self._counts:
            sizes = [image.num_sent for image in loaded]
            statistics = np.stack([*image_statistics(batch, self._transform), sizes], axis=1)  # as IMAGE_STATISTICS
            tensors.append(pb.Tensor(STATISTICS_TENSOR, statistics.astype(np.float32)))
        if self._sends_sizes:
            sizes_sent = [upright_size(data) for data in sent]
            tensors.append(pb.Tensor(SIZES_TENSOR, np.array(sizes_sent, np.int64)))
        if self._sampler is not None:
            tensors.append(pb.Tensor(KEYS, self._sampler.sample(request.request_id, sent)))
        return pb.InferenceResponse(tensors)


def _encoded(tensor: np.ndarray) -> list[bytes]:
    """tensor: [B, 1] of bytes."""
    return [value if isinstance(value, bytes) else str(value).encode() for value in tensor.reshape(-1)]
