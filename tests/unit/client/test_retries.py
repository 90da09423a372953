"""What is tried again, for how long, and what is said in the end."""

import asyncio
import itertools
import selectors
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from components.common.contracts.errors import EXIT_USER_ERROR, UserError
from enginery.serving.client.client import AsyncClient
from enginery.serving.client.transport import (
    Address,
    AnswerLate,
    Patience,
    RequestRefused,
    ServerOverloaded,
    ServerUnreachable,
    ServingError,
    failure,
    parse_address,
    persist,
    status_failure,
)

ADDRESS = parse_address("http://localhost:8000")
QUICK = Patience(timeout_s=0.5, retry_s=1.0, first_pause_s=0.01, most_pause_s=0.05)
LONG = Patience(timeout_s=60, retry_s=60, first_pause_s=0.01, most_pause_s=0.05)  # for what ends by itself


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


def test_errors_without_a_status_mean() -> None:
    assert isinstance(failure(TimeoutError(), ADDRESS, 3), AnswerLate)
    assert "within 3 s" in str(failure(TimeoutError(), ADDRESS, 3))
    assert isinstance(failure(ConnectionResetError("reset"), ADDRESS, 3), ServerUnreachable)
    assert type(failure(ValueError("odd"), ADDRESS, 3)) is ServingError


def test_what_is_refused_is_a_mistake_of_the_user_and_the_rest_is_not() -> None:
    assert RequestRefused("x").exit_code == EXIT_USER_ERROR
    assert isinstance(RequestRefused("x"), UserError)
    assert ServerUnreachable("x").exit_code == 1


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


def run(call: Callable[[], object], patience: Patience) -> tuple[list[float], object]:
    """Times of the attempts, and what came of them."""
    times: list[float] = []

    async def attempt() -> object:
        times.append(asyncio.get_running_loop().time())
        return call()

    async def go() -> object:
        try:
            return await persist(attempt, patience, ADDRESS, lambda: None)
        except Exception as error:
            return error

    with asyncio.Runner(loop_factory=_jumping_loop) as runner:
        return times, runner.run(go())


def test_no_connection_is_tried_again_until_patience_ends() -> None:
    def refuse() -> None:
        raise ConnectionRefusedError("refused")

    times, result = run(refuse, QUICK)
    assert isinstance(result, ServerUnreachable)
    assert QUICK.retry_s - QUICK.most_pause_s < times[-1] - times[0] <= QUICK.retry_s
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    pauses = [min(QUICK.first_pause_s * 2**index, QUICK.most_pause_s) for index in range(len(gaps))]
    assert all(pause / 2 - 1e-6 <= gap <= pause + 1e-6 for gap, pause in zip(gaps, pauses, strict=True))
    assert run(refuse, Patience(retry_s=0))[0][1:] == []


def test_a_refusal_and_a_late_answer_are_not_tried_again() -> None:
    def wrong() -> None:
        raise RequestRefused("not an image")

    def late() -> None:
        raise TimeoutError

    assert len(run(wrong, QUICK)[0]) == 1
    times, result = run(late, QUICK)
    assert len(times) == 1
    assert isinstance(result, AnswerLate)


@asynccontextmanager
async def server(handle: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[Address]:
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


def test_a_full_server_is_asked_again_over_the_wire() -> None:
    asked: list[str] = []

    def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) < 3:
            return web.json_response({"error": "Exceeds maximum queue size"}, status=503)
        return web.json_response({"model_stats": []})

    async def go() -> tuple[object, int]:
        async with server(handle) as address, AsyncClient(str(address), patience=LONG) as client:
            return await client.statistics("digits"), client.num_retries

    assert asyncio.run(go()) == ({"model_stats": []}, 2)
    assert asked == ["/v2/models/digits/stats"] * 3


def test_something_else_that_answers_is_no_model_server() -> None:
    async def go() -> None:
        page = server(lambda _: web.Response(text="<html>hello", status=404))
        async with page as address, AsyncClient(str(address), patience=LONG) as client:
            await client.classifier()

    with pytest.raises(ServingError):
        asyncio.run(go())
