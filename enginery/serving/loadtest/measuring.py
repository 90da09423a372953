"""A whole load test: which loads, from which processes, on which server."""

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from components.common.contracts.environment import environment
from components.common.contracts.errors import EngineryError, UserError
from enginery.serving.client.client import AsyncClient, NetworkModel
from enginery.serving.client.transport import ServerAddress
from enginery.serving.loadtest.generator import Load, Payload, RequestSamples, bind, generate, get_ready
from enginery.serving.loadtest.results import (
    RATE_SHARES,
    Level,
    LoadTest,
    Series,
    find_knee,
    measure_rates,
    server_change,
    summarize,
)

Result = TypeVar("Result")
WARMUP_S = 0.5  # of each level; connections are made in it, too
_START_S = 0.2  # until all processes know of a level
_BUDGET_FACTOR = 10  # times the median latency of a single client
_NUM_REASONS = 5
_WITH, _WITHOUT = "dynamic batching", "without"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The levels to measure, and how."""

    concurrencies: tuple[int, ...]
    rates: tuple[float, ...] | None  # requests per second; None searches for the knee
    seconds: float  # measured at each level
    latency_budget_ms: float | None  # None: ten times the median latency of a single client
    compare_batching: bool = False  # measure without dynamic batching, too
    num_processes: int = 1
    cores: tuple[int, ...] | None  # of the load generator
    timeout_s: float
    tensors: bool = False  # to the network instead of images to the classifier
    images_per_request: int = 1


def run_load_test(
    client: Callable[[], AsyncClient], plan: LoadPlan, make: Callable[["About"], Payload], say: Callable[[str], None]
) -> LoadTest:
    """Measure all levels of one server.

    Args:
        client: opens a client of the server.
        plan: which levels.
        make: the requests, from what the server says.
        say: called with each level before it starts.

    Raises:
        UserError: the server can't do what was asked for.
        ServingError: it does not answer before the test.
    """
    about = _ask(client, _describe)
    payload = make(about)
    if plan.compare_batching:
        _check_loading(client, about.network)
    target = about.network.name if plan.tensors else about.model
    with _processes(plan, client().address) as pool:
        tester = _Tester(client, plan, payload, target, about.network.name, pool, say)
        budget_ms = plan.latency_budget_ms or tester.default_budget_ms()
        names = {True: _WITH, False: _WITHOUT}
        series = [tester.measure(names[about.network.batches], about.network, budget_ms)]
        if plan.compare_batching:
            series.append(_without_batching(client, about.network, tester, budget_ms))
    return LoadTest(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        url=str(client().address),
        model=about.model,
        network=about.network.name,
        sent=payload.description,
        latency_budget_ms=budget_ms,
        seconds_per_level=plan.seconds,
        client_cores=plan.cores,
        max_batch_size=about.network.max_batch_size,
        instance_group=list(about.network.config.get("instance_group", [])),
        series=tuple(series),
        failures=tester.failures(),
        environment=environment(),
    )


@dataclass(frozen=True)
class About:
    """The tested models, as the server describes them."""

    model: str
    image_input: str
    network: NetworkModel


async def _describe(client: AsyncClient) -> About:
    model = await client.classifier()
    return About(model.name, model.image_input, await client.network())


def _check_loading(client: Callable[[], AsyncClient], served: NetworkModel) -> None:
    """Check before measuring that the network can be loaded: it is loaded with the settings that it has.

    Raises:
        UserError: it can't.
    """
    if not served.batches:
        message = f"{served.name} has no dynamic batching, so there is nothing to compare; drop the option"
        raise UserError(message, code="no-dynamic-batching", setting="compare-batching")
    try:
        _ask(client, lambda opened: opened.load(served.name, served.config))
    except EngineryError as error:
        raise UserError(
            f"the server does not let {served.name} be loaded with another configuration, which comparing needs "
            f"({error}); start it with `enginery serve --allow-loading`, or "
            "Triton itself with --model-control-mode=explicit --load-model=*",
            code="loading-refused",
            setting="compare-batching",
        ) from error


def _without_batching(
    client: Callable[[], AsyncClient], served: NetworkModel, tester: "_Tester", budget_ms: float
) -> Series:
    """Measure the same levels with a configuration without dynamic batching, which is taken back at the end."""
    config = {name: value for name, value in served.config.items() if name != "dynamic_batching"}
    try:
        _ask(client, lambda opened: opened.load(served.name, config))
        changed = _ask(client, lambda opened: opened.network())
        if changed.batches:
            message = f"the server put dynamic batching back into {served.name}: it can't be switched off"
            raise EngineryError(message, code="loading-ignored")
        return tester.measure(_WITHOUT, changed, budget_ms)
    finally:
        # By name alone Triton would keep the other settings, since no file of the model changed.
        _ask(client, lambda opened: opened.load(served.name, served.config))


def _ask(client: Callable[[], AsyncClient], work: Callable[[AsyncClient], Awaitable[Result]]) -> Result:
    async def ask() -> Result:
        async with client() as opened:
            return await work(opened)

    return asyncio.run(ask())


@contextmanager
def _processes(plan: LoadPlan, address: ServerAddress) -> Iterator[Executor]:
    with ProcessPoolExecutor(
        plan.num_processes, multiprocessing.get_context("spawn"), initializer=bind, initargs=(plan.cores,)
    ) as pool:
        list(pool.map(get_ready, [address] * plan.num_processes))
        yield pool


class _Tester:
    """Holds levels of load against one model of one server."""

    def __init__(
        self,
        client: Callable[[], AsyncClient],
        plan: LoadPlan,
        payload: Payload,
        target: str,
        network: str,
        pool: Executor,
        say: Callable[[str], None],
    ) -> None:
        self._client, self._plan, self._payload = client, plan, payload
        self._target, self._network, self._pool, self._say = target, network, pool, say
        self._seed = 0
        self._messages: Counter[str] = Counter()

    def failures(self) -> dict[str, int]:
        """The most frequent reasons so far why there was no answer."""
        return dict(self._messages.most_common(_NUM_REASONS))

    def default_budget_ms(self) -> float:
        """Ten times the median latency of a single client."""
        self._say("a single client, for the latency budget")
        alone = self._hold(concurrency=1)
        if alone.p50_ms is None:
            reason = next(iter(self.failures()), "none came back")
            raise EngineryError(
                f"none of a single client's {alone.num_requests} requests was answered: {reason}", code="no-answers"
            )
        return _BUDGET_FACTOR * alone.p50_ms

    def measure(self, name: str, served: NetworkModel, budget_ms: float) -> Series:
        """All levels of the plan."""
        closed = []
        for concurrency in self._plan.concurrencies:
            self._say(f"{name}: {concurrency} clients")
            closed.append(self._hold(concurrency=concurrency))
        rates, refine = self._plan.rates, False
        if rates is None:
            best = max(level.images_per_s for level in closed) / self._plan.images_per_request
            rates, refine = tuple(share * best for share in RATE_SHARES) if best else (), True
        levels = measure_rates(rates, refine, budget_ms, lambda rate: self._hold_rate(name, rate))
        batching = served.config.get("dynamic_batching")
        return Series(
            name=name,
            batching=dict(batching) if batching is not None else None,
            closed=tuple(closed),
            open=tuple(levels),
            knee=find_knee(levels, budget_ms),
        )

    def _hold_rate(self, name: str, rate: float) -> Level:
        self._say(f"{name}: {rate:,.0f} requests/s")
        return self._hold(request_rate=rate)

    def _hold(self, *, concurrency: int | None = None, request_rate: float | None = None) -> Level:
        plan, self._seed = self._plan, self._seed + 1
        load = Load(
            address=self._client().address,
            model=self._target,
            requests=self._payload.requests,
            start_at=0,
            duration_s=WARMUP_S + plan.seconds,
            timeout_s=plan.timeout_s,
        )
        before = _ask(self._client, lambda opened: opened.statistics(self._network))
        start_at = time.monotonic() + _START_S
        loads = share_load(load, plan.num_processes, start_at, self._seed, concurrency, request_rate)
        samples = RequestSamples()
        for part in self._pool.map(generate, loads):
            samples.extend(part)
        after = _ask(self._client, lambda opened: opened.statistics(self._network))
        self._messages.update(samples.messages)
        return summarize(
            samples,
            window=(start_at + WARMUP_S, start_at + load.duration_s),
            images_per_request=plan.images_per_request,
            server=server_change(before, after),
            concurrency=concurrency,
            request_rate=request_rate,
        )


def share_load(
    load: Load, num_processes: int, start_at: float, seed: int, concurrency: int | None, request_rate: float | None
) -> list[Load]:
    """One load as those of several processes. Poisson arrivals of theirs together are Poisson arrivals again."""
    if concurrency is None:
        assert request_rate is not None
        parts: list[dict[str, Any]] = [{"request_rate": request_rate / num_processes}] * num_processes
    else:
        shares = [
            concurrency // num_processes + (index < concurrency % num_processes) for index in range(num_processes)
        ]
        parts = [{"concurrency": share} for share in shares if share]
    return [replace(load, start_at=start_at, seed=1000 * seed + index, **part) for index, part in enumerate(parts)]
