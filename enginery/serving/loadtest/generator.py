"""The load generator: one process that sends prepared requests on a schedule and records their times."""

import asyncio
import io
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np

from components.common.contracts.errors import UserError
from enginery.serving.client.client import NetworkModel, find_images
from enginery.serving.client.transport import CHANNEL, PLAIN, ServerAddress, failure, input_tensors, status_failure


def poisson_arrivals(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Due times of a Poisson process: independent users, who do not wait for each other.

    Args:
        rate: requests per second on average.
        duration_s: how long they go on arriving.
        rng: where the randomness comes from.

    Returns:
        [N] float64, seconds from the start, ascending, all below `duration_s`. N is random, with mean rate x duration.
    """
    expected = rate * duration_s
    arrivals = np.empty(0)
    while not len(arrivals) or arrivals[-1] < duration_s:
        last = arrivals[-1] if len(arrivals) else 0.0
        gaps = rng.exponential(1 / rate, size=int(expected + 4 * np.sqrt(expected) + 8))
        arrivals = np.concatenate([arrivals, last + np.cumsum(gaps)])
    return arrivals[arrivals < duration_s]


_NUM_DISTINCT = 64  # requests that are sent in turn


@dataclass(frozen=True)
class Payload:
    """Requests ready to be sent, and what they are, for people."""

    requests: Sequence[bytes]
    description: str


def tensors(address: ServerAddress, network: NetworkModel, images_per_request: int) -> Payload:
    """Random normalized images for the network."""
    rng = np.random.default_rng(0)
    shape = (images_per_request, *network.shape)
    _check_batch(network, images_per_request)
    drawn = (rng.standard_normal(shape, dtype=np.float32) for _ in range(min(_NUM_DISTINCT, 8)))
    requests = [prepare(address, network.name, {network.input: images}) for images in drawn]
    return Payload(requests, f"random tensors of {' x '.join(map(str, shape))} in FP32")


def images(
    address: ServerAddress,
    model: str,
    image_input: str,
    network: NetworkModel,
    folder: Path | None,
    images_per_request: int,
) -> Payload:
    """Image files of a folder, or random ones of the network's size as JPEG."""
    _check_batch(network, images_per_request)
    files = random_images(_NUM_DISTINCT, *network.shape[-2:]) if folder is None else _images_in(folder)
    requests = []
    for start in range(0, max(len(files) - images_per_request + 1, 1), images_per_request):
        chosen = [files[(start + index) % len(files)] for index in range(images_per_request)]
        values = np.empty((images_per_request, 1), dtype=np.object_)
        values[:, 0] = chosen
        requests.append(prepare(address, model, {image_input: values}))
    size = float(np.mean([len(file) for file in files]))
    source = f"of {folder}" if folder else "of noise"
    each = "one image" if images_per_request == 1 else f"{images_per_request} images"
    return Payload(requests, f"{each} {source} per request, {size / 1000:.1f} kB on average")


def _check_batch(network: NetworkModel, images_per_request: int) -> None:
    if images_per_request > max(network.max_batch_size, 1):
        raise UserError(
            f"--batch-size {images_per_request}: the model {network.name} takes up to {network.max_batch_size} images",
            code="batch-too-large",
            setting="batch-size",
        )


def random_images(number: int, height: int, width: int) -> list[bytes]:
    """JPEG files of noise, the same each time."""
    from PIL import Image  # not needed by the processes that send

    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(number):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def _images_in(folder: Path) -> list[bytes]:
    if not folder.is_dir():
        raise UserError(
            f"--data {folder}: there is no such folder; name one of images", code="no-folder", setting="data"
        )
    files = find_images(folder)
    every = max(1, len(files) // _NUM_DISTINCT)  # from all over the folder, not only of its first class
    return [file.read_bytes() for file in files[::every][:_NUM_DISTINCT]]


_MAX_SAID = 300  # bytes of an error
_GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def prepare(address: ServerAddress, model: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    """One inference request in the bytes that go over the wire, behind its header's length where it is HTTP."""
    if address.protocol == "http":
        import tritonclient.http as library

        body, header_length = library.InferenceServerClient.generate_request_body(input_tensors(library, inputs))
        return int(header_length or 0).to_bytes(8, "little") + bytes(body)
    import tritonclient.grpc as library
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    for entry in input_tensors(library, inputs):
        request.inputs.append(entry._get_tensor())
        request.raw_input_contents.append(entry._get_content())
    return bytes(request.SerializeToString())


class HttpSender:
    """A connection for each request on its way, all kept open."""

    def __init__(self, address: ServerAddress, model: str) -> None:
        import aiohttp

        self._url = f"{address}/v2/models/{quote(model)}/infer"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def send(self, request: bytes) -> tuple[str, str] | None:
        """None for an answer; else the status, as `failures` knows it, and what was said.

        Raises:
            Exception: what the library below raises without an answer.
        """
        headers = {"Inference-Header-Content-Length": str(int.from_bytes(request[:8], "little")), **PLAIN}
        body = memoryview(request)[8:]
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            content = await response.read()
            ok = response.status == 200
            return None if ok else (str(response.status), content[:_MAX_SAID].decode(errors="replace"))

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()


class GrpcSender:
    """One HTTP/2 connection for all requests."""

    def __init__(self, address: ServerAddress) -> None:
        import grpc

        if address.tls:
            self._channel = grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(), options=CHANNEL)
        else:
            self._channel = grpc.aio.insecure_channel(address.target, options=CHANNEL)
        self._call = self._channel.unary_unary(_GRPC_METHOD)  # without serializers: bytes as they are
        self._error = grpc.aio.AioRpcError

    async def send(self, request: bytes) -> tuple[str, str] | None:
        """See HttpSender."""
        try:
            await self._call(request)
        except self._error as error:
            return str(error.code()), str(error.details())
        return None

    async def close(self) -> None:
        """See HttpSender."""
        await self._channel.close()


Sender = HttpSender | GrpcSender


def open_sender(address: ServerAddress, model: str) -> Sender:
    """A sender within the running event loop."""
    return HttpSender(address, model) if address.protocol == "http" else GrpcSender(address)


_TO_START_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of one process. Either `concurrency` or `request_rate` is set."""

    address: ServerAddress
    model: str
    requests: Sequence[bytes]  # as `sending.prepare` makes them; sent in turn
    concurrency: int | None = None  # clients, each waiting for its answer
    request_rate: float | None = None  # requests per second, as Poisson arrivals
    start_at: float  # on the monotonic clock, which all processes of a machine share
    duration_s: float  # warm-up included
    timeout_s: float
    seed: int = 0


@dataclass
class RequestSamples:
    """Outcomes of the requests, a row for each. Times are seconds on the monotonic clock."""

    due: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # "" for an answer, else what failed
    messages: Counter[str] = field(default_factory=Counter)  # of failures; few differ

    def extend(self, other: "RequestSamples") -> None:
        """Add the other's rows."""
        self.due += other.due
        self.sent += other.sent
        self.ended += other.ended
        self.kinds += other.kinds
        self.messages.update(other.messages)


def bind(cores: Sequence[int] | None) -> None:
    """Keep this process on some cores, and let Ctrl-C end it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if cores:
        os.sched_setaffinity(0, cores)


def get_ready(address: ServerAddress) -> None:
    """Import what sending takes, which needs seconds, and hold this process long enough for all others to start."""

    async def open_and_close() -> None:
        await open_sender(address, "").close()

    asyncio.run(open_and_close())
    time.sleep(_TO_START_S)


def generate(load: Load) -> RequestSamples:
    """Apply a load from start to end, and wait for the last answers."""
    return asyncio.run(_generate(load))


async def _generate(load: Load) -> RequestSamples:
    sender, samples = open_sender(load.address, load.model), RequestSamples()
    try:
        await asyncio.sleep(max(0.0, load.start_at - time.monotonic()))
        if load.concurrency is not None:
            await asyncio.gather(*(_client(sender, load, samples, index) for index in range(load.concurrency)))
        else:
            await _arrive(sender, load, samples)
    finally:
        await sender.close()
    return samples


async def _client(sender: Sender, load: Load, samples: RequestSamples, index: int) -> None:
    """A client that sends its next request when it has the answer to the last."""
    end, turn = load.start_at + load.duration_s, index
    while (now := time.monotonic()) < end:
        failed = await _send(sender, load, load.requests[turn % len(load.requests)], now, samples)
        turn += load.concurrency or 1
        if failed:
            await asyncio.sleep(0.01)  # a refusal comes at once: without a pause this loop would do nothing else


async def _arrive(sender: Sender, load: Load, samples: RequestSamples) -> None:
    """Requests at their times, whether or not earlier ones have been answered."""
    assert load.request_rate is not None
    waiting: set[asyncio.Task[bool]] = set()
    arrivals = poisson_arrivals(load.request_rate, load.duration_s, np.random.default_rng(load.seed))
    for turn, offset in enumerate(arrivals.tolist()):
        due = load.start_at + offset
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        request = load.requests[turn % len(load.requests)]
        task = asyncio.create_task(_send(sender, load, request, due, samples))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    if waiting:
        await asyncio.wait(waiting)


async def _send(sender: Sender, load: Load, request: bytes, due: float, samples: RequestSamples) -> bool:
    """One request; whether it failed."""
    sent, kind, message = time.monotonic(), "", ""
    try:
        # Whoever waits since the request was due does not wait longer because it was sent late.
        async with asyncio.timeout_at(due + load.timeout_s):  # an event loop's clock is the monotonic one
            if said := await sender.send(request):
                failed = status_failure(*said, load.address)
                kind, message = failed.kind, str(failed)
    except Exception as error:
        failed = failure(error, load.address, load.timeout_s)
        kind, message = failed.kind, str(failed)
    samples.due.append(due)
    samples.sent.append(sent)
    samples.ended.append(time.monotonic())
    samples.kinds.append(kind)
    if message:
        samples.messages[message] += 1
    return bool(kind)
