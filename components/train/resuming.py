"""Which training an unfinished output directory belongs to.

Each training has a folder of its own, named by what decides its result. So another one in the same place starts anew
and takes nothing away: with the first settings back, the first one goes on. All go when one has finished.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvidia import dali

from components.common.artifacts import Artifact, DatasetManifest, write_atomically
from components.common.digests import canonical_json, digest_json
from components.common.settings import how_to_set
from components.common.steplog import StepLog
from components.common.unfinished import earlier_outputs, held
from components.train.checkpointing import CheckpointFolder
from components.train.config import NOT_OF_THE_RESULT, TrainConfig
from components.train.distributed import World

_IDENTITY = "training.json"


def choose_folder(
    config: TrainConfig, data: Artifact[DatasetManifest], world: World, unfinished: Path, log: StepLog
) -> CheckpointFolder:
    """The folder of this training's checkpoints, new or found. Says so when those of another one are left alone."""
    identity = identity_of(config, data, world)
    folder = unfinished / digest_json(identity).removeprefix("sha256:")[:12]
    checkpoints = CheckpointFolder(folder, config.keep_last)
    if not checkpoints.steps():
        _fetch(folder)
    checkpoints.tidy()
    others = [other for other in unfinished.glob(f"*/{_IDENTITY}") if other.parent != folder]
    if not checkpoints.steps() and others:
        newest = max(others, key=lambda path: path.stat().st_mtime)
        found = json.loads(newest.read_bytes())
        differing = ", ".join(_differences(found, identity))
        log.warning(
            f"starting anew: the unfinished training in {unfinished.parent} is of {differing}. It stays there until "
            f"one has finished; {_way_back(found, identity)}"
        )
    folder.mkdir(exist_ok=True)
    write_atomically(folder / _IDENTITY, canonical_json(identity))
    return checkpoints


def _fetch(folder: Path) -> None:
    """Move the checkpoints of this same training here, if a killed run has left them in an output of its own."""
    for output in earlier_outputs():
        with suppress(OSError), held(output) as theirs:  # it is held or gone, of another training or on another disk
            (theirs / folder.name).replace(folder)
            return


def identity_of(config: TrainConfig, data: Artifact[DatasetManifest], world: World) -> dict[str, Any]:
    """What decides the result: another value of any of these is another training."""
    settings = config.model_dump(mode="json", exclude=set(NOT_OF_THE_RESULT))
    others = {
        "dataset": data.digest,
        "world_size": world.world_size,
        "device": world.device.type,
        "dali": dali.__version__,  # of another version, the reader's place in the data is not to be understood
    }
    return {**settings, **others}


def _way_back(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What makes a training go on that this one is not."""
    number, here = found.get("world_size"), wanted["world_size"]
    if number == here:
        return "to go on with it, stop this one and set what differs as it was"
    # Each process has its own part of the data, place in it and random numbers.
    what = "GPU" if found.get("device") == "cuda" else "process"
    count = f"one {what}" if number == 1 else f"{number} {what}{'s' if what == 'GPU' else 'es'}"
    return (
        f"to go on with it, stop this one and train on {count} again, by "
        f"{how_to_set('train', 'num_processes', str(number))} or torchrun --nproc-per-node"
    )


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = sorted({*found, *wanted})
    differing = [name for name in names if found.get(name) != wanted.get(name)]
    return [f"{name} {found.get(name)} instead of {wanted.get(name)}" for name in differing]
