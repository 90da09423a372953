"""Several training processes on this machine: torchrun starts them, this process speaks for them.

torchrun runs `python -m components.train.launching FOLDER`, which is one of the processes: the folder holds what it
is to do, and takes how it ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

import psutil
import torch

from components.common.contracts.errors import EXIT_FAILURE, EXIT_PREEMPTED, EngineryError, Preempted, UserError
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import Record
from components.common.process.disk import explain
from components.common.process.lifetime import PARENT_VARIABLE, end_children, end_with_parent
from components.common.process.step import DEBUG_VARIABLE
from components.common.process.steplog import QuietLog, StepLog
from components.train.arithmetic import threads_per_process
from components.train.config import TrainConfig
from components.train.training import train

_ROOT = Path(__file__).resolve().parents[2]
_LINE_PREFIX = "@enginery-rank-0 "
_PROGRESS_S = 0.1  # between two lines on progress
_TAIL_LINES = 12  # of what the processes wrote, when none could say what happened
# What gloo and NCCL's watchdog say when a process did not come to a meeting in time.
WAITED = r"Timed out waiting \d+ ?ms|collective operation timeout"
STUCK_FIX = (
    "see whether its GPU or its storage hangs (nvidia-smi, dmesg), or raise train.collective_timeout_s if a step may "
    "take that long"
)


class LaunchSpec(Record):
    """The work of all processes, in a file."""

    config: TrainConfig
    dataset: Path
    output: Path


class RankEnd(Record):
    """The end of a process, in a file of its own."""

    time: float  # seconds since 1970: the first failure is the cause of the others
    outcome: str = ""  # of a success
    message: str = ""  # of a failure
    exit_code: int = 0
    code: str = ""  # of an EngineryError, as is the setting
    setting: str = ""
    kind: Literal["done", "reported", "preempted", "unknown"] = "done"  # reported: an error that was raised to be read

    def write(self, folder: Path, rank: int) -> None:
        """Leave it for the process that launched this one."""
        write_atomically(folder / f"rank-{rank}.json", self.model_dump_json().encode())

    @classmethod
    def read_all(cls, folder: Path, number: int) -> "dict[int, RankEnd]":
        """Return the ends of all ranks that could still say how they ended."""
        paths = {rank: folder / f"rank-{rank}.json" for rank in range(number)}
        return {rank: cls.model_validate_json(path.read_bytes()) for rank, path in paths.items() if path.exists()}

    def as_error(self) -> EngineryError:
        """Return the error that the process raised."""
        error = EngineryError(self.message, code=self.code, setting=self.setting)
        error.exit_code = self.exit_code
        return error


def num_processes(config: TrainConfig) -> int:
    """Return how many processes to train with on this machine.

    Raises:
        UserError: more than there are GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and config.num_processes > num_gpus:
        raise UserError(
            f"train.num_processes is {config.num_processes}, and torch sees {num_gpus} GPUs; set it to {num_gpus} or "
            "less, or to 0 for one per GPU",
            code="too-few-gpus",
            setting="train.num_processes",
        )
    return config.num_processes or max(1, num_gpus)


def check_alone() -> None:
    """Check that this process was not meant to be one of several machines.

    Raises:
        UserError: Kubeflow Trainer says that there are more, and torchrun, which reads that, was left out.
    """
    number = os.environ.get("PET_NNODES", "1")
    if number not in ("", "1", "1:1"):
        raise UserError(
            f"this is one of {number} nodes (PET_NNODES), and each would train for itself: start the step by torchrun, "
            "which reads the PET_ variables, as in: python -m torch.distributed.run -m components.train ...",
            code="no-torchrun",
        )


def launch(config: TrainConfig, log: StepLog, number: int, *, dataset: Path, output: Path) -> str:
    """Train in `number` processes, which start again where one of them was killed. Returns the outcome.

    Raises:
        EngineryError: what the first process that failed said, or that one was killed once too often.
        Preempted: SIGTERM came; it was passed on, and they have saved.
    """
    for restart in range(1, config.max_restarts + 1):
        try:
            return _launch(config, log, number, dataset, output)
        except EngineryError as error:
            if error.code != "process-killed":
                raise
            log.warning(
                f"{error}\nAll start again from the newest checkpoint (restart {restart} of {config.max_restarts})"
            )
    return _launch(config, log, number, dataset, output)


def _launch(config: TrainConfig, log: StepLog, number: int, dataset: Path, output: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="enginery-train-") as name:
        folder = Path(name)
        task = LaunchSpec(config=config, dataset=dataset.absolute(), output=output.absolute())
        write_atomically(folder / "task.json", task.model_dump_json().encode())
        with (folder / "stderr.txt").open("w+b") as errors:
            group = _Group.start(number, folder, errors)
            try:
                with group.passing_on_sigterm():
                    group.listen(log)
                    group.process.wait()
            finally:
                end_children()
            errors.seek(0)
            written = errors.read().decode(errors="replace")
        ends = RankEnd.read_all(folder, number)
        if os.environ.get(DEBUG_VARIABLE) == "1" or not ends:
            sys.stderr.write(written)
        if len(ends) == number and all(end.kind == "done" for end in ends.values()):
            return ends[0].outcome  # whatever became of torchrun
        raise _failure(ends, number, asked=group.was_asked, written=written)


@dataclass
class _Group:
    """torchrun and the processes that it has started."""

    process: subprocess.Popen[bytes]
    was_asked: bool = False  # by SIGTERM, to stop

    @classmethod
    def start(cls, number: int, folder: Path, errors: IO[bytes]) -> "_Group":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={number}", "--max-restarts=0", "-m", "components.train.launching", str(folder)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_process(number)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # All are on this machine: its own interface always works, and its host name may not.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, "lo")
        # A session of its own, so that Ctrl-C reaches this process alone, which then ends them.
        return cls(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        )

    @contextmanager
    def passing_on_sigterm(self) -> Iterator[None]:
        """Send the training processes the SIGTERM that comes. They save and leave; torchrun would end them half-way."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.was_asked = True
            with suppress(psutil.NoSuchProcess):  # it is over
                ranks = psutil.Process(self.process.pid).children()
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
                if not ranks:
                    self.process.terminate()

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def listen(self, log: StepLog) -> None:
        """Repeat what rank 0 says; lines of libraries go where this process's own go."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(_LINE_PREFIX):
                method, arguments, options = json.loads(text.removeprefix(_LINE_PREFIX))
                getattr(log, method)(*arguments, **options)
            else:
                sys.stderr.write(text)


def _failure(ends: dict[int, RankEnd], number: int, *, asked: bool, written: str) -> BaseException:
    """Return one error for several processes that ended, most of them because another one did."""
    failed = sorted((end for end in ends.values() if end.message), key=lambda end: end.time)
    silent = [rank for rank in range(number) if rank not in ends]
    stopped = [end for end in failed if end.kind == "preempted"]
    if reported := [end for end in failed if end.kind == "reported"]:
        return reported[0].as_error()
    if asked:
        return Preempted(stopped[0].message if stopped else "stopped by SIGTERM before the first step")
    if any(re.search(WAITED, text, re.IGNORECASE) for text in (written, *(end.message for end in failed))):
        which = f"rank {', '.join(map(str, silent))} of them" if 0 < len(silent) < number else "one of them"
        return EngineryError(
            f"the {number} training processes were given up: they waited for each other longer than "
            f"train.collective_timeout_s, because {which} is stuck; {STUCK_FIX}.{_last_words(written)}",
            code="process-stuck",
            setting="train.collective_timeout_s",
        )
    if silent:
        return EngineryError(_of_killed(silent, number, written), code="process-killed")
    # torchrun ends the others by SIGTERM when one has failed, so only the first one's end says anything.
    return Preempted(failed[0].message) if failed[0].kind == "preempted" else failed[0].as_error()


def _of_killed(silent: list[int], number: int, written: str) -> str:
    """Name the ranks that could not say how they ended. The first to go is the cause, where torchrun knows it."""
    report = re.findall(r"rank\s*:\s*(\d+) .*?exitcode\s*:\s*(-?\d+)", written, re.DOTALL)
    codes = {int(rank): int(code) for rank, code in report}  # the last one that torchrun lists was the first to go
    first = next((rank for rank in reversed(codes) if rank in silent), None)
    which = ", ".join(map(str, silent)) if first is None or len(silent) == 1 else f"{first}, the first to go,"
    code = -codes.get(silent[0] if first is None else first, -signal.SIGKILL)
    by = f" by {signal.Signals(code).name}" if code in set(signal.Signals) else ""
    why = ", most often because memory ran out: try a smaller train.per_gpu_batch_size"
    return (
        f"of {number} training processes, rank {which} ended without a word, so it was killed{by}"
        f"{why if code == signal.SIGKILL else ''}.{_last_words(written)}"
    )


def _last_words(written: str) -> str:
    """Return what the processes wrote, without torchrun's report of them."""
    own = re.split(r"^[EW]\d{4} .*torch/distributed/elastic|^Root Cause", written, maxsplit=1, flags=re.MULTILINE)[0]
    tail = "\n".join(own.strip().splitlines()[-_TAIL_LINES:])
    return f" What they wrote last:\n{tail}" if tail else ""


class _ForwardingLog(StepLog):
    """The log of rank 0: everything goes as a line to the process that started it, which has the real log."""

    def __init__(self) -> None:
        super().__init__("train")
        self._forwarded_progress = 0.0

    def _say(self, kind: str, text: str) -> None:
        self._forward(kind, text=text)

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        """See StepLog."""
        now = time.monotonic()
        if now - self._forwarded_progress >= _PROGRESS_S or done == total:
            self._forwarded_progress = now
            self._forward("progress", phase=phase, done=done, total=total, unit=unit, detail=detail)

    def _track(self, call: str, *arguments: Any, **options: Any) -> None:
        self._forward("_track", call, *arguments, **options)

    def _forward(self, method: str, *arguments: Any, **options: Any) -> None:
        print(_LINE_PREFIX + json.dumps([method, arguments, options]), flush=True)


def main(folder: Path) -> int:
    """Train as one of several. Returns the exit code."""
    end_with_parent()
    rank = int(os.environ["RANK"])
    task = LaunchSpec.model_validate_json((folder / "task.json").read_bytes())
    try:
        # StopRequest puts this back once training is over: a signal must not keep the process from saying how it ended.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        log = _ForwardingLog() if rank == 0 else QuietLog("train")
        end = RankEnd(time=time.time(), outcome=train(task.config, log, dataset=task.dataset, output=task.output))
    except Preempted as stop:
        end = RankEnd(time=time.time(), message=str(stop), exit_code=EXIT_PREEMPTED, kind="preempted")
    except Exception as error:  # the boundary of the process; the launcher reports it in one line
        known = error if isinstance(error, EngineryError) else explain(error, task.output)
        if known is not error:
            traceback.print_exc()
        if known is None:
            message = f"rank {rank}: {type(error).__name__}: {error}"
            end = RankEnd(time=time.time(), message=message, exit_code=EXIT_FAILURE, code="unexpected", kind="unknown")
        else:
            end = RankEnd(
                time=time.time(),
                message=str(known),
                exit_code=known.exit_code,
                code=known.code,
                setting=known.setting,
                kind="reported",
            )
    end.write(folder, rank)
    return end.exit_code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what libraries would tidy up may wait for processes that are gone
