"""Take over the shards that killed runs have finished in outputs of their own."""

import shutil
from contextlib import suppress
from pathlib import Path

from components.common.unfinished import earlier_outputs, held
from components.preprocess.shards import read_record, record_files

PLAN = "plan.json"  # in the folder of records: digest of what is packed


def move_finished(records: Path, digest: str) -> int:
    """Move what killed runs have finished of this plan into the output of `records`. Returns how many shards that is.

    One that another process holds, or that is of another plan, stays as it is. What can't be moved is packed again.
    """
    num_shards = 0
    for output in earlier_outputs():
        with suppress(OSError):  # it is held, or gone: `enginery gc` or another run was faster
            num_shards += _move_from(output, records, digest)
    return num_shards


def _move_from(output: Path, records: Path, digest: str) -> int:
    num_shards = 0
    with held(output) as theirs:
        if (theirs / PLAN).read_bytes() != digest.encode():
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
