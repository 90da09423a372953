"""Take over the shards that killed runs have finished in outputs of their own."""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from components.common.artifacts import MANIFEST, UNFINISHED
from components.preprocess.config import EARLIER_VARIABLE
from components.preprocess.shards import read_record, record_files

PLAN = "plan.json"  # in the folder of records: digest of what is packed
LOCK = "lock"  # in the folder of records, held by the process at work there


def move_finished(records: Path, digest: str) -> int:
    """Move what killed runs have finished of this plan into the output of `records`. Returns how many shards that is.

    One that another process holds, or that is of another plan, stays as it is. What can't be moved is packed again.
    """
    num_shards = 0
    for output in json.loads(os.environ.get(EARLIER_VARIABLE) or "[]"):
        with suppress(OSError):  # it is held, or gone: `enginery gc` or another run was faster
            num_shards += _move_from(Path(output), records, digest)
    return num_shards


def _move_from(output: Path, records: Path, digest: str) -> int:
    theirs = output / UNFINISHED
    num_shards = 0
    with (theirs / LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (theirs / PLAN).read_bytes() != digest.encode() or (output / MANIFEST).exists():
            return 0
        for file in sorted(theirs.glob("*-*.json")):
            record = read_record(theirs, file.stem)
            if record is None or read_record(records, file.stem) is not None:
                continue
            for name in record.files:
                (output / name).replace(records.parent / name)
            for own in reversed(record_files(theirs, file.stem)):  # the record last: it says that all the rest is there
                own.replace(records / own.name)
            num_shards += 1
        for half in (*output.glob("*.tar"), *output.glob("*.idx")):  # which nobody will finish
            half.unlink()
        shutil.rmtree(theirs)
    return num_shards
