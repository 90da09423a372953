"""Addresses of servers, errors by kind, and what is sent again."""

import asyncio
import itertools
import selectors
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest
from aiohttp import web

from enginery.serving.client.client import AsyncClient
from enginery.serving.client.transport import (
    RequestRefused,
    RetryPolicy,
    ServerAddress,
    ServerOverloaded,
    ServerTimeout,
    ServerUnreachable,
    ServingError,
    parse_address,
    status_failure,
    with_retries,
)
from tests.unit.refusals import refuses

ADDRESS = parse_address("http://localhost:8000")
QUICK = RetryPolicy(timeout_s=0.5, retry_s=1.0, first_pause_s=0.01, most_pause_s=0.05)
LONG = RetryPolicy(timeout_s=60, retry_s=60, first_pause_s=0.01, most_pause_s=0.05)  # for what ends by itself


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost", "http://localhost:8000"),
        ("localhost:8001", "grpc://localhost:8001"),  # Triton's port for gRPC
        ("localhost:9001", "http://localhost:9001"),
        ("localhost", "http://localhost:8000"),
        ("GRPC://host", "grpc://host:8001"),
        ("https://host:443/", "https://host:443"),
        ("grpcs://host:443", "grpcs://host:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_protocol_and_port_come_from_the_address(url: str, meant: str) -> None:
    assert str(parse_address(url)) == meant


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host", "http://host:port", "http://host:99999", "http://[::1"),
        *("http://host:1/v2", "http://u@h:1", "http://:8000", ""),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with refuses("invalid-address", "url"):
        parse_address(url)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        ("400", "not an image", RequestRefused),
        ("404", "unknown model", RequestRefused),
        ("StatusCode.INVALID_ARGUMENT", "not an image", RequestRefused),
        ("503", "Exceeds maximum queue size", ServerOverloaded),
        ("StatusCode.UNAVAILABLE", "Exceeds maximum queue size", ServerOverloaded),
        ("StatusCode.UNAVAILABLE", "failed to connect to all addresses", ServerUnreachable),
        ("StatusCode.UNAVAILABLE", "errors resolving x:8001: [field:hostname lookup error:...]", ServerUnreachable),
        ("StatusCode.UNAVAILABLE", "recvmsg:Connection reset by peer", ServerUnreachable),
        ("500", "the model broke", ServingError),
        ("StatusCode.INTERNAL", "the model broke", ServingError),
    ],
)
def test_a_status_means(status: str, message: str, kind: type[ServingError]) -> None:
    failed = status_failure(status, message, ADDRESS)
    assert type(failed) is kind
    assert message in str(failed)
    assert str(ADDRESS) in str(failed)
    assert failed.retriable == (kind in (ServerOverloaded, ServerUnreachable))


class _Selector(selectors.DefaultSelector):
    """Waits for nothing, and counts how long it should have waited."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passed_s += timeout or 0.0
        return super().select(0)


def _jumping_loop() -> asyncio.AbstractEventLoop:
    """An event loop in which every pause is over at once, and no machine is slow."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.passed_s
    return loop


def run(call: Callable[[], object], retry: RetryPolicy) -> tuple[list[float], object]:
    """Times of the attempts, and what came of them."""
    times: list[float] = []

    async def attempt() -> object:
        times.append(asyncio.get_running_loop().time())
        return call()

    async def go() -> object:
        try:
            return await with_retries(attempt, retry, ADDRESS, lambda: None)
        except Exception as error:
            return error

    with asyncio.Runner(loop_factory=_jumping_loop) as runner:
        return times, runner.run(go())


def test_no_connection_is_tried_again_until_patience_ends_and_an_answer_not() -> None:
    """Neither a refusal nor a late one."""
    times, result = run(Mock(side_effect=ConnectionRefusedError("refused")), QUICK)
    assert isinstance(result, ServerUnreachable)
    assert QUICK.retry_s - QUICK.most_pause_s < times[-1] - times[0] <= QUICK.retry_s
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    pauses = [min(QUICK.first_pause_s * 2**index, QUICK.most_pause_s) for index in range(len(gaps))]
    assert all(pause / 2 - 1e-6 <= gap <= pause + 1e-6 for gap, pause in zip(gaps, pauses, strict=True))
    for error, retry, kind in (
        (ConnectionResetError("reset"), RetryPolicy(retry_s=0), ServerUnreachable),
        (RequestRefused("not an image"), QUICK, RequestRefused),
        (TimeoutError, QUICK, ServerTimeout),
        (ValueError("odd"), QUICK, ServingError),
    ):
        times, result = run(Mock(side_effect=error), retry)
        assert (len(times), type(result)) == (1, kind)


@asynccontextmanager
async def server(handle: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[ServerAddress]:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0)
        return handle(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield parse_address(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def test_a_full_server_is_asked_again_over_the_wire_and_no_model_server_is_not() -> None:
    asked: list[str] = []

    def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) < 3:
            return web.json_response({"error": "Exceeds maximum queue size"}, status=503)
        return web.json_response({"model_stats": []})

    async def go() -> tuple[object, int]:
        async with server(handle) as address, AsyncClient(str(address), retry=LONG) as client:
            answer = await client.statistics("digits"), client.num_retries
        page = server(lambda _: web.Response(text="<html>hello", status=404))
        async with page as address, AsyncClient(str(address), retry=LONG) as client:
            with pytest.raises(ServingError):
                await client.classifier()
        return answer

    assert asyncio.run(go()) == ({"model_stats": []}, 2)
    assert asked == ["/v2/models/digits/stats"] * 3
