"""The training loop: optimizer, learning-rate schedule, moving average of weights, what is kept and logged of it."""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import convert_conv2d_weight_memory_format

from components.common.contracts.errors import EngineryError, Preempted, UserError
from components.common.contracts.records import EpochRecord
from components.common.data.loader import Batch, Loader
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import load_weights
from components.common.tasks.task import Task
from components.common.tasks.translation.batches import SentenceLoader
from components.train.arithmetic import compiled, pick_compile_mode, pick_precision, speed_up_small_convolutions
from components.train.batches import BatchPlan
from components.train.checkpointing import (
    CheckpointFolder,
    Saved,
    random_state,
    restore_optimizer,
    set_random_state,
    split_tensors,
)
from components.train.config import TrainConfig
from components.train.distributed import (
    Consensus,
    StopRequest,
    World,
    all_reduce_sum,
    broadcast,
    broadcast_buffers,
    gather,
)
from components.train.divergence import LossWatch
from components.train.fine_tuning import keep_frozen_statistics
from components.train.resharding import ReshardedLoader
from components.train.speed import EpochSpeed, SpeedMeter, StepProfiler

if TYPE_CHECKING:
    from timm.utils.model_ema import ModelEmaV3


def build_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, at its peak learning rate.

    Weight decay is on matrices and filters only (Goyal et al., 2017; He et al., 2019).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    plain = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    learning_rate = config.learning_rate * config.global_batch_size / 256
    fused = device.type in ("cuda", "cpu")  # one pass over the weights
    betas = (config.momentum, 0.999)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
    if config.optimizer == "lamb":
        from timm.optim.lamb import Lamb

        return Lamb(groups, lr=learning_rate, betas=betas)  # no fused one without Apex; timm's runs in a few kernels
    nesterov = config.nesterov and config.momentum > 0
    optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=config.momentum, nesterov=nesterov, fused=fused)
    # Where GradScaler skips the first step, as FP16 often makes it, the fused one would leave its memory as it found it
    # and take that for gradients in the second step.
    for parameter in trained if config.momentum else ():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak, then down to zero. `num_steps` is the whole training."""
    num_warmup_steps = round(num_steps * config.warmup_fraction)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
        return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def build_ema(model: nn.Module, config: TrainConfig) -> "ModelEmaV3 | None":
    """Return a moving average of weights and BatchNorm statistics; None where it is off.

    The decay grows from 0 to ema_decay, so that the average of a short run forgets its random start.
    """
    if not config.ema_decay:
        return None
    from timm.utils.model_ema import ModelEmaV3

    return ModelEmaV3(model, decay=config.ema_decay, use_warmup=True)


MLLOG = "mllog.txt"


class MlLog:
    """Lines as MLPerf's training benchmark has them, for tools that read those: `:::MLLOG {json}`, one event each.

    The keys are MLCommons' own (mlperf_logging, mllog/constants.py; the library itself would bring pandas and SciPy).
    Rank 0 writes; a run that resumes adds to the file.
    """

    def __init__(self, folder: Path | None) -> None:
        """The file is in `folder`; without one nothing is written."""
        self._folder = folder

    def size(self) -> int:
        """Return the bytes of the file; 0 without one."""
        path = self._folder and self._folder / MLLOG
        return path.stat().st_size if path and path.exists() else 0

    def cut(self, size: int) -> None:
        """Remove the lines behind so many bytes: they are of what an earlier run did after its newest checkpoint."""
        if self._folder is not None and self.size() > size:
            os.truncate(self._folder / MLLOG, size)

    def event(self, key: str, value: Any = None, *, time_s: float | None = None, **metadata: Any) -> None:
        """Log what happened now, or at another time: with a key in _start or _stop, an interval's begin or end."""
        if self._folder is None:
            return
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
        entry = {"namespace": "", "time_ms": int((time_s or time.time()) * 1e3), "event_type": kind, "key": key}
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / MLLOG).open("a", encoding="utf-8") as file:
            file.write(f":::MLLOG {json.dumps({**entry, 'value': value, 'metadata': metadata})}\n")


# Live metrics as the terminal shows them, in this order.
_SHOWN: dict[str, Callable[[float], str]] = {
    "learning_rate": "learning rate {:.3g}".format,
    "images_per_s": "{:,.0f} images/s".format,
    "data_wait_pct": "{:.1f} % waiting for data".format,
    "gpu_utilization_pct": "GPU {:.0f} % busy".format,
    "gpu_memory_bytes": lambda value: f"{value / 1e9:.1f} GB of its memory",
    "gpu_power_w": "{:,.0f} W".format,
    "gpu_temperature_c": "{:.0f} °C".format,
    "cpu_pct": "CPU {:.0f} %".format,
    "memory_bytes": lambda value: f"{value / 1e9:.1f} GB of memory",
    "seconds_left": lambda value: f"{timedelta(seconds=round(value))} left",
}

_LOAD = [name for name in _SHOWN if name.startswith(("gpu_", "cpu_", "memory_", "seconds_"))]  # also while validating

# Outcomes of the consensus after a step; the largest one that a process asks for counts.
_CONTINUE, _SAVE, _SAVE_AND_STOP, _GIVE_UP = 0, 1, 2, 3


class Trainer:
    """Trains one model, alone or as one of several processes with a part of each batch."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        plan: BatchPlan,
        train: Loader | ReshardedLoader | SentenceLoader,
        val: Loader | SentenceLoader,
        *,
        world: World,
        log: StepLog,
        task: Task,
        unit: str = "images",
        checkpoints: CheckpointFolder | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`train` and `val` deliver batches of `task` on `world.device`; without `checkpoints` none is written.

        `unit` is what the progress counts.
        """
        self.model = convert_conv2d_weight_memory_format(model.to(world.device), torch.channels_last)
        self.config, self.plan, self.world, self.log = config, plan, world, log
        self._compile_mode = pick_compile_mode(config, world.device, log)
        if world.device.type == "cpu":
            speed_up_small_convolutions(self.model)
        elif self._compile_mode:
            from components.train import fused_norm  # Triton is not where there are no GPUs

            if plan.per_gpu_batch_size * config.image_size**2 >= fused_norm.MIN_PIXELS:
                fused_norm.fuse_norms(self.model)
        self.train, self.val = train, val
        self.dtype = pick_precision(config, world.device)
        self.steps_per_epoch = len(train) // plan.num_accumulated
        self.num_steps = config.epochs * self.steps_per_epoch
        self.optimizer = build_optimizer(self.model, config, world.device)
        self.schedule = build_schedule(self.optimizer, config, self.num_steps)
        self._parallel = self._in_parallel()  # from here on with rank 0's weights
        self.ema = build_ema(self.model, config)
        # Only FP16 gradients are small enough to vanish; bf16 has the range of FP32.
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == torch.float16)
        self.history: list[EpochRecord] = []
        self.num_steps_done = 0
        self.loss_sum = torch.zeros((), device=world.device)  # of this epoch's steps on this process
        self._task, self._unit = task, unit
        self._loss = task.loss(config.label_smoothing)
        self._objective = self._compiled()
        self.checkpoints, self._stop = checkpoints, stop or StopRequest()
        self._consensus = Consensus(world)
        self._meter = SpeedMeter(self.model, world, self.dtype, tf32=config.tf32)
        self._num_classes = train.num_classes
        self._watch = LossWatch(world.device, train.num_classes)
        folder = None if checkpoints is None else checkpoints.folder
        self.profiler = StepProfiler(config.profile_steps if world.is_main else 0, world.device, folder)
        self.mllog = MlLog(folder)
        self._live: dict[str, float] = {}  # metrics, some seconds old
        self._began = self._epoch_began = time.perf_counter()
        self._saved_at = time.monotonic()
        self._epoch_ended: float | None = None  # its training; validation may be under way
        self._validation_s = 0.0  # that the last one took

    def fit(self) -> EpochRecord:
        """Train until the target or for all epochs that are left, and return the last one's result.

        Raises:
            EngineryError: the loss is not finite, in training or on validation images in the epoch that is the result.
            Preempted: SIGTERM came, and all is saved.
        """
        while not self.is_done:
            done = len(self.history) + 1
            number = {"epoch_num": done}
            self.mllog.event("epoch_start", **number)
            train_loss, speed = self.train_epoch()
            self.mllog.event("epoch_stop", **number)
            self.mllog.event("tracked_stats", {"throughput": speed.train_images_per_s}, **number)
            val_loss = val_score_pct = None
            if done == self.config.epochs or done % self.config.validation_epochs == 0:
                self.mllog.event("eval_start", **number)
                val_loss, val_score_pct = self.evaluate()
                self.mllog.event("eval_accuracy", val_score_pct / 100, **number)
                self.mllog.event("eval_stop", **number)
            measured = {"val_loss": val_loss, "val_score_pct": val_score_pct, "elapsed_s": self._elapsed_s()}
            self.history.append(EpochRecord(train_loss=train_loss, **measured, **vars(speed)))
            self.log.metrics(self.metrics_of(done - 1), position=done - 1)
            if not math.isfinite(train_loss):
                raise self._diverged(done - 1)
            # The best so far too, whatever is to be published: a run that resumes may ask for it.
            if self.best_epoch == done - 1 or self.is_done or done % self.config.checkpoint_epochs == 0:
                self.save()
        result = self.history[self.published_epoch]
        if result.val_loss is None or not math.isfinite(result.val_loss):
            raise EngineryError(
                f"the trained model is of no use: its loss on validation images is {result.val_loss}, though that of "
                f"training was {result.train_loss:.2f}. Lower train.learning_rate, or raise train.warmup_fraction",
                code="validation-loss-not-finite",
                setting="train.learning_rate",
            )
        return self.history[-1]

    def capture(self) -> Saved | None:
        """Return the state of all processes, on rank 0; None elsewhere. Between two steps, by all at once."""
        own = {
            "loader": self.train.state(),
            "loss_sum": self.loss_sum.item(),
            "random": random_state(self.world.device),
        }
        ranks = gather(own, self.world)
        if not self.world.is_main:
            return None
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.module.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        numbers = split_tensors("optimizer", optimizer["state"], tensors)
        groups = split_tensors("group", dict(enumerate(optimizer["param_groups"])), tensors)
        state = {
            "num_steps": self.num_steps_done,
            "num_epochs": self.num_steps_done / self.steps_per_epoch,
            "history": [epoch.model_dump(exclude_none=True) for epoch in self.history],
            "epoch_seconds": self.epoch_seconds(),
            "elapsed_s": self._elapsed_s(),
            "optimizer": {"groups": groups, "numbers": numbers},
            "schedule": {name: value for name, value in self.schedule.state_dict().items() if name != "lr_lambdas"},
            "scaler": self.scaler.state_dict(),
            "ranks": ranks,
            "mllog_bytes": self.mllog.size(),
        }
        return Saved(num_steps=self.num_steps_done, state=state, tensors=tensors)

    def restore(self, saved: Saved) -> None:
        """Take the state that `capture` saw. The training loader has to be made with its state in there, too.

        Raises:
            UserError: another number of processes wrote it, and their epochs had more steps or fewer.
        """
        state, own, ranks = saved.state, saved.of_rank(self.world), saved.state["ranks"]
        if self.steps_per_epoch != (before := round(saved.num_steps / state["num_epochs"])):
            raise UserError(
                f"an epoch has {self.steps_per_epoch} steps with {self.world.world_size} processes, and had "
                f"{before} with {len(ranks)}, so the training can't resume with this "
                "number; take the earlier one, or another that accumulates as many batches",
                code="other-steps-per-epoch",
                setting="train.num_processes",
            )
        load_weights(self.model, saved.group("model"), "the checkpoint")
        if self.ema is not None:
            load_weights(self.ema.module, saved.group("ema"), "the checkpoint")
        restore_optimizer(self.optimizer, saved)
        self.schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None] * len(self.optimizer.param_groups)})
        self.scaler.load_state_dict(state["scaler"])
        self.mllog.cut(state.get("mllog_bytes", self.mllog.size()))  # version 0.1 had no such entry
        self._began = time.perf_counter() - state["elapsed_s"]
        loss_sum = sum(rank["loss_sum"] for rank in ranks) / len(ranks) if own is None else own["loss_sum"]
        self.resume(saved.num_steps, state["history"], state["epoch_seconds"], loss_sum)
        if own is None:
            torch.manual_seed(self.config.seed + 1000003 * self.world.rank + 15485863 * saved.num_steps)
        else:
            set_random_state(own["random"], self.world.device)

    def resume(self, num_steps: int, history: list[dict[str, Any]], epoch_seconds: float, loss_sum: float) -> None:
        """Take the counts of an earlier process."""
        self.num_steps_done = num_steps
        self.history = [EpochRecord(**epoch) for epoch in history]
        self._epoch_began = time.perf_counter() - epoch_seconds
        self.loss_sum.fill_(loss_sum)

    def epoch_seconds(self) -> float:
        """Return the time of this epoch's training so far, without validation and the time between two processes."""
        return (self._epoch_ended or time.perf_counter()) - self._epoch_began

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def epochs_to_target(self) -> int | None:
        """The number of epochs after which validation reached target_score_pct; None before, and without a target."""
        scores = [epoch.val_score_pct or 0.0 for epoch in self.history if self.config.target_score_pct]
        return next((done for done, value in enumerate(scores, 1) if value >= self.config.target_score_pct), None)

    @property
    def is_done(self) -> bool:
        """True if no epoch is left."""
        return len(self.history) >= self.config.epochs or self.epochs_to_target is not None

    def metrics_of(self, epoch: int) -> dict[str, float]:
        """Return the measurements of an epoch, and once the target is reached the epochs and seconds until then."""
        metrics = self.history[epoch].model_dump(exclude_none=True)
        if done := self.epochs_to_target:
            metrics |= {"epochs_to_target": done, "seconds_to_target": self.history[done - 1].model_dump()["elapsed_s"]}
        return metrics

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0, with the highest score on validation images, the first of equals; None before any."""
        scores = {
            number: epoch.val_score_pct or 0.0
            for number, epoch in enumerate(self.history)
            if epoch.val_loss is not None and math.isfinite(epoch.val_loss)
        }
        return max(scores, key=scores.__getitem__) if scores else None

    @property
    def published_epoch(self) -> int:
        """The epoch, from 0, whose weights are the result, once all are done."""
        best = self.best_epoch if self.config.publish == "best" else None
        return len(self.history) - 1 if best is None else best

    def num_steps_of(self, epoch: int) -> int:
        """Return the number of steps that are done after an epoch."""
        return (epoch + 1) * self.steps_per_epoch

    def release(self) -> None:
        """Let go of what takes the GPU's memory. Nothing can be trained with it after that."""
        torch._dynamo.reset()
        del self.model, self.optimizer, self.schedule, self.ema, self.scaler, self.loss_sum
        del self._parallel, self._objective, self._meter, self._watch

    def published(self) -> nn.Module:
        """Return the model that is validated and becomes the result: the average of the weights where there is one."""
        return self.model if self.ema is None else self.ema.module

    def _in_parallel(self) -> nn.Module:
        if self.world.world_size == 1:
            return self.model
        device_ids = None if self.world.device_id is None else [self.world.device_id]
        parallel = DistributedDataParallel(
            self.model,
            device_ids=device_ids,
            bucket_cap_mb=self.config.bucket_mb,
            static_graph=self.config.static_graph,
            gradient_as_bucket_view=True,
        )
        # Training does not read BatchNorm's statistics, so rank 0's go round when somebody does (`evaluate`), and not
        # before every step, which would take some 160 copies and make all wait for rank 0. The argument of this name is
        # on its way out of torch.
        parallel.broadcast_buffers = False
        return parallel

    def _compiled(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def objective(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            # images: [B, 3, H, W] float32 or, with autocast, float16; channels_last, normalized
            # labels: [B] int64 or [B, num_classes] float32; of text see SentenceLoader
            with torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss: torch.Tensor = self._loss(self._parallel(images), labels)
            return loss

        # Beyond its limit of graphs per function torch stops compiling; each image size is one, and with several
        # processes and accumulated batches two: one of them leaves out the all-reduce.
        torch._dynamo.config.recompile_limit = 8 + 2 * len(set(self.config.image_sizes))
        torch._dynamo.config.optimize_ddp = self.config.split_graph
        # Model and loss together: as one graph they take fewer kernels.
        return compiled(objective, self._compile_mode)

    def train_epoch(self) -> tuple[float, EpochSpeed]:
        """Train the steps that are left of this epoch. Returns the mean loss over all processes, and the speed."""
        epoch = len(self.history)
        done = self.num_steps_done - epoch * self.steps_per_epoch
        if not done:
            self.loss_sum.zero_()
            self._epoch_began = time.perf_counter()
        self.model.train()
        keep_frozen_statistics(self.model)
        self._epoch_ended = None
        batches = iter(self.train) if done < self.steps_per_epoch else iter(())
        self._meter.begin()
        try:
            for _ in range(done, self.steps_per_epoch):
                self.profiler.before_step()
                loss = self._step(batches)
                self.profiler.after_step()
                self.loss_sum += loss
                self.num_steps_done += 1
                self._stop.begin()  # not before: compiling for the first step may take minutes
                self._watch.put(self.num_steps_done, loss)
                self._report(epoch)
                self._after_step()
            loss_sum = all_reduce_sum(self.loss_sum.clone(), self.world).item() / self.world.world_size
            self._epoch_ended = time.perf_counter()
            speed = self._meter.end(self.steps_per_epoch * self.plan.global_batch_size, self.epoch_seconds())
        finally:
            self._meter.stop()
        self.profiler.finish()  # where the epoch has fewer steps
        return loss_sum / self.steps_per_epoch, speed

    def _report(self, epoch: int) -> None:
        """Show the progress, and every `LIVE_S` log live metrics."""
        if live := self._meter.live():
            live["learning_rate"] = float(self.schedule.get_last_lr()[0])
            if self._watch.mean is not None:
                live["loss"] = self._watch.mean
            self._live |= live
            self._log_live(self._num_validations(epoch) * self._validation_s)
        parts = [f"epoch {epoch + 1}/{self.config.epochs}"]
        if self._watch.mean is not None:
            parts.append(f"loss {self._watch.mean:.2f}")
        detail = ", ".join(filter(None, (*parts, self._shown(_SHOWN))))
        self.log.progress("training", self.num_steps_done, self.num_steps, detail, unit="steps")

    def _shown(self, names: Collection[str]) -> str:
        shown = [text(self._live[name]) for name, text in _SHOWN.items() if name in names and name in self._live]
        return ", ".join(shown).replace("images", self._unit)

    def _log_live(self, validation_s: float) -> None:
        """Log live metrics with the time that is left, if validation takes that many seconds of it."""
        if rate := self._live.get("images_per_s"):
            num_images = (self.num_steps - self.num_steps_done) * self.plan.global_batch_size
            self._live["seconds_left"] = num_images / rate + validation_s
        self.log.live({f"live/{name}": value for name, value in self._live.items()}, position=self.num_steps_done)

    def _num_validations(self, epoch: int) -> int:
        """Return how many validations are left from that epoch's on, without a target."""
        every, last = self.config.validation_epochs, self.config.epochs
        return sum(not number % every or number == last for number in range(epoch + 1, last + 1))

    def _step(self, batches: Iterator[Batch]) -> torch.Tensor:
        """One optimizer step. Returns the mean loss of this process's images, still on the device."""
        loss_sum = torch.zeros((), device=self.world.device)
        # Only the last of a step's batches needs an all-reduce.
        no_sync = self._parallel.no_sync if isinstance(self._parallel, DistributedDataParallel) else nullcontext
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(self.plan.num_accumulated):
            batch = self._meter.next(batches)
            with no_sync() if index + 1 < self.plan.num_accumulated else nullcontext():
                loss = self._objective(batch.images, batch.labels) / self.plan.num_accumulated
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        if self.ema is not None:
            self.ema.update(self.model, step=self.num_steps_done + 1)
        return loss_sum

    def _after_step(self) -> None:
        wanted, minutes = _CONTINUE, self.config.checkpoint_minutes
        if self._watch.trouble is not None:
            wanted = _GIVE_UP
        elif self._stop.requested:
            wanted = _SAVE_AND_STOP
        elif self.world.is_main and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes:
            wanted = _SAVE
            self._saved_at = time.monotonic()  # the answer comes one step later, and one is enough
        self._agree(wanted)

    def _agree(self, wanted: int) -> None:
        """Do what the processes have agreed on."""
        agreed = self._consensus.reach(wanted)
        if agreed == _GIVE_UP:
            raise self._diverged(len(self.history))
        if agreed != _CONTINUE:
            self.save()
        if agreed == _SAVE_AND_STOP:
            all_reduce_sum(torch.zeros(()), self.world)  # none ends before rank 0 has written
            raise Preempted(
                f"stopped by SIGTERM after step {self.num_steps_done} of {self.num_steps}, and saved; the same command "
                "resumes there"
            )

    def _diverged(self, epoch: int) -> EngineryError:
        """Return the error of the first rank that saw the trouble; all processes take part and raise the same."""
        text = self._watch.explain(self.config, self.dtype, epoch=epoch, num_steps=self.num_steps)
        seen = [text for text, trouble in gather((text, self._watch.trouble), self.world) if trouble is not None]
        text = broadcast(seen[0] if seen else text, self.world)
        return EngineryError(text, code="diverged", setting="train.learning_rate")

    def save(self) -> None:
        """Write a checkpoint, on rank 0; all processes take part."""
        loss = all_reduce_sum(self.loss_sum.clone(), self.world).item()
        if not math.isfinite(loss):  # nobody should resume there
            raise self._diverged(len(self.history))
        saved, best = self.capture(), self.best_epoch
        if saved is not None and self.checkpoints is not None:
            best_num_steps = None if best is None else self.num_steps_of(best)
            self.checkpoints.save(saved, best_num_steps=best_num_steps)
        self._saved_at = time.monotonic()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and score in per cent over the validation split, in the precision of training."""
        model = self.published()
        broadcast_buffers(model, self.world)
        model.eval()
        totals = self._task.new_totals(self._num_classes, self.world.device)
        batches, done = iter(self.val), 0
        largest_part = math.ceil(self.plan.num_val_images / self.world.world_size)
        num_rounds = math.ceil(largest_part / self.plan.per_gpu_batch_size)
        began = time.perf_counter()
        self._meter.watch()
        try:
            # As many rounds in all processes, though some have a batch less: after each they agree whether to continue.
            while (batch := next(batches, None)) is not None or done < num_rounds:
                if batch is not None:
                    with torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype != torch.float32):
                        logits = model(batch.images)
                    self._task.count(totals, logits, batch.labels)
                done += 1
                if load := self._meter.live_load():
                    self._live |= load
                    round_s = (time.perf_counter() - began) / done
                    later = self._num_validations(len(self.history) + 1) * num_rounds
                    self._log_live(round_s * (num_rounds - done + later))
                self.log.progress("validating", done, num_rounds, self._shown(_LOAD), unit="batches")
                self._agree(_SAVE_AND_STOP if self._stop.requested else _CONTINUE)
        finally:
            self._meter.stop()
        self._validation_s = time.perf_counter() - began
        return self._task.result(all_reduce_sum(totals, self.world), self.plan.num_val_images)
