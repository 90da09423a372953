"""Divergence: a loss that is not finite, or that stays far above the chance level, ends the run."""

import math
from collections import deque
from statistics import median

import torch

from components.train.config import TrainConfig

_WINDOW = 50  # steps whose median is judged, and that are shown when it ends
_NUM_FIRST = 10  # steps that say where the loss began
_LIMIT = 3.0  # times the loss at the beginning, or the chance level if that is more
_PENDING = 32  # losses on their way from the GPU before anybody waits for one
_NUM_SHOWN = 6


class LossWatch:
    """Reads each step's loss without keeping a GPU waiting: a step's loss is known one step later, or a few.

    The GPU copies it to memory of the host when it gets there; this process looks whether it has.
    """

    def __init__(self, device: torch.device, num_classes: int) -> None:
        """The chance level, the loss of a guess among `num_classes`, is their number's logarithm."""
        self.trouble: tuple[int, float] | None = None  # step, and its loss or the median that is too high
        self._on_gpu = device.type == "cuda"
        self._landing = torch.zeros(_PENDING, pin_memory=self._on_gpu)
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._last: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._first: list[float] = []
        self._chance_level = math.log(max(2, num_classes))

    def put(self, step: int, loss: torch.Tensor) -> None:
        """Take the loss of a step, a scalar on the device."""
        if not self._on_gpu:
            self._judge(step, float(loss))
            return
        while self._pending and (len(self._pending) == _PENDING or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            self._take_oldest()
        self._landing[step % _PENDING].copy_(loss.detach(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending.append((step, arrived))

    @property
    def mean(self) -> float | None:
        """The mean of the losses that were read last; None before the first."""
        return sum(loss for _, loss in self._last) / len(self._last) if self._last else None

    def _take_oldest(self) -> None:
        step, arrived = self._pending.popleft()
        arrived.synchronize()
        self._judge(step, float(self._landing[step % _PENDING]))

    def _judge(self, step: int, loss: float) -> None:
        if self.trouble is not None:
            return
        if not math.isfinite(loss):
            self.trouble = (step, loss)
            return
        self._last.append((step, loss))
        if len(self._first) < _NUM_FIRST:
            self._first.append(loss)
        beginning = max(self._chance_level, sum(self._first) / len(self._first))
        # The median: a single step may be wild and the next ones recover.
        if len(self._last) == _WINDOW and (middle := median(one for _, one in self._last)) > _LIMIT * beginning:
            self.trouble = (step, middle)

    def explain(self, config: TrainConfig, dtype: torch.dtype, *, epoch: int, num_steps: int) -> str:
        """Return what the user should read: when it happened, the losses before, and what to change.

        Waits for the losses that are on their way. Where another process saw the trouble, the step is not known.

        Args:
            config: of the training.
            dtype: of its arithmetic.
            epoch: in which it happened, from 0.
            num_steps: of the whole training.
        """
        while self._pending:
            self._take_oldest()
        where, what = f"in epoch {epoch + 1}", "the loss is not finite"
        if self.trouble is not None:
            step, loss = self.trouble
            where += f", at step {step} of {num_steps}"
            what = f"the loss is {loss:.3g}"
            if math.isfinite(loss):
                what = f"the loss of the last {_WINDOW} steps is {loss:.3g} in the median, far above the chance level"
        every = list(self._last)
        chosen = {round(index * (len(every) - 1) / (_NUM_SHOWN - 1)) for index in range(_NUM_SHOWN) if every}
        shown = ", ".join(f"{every[index][1]:.3g} (step {every[index][0]})" for index in sorted(chosen))
        before = f" Before: {shown}." if shown else ""
        fp16 = ", or train.precision to bf16 (fp16 ends at 65,504)" if dtype == torch.float16 else ""
        rate, warmup = config.learning_rate, config.warmup_fraction
        advice = (
            f"Lower train.learning_rate, which is {rate:g}, to {rate / 4:g}, or raise train.warmup_fraction, which is "
            f"{warmup:g}{fp16}"
        )
        if self.trouble is not None and self.trouble[0] == 1:
            source = "train.pretrained" if config.pretrained else "the images"
            advice = f"It was the very first step, so see whether the numbers in {source} are sound{fp16}"
        return f"training diverged {where}: {what}.{before} {advice}"
