"""The load generator: one process that sends requests and notes when each was due, sent and answered."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipelines.client.addresses import Address
from pipelines.client.failures import failure, status_failure
from pipelines.loadtest.schedule import poisson_arrivals
from pipelines.loadtest.sending import Sender, open_sender

_TO_START_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one process does to the server. Either `concurrency` or `request_rate` is set."""

    address: Address
    model: str
    requests: Sequence[bytes]  # as `sending.prepare` makes them; sent in turn
    concurrency: int | None = None  # clients, each waiting for its answer
    request_rate: float | None = None  # requests per second, as Poisson arrivals
    start_at: float  # on the monotonic clock, which all processes of a machine share
    duration_s: float  # warm-up included
    timeout_s: float
    seed: int = 0


@dataclass
class Samples:
    """What became of the requests, a row for each. Times are seconds on the monotonic clock."""

    due: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # "" for an answer, else what failed
    messages: Counter[str] = field(default_factory=Counter)  # of failures; few differ

    def extend(self, other: "Samples") -> None:
        """Add the other's rows."""
        self.due += other.due
        self.sent += other.sent
        self.ended += other.ended
        self.kinds += other.kinds
        self.messages.update(other.messages)


def bind(cores: Sequence[int] | None) -> None:
    """Keep this process, and what it starts, on some cores."""
    if cores:
        os.sched_setaffinity(0, cores)


def get_ready(address: Address) -> None:
    """Import what sending takes, which needs seconds, and hold this process long enough for all others to start."""

    async def open_and_close() -> None:
        await open_sender(address, "").close()

    asyncio.run(open_and_close())
    time.sleep(_TO_START_S)


def generate(load: Load) -> Samples:
    """Apply a load from start to end, and wait for the last answers."""
    return asyncio.run(_generate(load))


async def _generate(load: Load) -> Samples:
    sender, samples = open_sender(load.address, load.model), Samples()
    try:
        await asyncio.sleep(max(0.0, load.start_at - time.monotonic()))
        if load.concurrency is not None:
            await asyncio.gather(*(_client(sender, load, samples, index) for index in range(load.concurrency)))
        else:
            await _arrive(sender, load, samples)
    finally:
        await sender.close()
    return samples


async def _client(sender: Sender, load: Load, samples: Samples, index: int) -> None:
    """A client that sends its next request when it has the answer to the last."""
    end, turn = load.start_at + load.duration_s, index
    while (now := time.monotonic()) < end:
        failed = await _send(sender, load, load.requests[turn % len(load.requests)], now, samples)
        turn += load.concurrency or 1
        if failed:
            await asyncio.sleep(0.01)  # a refusal comes at once: without a pause this loop would do nothing else


async def _arrive(sender: Sender, load: Load, samples: Samples) -> None:
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


async def _send(sender: Sender, load: Load, request: bytes, due: float, samples: Samples) -> bool:
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
