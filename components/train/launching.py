"""Several training processes on this machine: torchrun starts them, this process speaks for them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import psutil
import torch

from components.common.contracts.errors import EngineryError, Preempted, UserError
from components.common.process.lifetime import PARENT_VARIABLE, end_children
from components.common.process.step import DEBUG_VARIABLE
from components.common.process.steplog import StepLog
from components.train.arithmetic import threads_per_process
from components.train.config import TrainConfig
from components.train.ranks import LINE_PREFIX, RankEnd, Task

_ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 12  # of what the processes wrote, when none could say what happened
# What gloo and NCCL's watchdog say when a process did not come to a meeting in time.
_WAITED = r"Timed out waiting \d+ ?ms|collective operation timeout"


def num_processes(config: TrainConfig) -> int:
    """How many processes to train with on this machine.

    Raises:
        UserError: more than there are GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and config.num_processes > num_gpus:
        raise UserError(
            f"train.num_processes is {config.num_processes}, and torch sees {num_gpus} GPUs; set it to {num_gpus} or "
            "less, or to 0 for one per GPU"
        )
    return config.num_processes or max(1, num_gpus)


def check_alone() -> None:
    """See that this process was not meant to be one of several machines.

    Raises:
        UserError: Kubeflow Trainer says that there are more, and torchrun, which reads that, was left out.
    """
    number = os.environ.get("PET_NNODES", "1")
    if number not in ("", "1", "1:1"):
        raise UserError(
            f"this is one of {number} nodes (PET_NNODES), and each would train for itself: start the step by torchrun, "
            "which reads the PET_ variables, as in: python -m torch.distributed.run -m components.train ..."
        )


def launch(config: TrainConfig, log: StepLog, number: int, *, dataset: Path, output: Path) -> str:
    """Train in `number` processes. Returns the outcome.

    Raises:
        EngineryError: what the first process that failed said, or that one was killed.
        Preempted: SIGTERM came; it was passed on, and they have saved.
    """
    with tempfile.TemporaryDirectory(prefix="enginery-train-") as name:
        folder = Path(name)
        Task(config=config, dataset=dataset.absolute(), output=output.absolute()).write(folder)
        with (folder / "stderr.txt").open("w+b") as errors:
            group = _Group.start(number, folder, errors)
            try:
                with group.passing_on_sigterm():
                    group.listen(log)
                    group.process.wait()
            finally:
                end_children()
            ends = RankEnd.read_all(folder, number)
            if os.environ.get(DEBUG_VARIABLE) == "1" or not ends:
                errors.seek(0)
                sys.stderr.write(errors.read().decode(errors="replace"))
            if len(ends) == number and all(end.kind == "done" for end in ends.values()):
                return ends[0].outcome  # whatever became of torchrun
            errors.seek(0)
            raise _failure(ends, number, asked=group.was_asked, written=errors.read().decode(errors="replace"))


@dataclass
class _Group:
    """torchrun and the processes that it has started."""

    process: subprocess.Popen[bytes]
    was_asked: bool = False  # by SIGTERM, to stop

    @classmethod
    def start(cls, number: int, folder: Path, errors: IO[bytes]) -> "_Group":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={number}", "--max-restarts=0", "-m", "components.train.ranks", str(folder)]
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
        """Tell the training processes what this one is told. They save and leave; torchrun would end them half-way."""

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
            if text.startswith(LINE_PREFIX):
                method, arguments = json.loads(text.removeprefix(LINE_PREFIX))
                getattr(log, method)(**arguments)
            else:
                sys.stderr.write(text)


def _failure(ends: dict[int, RankEnd], number: int, *, asked: bool, written: str) -> BaseException:
    """What one message says of several processes that ended, most of them because another one did."""
    failed = sorted((end for end in ends.values() if end.message), key=lambda end: end.time)
    silent = [rank for rank in range(number) if rank not in ends]
    stopped = [end for end in failed if end.kind == "preempted"]
    if told := [end for end in failed if end.kind == "told"]:
        return _as_error(told[0])
    if asked:
        return Preempted(stopped[0].message if stopped else "stopped by SIGTERM before the first step")
    if any(re.search(_WAITED, text, re.IGNORECASE) for text in (written, *(end.message for end in failed))):
        return EngineryError(_of_stuck(silent, number, written))
    if silent:
        return EngineryError(_of_killed(silent, number, written))
    # torchrun ends the others by SIGTERM when one has failed, so only the first one's end says anything.
    return Preempted(failed[0].message) if failed[0].kind == "preempted" else _as_error(failed[0])


def _of_stuck(silent: list[int], number: int, written: str) -> str:
    which = f"rank {', '.join(map(str, silent))} of them" if 0 < len(silent) < number else "one of them"
    return (
        f"the {number} training processes were given up: they waited for each other longer than "
        f"train.collective_timeout_s, because {which} is stuck. See whether its GPU or its storage hangs (nvidia-smi, "
        f"dmesg), or raise the setting if a step may take that long.{_last_words(written)}"
    )


def _of_killed(silent: list[int], number: int, written: str) -> str:
    """Of ranks that could not say how they ended. The first to go is the cause, where torchrun knows which that was."""
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
    """What the processes wrote, without torchrun's report of them."""
    own = re.split(r"^[EW]\d{4} .*torch/distributed/elastic|^Root Cause", written, maxsplit=1, flags=re.MULTILINE)[0]
    tail = "\n".join(own.strip().splitlines()[-_TAIL_LINES:])
    return f" What they wrote last:\n{tail}" if tail else ""


def _as_error(end: RankEnd) -> EngineryError:
    error = EngineryError(end.message)
    error.exit_code = end.exit_code
    return error
