"""Which sample of a data set is damaged, where DALI only says that something could not be read or decoded."""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

from components.common.artifacts import Artifact, DatasetManifest
from components.common.digests import digest_file
from components.common.errors import EngineryError

_RENEW = "Make the data set anew with `python -m components.preprocess` (in a pipeline: enginery run ... --no-reuse)"
IMAGE_EXTENSIONS = ("jpg", "png", "webp", "bmp", "tif")
# What an error says when memory ran out: torch, CUDA; DALI (dali/core/cuda_error.h), twice; cuDNN and cuBLAS; torch on
# a CPU.
NO_MEMORY = ("out of memory", "Can't allocate", "CUDA allocation failed", "ALLOC_FAILED", "can't allocate memory")


@contextmanager
def explained(dataset: Artifact[DatasetManifest], split: str) -> Iterator[None]:
    """Turn what DALI says of a damaged shard, which names neither shard nor image, into one message.

    Raises:
        EngineryError: a sample could not be read or decoded. Other errors, such as no GPU memory, pass.
    """
    try:
        yield
    except (RuntimeError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):  # a damaged index put odd bytes into DALI's own message
            reason = "what it says of it is no text"
        else:
            text = str(error)
            of_data = "readers.webdataset" in text or "decoders.image" in text
            if not of_data or any(sign in text for sign in NO_MEMORY):
                raise
            reason = " ".join(text.rpartition("encountered:")[2].partition("Current pipeline")[0].split())
        damaged = first_damaged_sample(dataset, split)
        if damaged:
            raise EngineryError(f"{damaged}. {_RENEW} (DALI: {reason})") from error
        raise EngineryError(
            f"DALI can't decode the {split} split of {dataset.path}, though every sample is as preprocess packed it: "
            f"{reason}. `enginery doctor` shows whether DALI works here"
        ) from error


def check_indexes(dataset: Artifact[DatasetManifest], split: str) -> None:
    """See that the shards' indexes are as preprocess wrote them: DALI believes them, and crashes on some damaged ones.

    Raises:
        EngineryError: one is not.
    """
    for shard in dataset.manifest.splits[split].shards:  # type: ignore[index]
        if problem := _index_problem(dataset, shard):
            raise EngineryError(f"{problem}. {_RENEW}")


def _index_problem(dataset: Artifact[DatasetManifest], shard: str) -> str:
    index = dataset.file(shard).with_suffix(".idx")
    try:
        found = digest_file(index)
    except FileNotFoundError:
        return f"the index {index} is missing"
    if found != dataset.manifest.files[index.name].digest:
        return f"the index {index} is damaged: it is not what preprocess wrote"
    return ""


def first_damaged_sample(dataset: Artifact[DatasetManifest], split: str) -> str:
    """The first sample of a split that is not what preprocess packed, as a sentence; empty when all are."""
    with dataset.file(f"{split}.jsonl").open(encoding="utf-8") as lines:
        entries = {entry["key"]: entry for entry in map(json.loads, lines)}
    for shard in dataset.manifest.splits[split].shards:  # type: ignore[index]
        file = dataset.file(shard)
        if problem := _index_problem(dataset, shard):
            return problem
        try:
            with tarfile.open(file) as archive:
                for member in archive:
                    key, _, extension = member.name.partition(".")
                    content = archive.extractfile(member)
                    if extension not in IMAGE_EXTENSIONS or content is None:
                        continue
                    entry = entries.get(key, {"path": "unknown", "sha256": ""})
                    if hashlib.sha256(content.read()).hexdigest() != entry["sha256"]:
                        return (
                            f"the shard {file} is damaged: sample {member.name}, made from {entry['path']}, "
                            "is not what preprocess packed"
                        )
        except (OSError, tarfile.TarError) as error:
            return f"the shard {file} is damaged: {error}"
    return ""
