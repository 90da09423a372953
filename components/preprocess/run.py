"""preprocess: labelled images -> WebDataset shards; pairs of sentences -> tab-separated values."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import DatasetPartManifest, seal
from components.common.dataset.assembling import Packed, assemble, check_rejected, join_rejected, report
from components.common.dataset.shards import RECORDS, open_output, record_files
from components.common.process.steplog import StepLog
from components.common.tasks import TASKS
from components.preprocess.config import PreprocessConfig
from components.preprocess.packing import pack, plan_digest, plan_tasks, resume, stratified
from components.preprocess.sources import check_data_folder, find_samples, is_uri, local_path
from components.preprocess.sources.folders import is_visible
from components.preprocess.sources.samples import VAL_NAMES


def run(config: PreprocessConfig, log: StepLog, *, output: Path) -> str:
    """Scan, decode, split and pack. See the package's docstring."""
    check_data_folder(config.data, config.task)
    _check_apart(config.data, output)
    if TASKS[config.task].of_text:
        from components.preprocess import translation  # SentencePiece is not for images

        return translation.run(config, log, output=output)
    with open_output(output) as records:
        scratch = records / "unpacked"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        source = find_samples(
            config.data,
            val_fraction=config.val_fraction,
            seed=config.seed,
            class_names_file=config.class_names_file,
            scratch=scratch,
            task=config.task,
        )
        if source.unused:
            log.note(
                f"images that are not used: {len(source.unused):,}, such as {source.unused[0]}. They are in neither "
                "split, as in folders and lists named test or eval, or have no annotations"
            )
        source.splits["train"] = stratified(source.splits["train"], config.seed)
        tasks = plan_tasks(config, source, output)
        digest = plan_digest(config, source)
        resume(records, f"{digest} {config.part}", log)
        packed = [Packed(record=record, records=records) for record in pack(config, tasks, log)]
        shutil.rmtree(scratch)
        if config.part:
            said = _close_part(config, source.classes, packed, digest, output)
        else:
            said = report(*assemble(config, source.classes, packed, output), log)
        shutil.rmtree(records)
    return said


def _check_apart(data: str, output: Path) -> None:
    """See that what is written is not taken for images.

    Raises:
        UserError: the output lies in the data folder.
    """
    folder, written = local_path(data).resolve(), output.resolve()
    if is_uri(data) or not written.is_relative_to(folder):
        return
    inside = written.relative_to(folder).as_posix()
    # What is hidden, such as .enginery, is not seen, nor what lies beside train/ and val/.
    has_splits = (folder / "train").is_dir() and any((folder / name).is_dir() for name in VAL_NAMES)
    if is_visible(inside) and (not has_splits or inside.split("/")[0] in (".", "train", *VAL_NAMES)):
        raise UserError(
            f"the output {output} lies in the data folder {local_path(data)}, where it would be taken for a class; "
            "name one outside of it, and remove this one",
            code="output-in-data",
            setting="output",
        )


def _close_part(
    config: PreprocessConfig, classes: tuple[str, ...], packed: Sequence[Packed], digest: str, output: Path
) -> str:
    """Complete a part: its records go with the shards, since `merge` needs them."""
    kept = output / RECORDS
    kept.mkdir(exist_ok=True)
    for one in packed:
        for file in record_files(one.records, one.record.name):
            shutil.copyfile(file, kept / file.name)
    num_rejected = sum(one.record.num_rejected for one in packed)
    if config.on_bad == "fail":
        join_rejected(packed, output)
        check_rejected(config, packed, output)
    seal(
        output,
        DatasetPartManifest,
        inputs={},
        config=config,
        known={name: entry for one in packed for name, entry in one.record.files.items()},
        classes=classes,
        part=config.part,
        plan_digest=digest,
        shards=tuple(one.record.name for one in packed),
    )
    num_images = sum(one.record.num_images for one in packed)
    return f"part {config.part}: {num_images:,} images, {num_rejected} rejected (shards: {len(packed)})"
