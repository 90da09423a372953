"""Checkpoints of an unfinished training: when they count, and what happens when one can't be read."""

import fcntl
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from components.common.contracts.digests import canonical_json, digest_json
from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.common.contracts.errors import Preempted
from components.common.contracts.manifests import PARTIAL_OUTPUT, CheckpointManifest, load
from components.common.data.loader import Batch, Loader
from components.common.runtimes.architectures import build_model
from components.train import training
from components.train.checkpointing import WEIGHTS, CheckpointFolder, Saved, parse, write_safetensors
from components.train.train_job import VOLUME_VARIABLE
from components.train.trainer import MLLOG, Trainer
from components.train.training import _outcome
from tests.unit.refusals import refuses

from .conftest import Log, Train

Go = Callable[..., Log]


@pytest.fixture
def go(train: Train) -> Go:
    """`go(output, sigterm_after, **settings)`: train there until then, or until `stops_after` by another signal."""

    def start(output: str = "out", sigterm_after: int = 0, stops_after: int = 0, **changed: Any) -> Log:
        log = Log(sigterm_after)
        if last := sigterm_after or stops_after:
            with pytest.raises(Preempted, match=f"after step {last} of"):
                train(log, output, **changed)
        else:
            train(log, output, **changed)
        return log

    return start


def weights(path: Path) -> str:
    return load(path, CheckpointManifest).manifest.files[WEIGHTS].digest


def resumed(log: Log) -> int:
    """The step after which a run began; 0 for the first."""
    notes = [text for text in log.said if text.startswith("resuming after step ")]
    return int(notes[0].split()[3]) if notes else 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_every_optimizer_resumes_to_the_same_bits(go: Go, tmp_path: Path, optimizer: str) -> None:
    """SqueezeNet has dropout, so random numbers count, too. Left in an epoch, and between its end and the next."""
    rate = {"optimizer": optimizer, "learning_rate": 0.1 if optimizer == "sgd" else 0.01}  # at 0.4 it learns nothing
    rate["epochs"] = 2
    go("whole", **rate)
    for step in (4, 6):
        go("broken", sigterm_after=step, **rate)
    assert resumed(go("broken", **rate)) == 6
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_a_try_in_another_pod_resumes_from_the_volume(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that a pod held is gone with it; another KFP run of the same settings begins at the start."""
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setenv(VOLUME_VARIABLE, str(volume))
    monkeypatch.setenv(KFP_RUN_VARIABLE, "run-1")
    go("first-pod", sigterm_after=8, epochs=2)
    monkeypatch.setenv(KFP_RUN_VARIABLE, "run-2")
    assert resumed(go("other-run", epochs=2)) == 0
    monkeypatch.setenv(KFP_RUN_VARIABLE, "run-1")
    assert resumed(go("second-pod", epochs=2)) == 8
    assert weights(tmp_path / "second-pod") == weights(tmp_path / "other-run")
    assert list((volume / "enginery/runs").iterdir()) == []  # the checkpoints went with success


def test_sigterm_during_validation(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the rest of it: the checkpoint is of the epoch's last step, and validation begins again."""
    go("whole", epochs=2)
    deliver, num_validations = Loader.__iter__, 0

    def interrupted(loader: Loader) -> Iterator[Batch]:
        nonlocal num_validations
        for batch in deliver(loader):
            yield batch
            if loader._split == "val":
                num_validations += 1
                if num_validations == 1:  # of two batches
                    os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loader, "__iter__", interrupted)
    go("broken", stops_after=6, epochs=2)
    assert num_validations == 1
    monkeypatch.undo()
    assert resumed(go("broken", epochs=2)) == 6
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_other_settings_start_again_and_take_nothing_away(go: Go, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(build_model("squeezenet1_1", 10).state_dict(), file)
    go(sigterm_after=2, pretrained=str(file))
    torch.save(build_model("squeezenet1_1", 10).state_dict(), file)
    assert "is of pretrained_digest sha256:" in go(sigterm_after=4, pretrained=str(file)).said[0]
    file.unlink()  # whoever resumes does not need it
    log = go(sigterm_after=2, learning_rate=0.2)
    assert "is of learning_rate 0.4 instead of 0.2, pretrained" in log.said[0]
    # Settings that don't change the result may change. The last one by its name up to version 0.1.
    assert resumed(go(sigterm_after=5, pretrained=str(file), keep_last=5, publish="best", stuck_after_s=60)) == 4
    for file in (tmp_path / "out" / PARTIAL_OUTPUT).glob("*/training.json"):  # of a version without this setting
        identity = json.loads(file.read_bytes())
        del identity["decode_on"]
        file.write_bytes(canonical_json(identity))
        file.parent.rename(file.parent.with_name(digest_json(identity).removeprefix("sha256:")[:12]))
    log = go(sigterm_after=4, learning_rate=0.2, decode_on="cpu")
    assert "is of decode_on gpu instead of cpu" in log.said[0]
    assert resumed(go(learning_rate=0.2)) == 2
    assert not (tmp_path / "out" / PARTIAL_OUTPUT).exists()


class Killer(Log):
    """Kills rank 1 of those that train, once, after a step."""

    def __init__(self, kills_after: int) -> None:
        super().__init__()
        self.kills_after = kills_after

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        if not self.kills_after or done < self.kills_after:
            return
        for process in psutil.Process().children(recursive=True):
            if process.environ().get("RANK") == "1":
                process.kill()
                self.kills_after = 0


LEARNS: dict[str, Any] = {"architecture": "timm/resnet10t", "learning_rate": 0.1, "epochs": 5}


@pytest.mark.slow
def test_another_number_of_processes_resumes_within_an_epoch(go: Go, train: Train) -> None:
    """And where one of them is killed, they start again by themselves. Quick: test_resharding and test_launching."""
    go(sigterm_after=8, **LEARNS)
    killer = Killer(14)
    history = train(killer, num_processes=2, **LEARNS).manifest.history
    notes = [text for text in killer.said if "checkpoint" in text or text.startswith("resuming")]
    assert notes[0] == "resuming after step 8 of 30, where an earlier run stopped, with 2 processes instead of 1"
    assert re.search(r"rank 1 .* killed by SIGKILL(.|\n)*All start again .* \(restart 1 of 3\)", notes[1])
    assert re.fullmatch(r"resuming after step (8|12|18|24) of 30, where an earlier run stopped.*", notes[2])
    losses = [epoch.train_loss for epoch in history]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
    seconds = [epoch.elapsed_s or 0.0 for epoch in history]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_the_same_number_of_processes_resumes_to_the_same_bits(go: Go, train: Train) -> None:
    found = []
    for name, log in (("killed", Killer(14)), ("other", Log())):
        go(name, sigterm_after=6, **LEARNS)
        found.append(train(log, name, num_processes=2, **LEARNS).manifest)
    assert found[0].files[WEIGHTS] == found[1].files[WEIGHTS]
    whole = train(Log(), "whole", **LEARNS).manifest
    assert found[0].history[0].train_loss == whole.history[0].train_loss
    assert found[0].history[1].train_loss != whole.history[1].train_loss
    with refuses("process-killed"):
        train(Killer(1), "never", num_processes=2, max_restarts=0, **LEARNS)


def test_damaged_and_partial_checkpoints(go: Go, tmp_path: Path) -> None:
    """A damaged one gives way to the one before. What a killed process was writing would fill the disk in time."""
    go(sigterm_after=7)
    *_, before, newest = sorted((tmp_path / "out" / PARTIAL_OUTPUT).glob("*/step-*.safetensors"))
    assert (before.stem, newest.stem) == ("step-00000006", "step-00000007")
    newest.write_bytes(newest.read_bytes()[:-100])
    partial = [newest.with_name(name) for name in (".writing-step-00000008.safetensors", ".tmpofcjeM")]
    for path in partial:
        path.write_bytes(b"partial")
    newest.with_name(".ipynb_checkpoints").mkdir()  # as Jupyter makes where someone looks
    log = go(sigterm_after=8)
    assert "step-00000007.safetensors can't be read" in log.said[0]
    assert resumed(log) == 6
    assert not any(path.exists() for path in partial)
    for path in (tmp_path / "out" / PARTIAL_OUTPUT).glob("*/step-*.safetensors"):
        path.write_bytes(b"nothing")
    with refuses("checkpoints-damaged"):
        go()


@pytest.mark.parametrize("content", [b"", b"nothing", bytes(100)])
def test_what_is_no_checkpoint(content: bytes) -> None:
    with refuses("checkpoint-damaged"):
        parse(content)


def _kill_at(owner: Any, name: str, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until this is called."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            go(epochs=1)


def test_killed_between_sealing_and_tidying(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_at(shutil, "rmtree", go, monkeypatch)
    sealed = weights(tmp_path / "out")
    for _ in range(2):  # killed behind tidying it starts again, too: by torchrun, or in another pod
        assert resumed(go(epochs=1)) == 0
        assert weights(tmp_path / "out") == sealed
        assert not (tmp_path / "out" / PARTIAL_OUTPUT).exists()
    with refuses("output-not-empty"):
        go(epochs=2)


def test_a_training_is_not_done_with_weights_that_are_others_since(go: Go, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(build_model("squeezenet1_1", 10).state_dict(), file)
    for _ in range(2):
        go(epochs=1, pretrained=str(file))
    os.utime(file)
    with refuses("output-not-empty"):
        go(epochs=1, pretrained=str(file))


@pytest.mark.parametrize(("owner", "name", "step"), [(Trainer, "save", 0), (training, "_publish", 6)])
def test_killed_before_a_checkpoint_and_behind_it(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: int
) -> None:
    _kill_at(owner, name, go, monkeypatch)
    assert resumed(go(epochs=1)) == step
    keys = re.findall('"key": "([^"]*)"', (tmp_path / "out" / MLLOG).read_text())
    assert len(keys) == len(set(keys))


def test_best_and_last_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2, 3, 4, 5):
        saved = Saved(num_steps=step, state={"num_steps": step}, tensors={"model/w": torch.full((2,), float(step))})
        folder.save(saved, best_num_steps=min(step, 2))
    assert folder.steps() == [2, 4, 5]
    assert folder.at(2).group("model")["w"].tolist() == [2, 2]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_best_epoch_can_be_the_result(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for the best at first; the epoch between the others is it: the first one's loss is infinite."""
    top1, weights = [90.0, 60.0, 10.0], {}

    def evaluated(trainer: Trainer) -> tuple[float, float]:
        epoch = len(trainer.history)
        weights[epoch] = {name: value.clone() for name, value in trainer.published().state_dict().items()}
        return 1.0 if epoch else math.inf, top1[epoch]

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    settings = {"architecture": "shufflenet_v2_x0_5", "checkpoint_epochs": 3}
    go(sigterm_after=14, **settings)
    go(**settings, publish="best")
    checkpoint = load(tmp_path / "out", CheckpointManifest)
    assert [epoch.val_score_pct for epoch in checkpoint.manifest.history] == top1
    assert checkpoint.manifest.metrics["val_score_pct"] == 60.0
    assert checkpoint.manifest.metrics["elapsed_s"] == checkpoint.manifest.history[-1].elapsed_s
    assert "at 60.00 % top-1 after epoch 2," in _outcome(checkpoint, 1)
    published = load_file(checkpoint.file(WEIGHTS))
    assert all(torch.equal(value, weights[1][name]) for name, value in published.items())


def test_a_tensor_of_two_names_is_written_twice(tmp_path: Path) -> None:
    """Of a module in two places, as CoaT has them."""
    weight = torch.arange(3.0)
    write_safetensors(tmp_path / WEIGHTS, {"one": weight, "other": weight})
    assert load_file(tmp_path / WEIGHTS).keys() == {"one", "other"}


def test_weights_are_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_safetensors(tmp_path / WEIGHTS, {"w": torch.zeros(2)})
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_epochs_without_validation(train: Train) -> None:
    history = train(validation_epochs=2, epochs=3).manifest.history
    assert [epoch.val_score_pct is None for epoch in history] == [True, False, False]


def test_two_at_once_and_foreign_files(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.process.partial_output._PATIENCE_S", 0.2)
    folder = tmp_path / "out" / PARTIAL_OUTPUT
    folder.mkdir(parents=True)
    (tmp_path / "out" / ".partial.1.tmp").write_text("what the other one writes")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refuses("output-in-use"):
            go()
    assert (tmp_path / "out" / ".partial.1.tmp").exists()
    (tmp_path / "out" / "train-000000.tar").write_bytes(b"theirs")
    with refuses("output-occupied"):
        go()
