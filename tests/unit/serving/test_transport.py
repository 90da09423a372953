"""Addresses of servers, errors by kind, and what is sent again."""

import asyncio
import itertools
import selectors
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from enginery.serving.client.client import AsyncClient, Client
from enginery.serving.client.transport import (
    RequestRefused,
    RetryPolicy,
    ServerAddress,
    ServerOverloaded,
    ServerTimeout,
    ServerUnreachable,
    ServingError,
    Transport,
    parse_address,
    status_failure,
    with_retries,
)
from enginery.serving.loadtest.generator import HttpSender, prepare
from tests.serving import Served, serving
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
        *("http://host:1/v2", "http://u@h:1", "http://:8000", "", "http://:secret@h:1", "u:secret@h:8000"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with refuses("invalid-address", "url") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


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


def test_a_port_for_http_is_told_from_no_server() -> None:
    failed = status_failure("StatusCode.UNAVAILABLE", "failed to connect: Failed parsing HTTP/2", ADDRESS)
    assert f"write http://{ADDRESS.target}" in str(failed)


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


def test_a_full_server_is_asked_again_over_the_wire() -> None:
    answers = iter([(503, {"error": "Exceeds maximum queue size"})] * 2 + [(200, {"model_stats": []})])

    async def go() -> tuple[object, int]:
        async with AsyncClient(state.endpoint, retry=LONG) as client:
            return await client.statistics("digits"), client.num_retries

    with serving(Served(answers=lambda *_: next(answers))) as state:
        assert asyncio.run(go()) == ({"model_stats": []}, 2)
    assert [path for _, path, _ in state.requests] == ["/v2/models/digits/stats"] * 3


def test_something_else_that_answers_is_no_model_server() -> None:
    async def go() -> None:
        async with AsyncClient(state.endpoint, retry=LONG) as client:
            await client.classifier()

    with serving(Served(answers=lambda *_: (404, b"<html>hello"))) as state, pytest.raises(ServingError):
        asyncio.run(go())


def test_answers_in_json_are_read_and_those_without_the_outputs_are_the_servers_failure() -> None:
    """As servers without Triton's extension for binary data send them."""
    metadata = {"name": "m", "inputs": [{"name": "IMAGE", "datatype": "BYTES"}]}
    metadata["outputs"] = [{"name": "L", "datatype": "BYTES"}, {"name": "P", "datatype": "FP32"}]
    labels = {"name": "L", "datatype": "BYTES", "shape": [1, 2], "data": ["cat", "dog"]}
    shares = {"name": "P", "datatype": "FP32", "shape": [1, 2], "data": [0.75, 0.25]}
    outputs = [labels, shares]

    def answers(_: str, path: str, __: object) -> tuple[int, object]:
        return 200, {"infer": {"outputs": outputs}, "config": {}}.get(path.rpartition("/")[2], metadata)

    with serving(Served(answers=answers)) as state, Client(state.endpoint, model="m", retry=LONG) as client:
        answer = client.classify(b"image")
        assert (answer.labels, answer.probabilities) == (("cat", "dog"), (0.75, 0.25))
        outputs.remove(labels)
        with pytest.raises(ServingError, match="KeyError: 'L'"):
            client.classify(b"image")


def test_nobody_is_led_to_another_host() -> None:
    async def go(leading: ServerAddress) -> tuple[str, str] | None:
        for attempt in ("ready", "index", "load", "infer"):
            transport = Transport(leading, "0123456789abcdef")
            arguments = {"load": ("m", {}), "infer": ("m", {"x": np.zeros((1, 3), np.float32)})}.get(attempt, ())
            try:
                with pytest.raises(ServingError, match="which nobody named"):
                    await getattr(transport, attempt)(*arguments)
            finally:
                await transport.close()
        sender = HttpSender(leading, "m")
        try:
            return await sender.send(prepare(leading, "m", {"x": np.zeros((1, 3), np.float32)}))
        finally:
            await sender.close()

    with serving(Served()) as inner:
        lead = Served(answers=lambda _, path, __: (307, b"", {"Location": inner.endpoint + path}))
        with serving(lead) as leading:
            failed = asyncio.run(go(parse_address(leading.endpoint)))
    assert failed == ("307", "")
    assert inner.requests == []
