"""merge: parts of a data set -> the data set."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import (
    MANIFEST,
    UNFINISHED,
    Artifact,
    DatasetPartManifest,
    load,
    prepare_directory,
)
from components.common.process.steplog import StepLog
from components.merge.config import MergeConfig
from components.preprocess.assembling import Packed, assemble
from components.preprocess.config import PreprocessConfig
from components.preprocess.data_issues import SPLITS
from components.preprocess.packing import JOINING
from components.preprocess.run import RECORDS, outcome, report
from components.preprocess.shards import read_record


def run(config: MergeConfig, log: StepLog, *, output: Path) -> str:
    """Join all parts. See the package's docstring."""
    parts = [load(Path(path), DatasetPartManifest, verify=(".json", ".jsonl", ".idx")) for path in config.parts]
    _check_complete(parts)
    unfinished = _open_output(output)
    packed = []
    for part in parts:
        for name in part.manifest.shards:
            record = read_record(part.path / RECORDS, name)
            if record is None:
                raise EngineryError(f"{part.path} has no record of its shard {name}; pack the part again")
            packed.append(Packed(record=record, records=part.path / RECORDS))
            for file in record.files:
                _link(part.file(file), output / file)
            log.progress("joining", len(packed), sum(len(one.manifest.shards) for one in parts), unit="shards")
    packed.sort(key=lambda one: (SPLITS.index(one.record.name.split("-")[0]), one.record.name))
    artifact, problems = assemble(_settings(config, parts[0]), parts[0].manifest.classes, packed, output)
    shutil.rmtree(unfinished)
    report(artifact, problems, log)
    return outcome(artifact)


def _open_output(output: Path) -> Path:
    """Make the output directory, or empty it of what a join left that was killed or refused what it found.

    Raises:
        UserError: it holds something else.
    """
    unfinished = output / UNFINISHED
    if (unfinished / JOINING).exists() and not (output / MANIFEST).exists():
        for entry in output.iterdir():
            if entry != unfinished:
                entry.unlink()  # links to the parts' files, or copies
    else:
        prepare_directory(output)
        unfinished.mkdir()
        (unfinished / JOINING).touch()
    return unfinished


def _settings(config: MergeConfig, part: Artifact[DatasetPartManifest]) -> PreprocessConfig:
    """Those of the parts, but for what was decided anew for the whole."""
    decided: dict[str, Any] = {"part": ""}
    if config.on_leak != "as_packed":
        decided["on_leak"] = config.on_leak
    if config.max_bad_fraction >= 0:
        decided["max_bad_fraction"] = config.max_bad_fraction
    return PreprocessConfig.model_validate({**part.manifest.config, **decided})


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
