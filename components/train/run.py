"""train: Dataset -> Checkpoint."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.common.contracts.environment import torchrun_rank
from components.common.contracts.errors import EngineryError, shortened
from components.common.contracts.manifests import ALL_FILES, DatasetManifest, load
from components.common.process.steplog import StepLog
from components.train.config import TrainConfig
from components.train.launching import STUCK_FIX, WAITED, check_alone, launch, num_processes
from components.train.nodes import leaving_final_errors, train_in_volume, train_on_nodes
from components.train.train_job import JOB_VARIABLE, VOLUME_VARIABLE, TrainJobRequest
from components.train.training import train

# Of gloo and NCCL, when the process at the other end of a connection has ended.
_GONE = r"Connection (closed|reset)|Broken pipe|remote process exited|ncclRemoteError"


def run(config: TrainConfig, log: StepLog, *, dataset: Path, output: Path) -> str:
    """Train on all GPUs of this machine, or as one process of a torchrun's. See the package's docstring."""
    if torchrun_rank() is not None:
        with leaving_final_errors(), naming_lost_processes():
            return train(config, log, dataset=dataset, output=output)
    check_alone()
    if config.verify:
        load(dataset, DatasetManifest, verify=ALL_FILES)
    if request := os.environ.get(JOB_VARIABLE):
        return train_on_nodes(TrainJobRequest.model_validate_json(request), config, log, dataset, output)

    def alone(output: Path) -> str:
        number = num_processes(config)
        if number > 1:
            return launch(config, log, number, dataset=dataset, output=output)
        return train(config, log, dataset=dataset, output=output)

    if volume := os.environ.get(VOLUME_VARIABLE):
        return train_in_volume(alone, Path(volume), config, dataset, output)
    return alone(output)


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Translate the error of a library when another process of the user's torchrun has ended or is stuck.

    Raises:
        EngineryError: one has or is; its message says what to do.
    """
    try:
        yield
    except RuntimeError as error:
        if re.search(WAITED, str(error), re.IGNORECASE):
            code, what = "process-stuck", f"did not answer in time: {STUCK_FIX}"
        elif re.search(_GONE, str(error)):
            code, what = "process-lost", "has ended, and its own output says why"
        else:
            raise
        raise EngineryError(
            f"another of the {os.environ['WORLD_SIZE']} training processes {what}; training resumes from the newest "
            "checkpoint once all are started again, as torchrun --max-restarts does. The library says: "
            f"{shortened(str(error))}",
            code=code,
        ) from error
