"""One of several training processes that `launching` has started: what it is told, and how it tells how it ended.

`python -m components.train.ranks FOLDER`, by torchrun alone.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from components.common.contracts.errors import EXIT_FAILURE, EXIT_PREEMPTED, EngineryError, Preempted
from components.common.contracts.manifests import write_atomically
from components.common.process.disk import explain
from components.common.process.lifetime import end_with_parent
from components.common.process.steplog import QuietLog, StepLog
from components.train.config import TrainConfig

LINE_PREFIX = "@enginery-rank-0 "
_PROGRESS_S = 0.1  # between two lines on progress


class Task(BaseModel):
    """What all processes are told, in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
    dataset: Path
    output: Path

    def write(self, folder: Path) -> None:
        """For processes that are going to start."""
        write_atomically(folder / "task.json", self.model_dump_json().encode())

    @classmethod
    def read(cls, folder: Path) -> "Task":
        """What `write` has written."""
        return cls.model_validate_json((folder / "task.json").read_bytes())


class RankEnd(BaseModel):
    """How a process ended, in a file of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float  # seconds since 1970: the first failure is the cause of the others
    outcome: str = ""  # of a success
    message: str = ""  # of a failure
    exit_code: int = 0
    kind: Literal["done", "told", "preempted", "unknown"] = "done"  # told: an error that was raised to be read

    def write(self, folder: Path, rank: int) -> None:
        """Leave it for `launching`."""
        write_atomically(folder / f"rank-{rank}.json", self.model_dump_json().encode())

    @classmethod
    def read_all(cls, folder: Path, number: int) -> "dict[int, RankEnd]":
        """Of all ranks that could still say how they ended."""
        paths = {rank: folder / f"rank-{rank}.json" for rank in range(number)}
        return {rank: cls.model_validate_json(path.read_bytes()) for rank, path in paths.items() if path.exists()}


class ForwardingLog(StepLog):
    """Rank 0's voice: everything goes as a line to the process that started it, which has the real log."""

    def __init__(self) -> None:
        super().__init__("train")
        self._told_progress = 0.0

    def note(self, text: str) -> None:
        """See StepLog."""
        self._forward("note", text=text)

    def warning(self, text: str) -> None:
        """See StepLog."""
        self._forward("warning", text=text)

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """See StepLog."""
        now = time.monotonic()
        if now - self._told_progress >= _PROGRESS_S or done == total:
            self._told_progress = now
            self._forward("progress", phase=phase, done=done, total=total, unit=unit, detail=detail)

    def metrics(self, values: dict[str, float], *, position: int = 0) -> None:
        """See StepLog."""
        self._forward("metrics", values=values, position=position)

    def params(self, values: dict[str, Any]) -> None:
        """See StepLog."""
        self._forward("params", values=values)

    def dataset(self, name: str, digest: str, num_images: int, context: Literal["training", "validation"]) -> None:
        """See StepLog."""
        self._forward("dataset", name=name, digest=digest, num_images=num_images, context=context)

    def _forward(self, method: str, **arguments: Any) -> None:
        print(LINE_PREFIX + json.dumps([method, arguments]), flush=True)


def main(folder: Path) -> int:
    """Train as one of several. Returns the exit code."""
    end_with_parent()
    rank = int(os.environ["RANK"])
    task = Task.read(folder)
    try:
        from components.train.run import train

        # StopRequest puts this back once training is over: a signal must not keep the process from saying how it ended.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        log = ForwardingLog() if rank == 0 else QuietLog("train")
        outcome = train(task.config, log, dataset=task.dataset, output=task.output)
        end = RankEnd(time=time.time(), outcome=outcome)
    except Preempted as stop:
        end = RankEnd(time=time.time(), message=str(stop), exit_code=EXIT_PREEMPTED, kind="preempted")
    except EngineryError as error:
        end = RankEnd(time=time.time(), message=str(error), exit_code=error.exit_code, kind="told")
    except Exception as error:  # the boundary of the process; the launcher tells it in one line
        traceback.print_exc()
        end = _unknown(error, rank, task.output)
    end.write(folder, rank)
    return end.exit_code


def _unknown(error: Exception, rank: int, output: Path) -> RankEnd:
    explained = explain(error, output)
    if explained is not None:
        return RankEnd(time=time.time(), message=str(explained), exit_code=explained.exit_code, kind="told")
    message = f"rank {rank}: {type(error).__name__}: {error}"
    return RankEnd(time=time.time(), message=message, exit_code=EXIT_FAILURE, kind="unknown")


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what libraries would tidy up may wait for processes that are gone
