"""Samples of live requests for `enginery shadow`, over a Unix socket of this machine.

A repository that was exported with a share above 0 may be sampled, and is while somebody of the server's own account
listens. What answers requests puts samples into a short queue, and never waits: a thread of its own sends them, and
what finds no room is dropped and counted. Nothing is written to disk.
"""

import json
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from pydantic import Field

from components.common.contracts.manifests import Artifact, RepositoryManifest
from components.common.contracts.records import Precision, Record

SHADOW_VARIABLE = "ENGINERY_SHADOW_SOCKET"  # path of the socket; without it nothing is sampled
KEYS = "SHADOW_KEYS"  # tensor between the models of the ensemble: of each image 0, or its sample's number
MAX_IMAGE_BYTES = 4 << 20  # of a sampled image; larger ones are dropped
_MAX_ID = 1000  # characters of a request's id; longer ones are left out
_MAX_WAITING = 32  # samples in the queue
_RETRY_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


class ShadowedModel(Record):
    """An exported repository, as its manifest names it."""

    name: str
    version: str = Field(description="Of the registered model; empty for one from no registry.")
    precision: Precision
    bundle_digest: str
    repository_digest: str

    @classmethod
    def of(cls, repository: Artifact[RepositoryManifest]) -> Self:
        """The record of a repository."""
        manifest = repository.manifest
        return cls(
            name=manifest.name,
            version=manifest.version,
            precision=manifest.precision,
            bundle_digest=manifest.inputs["bundle"],
            repository_digest=repository.digest,
        )


class Sampler:
    """Hands samples on to whoever listens. Called by one thread.

    Args:
        share: of the images, above 0 to 1.
        served: the ShadowedModel and its folder, for the other end.
    """

    def __init__(self, share: float, served: Mapping[str, Any]) -> None:
        self._share, self._served = share, served
        self._path = os.environ.get(SHADOW_VARIABLE, "")
        self._waiting: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue(_MAX_WAITING)
        self._listened = False
        self._counts = {"seen": 0, "dropped": 0}  # images since somebody listens
        if self._path:
            threading.Thread(target=self._run, name="shadow", daemon=True).start()

    @classmethod
    def of(cls, repository: Artifact[RepositoryManifest]) -> Self | None:
        """The sampler of a repository that is served; None where it was exported without a share."""
        share = repository.manifest.config.get("shadow_share")
        served = {"champion": ShadowedModel.of(repository).model_dump(), "folder": str(repository.path)}
        return cls(share, served) if share else None

    def sample(self, request_id: Callable[[], str], images: Sequence[bytes]) -> np.ndarray:
        """Hand on some of the images of a request. Returns the samples' numbers, [B, 1] int64, and 0 for the others."""
        keys = np.zeros((len(images), 1), np.int64)
        for index, image in enumerate(images) if self._listened else ():
            self._counts["seen"] += 1
            if random.random() >= self._share:
                continue
            key = random.getrandbits(62) + 1
            name = _usable(request_id)
            name = f"{name}/{index}" if name and len(images) > 1 else name
            if len(image) <= MAX_IMAGE_BYTES and self._put({"key": key, "id": name, **self._counts}, image):
                keys[index] = key
            else:
                self._counts["dropped"] += 1
        return keys

    def answer(self, keys: np.ndarray, labels: np.ndarray) -> None:
        """Hand on what was answered to samples. keys: [B, 1] int64; labels: [B] bytes."""
        for key, label in zip(keys[:, 0].tolist(), labels, strict=True):
            if key:
                self._put({"key": key, "label": label.decode()}, b"")

    def _put(self, head: dict[str, Any], image: bytes) -> bool:
        try:
            self._waiting.put_nowait(({**head, "time": time.monotonic()}, image))
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            with suppress(OSError), self._connect() as connection:  # nobody listens, or not any more
                connection.send_bytes(json.dumps(self._served).encode())
                self._counts, self._listened = {"seen": 0, "dropped": 0}, True
                while not connection.poll():  # the other end says nothing: else it has gone
                    with suppress(queue.Empty):
                        head, image = self._waiting.get(timeout=_RETRY_S)
                        connection.send_bytes(json.dumps(head).encode() + b"\n" + image)
            self._listened = False
            while not self._waiting.empty():
                self._waiting.get_nowait()
            time.sleep(_RETRY_S)

    def _connect(self) -> Connection:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.connect(self._path)
            credentials = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                raise PermissionError("another account listens")
            return Connection(opened.detach())


def _usable(request_id: Callable[[], str]) -> str:
    """The client's id for its request; empty where it is too long or, as Triton lets pass over HTTP, no UTF-8."""
    try:
        name = request_id()
    except UnicodeDecodeError:
        return ""
    return name if len(name) <= _MAX_ID else ""
