"""Have a model read by a process of its own, in bounded memory, before a run and before the step reads it.

It may be anybody's file: whatever reading it does to memory or to a library's code, the caller lives on, and need not
import the libraries.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from components.common.contracts.errors import EXIT_FAILURE, EXIT_USER_ERROR, EngineryError, UserError

_ROOT = Path(__file__).resolve().parents[2]
_ROOM_BYTES, _ROOM_TIMES = 1 << 33, 8  # of memory to read a model in, and how often its files may be in it


def check_apart(model: Path, architecture: str, classes: Sequence[str] | None, image_size: int) -> None:
    """Check what `sources.check_model` checks, by these arguments.

    Raises:
        UserError: the model can't be used, or ended the process.
        EngineryError: a file of it is damaged.
    """
    given = json.dumps([str(model), architecture, classes, image_size])
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "components.export.model_check", given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    last, ended = ((text.strip().splitlines() or [""])[-1] for text in (done.stdout, done.stderr))
    if done.returncode in (EXIT_USER_ERROR, EXIT_FAILURE):
        kind = UserError if done.returncode == EXIT_USER_ERROR else EngineryError
        text, code = json.loads(last) if last.startswith("[") else (ended, "model-unusable")
        raise kind(text, code=code, setting="--model")
    if done.returncode:
        raise UserError(
            f"reading the model {model} ended the process that did it ({done.returncode}): the file is damaged, or it "
            "needs more memory than there is. Export it again, or take a machine with more memory",
            code="model-kills-reader",
            setting="--model",
        )


def _limit_memory(model: Path) -> None:
    """Bound this process: a model of a few hundred bytes may compute tensors of any size."""
    files = [file for file in (model, *model.rglob("*")) if file.is_file()]
    room = max(_ROOM_BYTES, _ROOM_TIMES * sum(file.stat().st_size for file in files))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(status["VmData"].split()[0]) * 1024 + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main(given: str) -> None:
    """Check a model by the arguments as JSON; message and code of a refusal go to standard output."""
    from components.export.sources import check_model

    model, architecture, classes, image_size = json.loads(given)
    _limit_memory(Path(model))
    try:
        check_model(Path(model), architecture, classes, image_size)
    except EngineryError as error:
        print(json.dumps([str(error), error.code]))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
