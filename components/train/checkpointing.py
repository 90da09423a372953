"""Checkpoints of an unfinished training: the state they hold, their files, and which training they belong to."""

import base64
import json
import os
import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia import dali
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from components.common.contracts.digests import canonical_json, digest_file, digest_json
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import MANIFEST, Artifact, DatasetManifest, write_atomically
from components.common.data.places import local_path
from components.common.process.partial_output import earlier_outputs, hold
from components.common.process.steplog import StepLog
from components.train.config import NON_FINGERPRINTED_SETTINGS, TrainConfig
from components.train.distributed import World

WEIGHTS = "weights.safetensors"
_STATE = "state"  # key in the header
_TEMPORARY = ".writing"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The content of a checkpoint. Tensors are named GROUP/NAME, such as model/conv1.weight."""

    num_steps: int  # optimizer steps that were done
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of one group, by their names in it."""
        return {key.partition("/")[2]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}

    def of_rank(self, world: World) -> dict[str, Any] | None:
        """Return what differs from process to process: loader, loss_sum, random. None if others than these wrote it."""
        ranks = self.state["ranks"]
        return ranks[world.rank] if len(ranks) == world.world_size else None

    def loader_states(self) -> list[dict[str, Any]]:
        """Return the states of the loaders of all parts in which the split is read, in their order."""
        found: dict[int, dict[str, Any]] = {}
        for rank in self.state["ranks"]:
            states = rank["loader"] if isinstance(rank["loader"], list) else [rank["loader"]]
            found |= {state["identity"]["shard_id"]: state for state in states}
        return [found[number] for number in sorted(found)]


class CheckpointFolder:
    """The checkpoints of one training: the last few, and that of its best epoch."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        """`folder` is made when the first checkpoint is written."""
        self.folder = folder
        self._keep_last = keep_last

    def save(self, saved: Saved, *, best_num_steps: int | None) -> None:
        """Write a checkpoint and remove those that are no longer needed.

        Args:
            saved: what to write; its state must fit into JSON.
            best_num_steps: of the checkpoint to keep though it is old, if any.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(self._path(saved.num_steps), saved.tensors, {_STATE: json.dumps(saved.state)})
        steps = self.steps()
        for num_steps in {*steps} - {*steps[-self._keep_last :], best_num_steps}:
            self._path(num_steps).unlink()

    def tidy(self) -> None:
        """Remove what a process was writing when it was killed. Nobody else may be at work here."""
        for path in (*self.folder.glob(f"{_TEMPORARY}-*"), *self.folder.glob(".tmp*")):  # these are of safetensors
            path.unlink()

    def steps(self) -> list[int]:
        """Return the number of steps done of each checkpoint, in their order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.safetensors"))

    def newest(self, log: StepLog) -> bytes | None:
        """Return the content of the newest checkpoint that can be read; None where there is none.

        Raises:
            EngineryError: there are some, and none can be read.
        """
        steps = self.steps()
        for num_steps in reversed(steps):
            path = self._path(num_steps)
            try:
                content = path.read_bytes()
                parse(content)
                return content
            except (OSError, EngineryError) as error:
                log.warning(f"the checkpoint {path} can't be read ({error}); trying the one before")
        if steps:
            raise EngineryError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be read; see whether its disk is sound, "
                "or remove the folder to start again",
                code="checkpoints-damaged",
            )
        return None

    def at(self, num_steps: int) -> Saved:
        """Return the checkpoint after that many steps."""
        return parse(self._path(num_steps).read_bytes())

    def _path(self, num_steps: int) -> Path:
        return self.folder / f"step-{num_steps:08d}.safetensors"


def parse(content: bytes) -> Saved:
    """Return the checkpoint in a file's content.

    Raises:
        EngineryError: it is not one, or damaged.
    """
    try:
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        state = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_STATE])
        return Saved(num_steps=int(state["num_steps"]), state=state, tensors=tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        text = f"it is no checkpoint or damaged: {type(error).__name__}: {error}"
        raise EngineryError(text, code="checkpoint-damaged") from None


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors so that the file is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f"{_TEMPORARY}-{path.name}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors puts a file in its place that is its owner's alone
        given, seen = {}, set()
        for name, tensor in tensors.items():
            given[name] = tensor.detach().cpu().contiguous()
            if (place := given[name].untyped_storage().data_ptr()) in seen:  # a module in two places, say
                given[name] = given[name].clone()
            seen.add(place)
        save_file(given, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the names in it, too
    finally:
        os.close(folder)


def split_tensors(group: str, entries: dict[int, dict[str, Any]], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what is no tensor of numbered entries; the rest goes to `tensors`, under the group's name."""
    others: dict[str, dict[str, Any]] = {}
    for index, values in entries.items():
        others[str(index)] = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{group}/{index}/{name}": value for name, value in found.items()}
    return others


def _join_tensors(others: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Undo `split_tensors`."""
    entries = {int(index): dict(values) for index, values in others.items()}
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        entries.setdefault(int(index), {})[name] = tensor
    return entries


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    """Give an optimizer its state back."""
    state = _join_tensors(saved.state["optimizer"]["numbers"], saved.group("optimizer"))
    groups = _join_tensors(saved.state["optimizer"]["groups"], saved.group("group"))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        for name, value in values.items():
            # A file has no memory layout; other strides than the parameter's would take other, slower kernels.
            if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                values[name] = torch.empty_like(parameters[index], dtype=value.dtype).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": [groups[index] for index in sorted(groups)]})


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the four generators that a training process may draw from."""
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {**generator, "state": {**generator["state"], "key": generator["state"]["key"].tolist()}},
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else "",
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Undo `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    generator = state["numpy"]
    keys = np.array(generator["state"]["key"], np.uint32)
    np.random.set_state({**generator, "state": {**generator["state"], "key": keys}})
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


_IDENTITY = "training.json"


def _digest_of_weights(config: TrainConfig) -> str:
    """Return the digest of the file that a training on this machine begins with; empty where there is none."""
    path = local_path(config.pretrained)
    file = path / WEIGHTS if (path / MANIFEST).is_file() else path
    return digest_file(file) if config.pretrained and file.is_file() else ""


def choose_folder(
    config: TrainConfig, data: Artifact[DatasetManifest], world: World, partial_output: Path, log: StepLog
) -> CheckpointFolder:
    """Return the folder of this training's checkpoints, new or found. Warns when those of another one stay there."""
    identity = {  # what decides the result: another value of any of these is another training
        **config.model_dump(mode="json", exclude=set(NON_FINGERPRINTED_SETTINGS)),
        "dataset": data.digest,
        "device": world.device.type,
        "dali": dali.__version__,  # of another version, the reader's place in the data is not to be understood
    }
    if digest := _digest_of_weights(config):
        identity["pretrained_digest"] = digest
    # Whoever resumes does not need the file that it began with; and settings that are newer had their defaults.
    begun = sorted(partial_output.glob(f"*/{_IDENTITY}"), key=lambda path: path.stat().st_mtime, reverse=True)
    read = (json.loads(path.read_bytes()) for path in begun)
    newer = TrainConfig().model_dump(mode="json", exclude=set(NON_FINGERPRINTED_SETTINGS))
    identity = next((found for found in read if {**newer, **found, **identity} == {**newer, **found}), identity)
    folder = partial_output / digest_json(identity).removeprefix("sha256:")[:12]
    checkpoints = CheckpointFolder(folder, config.keep_last)
    if not checkpoints.steps():  # a killed run may have left them in an output of its own
        for output in earlier_outputs():
            with suppress(OSError), hold(output) as theirs:  # or: held, gone, of another training, on another disk
                (theirs / folder.name).replace(folder)
                break
    checkpoints.tidy()
    others = [other for other in partial_output.glob(f"*/{_IDENTITY}") if other.parent != folder]
    if not checkpoints.steps() and others:
        newest = max(others, key=lambda path: path.stat().st_mtime)
        found = newer | json.loads(newest.read_bytes())
        differing = [name for name in sorted({*found, *identity}) if found.get(name) != identity.get(name)]
        text = ", ".join(f"{name} {found.get(name)} instead of {identity.get(name)}" for name in differing)
        log.warning(
            f"starting again: the unfinished training in {partial_output.parent} is of {text}. It stays there until "
            f"one has finished; to resume it, stop this one and set what differs as it was"
        )
    folder.mkdir(exist_ok=True)
    write_atomically(folder / _IDENTITY, canonical_json(identity))
    return checkpoints
