"""Checkpoints of an unfinished training: one safetensors file each, whose header holds all that is no tensor, as JSON.

Nothing in them is unpickled. A file has its name only once it is whole and on the disk.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from components.common.errors import EngineryError
from components.common.steplog import StepLog

WEIGHTS = "weights.safetensors"
_STATE = "state"  # key in the header
_TEMPORARY = ".writing"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds. Tensors are named GROUP/NAME, such as model/conv1.weight."""

    num_steps: int  # optimizer steps that were done
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one group, by their names in it."""
        return {key.partition("/")[2]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


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
        for num_steps in steps[: -self._keep_last]:
            if num_steps != best_num_steps:
                self._path(num_steps).unlink()

    def tidy(self) -> None:
        """Remove what a process was writing when it was killed. Nobody else may be at work here."""
        for path in self.folder.glob(f"{_TEMPORARY}-*"):
            path.unlink()

    def steps(self) -> list[int]:
        """Of each checkpoint the number of steps done, in their order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.safetensors"))

    def newest(self, log: StepLog) -> bytes | None:
        """The content of the newest checkpoint that can be read; None where there is none.

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
                "or remove the folder to start anew"
            )
        return None

    def at(self, num_steps: int) -> Saved:
        """The checkpoint after that many steps."""
        return parse(self._path(num_steps).read_bytes())

    def _path(self, num_steps: int) -> Path:
        return self.folder / f"step-{num_steps:08d}.safetensors"


def parse(content: bytes) -> Saved:
    """A checkpoint from a file's content.

    Raises:
        EngineryError: it is not one, or damaged.
    """
    try:
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        state = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_STATE])
        return Saved(num_steps=int(state["num_steps"]), state=state, tensors=tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise EngineryError(f"it is no checkpoint or damaged: {type(error).__name__}: {error}") from None


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors so that the file is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f"{_TEMPORARY}-{path.name}")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    """Bring the names in a directory to the disk, too."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
