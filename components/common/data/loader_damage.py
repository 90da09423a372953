"""Find the damaged sample where DALI only says that something failed, and bound calls that may wait for ever."""

import hashlib
import json
import queue
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, DatasetManifest


def image_places(index: Path) -> Iterator[tuple[str, int, int]]:
    """Key, offset and size of each image of a shard, from its DALI index: "jpg 512 778 000000000.jpg cls ..."."""
    with index.open(encoding="utf-8") as lines:
        next(lines)  # version and number of samples
        for line in lines:
            parts = line.split()
            for extension, offset, size, name in zip(*[iter(parts)] * 4, strict=True):
                if extension != "cls":
                    yield name.removesuffix(f".{extension}"), int(offset), int(size)


Result = TypeVar("Result")


class Watchdog:
    """Runs calls, one after the other, in a thread of its own, and waits for each no longer than `limit_s` seconds.

    A call that is stuck stays so: nothing can end a thread that hangs in a library. Its thread is a daemon, so the
    process can still end, and holds what the call belongs to, so that no destructor waits for it either.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stuck = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises.

        Raises:
            TimeoutError: this call, or one before it, did not come back in time.
        """
        future: Future[Result] = Future()
        if self._stuck:
            raise TimeoutError
        self._calls.put((future, function))
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            self._stuck = not future.done()  # or the function raised it
            raise


def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        _run(*call)
        del call  # it would keep a batch alive while this thread waits for the next call


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # whatever it is, the caller raises it
        future.set_exception(error)


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
