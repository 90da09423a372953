"""The training loop's reports: divergence, memory that is too small, speed, MLPerf's log and a profile."""

import gzip
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.settings import resolve
from components.common.data.loader import Batch, translate_errors
from components.common.process.gpu_monitor import GpuReading
from components.common.runtimes.architectures import build_model
from components.common.tasks import load_task
from components.train import memory, speed
from components.train.arithmetic import pick_compile_mode, pick_precision, speed_up_small_convolutions
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import World
from components.train.divergence import LossWatch
from components.train.memory import explain_out_of_memory, is_out_of_memory
from components.train.speed import TRACE, SpeedMeter, flops_per_image, peak_tflops
from components.train.trainer import MLLOG, Trainer, build_optimizer
from components.train.training import _fit
from tests.conftest import Dataset
from tests.unit.refusals import refuses

from .conftest import Log, Train

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Batches:
    """A loader of random batches: one again and again, or new ones, of which there is nothing to learn."""

    num_classes = 4

    def __init__(self, num_batches: int, *, wait_s: float = 0.0, is_new: bool = False) -> None:
        self.num_batches, self.wait_s, self.is_new = num_batches, wait_s, is_new
        self.generator = torch.Generator().manual_seed(1)
        self.batch = self.draw()

    def draw(self) -> Batch:
        labels = torch.randint(0, 4, (8,), generator=self.generator)
        return Batch(images=torch.randn(8, 3, 16, 16, generator=self.generator), labels=labels)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        self.generator.manual_seed(2)
        for _ in range(self.num_batches):
            time.sleep(self.wait_s)
            yield self.draw() if self.is_new else self.batch


def small_trainer(batches: Batches, **settings: Any) -> Trainer:
    config = resolve(TrainConfig, "train", {"epochs": 1, "global_batch_size": 8, **settings})
    plan = plan_batches(config, 1, num_train_images=8, num_val_images=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 4))
    loaders: Any = (batches, Batches(1))
    return Trainer(model, config, plan, *loaders, world=World(device=CPU), log=Log(), task=load_task("classification"))


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_ends_the_run(train: Train, tmp_path: Path, num_processes: int) -> None:
    with refuses("diverged", "train.learning_rate") as caught:
        train(learning_rate=1e12, warmup_fraction=0, num_processes=num_processes)
    text = str(caught.value)
    assert "training diverged in epoch 1, at step " in text
    assert " of 18: the loss is " in text
    assert "Before: 2." in text  # ten classes: the first step's loss is the chance level
    assert "Lower train.learning_rate, which is 1e+12, to 2.5e+11, or raise train.warmup_fraction, which is 0" in text
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_loss_far_above_chance_level_ends_the_run() -> None:
    """At this rate the loss grows, and stays finite for more than 50 steps."""
    batches = Batches(300, is_new=True)
    trainer = small_trainer(batches, learning_rate=5, warmup_fraction=0, momentum=0.5, weight_decay=0)
    with pytest.raises(EngineryError, match=r"the loss of the last 50 steps is .* far above the chance level\. Before"):
        trainer.fit()
    assert trainer.num_steps_done < 300


@pytest.mark.parametrize(
    "losses",
    [
        [6.5] * 39 + [2.0] * 50 + [1e6] + [2.0] * 100,  # a slow beginning, and a single wild step
        [0.01] * 19 + [1.5] * 180,  # of pretrained weights: from almost nothing to less than the chance level
    ],
)
def test_losses_that_are_no_divergence(losses: list[float]) -> None:
    watch = LossWatch(CPU, num_classes=10)
    for step, loss in enumerate(losses):
        watch.put(step, torch.tensor(loss))
    assert watch.trouble is None
    assert watch.mean == pytest.approx(losses[-1])


def test_the_first_step_is_not_the_learning_rates_fault() -> None:
    batches = Batches(3)
    batches.batch.images[0, 0, 0, 0] = math.nan
    with pytest.raises(EngineryError, match=r"at step 1 of 3: the loss is nan\. It was the very first step, so see"):
        small_trainer(batches).fit()


@pytest.fixture
def limited_memory() -> Iterator[Callable[[int], None]]:
    """`limited_memory(n)`: models have room for n images. A CPU's memory does not run out, so a hook raises for it."""
    removed = []

    def limit(num_images: int) -> None:
        def hook(module: nn.Module, inputs: Any) -> None:
            if isinstance(module, nn.Conv2d) and inputs[0].device == CPU and len(inputs[0]) > num_images:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        removed.append(nn.modules.module.register_module_forward_pre_hook(hook))

    yield limit
    for handle in removed:
        handle.remove()


@pytest.mark.parametrize("before_the_first_step", [False, True])
def test_out_of_memory_names_a_batch_that_fits(
    train: Train, limited_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, before_the_first_step: bool
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't allocate 805306368 bytes on device 0.")

    limited_memory(5)
    if before_the_first_step:
        monkeypatch.setattr("components.train.training.Loader", full)
    with refuses("out-of-memory", "train.per_gpu_batch_size") as caught:
        train()
    assert "does not hold a batch of 16 images of 32 px (train.per_gpu_batch_size). 4 were tried" in str(caught.value)
    assert "set train.per_gpu_batch_size to 4. Gradients are then accumulated over 4 batches" in str(caught.value)
    if not before_the_first_step:
        checkpoint = train(per_gpu_batch_size=4, epochs=1)  # what was said is so
        assert checkpoint.manifest.history[0].train_loss > 0


def test_out_of_memory_where_nothing_fits(train: Train, limited_memory: Callable[[int], None]) -> None:
    limited_memory(0)
    with pytest.raises(UserError, match=r"a batch of 8 images .* and not one image either\. Set a smaller train\.imag"):
        train(per_gpu_batch_size=8)


def search(**settings: Any) -> str:
    config = resolve(TrainConfig, "train", {"architecture": "squeezenet1_1", "image_size": 32, **settings})
    plan = plan_batches(config, 1, num_train_images=64, num_val_images=8)
    return explain_out_of_memory(config, plan, World(device=CPU), 10)


def test_the_search_for_a_batch_that_fits_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_fits", lambda size, *_: size <= 10)
    assert ". 8 were tried here and fit" in search(global_batch_size=64)
    monkeypatch.setattr(memory, "_LIMIT_S", 0.0)
    assert ". 4 were tried here and fit" in search(global_batch_size=64)  # the first that does


@pytest.mark.parametrize("architecture", ["detection/fcos_small", "segmentation/fpn_small", "timm/lambda_resnet26t"])
def test_the_search_trains_other_networks_too(architecture: str) -> None:
    settings = {"architecture": architecture, "image_size": 64, "label_smoothing": 0.0}
    assert ". 1 were tried here and fit" in search(global_batch_size=2, **settings)


def test_a_network_with_a_convolution_of_three_axes_trains(train: Train) -> None:
    assert train(architecture="timm/lambda_resnet26t", image_size=32, epochs=1).manifest.history


def test_the_search_trains_what_training_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen backbone there are gradients of the head alone."""
    trained: list[int] = []

    def build(model: nn.Module, *arguments: Any) -> torch.optim.Optimizer:
        trained.append(sum(parameter.requires_grad for parameter in model.parameters()))
        return build_optimizer(model, *arguments)

    monkeypatch.setattr(memory, "build_optimizer", build)
    search(global_batch_size=2, freeze_backbone=True, pretrained="default")
    search(global_batch_size=2)
    assert set(trained) == {2, 52}


@pytest.mark.parametrize("said", ["Can't allocate 805306368 bytes on device 0.", "CUDA allocation failed"])
def test_memory_that_runs_out_while_decoding_is_no_damaged_image(tiny_dataset: Dataset, said: str) -> None:
    operator = "nvidia.dali.fn.decoders.image_random_crop"
    error = RuntimeError(f"Error in GPU operator `{operator}`,\nencountered:\n\n{said}\n\nCurrent pipeline object is")
    with pytest.raises(RuntimeError) as caught, translate_errors(tiny_dataset, "train"):
        raise error
    assert caught.value is error
    assert is_out_of_memory(error)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_gpus_that_emulate_bf16_train_in_fp16(monkeypatch, has_bf16: bool, dtype: torch.dtype) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return has_bf16 or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert pick_precision(resolve(TrainConfig, "train", {}), GPU) == dtype


@pytest.mark.parametrize(
    ("compile_", "device", "has", "mode", "warning"),
    [
        ("auto", GPU, {"gcc", "Python.h"}, "default", ""),
        ("auto", GPU, {"gcc"}, "", "no headers of Python (Debian, Ubuntu: sudo apt-get install python3-dev)"),
        ("auto", GPU, set(), "", "no C compiler"),
        ("auto", CPU, {"gcc", "Python.h"}, "", ""),
        ("tuned", CPU, set(), "tuned", ""),
        ("off", GPU, set(), "", ""),
        ("tuned", GPU, set(), None, ""),
    ],
)
def test_the_mode_of_compiling(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compile_: str,
    device: torch.device,
    has: set[str],
    mode: str | None,
    warning: str,
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr("shutil.which", lambda name: name if name in has else None)
    monkeypatch.delenv("CC", raising=False)
    if "Python.h" in has:
        (tmp_path / "Python.h").touch()
    config, log = resolve(TrainConfig, "train", {"compile": compile_}), Log()
    if mode is None:
        with refuses("no-compiler", "train.compile"):
            pick_compile_mode(config, device, log)
    else:
        assert pick_compile_mode(config, device, log) == mode
        assert warning in "".join(log.said)
        assert bool(log.said) == bool(warning)


def test_sentences_of_many_lengths_are_not_compiled() -> None:
    config = resolve(TrainConfig, "train", {"architecture": "translation/transformer_small"})
    assert pick_compile_mode(config, GPU, Log()) == ""


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    with refuses("compile-failed", "train.compile"):
        _fit(small_trainer(Batches(1), compile="default"), 4)


def test_the_reports_of_an_epoch(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LIVE_S", 1e-9)
    log = Log()
    checkpoint = train(log, epochs=2, profile_steps=2)
    first, second = checkpoint.manifest.history
    assert 0 < first.data_wait_pct < 100
    model = build_model("squeezenet1_1", 10)
    speed_up_small_convolutions(model)  # as training on a CPU does
    side = flops_per_image(model, (3, 32, 32))
    assert second.tflops_per_s == pytest.approx(side * second.train_images_per_s / 1e12)
    assert (second.gpu_power_w, second.peak_pct) == (None, None)  # there is no GPU to ask
    assert set(log.epochs[1]) == {*log.epochs[0]} >= {"data_wait_pct", "tflops_per_s", "train_images_per_s"}
    assert all(word in log.details[0] for word in ("loss", "images/s", "% waiting for data", "0:00:", "left"))
    assert list(log.now) == list(range(1, 13))
    rows = [{name.removeprefix("live/"): value for name, value in row.items()} for row in log.now.values()]
    assert all(0 <= row["data_wait_pct"] <= 100 and row["memory_bytes"] > 0 and "cpu_pct" in row for row in rows)
    later = [row["seconds_left"] - 16 * (12 - step) / row["images_per_s"] for step, row in enumerate(rows, 1)]
    assert later[:5] == pytest.approx([0] * 5, abs=1e-6)  # how long validations take is not known before the first
    assert later[6:11] == pytest.approx([later[6]] * 5)
    assert min(later[5:7]) > 0  # steps 6 and 12 have the last values of a validation
    assert later[11] == pytest.approx(0, abs=1e-6)
    assert (rows[-1]["loss"], rows[-1]["learning_rate"]) == (pytest.approx(second.train_loss, rel=0.5), 0)

    lines = checkpoint.file(MLLOG).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert {tuple(sorted(event)) for event in events} == {
        ("event_type", "key", "metadata", "namespace", "time_ms", "value")
    }
    keys = [event["key"] for event in events]
    epoch = ["epoch_start", "epoch_stop", "tracked_stats", "eval_start", "eval_accuracy", "eval_stop"]
    begin = keys.index("run_start")
    assert keys[begin:] == ["run_start", *epoch, *epoch, "run_stop"]
    assert {"global_batch_size", "opt_name", "train_samples", "eval_samples", "seed"} < set(keys[:begin])

    with gzip.open(checkpoint.file(TRACE)) as file:
        assert json.load(file)["traceEvents"]
    profile = checkpoint.manifest.profile
    assert profile.num_steps == 2
    assert sum(profile.families_pct.values()) == pytest.approx(100)
    assert any("conv" in operation.name for operation in profile.operations)


def test_mlperf_s_checker_accepts_the_log(train: Train, tmp_path: Path) -> None:
    """By the last rules with ResNet-50 among the benchmarks, in the open division."""
    log = train(architecture="resnet50", epochs=1, global_batch_size=48).file(MLLOG)
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "4.0.0"]
    command += ["--log_output", str(tmp_path / "checker.txt")]
    done = subprocess.run([*command, str(log)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "less.txt").write_text(re.sub(".*eval_accuracy.*\n", "", log.read_text()))
    assert subprocess.run([*command, str(tmp_path / "less.txt")], capture_output=True).returncode == 1


def test_training_ends_when_validation_reaches_the_target(train: Train) -> None:
    small = {"architecture": "timm/resnet10t", "global_batch_size": 32}
    top1 = [epoch.val_score_pct or 0.0 for epoch in train(output="whole", **small).manifest.history]
    target = max(top1[:2])
    expected = top1.index(target) + 1
    log = Log()
    checkpoint = train(log, target_score_pct=target, **small)
    record = checkpoint.manifest
    assert [epoch.val_score_pct for epoch in record.history] == top1[:expected]
    assert record.metrics["epochs_to_target"] == expected < len(top1)
    assert 0 < record.metrics["seconds_to_target"] == record.history[-1].elapsed_s
    assert log.epochs[-1] == record.metrics
    assert '"status": "success"' in checkpoint.file(MLLOG).read_text()
    assert f"top-1 on validation images after epoch {expected}" in "".join(log.said)
    log = Log()
    checkpoint = train(log, "never", target_score_pct=100, epochs=1)
    assert "epochs_to_target" not in checkpoint.manifest.metrics
    assert '"status": "aborted"' in checkpoint.file(MLLOG).read_text()
    best = checkpoint.manifest.metrics["val_score_pct"]
    assert f"which is 100: the best of 1 epochs has {best:.2f} %" in "".join(log.said)


def test_a_count_of_operations_leaves_the_weights_where_they_are() -> None:
    """Of a module in two places and of a weight in two modules, as CoaT and language models have them."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False))
    model.append(model[0])
    model[2].weight = model[0].weight
    before = dict(model.named_modules()), [*model.parameters(), *model.buffers()]
    assert flops_per_image(model, (3, 4, 4)) > 0
    assert dict(model.named_modules()) == before[0]
    assert all(one is other for one, other in zip([*model.parameters(), *model.buffers()], before[1], strict=True))


def test_short_epochs_and_validations_have_live_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LIVE_S", 0.5)
    meter = SpeedMeter(nn.Linear(2, 2), World(device=CPU), torch.float32, tf32=False)
    found = []
    for _ in range(4):
        meter.begin()
        meter.next(iter(Batches(1, wait_s=0.14)))
        found.append(meter.live())
        meter.end(8, 0.14)
        meter.watch()
        time.sleep(0.4)  # a validation
        found.append(meter.live_load())
    assert [bool(values) for values in found] == [False, True, False, True, False, True, True, True]
    speeds = found[6]  # of all the training, while the load comes in validations alone
    assert 32 / 1.1 < speeds["images_per_s"] <= 32 / 0.56
    assert 90 < speeds["data_wait_pct"] <= 100
    time.sleep(0.5)
    meter.begin()
    meter.next(iter(Batches(1, wait_s=0.3)))
    assert {"images_per_s", "cpu_pct"} <= meter.live().keys()


def test_time_that_waits_for_a_slow_loader() -> None:
    trainer = small_trainer(Batches(10, wait_s=0.1))
    _, measured = trainer.train_epoch()
    assert measured.train_images_per_s < 80
    assert measured.data_wait_pct / 100 * (80 / measured.train_images_per_s) >= 0.99  # seconds; each batch waits 0.1


@pytest.mark.parametrize(("powers", "total"), [((300.0, 350.0), 650.0), ((300.0, None), None)])
def test_power_is_of_all_gpus_or_of_none(monkeypatch, powers: tuple[float | None, ...], total: float | None) -> None:
    """One of two spans was too short to tell: the other's power alone would pass for the sum."""
    meter = SpeedMeter(nn.Linear(2, 2), World(device=CPU), torch.float32, tf32=False)
    assert meter.live() == {}  # too early
    others = [(0.0, GpuReading(power_w=power, utilization_pct=50, memory_bytes=1)) for power in powers]
    monkeypatch.setattr(speed, "gather", lambda own, world: others)
    assert meter.end(8, 1.0).gpu_power_w == total


def test_flops() -> None:
    model = build_model("resnet50", 1000)
    # 4.09 G multiply-adds forward (He et al., 2016), twice that backward, less the first layer's input gradient.
    assert flops_per_image(model, (3, 224, 224)) == pytest.approx(3 * 2 * 4.09e9, rel=0.02)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc."))
    assert flops_per_image(model, (3, 224, 224)) == pytest.approx(2 * 4.09e9, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, True, 989.4),
        ("NVIDIA H200", torch.float32, False, 66.9),
        ("NVIDIA L40", torch.float16, True, 181),
        ("Tesla T4", torch.bfloat16, True, None),
        ("NVIDIA A1000", torch.float16, True, None),
    ],
)
def test_peaks(gpu: str, dtype: torch.dtype, tf32: bool, peak: float | None) -> None:
    assert peak_tflops(gpu, dtype, tf32=tf32) == peak
