"""merge: parts of a data set -> the data set."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from components.common.artifacts import Artifact, DatasetPartManifest, load, prepare_directory
from components.common.errors import EngineryError, UserError
from components.common.steplog import StepLog
from components.merge.config import MergeConfig
from components.preprocess.assembling import Packed, assemble
from components.preprocess.config import PreprocessConfig
from components.preprocess.findings import SPLITS
from components.preprocess.run import RECORDS, outcome, report
from components.preprocess.shards import read_record


def run(config: MergeConfig, log: StepLog, *, output: Path) -> str:
    """Join all parts. See the package's docstring."""
    parts = [load(Path(path), DatasetPartManifest, verify=(".json", ".jsonl", ".idx")) for path in config.parts]
    _check_complete(parts)
    prepare_directory(output)
    packed = []
    for part in parts:
        for name in part.manifest.shards:
            record = read_record(part.path / RECORDS, name)
            if record is None:
                raise EngineryError(f"{part.path} has no record of its shard {name}; pack the part again")
            packed.append(Packed(record=record, records=part.path / RECORDS))
            for file in record.files:
                _link(part.file(file), output / file)
            log.progress("joining", len(packed), sum(len(one.manifest.shards) for one in parts), "shards")
    packed.sort(key=lambda one: (SPLITS.index(one.record.name.split("-")[0]), one.record.name))
    settings = PreprocessConfig.model_validate({**parts[0].manifest.config, "part": ""})
    artifact, problems = assemble(settings, parts[0].manifest.classes, packed, output)
    report(artifact, problems, log)
    return outcome(artifact)


def _check_complete(parts: Sequence[Artifact[DatasetPartManifest]]) -> None:
    """Whether these are all parts of one data set, each once.

    Raises:
        UserError: they are not.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.manifest.plan_digest != first.manifest.plan_digest:
            raise UserError(
                f"{part.path} and {first.path} are parts of different data sets: other images, seed or settings; pack "
                "all parts from the same data with the same settings"
            )
    num_parts = int(first.manifest.part.split("/")[1])
    wanted = {f"{number}/{num_parts}" for number in range(1, num_parts + 1)}
    given = [part.manifest.part for part in parts]
    if twice := sorted({part for part in given if given.count(part) > 1}):
        raise UserError(f"the part {twice[0]} is given twice; name each part once")
    if missing := sorted(wanted - set(given)):
        raise UserError(f"of {num_parts} parts {', '.join(missing[:5])} is missing; pack it with --part {missing[0]}")
    if foreign := sorted(set(given) - wanted):
        raise UserError(f"{foreign[0]} is no part of {num_parts} parts; pack all parts with the same number of parts")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
