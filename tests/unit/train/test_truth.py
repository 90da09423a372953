"""What training says of itself: divergence, memory that is too small, speed, log lines and a profile."""

import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.records import EpochRecord, Split
from components.common.contracts.settings import resolve
from components.common.data.loader import Batch
from components.common.data.loader_damage import explained
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.train import memory, speed
from components.train.arithmetic import pick_compile_mode, pick_precision, speed_up_small_convolutions
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import World
from components.train.divergence import LossWatch
from components.train.memory import explain_out_of_memory, is_out_of_memory
from components.train.mllog import NAME as MLLOG
from components.train.publishing import warn_of_a_guess
from components.train.run import _fit, run
from components.train.speed import TRACE, SpeedMeter, _Own, flops_per_image, peak_tflops
from components.train.trainer import Trainer, build_optimizer

CPU = torch.device("cpu")
Run = Callable[..., Artifact[CheckpointManifest]]


@pytest.fixture
def train(tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path) -> Run:
    """`train(log, **changed)`: the whole step, of a network with few weights."""

    def trained(log: StepLog | None = None, **changed: Any) -> Artifact[CheckpointManifest]:
        config = resolve(TrainConfig, "train", settings, {"architecture": "squeezenet1_1"}, changed)
        run(config, log or StepLog("train"), dataset=tiny_dataset.path, output=tmp_path / "out")
        return load(tmp_path / "out", CheckpointManifest)

    return trained


class Batches:
    """A loader of one random batch, again and again."""

    num_classes = 4

    def __init__(self, num_batches: int, wait_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(8, 3, 16, 16, generator=generator)
        self.batch = Batch(images=images, labels=torch.randint(0, 4, (8,), generator=generator))
        self.num_batches, self.wait_s = num_batches, wait_s

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.num_batches):
            time.sleep(self.wait_s)
            yield self.batch


class NewBatches(Batches):
    """Other images and labels in each step: there is nothing to learn."""

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(2)
        for _ in range(self.num_batches):
            labels = torch.randint(0, 4, (8,), generator=generator)
            yield Batch(images=torch.randn(8, 3, 16, 16, generator=generator), labels=labels)


def small_trainer(batches: Batches, **settings: Any) -> Trainer:
    config = resolve(TrainConfig, "train", {"epochs": 1, "global_batch_size": 8, **settings})
    plan = plan_batches(config, 1, num_train_images=8, num_val_images=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 4))
    loaders: Any = (batches, Batches(1))
    return Trainer(model, config, plan, *loaders, world=World(device=CPU), log=StepLog("train"))


def test_a_loss_that_is_not_finite_ends_the_run_with_step_and_curve(train: Run, tmp_path: Path) -> None:
    with pytest.raises(EngineryError) as caught:
        train(learning_rate=1e12, warmup_fraction=0)
    told = str(caught.value)
    assert "training diverged in epoch 1, at step " in told
    assert " of 18: the loss is " in told
    assert "Before: 2." in told  # ten classes: the first step's loss is that of a guess
    assert "(step 1)" in told
    assert "Lower train.learning_rate, which is 1e+12, to 2.5e+11, or raise train.warmup_fraction, which is 0" in told
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow  # one process above, and an error of two in test_launching.py
def test_two_processes_end_together_and_say_the_same(train: Run) -> None:
    with pytest.raises(EngineryError, match=r"training diverged in epoch 1, at step \d+ of 18: the loss is .*Before: "):
        train(learning_rate=1e12, warmup_fraction=0, num_processes=2)


def test_a_loss_far_above_a_guess_ends_the_run() -> None:
    """At this rate the loss grows, and stays finite for more than 50 steps."""
    trainer = small_trainer(NewBatches(300), learning_rate=5, warmup_fraction=0, momentum=0.5, weight_decay=0)
    with pytest.raises(EngineryError, match=r"the loss of the last 50 steps is .* far above a guess's\. Before: "):
        trainer.fit()
    assert trainer.num_steps_done < 300


def test_a_slow_beginning_is_no_divergence() -> None:
    watch = LossWatch(CPU, num_classes=10)
    for step in range(1, 200):
        watch.put(step, torch.tensor(6.5 if step < 40 else 1e6 if step == 90 else 2.0))  # and a single wild step
    assert watch.trouble is None
    assert watch.mean == pytest.approx(2.0)
    pretrained = LossWatch(CPU, num_classes=10)
    for step in range(1, 200):  # from almost nothing to less than a guess's
        pretrained.put(step, torch.tensor(0.01 if step < 20 else 1.5))
    assert pretrained.trouble is None


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


def test_out_of_memory_names_a_batch_that_fits(train: Run, limited_memory: Callable[[int], None]) -> None:
    limited_memory(5)
    with pytest.raises(UserError) as caught:
        train()
    told = str(caught.value)
    assert "does not hold a batch of 16 images of 32 px (train.per_gpu_batch_size). 4 were tried here and fit" in told
    assert "set train.per_gpu_batch_size to 4. Gradients are then accumulated over 4 batches" in told
    checkpoint = train(per_gpu_batch_size=4, epochs=1)  # what was said is so
    assert checkpoint.manifest.history[0].train_loss > 0


def test_out_of_memory_where_nothing_fits(train: Run, limited_memory: Callable[[int], None]) -> None:
    limited_memory(0)
    with pytest.raises(
        UserError, match=r"a batch of 8 images .* and not one image either\. Set a smaller train\.image"
    ):
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


def test_memory_that_runs_out_before_the_first_step(
    train: Run, limited_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't allocate 805306368 bytes on device 0.")

    monkeypatch.setattr("components.train.run.Loader", full)
    limited_memory(5)
    with pytest.raises(UserError, match=r"does not hold a batch of 16 images .* set train\.per_gpu_batch_size to 4"):
        train()


@pytest.mark.parametrize("said", ["Can't allocate 805306368 bytes on device 0.", "CUDA allocation failed"])
def test_memory_that_runs_out_while_decoding_is_no_damaged_image(
    tiny_dataset: Artifact[DatasetManifest], said: str
) -> None:
    operator = "nvidia.dali.fn.decoders.image_random_crop"
    error = RuntimeError(f"Error in GPU operator `{operator}`,\nencountered:\n\n{said}\n\nCurrent pipeline object is")
    with pytest.raises(RuntimeError) as caught, explained(tiny_dataset, "train"):
        raise error
    assert caught.value is error
    assert is_out_of_memory(error)


def test_gpus_that_emulate_bf16_train_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(TrainConfig, "train", {})
    has_tensor_cores_for_it = False

    def is_supported(including_emulation: bool = True) -> bool:
        return has_tensor_cores_for_it or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert pick_precision(config, torch.device("cuda", 0)) == torch.float16
    has_tensor_cores_for_it = True
    assert pick_precision(config, torch.device("cuda", 0)) == torch.bfloat16


def test_what_compiling_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto, gpu, log = resolve(TrainConfig, "train", {}), torch.device("cuda", 0), StepLog("train")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    assert pick_compile_mode(auto, gpu, log) == ""
    assert "no headers of Python (Debian, Ubuntu: sudo apt-get install python3-dev)" in capsys.readouterr().err
    (tmp_path / "Python.h").touch()
    assert pick_compile_mode(auto, gpu, log) == "default"
    assert pick_compile_mode(auto, CPU, log) == ""
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert pick_compile_mode(auto, gpu, log) == ""
    assert "no C compiler" in capsys.readouterr().err
    tuned = resolve(TrainConfig, "train", {"compile": "tuned"})
    with pytest.raises(UserError, match=r"train\.compile is tuned, and this machine has no C compiler .*set it to off"):
        pick_compile_mode(tuned, gpu, log)
    assert pick_compile_mode(tuned, CPU, log) == "tuned"
    assert pick_compile_mode(resolve(TrainConfig, "train", {"compile": "off"}), gpu, log) == ""


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(EngineryError, match=r"torch\.compile failed on resnet50 \(train\.compile default\): .*to off"):
        _fit(small_trainer(Batches(1), compile="default"), 4)


class Recorder(StepLog):
    def __init__(self) -> None:
        super().__init__("train")
        self.epochs: list[dict[str, float]] = []
        self.details: list[str] = []

    def metrics(self, values: dict[str, float], *, position: int = 0) -> None:
        self.epochs.append(values)

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        self.details.append(detail)


def test_what_an_epoch_reports(train: Run) -> None:
    log = Recorder()
    checkpoint = train(log, epochs=2, profile_steps=2)
    first, second = checkpoint.manifest.history
    assert first.data_wait_pct is not None
    assert 0 < first.data_wait_pct < 100
    model = build_model("squeezenet1_1", 10)
    speed_up_small_convolutions(model)  # as training on a CPU does
    side = flops_per_image(model, 32, 32)
    assert side is not None
    assert second.tflops_per_s == pytest.approx(side * second.train_images_per_s / 1e12)
    assert (second.gpu_power_w, second.peak_pct) == (None, None)  # there is no GPU to ask
    assert set(log.epochs[1]) == {*log.epochs[0]} >= {"data_wait_pct", "tflops_per_s", "train_images_per_s"}
    assert "images/s" in log.details[0]
    assert "loss" in log.details[-1]
    assert "% waiting for data" in log.details[-1]
    _check_mllog(checkpoint.file(MLLOG).read_text())
    _check_profile(checkpoint)


def _check_mllog(text: str) -> None:
    lines = text.splitlines()
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
    assert events[-1]["metadata"] == {"status": "success"}


def _check_profile(checkpoint: Artifact[CheckpointManifest]) -> None:
    with gzip.open(checkpoint.file(TRACE)) as file:
        assert json.load(file)["traceEvents"]
    profile = checkpoint.manifest.profile
    assert profile is not None
    assert profile.num_steps == 2
    assert sum(profile.families_pct.values()) == pytest.approx(100)
    assert any("conv" in operation.name for operation in profile.operations)


def test_a_training_too_short_to_be_profiled_says_so(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(epochs=1, profile_steps=2).manifest.profile is None  # 6 steps
    assert "train.profile_steps: no step was recorded: the first 8" in capsys.readouterr().err


def test_time_that_waits_for_a_slow_loader() -> None:
    trainer = small_trainer(Batches(10, wait_s=0.1))
    _, speed = trainer.train_epoch()
    assert speed.train_images_per_s < 80
    assert speed.data_wait_pct / 100 * (80 / speed.train_images_per_s) >= 0.99  # seconds; each batch waits 0.1


def test_power_is_of_all_gpus_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two spans was too short to tell: the other's power alone would pass for the sum."""
    meter = SpeedMeter(nn.Linear(2, 2), World(device=CPU), torch.float32, tf32=False)
    for powers, told in (((300.0, 350.0), 650.0), ((300.0, None), None)):
        others = [_Own(wait_share=0, utilization_pct=50, memory_bytes=1, power_w=power) for power in powers]
        monkeypatch.setattr(speed, "to_main", lambda own, world, others=others: others)
        assert meter.end(8, 1.0).gpu_power_w == told


def test_sizes_that_no_epoch_sees_are_told(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train(epochs=1, image_sizes=[24, 32, 32])
    told = capsys.readouterr().err
    assert "lists 3 epochs' sizes, and train.epochs is 1: training ends with images of 24 px and never sees 32" in told


def test_epochs_of_earlier_versions_are_read() -> None:
    old = {"train_loss": 1.0, "train_images_per_s": 2.0, "val_loss": None, "val_top1_pct": 3.0}
    assert EpochRecord.model_validate(old).data_wait_pct is None


def test_flops_and_peaks() -> None:
    model = build_model("resnet50", 1000)
    # 4.09 G multiply-adds forward (He et al., 2016), twice that backward, less the first layer's input gradient.
    assert flops_per_image(model, 224, 224) == pytest.approx(3 * 2 * 4.09e9, rel=0.02)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc."))
    assert flops_per_image(model, 224, 224) == pytest.approx(2 * 4.09e9, rel=0.02)
    assert peak_tflops("NVIDIA H200", torch.bfloat16, tf32=True) == 989.4
    assert peak_tflops("NVIDIA H200", torch.float32, tf32=False) == 66.9
    assert peak_tflops("NVIDIA L40", torch.float16, tf32=True) == 181
    assert peak_tflops("Tesla T4", torch.bfloat16, tf32=True) is None
    assert peak_tflops("NVIDIA A1000", torch.float16, tf32=True) is None


def test_a_model_that_learned_nothing_is_told(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train(learning_rate=1e-9, epochs=1)
    told = capsys.readouterr().err
    assert "the model learned nothing that shows: " in told
    assert "Lower train.learning_rate, which is 1e-09, to 2.5e-10, raise train.epochs, which is 1" in told


@pytest.mark.parametrize(
    ("counts", "top1_pct", "warned"),
    [
        ((50, 50), 50.0, True),
        ((50, 50), 59.0, True),  # two deviations of a guess are 10 points
        ((50, 50), 61.0, False),
        ((900, 100), 90.0, True),  # the most frequent class each time
        ((100,), 100.0, False),  # one class can't be missed
    ],
)
def test_what_counts_as_a_guess(
    counts: tuple[int, ...], top1_pct: float, warned: bool, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    split = Split(num_images=sum(counts), shards=(), class_counts=counts, digest="")
    warn_of_a_guess(StepLog("train"), resolve(TrainConfig, "train", settings, {}), split, top1_pct)
    assert ("learned nothing" in capsys.readouterr().err) == warned
