"""What is kept of an unfinished training, when it counts, and what happens when it can't be read."""

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.common.contracts.errors import EngineryError, Preempted, UserError
from components.common.contracts.manifests import UNFINISHED, Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.data.loader import Batch, Loader
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.train.checkpointing import WEIGHTS, CheckpointFolder, Saved, choose_folder, parse
from components.train.config import TrainConfig
from components.train.distributed import World
from components.train.run import run
from components.train.trainer import Trainer


class Log(StepLog):
    """Keeps what it is told, and sends SIGTERM after a step."""

    def __init__(self, sigterm_after: int = 0) -> None:
        super().__init__("train")
        self.said: list[str] = []
        self.sigterm_after = sigterm_after

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        if done == self.sigterm_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, kind: str, text: str) -> None:
        self.said.append(text)


Go = Callable[..., Log]


@pytest.fixture
def go(tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path) -> Go:
    """`go(place, sigterm_after, **settings)`: train there until then, or until `stops_after` by another signal."""

    def train(place: str = "out", sigterm_after: int = 0, stops_after: int = 0, **changed: Any) -> Log:
        log = Log(sigterm_after)
        config = resolve(TrainConfig, "train", settings, {"architecture": "squeezenet1_1"}, changed)
        if last := sigterm_after or stops_after:
            with pytest.raises(Preempted, match=f"after step {last} of"):
                run(config, log, dataset=tiny_dataset.path, output=tmp_path / place)
        else:
            run(config, log, dataset=tiny_dataset.path, output=tmp_path / place)
        return log

    return train


def weights(path: Path) -> str:
    return load(path, CheckpointManifest).manifest.files[WEIGHTS].digest


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_every_optimizer_goes_on_as_if_nothing_had_been(go: Go, tmp_path: Path, optimizer: str) -> None:
    """SqueezeNet has dropout, so random numbers count, too. Left in an epoch, and between its end and the next."""
    rate = {"optimizer": optimizer, "learning_rate": 0.4 if optimizer == "sgd" else 0.01}
    go("whole", **rate)
    for step in (4, 6):
        go("broken", sigterm_after=step, **rate)
    assert "going on after step 6 of 18, where an earlier run stopped" in go("broken", **rate).said
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_sigterm_during_validation(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the rest of it: the checkpoint is of the epoch's last step, and validation begins anew."""
    go("whole", global_batch_size=8)
    deliver, num_validations = Loader.__iter__, 0

    def interrupted(loader: Loader) -> Iterator[Batch]:
        nonlocal num_validations
        for batch in deliver(loader):
            yield batch
            if loader._split == "val":
                num_validations += 1
                if num_validations == 5:  # the second batch of three of the second epoch
                    os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loader, "__iter__", interrupted)
    go("broken", stops_after=24, global_batch_size=8)
    assert num_validations == 5
    monkeypatch.undo()
    assert "going on after step 24 of 36, where an earlier run stopped" in go("broken", global_batch_size=8).said
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_other_settings_start_anew_and_take_nothing_away(go: Go, tmp_path: Path) -> None:
    go(sigterm_after=4)
    log = go(sigterm_after=2, learning_rate=0.2)
    assert "is of learning_rate 0.4 instead of 0.2. It stays there" in log.said[0]
    assert "going on after step 4 of 18, where an earlier run stopped" in go(sigterm_after=5).said
    assert "going on after step 2 of 18, where an earlier run stopped" in go(learning_rate=0.2).said
    assert not (tmp_path / "out" / UNFINISHED).exists()


def test_another_number_of_processes_is_told_how_to_go_on(
    tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path
) -> None:
    config, log = resolve(TrainConfig, "train", settings), Log()
    for number, device in ((4, "cuda"), (2, "cuda"), (1, "cpu")):
        time.sleep(0.01)  # the newest is compared with
        choose_folder(config, tiny_dataset, World(world_size=number, device=torch.device(device)), tmp_path, log)
    first, second = log.said
    assert "is of world_size 4 instead of 2. It stays there until one has finished; to go on with it, stop" in first
    assert "train on 4 GPUs again, by --set train.num_processes=4 (python -m components.train: --num-proc" in first
    assert "is of device cuda instead of cpu, world_size 2 instead of 1." in second


def test_pretrained_weights_may_be_gone_when_it_goes_on(go: Go, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(build_model("squeezenet1_1", 10).state_dict(), file)
    go(sigterm_after=4, pretrained=str(file))
    file.unlink()
    assert "going on after step 4 of 18, where an earlier run stopped" in go(sigterm_after=5, pretrained=str(file)).said


def test_settings_that_do_not_change_the_result_may_change(go: Go) -> None:
    go(sigterm_after=4)
    assert any("going on after step 4" in text for text in go(keep_last=5, stuck_after_s=60, publish="best").said)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(go: Go, tmp_path: Path) -> None:
    go(sigterm_after=7)
    *_, before, newest = sorted((tmp_path / "out" / UNFINISHED).glob("*/step-*.safetensors"))
    assert (before.stem, newest.stem) == ("step-00000006", "step-00000007")
    newest.write_bytes(newest.read_bytes()[:-100])
    log = go(sigterm_after=8)
    assert "step-00000007.safetensors can't be read" in log.said[0]
    assert "going on after step 6 of 18, where an earlier run stopped" in log.said
    for path in (tmp_path / "out" / UNFINISHED).glob("*/step-*.safetensors"):
        path.write_bytes(b"nothing")
    with pytest.raises(EngineryError, match=r"none of the \d checkpoints in .* can be read; see whether"):
        go()


def test_half_a_checkpoint_does_not_stay(go: Go, tmp_path: Path) -> None:
    """Of a process that was killed while it wrote, time and again: they would fill the disk."""
    go(sigterm_after=2)
    (folder,) = (path for path in (tmp_path / "out" / UNFINISHED).iterdir() if path.is_dir())
    (folder / ".writing-step-00000003.safetensors").write_bytes(b"half")
    assert "going on after step 2 of 18, where an earlier run stopped" in go(sigterm_after=4).said
    assert sorted(path.name for path in folder.glob("*safetensors")) == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]


def test_killed_between_sealing_and_tidying(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        go(epochs=1)
    monkeypatch.undo()
    sealed = weights(tmp_path / "out")
    go(epochs=1)
    assert weights(tmp_path / "out") == sealed
    assert not (tmp_path / "out" / UNFINISHED).exists()


def test_best_and_last_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2, 3, 4, 5):
        saved = Saved(num_steps=step, state={"num_steps": step}, tensors={"model/w": torch.full((2,), float(step))})
        folder.save(saved, best_num_steps=min(step, 2))
    assert folder.steps() == [2, 4, 5]
    assert folder.at(2).group("model")["w"].tolist() == [2, 2]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_best_epoch_can_be_the_result(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for the best at first; the epoch between the others is it."""
    top1, weights = [20.0, 60.0, 10.0], {}

    def evaluated(trainer: Trainer) -> tuple[float, float]:
        epoch = len(trainer.history)
        weights[epoch] = {name: value.clone() for name, value in trainer.published().state_dict().items()}
        return 1.0, top1[epoch]

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    settings = {"architecture": "shufflenet_v2_x0_5", "checkpoint_epochs": 3}
    go(sigterm_after=14, **settings)
    go(**settings, publish="best")
    checkpoint = load(tmp_path / "out", CheckpointManifest)
    assert [epoch.val_top1_pct for epoch in checkpoint.manifest.history] == top1
    assert checkpoint.manifest.metrics["val_top1_pct"] == 60.0
    published = load_file(checkpoint.file(WEIGHTS))
    assert all(torch.equal(value, weights[1][name]) for name, value in published.items())


def test_epochs_without_validation(go: Go, tmp_path: Path) -> None:
    go(validation_epochs=2, epochs=3)
    history = load(tmp_path / "out", CheckpointManifest).manifest.history
    assert [epoch.val_top1_pct is None for epoch in history] == [True, False, False]


def test_what_is_no_checkpoint() -> None:
    for content in (b"", b"nothing", bytes(100)):
        with pytest.raises(EngineryError, match="it is no checkpoint or damaged"):
            parse(content)


def test_two_at_once_and_foreign_files(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.process.partial_output._PATIENCE_S", 0.2)
    folder = tmp_path / "out" / UNFINISHED
    folder.mkdir(parents=True)
    (tmp_path / "out" / ".half.1.tmp").write_text("what the other one writes")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process writes .* at this moment; wait for it"):
            go()
    assert (tmp_path / "out" / ".half.1.tmp").exists()
    (tmp_path / "out" / "train-000000.tar").write_bytes(b"theirs")
    with pytest.raises(UserError, match=r"holds train-000000\.tar, which this step did not write; name another"):
        go()


def test_nothing_is_left_where_nothing_began(go: Go, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model 'resnet51'"):
        go(architecture="resnet51")
    assert not list((tmp_path / "out").glob("*/*/step-*"))
