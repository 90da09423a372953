"""Whether training still learns: a loss that is not finite, or that stays far above a guess's, ends the run."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

import torch

from components.train.config import TrainConfig

_WINDOW = 50  # steps whose median is judged, and that are shown when it ends
_NUM_FIRST = 10  # steps that say where the loss began
_LIMIT = 3.0  # times the loss at the beginning, or of a guess if that is more
_PENDING = 32  # losses on their way from the GPU before anybody waits for one
_NUM_SHOWN = 6


class LossWatch:
    """Reads each step's loss without keeping a GPU waiting: a step's loss is known one step later, or a few.

    The GPU copies it to memory of the host when it gets there; this process looks whether it has.
    """

    def __init__(self, device: torch.device, num_classes: int) -> None:
        """Nothing is known yet. A guess among `num_classes` has a loss of their number's logarithm."""
        self.trouble: tuple[int, float] | None = None  # step, and its loss or the median that is too high
        self._on_gpu = device.type == "cuda"
        self._landing = torch.zeros(_PENDING, pin_memory=self._on_gpu)
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._last: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._first: list[float] = []
        self._guess = math.log(max(2, num_classes))

    def put(self, step: int, loss: torch.Tensor) -> None:
        """The loss of a step, a scalar on the device."""
        if not self._on_gpu:
            self._judge(step, float(loss))
            return
        while self._pending and (len(self._pending) == _PENDING or self._has_arrived()):
            self._take_oldest()
        self._landing[step % _PENDING].copy_(loss.detach(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending.append((step, arrived))

    def take_all(self) -> None:
        """Read what is on its way, and wait for it."""
        while self._pending:
            self._take_oldest()

    @property
    def mean(self) -> float | None:
        """Of the losses that were read last; None before the first."""
        return sum(loss for _, loss in self._last) / len(self._last) if self._last else None

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """A few (step, loss) of the last steps that were read, the newest last."""
        every = list(self._last)
        chosen = {round(index * (len(every) - 1) / max(1, _NUM_SHOWN - 1)) for index in range(_NUM_SHOWN)}
        return tuple(every[index] for index in sorted(chosen)) if every else ()

    def _has_arrived(self) -> bool:
        return self._pending[0][1].query()  # type: ignore[no-untyped-call]

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
        beginning = max(self._guess, sum(self._first) / len(self._first))
        # The median: a single step may be wild and the next ones recover.
        if len(self._last) == _WINDOW and (middle := median(one for _, one in self._last)) > _LIMIT * beginning:
            self.trouble = (step, middle)


def explain_divergence(
    config: TrainConfig,
    dtype: torch.dtype,
    *,
    epoch: int,
    num_steps: int,
    trouble: tuple[int, float] | None,
    curve: Iterable[tuple[int, float]],
) -> str:
    """What the user should read: when it happened, the losses before, and what to change.

    Args:
        config: of the training.
        dtype: of its arithmetic.
        epoch: in which it happened, from 0.
        num_steps: of the whole training.
        trouble: the step, from 1, and its loss or the median of the last steps; None where another process saw it.
        curve: (step, loss) of some steps before.
    """
    where = f"in epoch {epoch + 1}"
    what = "the loss is not finite"
    if trouble is not None:
        step, loss = trouble
        where += f", at step {step} of {num_steps}"
        what = f"the loss is {loss:.3g}"
        if math.isfinite(loss):
            what = f"the loss of the last {_WINDOW} steps is {loss:.3g} in the median, far above a guess's"
    shown = ", ".join(f"{loss:.3g} (step {step})" for step, loss in curve if math.isfinite(loss))
    before = f" Before: {shown}." if shown else ""
    return f"training diverged {where}: {what}.{before} {_advice(config, dtype, trouble)}"


def _advice(config: TrainConfig, dtype: torch.dtype, trouble: tuple[int, float] | None) -> str:
    fp16 = ", or train.precision to bf16 (fp16 ends at 65,504)" if dtype == torch.float16 else ""
    if trouble is not None and trouble[0] == 1:
        source = "train.pretrained" if config.pretrained else "the images"
        return f"It was the very first step, so see whether the numbers in {source} are sound{fp16}"
    return (
        f"Lower train.learning_rate, which is {config.learning_rate:g}, to {config.learning_rate / 4:g}, or raise "
        f"train.warmup_fraction, which is {config.warmup_fraction:g}{fp16}"
    )
