"""What DALI has on a GPU, in torch's own memory."""

from collections import deque

import torch

_MAX_PENDING = 2  # copies that may be under way; each keeps a batch of DALI's from being overwritten


class OwnedOutputs:
    """Copies DALI's outputs, and lets go of each when the GPU has copied it.

    DALI hands out its memory without a copy, and takes it back as soon as the tensor is gone on the host: it knows
    nothing of torch's streams. The host is ahead of the GPU, so a batch would be overwritten by a later one while, or
    before, the GPU reads it. What is torch's is freed in the order of its streams.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def copied(self, output: torch.Tensor) -> torch.Tensor:
        """The copy, on the current stream, with the same strides."""
        while self._pending and (len(self._pending) == _MAX_PENDING or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            _, done = self._pending.popleft()
            done.synchronize()
        copy = output.clone()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(output.device))
        self._pending.append((output, done))
        return copy
