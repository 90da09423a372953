"""A challenger beside the champion: samples of live requests arrive over a Unix socket, and a second model answers."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, RepositoryManifest
from components.common.contracts.records import Record
from components.common.data.dali_pipelines import ImageBatches
from components.common.data.evaluation import most_likely, names_class
from components.common.registry.trust import check_folder
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from components.serve.repository_check import open_repository
from components.serve.shadow import MAX_IMAGE_BYTES, SHADOW_VARIABLE, ShadowedModel
from enginery.serving.client.client import Client
from enginery.serving.client.transport import RetryPolicy
from enginery.serving.shadow_record import ShadowAnswer

_MAX_MESSAGE_BYTES = MAX_IMAGE_BYTES + (1 << 16)
_MAX_WAITING = 64  # samples of which one half has arrived
_POLL_S = 0.2
# Where a connection ended, or sends what no server of ours does.
_NONE_OF_OURS = (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RecursionError)

Classify = Callable[[bytes], str]  # an encoded image to its class; empty, or raises EngineryError, where there is none


class ShadowConfig(Record):
    """Settings of a comparison."""

    num_requests: int = Field(1000, ge=1, description="Images to compare.")
    minutes: float = Field(60.0, gt=0, description="Longest time to wait for them.")
    priority: Literal["idle", "normal"] = Field("idle", description="Of the process that runs the challenger.")


class ShadowSample(Record):
    """An image, and what the champion answered."""

    id: str
    image: bytes
    label: str
    served_ms: FiniteFloat


@dataclass
class SampleListener:
    """Takes samples from all processes of the first server that sends any."""

    server: socket.socket
    say: Callable[[str], None]
    champion: ShadowedModel | None = None
    folder: Path = Path()  # of the champion's repository, as its server has it
    num_unpaired: int = 0
    _open: list[Connection] = field(default_factory=list)
    _counts: dict[Connection, dict[str, int]] = field(default_factory=dict)  # of the champion, ended ones too
    _halves: dict[int, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    _others: set[str] = field(default_factory=set)  # digests of other repositories whose servers were turned away

    @classmethod
    @contextmanager
    def at(cls, path: Path, say: Callable[[str], None]) -> Iterator["SampleListener"]:
        """Listen at a path, for this account alone, as long as the context lasts.

        Raises:
            UserError: another process does, or the path can't be had.
        """
        server = socket.socket(socket.AF_UNIX)
        with closing(server):
            try:
                if path.is_socket():
                    _remove_left(path)
                before = os.umask(0o177)
                try:
                    server.bind(str(path))
                finally:
                    os.umask(before)
                server.listen(16)
            except OSError as error:
                raise UserError(
                    f"can't listen at {path}: {error.strerror or error}; name a short path in a folder of yours in "
                    f"{SHADOW_VARIABLE}, for `enginery serve`, too",
                    code="cannot-listen",
                    setting=SHADOW_VARIABLE,
                ) from None
            try:
                listener = cls(server, say)
                yield listener
            finally:
                path.unlink(missing_ok=True)
                for connection in listener._open:
                    connection.close()

    def count(self, what: str) -> int:
        """Return the number of images that the champion has "seen" or "dropped", up to the last sample."""
        return sum(counts.get(what, 0) for counts in self._counts.values())

    def poll(self) -> list[ShadowSample]:
        """Return what has become complete, after waiting a moment for it."""
        samples = []
        for ready in wait([self.server, *self._open], _POLL_S):
            if not isinstance(ready, Connection):
                self._open.append(Connection(self.server.accept()[0].detach()))
                continue
            try:
                sample = self._receive(ready, ready.recv_bytes(_MAX_MESSAGE_BYTES))
            except _NONE_OF_OURS:
                self._open.remove(ready)
                ready.close()
            else:
                samples += [sample] if sample else []
        return samples

    def _receive(self, source: Connection, message: bytes) -> ShadowSample | None:
        head, _, image = message.partition(b"\n")
        content: dict[str, Any] = json.loads(head)
        if source not in self._counts:
            self._greet(ShadowedModel.model_validate(content["champion"]), Path(content["folder"]))
            self._counts[source] = {}
            return None
        self._counts[source] |= {what: int(content[what]) for what in ("seen", "dropped") if what in content}
        other = self._halves.pop(content["key"], None)
        if other is None or ("id" in other[0]) == ("id" in content):  # the same half, of a number that a client made up
            self._halves[content["key"]] = content, image
            if len(self._halves) > _MAX_WAITING:
                self._halves.pop(next(iter(self._halves)))
                self.num_unpaired += 1
            return None
        both = {**content, **other[0]}
        return ShadowSample(
            id=both["id"],
            image=image or other[1],
            label=both["label"],
            served_ms=1e3 * abs(content["time"] - other[0]["time"]),
        )

    def _greet(self, found: ShadowedModel, folder: Path) -> None:
        """Note who the champion is, or refuse a server of something else."""
        if self.champion is None:
            self.champion, self.folder = found, folder
        if found != self.champion:
            if found.repository_digest not in self._others:
                self._others.add(found.repository_digest)
                self.say(f"a server of another repository ({found.repository_digest}) is left aside")
            raise ValueError("another champion")


def _remove_left(path: Path) -> None:
    """Remove the socket of a listener that was killed."""
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise UserError(
        f"another `enginery shadow` listens at {path}; wait until it ends, or name another path in {SHADOW_VARIABLE}, "
        "for `enginery serve`, too",
        code="shadow-runs-already",
        setting=SHADOW_VARIABLE,
    )


@contextmanager
def _local_model(repository: Artifact[RepositoryManifest]) -> Iterator[Classify]:
    """A repository's models in this process, on the CPU."""
    manifest = repository.manifest
    file = fit_model(manifest.cpu_models).file if manifest.cpu_models else manifest.cpu_model
    images = ImageBatches(manifest.image_transform, 1)
    with closing(OpenVINORunner(repository.file(file), manifest.image_shapes)) as runner:

        def classify(image: bytes) -> str:
            logits = runner.infer(images.load([image], ["the image"]))  # [1, classes]
            return manifest.classes[most_likely(logits[0], 1)[0][0]] if names_class(logits[0]) else ""

        yield classify


@contextmanager
def _served_model(repository: Artifact[RepositoryManifest], url: str) -> Iterator[Classify]:
    """A repository's models by the server at `url`."""
    manifest = repository.manifest
    own = {"bundle_digest": manifest.inputs["bundle"], "precision": manifest.precision}
    with Client(url, model=manifest.name, retry=RetryPolicy(timeout_s=10, retry_s=0)) as client:
        served = client.parameters()
        if wrong := [name for name, value in own.items() if served.get(name) != value]:
            raise UserError(
                f"{url} serves the {wrong[0]} {served.get(wrong[0])} as {manifest.name}, and {repository.path} has "
                f"{own[wrong[0]]}; serve that there, or name the repository that is served",
                code="other-challenger-served",
                setting="--url",
            )
        yield lambda image: client.classify(image, top_k=1).label or ""


def open_challenger(folder: Path) -> Artifact[RepositoryManifest]:
    """The exported repository in a folder, every file checked, as the machine's trust policy wants it signed.

    Raises:
        UserError: it is none.
        EngineryError: it was changed, or nobody vouches for it.
    """
    repository = open_repository(folder)
    check_folder(f"the model repository {folder}", folder)
    return repository


def run_shadow(
    challenger: Artifact[RepositoryManifest],
    path: Path,
    url: str,
    config: ShadowConfig,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> tuple[list[ShadowAnswer], dict[str, Any]]:
    """Have the challenger answer samples until there are enough, the time is over, or it is stopped.

    Returns:
        The answers, and fields of the record.

    Raises:
        UserError: no sample came; see `SampleListener.at`.
    """
    answers: list[ShadowAnswer] = []
    with SampleListener.at(path, say) as listener, ExitStack() as stack:
        if config.priority == "idle":
            _yield_to_others()
        model = _served_model(challenger, url) if url else _local_model(challenger)
        models = {"challenger": stack.enter_context(model)}
        started, deadline = datetime.now(UTC), time.monotonic() + 60 * config.minutes
        say(f"waiting for samples at {path}")
        while len(answers) < config.num_requests and time.monotonic() < deadline and not is_stopped():
            known = listener.champion is not None
            for sample in listener.poll():
                # Which begins changes, as the second finds the image in the caches.
                answers.append(_answer(sample, models, sorted(models, reverse=len(answers) % 2 == 1)))
                if len(answers) % max(1, config.num_requests // 10) == 0:
                    say(f"{len(answers):,} of {config.num_requests:,} images compared")
            if not known and (champion := listener.champion) is not None:
                if not url and (repository := _champion_repository(champion, listener.folder, say)) is not None:
                    models["champion"] = stack.enter_context(_local_model(repository))
                say(f"the champion is {champion.name} {champion.version} ({champion.repository_digest})")
    if not answers or listener.champion is None:
        fix, setting = "Send it images, or wait longer with --minutes", "--minutes"
        if listener.champion is None:
            fix = "Export and serve the champion with --shadow-share above 0, by this account and on this machine; "
            fix += f"where its server has another {SHADOW_VARIABLE}, set that"
            setting = "--shadow-share"
        raise UserError(f"no request of a champion was sampled at {path}. {fix}", code="no-samples", setting=setting)
    fields = {
        "champion": listener.champion,
        "challenger": ShadowedModel.of(challenger),
        "asked": url,
        "started": started,
        "ended": datetime.now(UTC),
        "num_seen": listener.count("seen"),
        "num_dropped": listener.count("dropped"),
        "num_unpaired": listener.num_unpaired,
    }
    return answers, fields


def _yield_to_others() -> None:
    """Run only where no other process of the machine wants to: before threads are started, which inherit it."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # where the kernel shares time by session first
        Path("/proc/self/autogroup").write_text("19")


def _champion_repository(
    champion: ShadowedModel, folder: Path, say: Callable[[str], None]
) -> Artifact[RepositoryManifest] | None:
    """The champion's own files, for a fair comparison of speed in this process; None where they can't be had."""
    try:
        repository = open_repository(folder, bytecode=True)
        if ShadowedModel.of(repository) == champion:
            return repository
        reason = "it has changed"
    except EngineryError as error:
        reason = str(error)
    say(f"the speed of both is not compared: {folder} can't be read here ({reason})")
    return None


def _answer(sample: ShadowSample, models: Mapping[str, Classify], order: Sequence[str]) -> ShadowAnswer:
    """The models on one image, one after the other in this order."""
    found = {role: _timed(models[role], sample.image) for role in order}
    label, challenger_ms = found["challenger"]
    return ShadowAnswer(
        id=sample.id,
        image_digest=digest_bytes(sample.image),
        champion=sample.label,
        challenger=label,
        champion_ms=sample.served_ms,
        challenger_ms=challenger_ms,
        beside_ms=found["champion"][1] if "champion" in found else None,
    )


def _timed(classify: Classify, image: bytes) -> tuple[str, float]:
    """The class, empty where there is no answer, and the milliseconds."""
    start = time.perf_counter()
    try:
        label = classify(image)
    except EngineryError:
        label = ""
    return label, 1e3 * (time.perf_counter() - start)
