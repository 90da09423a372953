"""The training loop."""

import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from components.common.errors import EngineryError
from components.common.loader import Loader
from components.common.steplog import StepLog
from components.train.config import TrainConfig
from components.train.optimization import build_optimizer, build_schedule


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """What one epoch measured."""

    train_loss: float
    train_images_per_s: float
    val_loss: float
    val_top1_pct: float

    def metrics(self) -> dict[str, float]:
        """By metric name, for tracking and manifests."""
        return dict(vars(self))


def pick_precision(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of autocast: what the config asks for, or what the device is good at."""
    if config.precision != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


class Trainer:
    """Trains one model on one device."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, train: Loader, val: Loader, device: torch.device, log: StepLog
    ) -> None:
        """`train` and `val` deliver batches on `device`."""
        self.model = model.to(device).to(memory_format=torch.channels_last)
        self.config = config
        self.train = train
        self.val = val
        self.device = device
        self.log = log
        self.dtype = pick_precision(config, device)
        self.num_steps = config.epochs * len(train)
        self.optimizer = build_optimizer(self.model, config, device)
        self.schedule = build_schedule(self.optimizer, config, self.num_steps)
        # Only FP16 gradients are small enough to vanish; bf16 has the range of FP32.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.history: list[EpochResult] = []
        self.loss = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)

    def fit(self) -> EpochResult:
        """Train for all epochs and return the last one's result.

        Raises:
            EngineryError: the loss is not finite, in training or after the last epoch on validation images.
        """
        result = None
        for epoch in range(self.config.epochs):
            result = self._epoch(epoch)
            self.history.append(result)
            self.log.metrics(result.metrics(), position=epoch)
            if not math.isfinite(result.train_loss):
                raise EngineryError(
                    f"training diverged in epoch {epoch + 1}: the loss is {result.train_loss}. "
                    "Lower train.learning_rate, or raise train.warmup_fraction"
                )
        assert result is not None  # config.epochs >= 1
        if not math.isfinite(result.val_loss):
            raise EngineryError(
                f"the trained model is of no use: its loss on validation images is {result.val_loss}, though that of "
                f"training was {result.train_loss:.2f}. Lower train.learning_rate, or raise train.warmup_fraction"
            )
        return result

    def _epoch(self, epoch: int) -> EpochResult:
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        started = time.perf_counter()
        for index, batch in enumerate(self.train):
            loss_sum += self._step(batch.images, batch.labels)
            done = epoch * len(self.train) + index + 1
            self.log.progress("training", done, self.num_steps, self._detail(epoch, index, loss_sum))
        train_loss = loss_sum.item() / len(self.train)  # waits for the device
        seconds = time.perf_counter() - started
        val_loss, val_top1_pct = self.evaluate()
        return EpochResult(
            train_loss=train_loss,
            train_images_per_s=len(self.train) * self.config.global_batch_size / seconds,
            val_loss=val_loss,
            val_top1_pct=val_top1_pct,
        )

    def _detail(self, epoch: int, index: int, loss_sum: torch.Tensor) -> str:
        text = f"epoch {epoch + 1}/{self.config.epochs}"
        if self.device.type == "cpu":  # on a GPU reading the loss would stall the queue
            text += f", loss {loss_sum.item() / (index + 1):.2f}"
        return text

    def _step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One optimizer step. Returns the loss, still on the device."""
        # images: [B, 3, H, W] float32, channels_last, normalized
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss: torch.Tensor = self.loss(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and top-1 in per cent over the validation split, in the precision of training."""
        self.model.eval()
        correct = torch.zeros((), device=self.device)
        loss_sum = torch.zeros((), device=self.device)
        for batch in self.val:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                logits = self.model(batch.images)
            loss_sum += nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum")
            correct += (logits.argmax(dim=1) == batch.labels).sum()
        return loss_sum.item() / self.val.num_images, 100 * correct.item() / self.val.num_images
