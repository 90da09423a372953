"""Batches of encoded images from memory, by the very operators of evaluation: what a validated model is served with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.contracts.transforms import TransformSpec
from components.common.data.image_files import check_encoded, undecodable
from components.common.data.loader_pipelines import memory_pipeline

_MOST_PIXELS = 1 << 28  # decoded at once, of 3 bytes each


class ImageBatches:
    """Decodes on the CPU. Not for several threads at once."""

    def __init__(self, spec: TransformSpec, batch_size: int) -> None:
        """`batch_size` is the most images that one call takes."""
        self._spec = spec
        self._batch_size = batch_size
        self._pipe: Any = None

    def load(self, encoded: Sequence[bytes], names: Sequence[str]) -> np.ndarray:
        """Images as a model gets them.

        Args:
            encoded: contents of image files, 1 to `batch_size` of them.
            names: what to call each in an error.

        Returns:
            [B, 3, crop_size, crop_size] float32, normalized, C-contiguous.

        Raises:
            UserError: one is not an image that preprocess takes; the message names it.
        """
        for data, name in zip(encoded, names, strict=True):
            check_encoded(data, name)
        try:
            return self._run(encoded)
        except RuntimeError:
            self._pipe = None  # DALI's pipeline is of no use after an error
            self._name_the_culprit(encoded, names)
            raise

    def load_each(
        self, encoded: Sequence[bytes], names: Sequence[str], *, max_bytes: int | None = None
    ) -> list[np.ndarray | UserError]:
        """The same for images of several callers: for each one [3, crop_size, crop_size] float32, or what is wrong.

        Takes any number of them, and decodes no more at once than fit into about a gigabyte.

        Args:
            encoded: contents of image files.
            names: what to call each in an error.
            max_bytes: longest content; None for any.
        """
        found: dict[int, np.ndarray | UserError] = {}
        chunk: list[int] = []  # images that are decoded together
        pixels = 0

        def decode() -> None:
            images = self._load_chunk([encoded[index] for index in chunk], [names[index] for index in chunk])
            found.update(zip(chunk, images, strict=True))
            chunk.clear()

        for index, (data, name) in enumerate(zip(encoded, names, strict=True)):
            try:
                size = _checked(data, name, max_bytes)
            except UserError as error:
                found[index] = error
                continue
            if chunk and (len(chunk) == self._batch_size or pixels + size > _MOST_PIXELS):
                decode()
                pixels = 0
            chunk.append(index)
            pixels += size
        if chunk:
            decode()
        return [found[index] for index in range(len(encoded))]

    def _load_chunk(self, encoded: Sequence[bytes], names: Sequence[str]) -> list[np.ndarray | UserError]:
        """Images that were checked. Where DALI refuses one all the same, each goes on its own."""
        try:
            return list(self._run(encoded))
        except RuntimeError as error:
            self._pipe = None  # DALI's pipeline is of no use after an error
            if len(encoded) == 1:
                return [undecodable(error, names[0])]
        return [self._load_chunk([data], [name])[0] for data, name in zip(encoded, names, strict=True)]

    def _run(self, encoded: Sequence[bytes]) -> np.ndarray:
        if self._pipe is None:
            self._pipe = memory_pipeline(
                self._spec,
                batch_size=self._batch_size,
                num_threads=num_cores(),
                device_id=None,
                prefetch_queue_depth=1,
                exec_async=False,
                exec_pipelined=False,
            )
            self._pipe.build()
        self._pipe.feed_input("encoded", [np.frombuffer(data, np.uint8) for data in encoded])
        (images,) = self._pipe.run()
        return np.ascontiguousarray(images.as_array().transpose(0, 3, 1, 2))

    def _name_the_culprit(self, encoded: Sequence[bytes], names: Sequence[str]) -> None:
        for data, name in zip(encoded, names, strict=True):
            try:
                ImageBatches(self._spec, 1)._run([data])
            except RuntimeError as error:
                raise undecodable(error, name) from None


def _checked(data: bytes, name: str, max_bytes: int | None) -> int:
    """How many pixels an image has that can be decoded."""
    if max_bytes is not None and len(data) > max_bytes:
        raise UserError(f"{name} has {len(data):,} bytes, and {max_bytes:,} are taken at most; make it smaller")
    return check_encoded(data, name)
