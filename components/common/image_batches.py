"""Batches of encoded images from memory, by the very operators of evaluation: what a validated model is served with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from components.common.environment import num_cores
from components.common.image_files import check_encoded, undecodable
from components.common.loader_pipelines import memory_pipeline
from components.common.transforms import TransformSpec


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
