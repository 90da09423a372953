"""merge: parts of a dataset -> the dataset."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, DatasetPartManifest, load
from components.common.dataset.assembling import Packed, assemble, report
from components.common.dataset.data_issues import SPLITS
from components.common.dataset.settings import DatasetSettings
from components.common.dataset.shards import RECORDS, open_output, read_record
from components.common.process.dataset_volume import find_dataset
from components.common.process.steplog import StepLog
from components.merge.config import MergeConfig


def run(config: MergeConfig, log: StepLog, *, output: Path) -> str:
    """Join all parts. See the package's docstring."""
    parts = [
        load(find_dataset(Path(path)), DatasetPartManifest, verify=(".json", ".jsonl", ".idx")) for path in config.parts
    ]
    _check_complete(parts)
    with open_output(output, joining=True) as records:
        for entry in list(output.iterdir()):
            if entry != records:
                entry.unlink()  # links to the parts' files, or copies, of a join that was killed or refused
        packed = []
        num_shards = sum(len(part.manifest.shards) for part in parts)
        for one in (one for part in parts for one in _linked(part, output)):
            packed.append(one)
            log.progress("joining", len(packed), num_shards, unit="shards")
        packed.sort(key=lambda one: (SPLITS.index(one.record.name.split("-")[0]), one.record.name))
        artifact, issues = assemble(_settings(config, parts[0]), parts[0].manifest.classes, packed, output)
        shutil.rmtree(records)
    return report(artifact, issues, log)


def _linked(part: Artifact[DatasetPartManifest], output: Path) -> Iterator[Packed]:
    """Put a part's shards into the output, as links where the file system has them."""
    for name in part.manifest.shards:
        record = read_record(part.path / RECORDS, name)
        if record is None or record.name != name or not record.files.keys() <= part.manifest.files.keys():
            raise EngineryError(
                f"{part.path} has no valid record of its shard {name}; pack the part again", code="no-shard-record"
            )
        for file in record.files:
            if (output / file).exists():
                raise EngineryError(
                    f"{part.path} holds the shard {name} of another part; pack the part again", code="shard-twice"
                )
            try:
                os.link(part.file(file), output / file)
            except OSError:  # another file system, or one without links
                shutil.copyfile(part.file(file), output / file)
        yield Packed(record=record, records=part.path / RECORDS)


def _settings(config: MergeConfig, part: Artifact[DatasetPartManifest]) -> DatasetSettings:
    """Those of the parts, but for what was decided again for the whole."""
    decided: dict[str, Any] = {"part": ""}
    if config.on_leak != "as_packed":
        decided["on_leak"] = config.on_leak
    if config.near_duplicates != "as_packed":
        decided["near_duplicates"] = config.near_duplicates
    if config.max_bad_fraction >= 0:
        decided["max_bad_fraction"] = config.max_bad_fraction
    return DatasetSettings.model_validate({**part.manifest.config, **decided})


def _check_complete(parts: Sequence[Artifact[DatasetPartManifest]]) -> None:
    """See that these are all parts of one dataset, each once.

    Raises:
        UserError: they are not.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.manifest.plan_digest != first.manifest.plan_digest:
            raise UserError(
                f"{part.path} and {first.path} are parts of different datasets: other images, seed or settings; pack "
                "all parts from the same data with the same settings",
                code="foreign-part",
                setting="merge.parts",
            )
    num_parts = int(first.manifest.part.split("/")[1])
    wanted = {f"{number}/{num_parts}" for number in range(1, num_parts + 1)}
    given = [part.manifest.part for part in parts]
    if twice := sorted({part for part in given if given.count(part) > 1}):
        raise UserError(
            f"the part {twice[0]} is given twice; name each part once", code="part-twice", setting="merge.parts"
        )
    if missing := sorted(wanted - set(given)):
        message = f"of {num_parts} parts {', '.join(missing[:5])} is missing; pack it with --part {missing[0]}"
        raise UserError(message, code="missing-part", setting="merge.parts")
    if foreign := sorted(set(given) - wanted):
        message = f"{foreign[0]} is no part of {num_parts} parts; pack all parts with the same number of parts"
        raise UserError(message, code="foreign-part", setting="merge.parts")
