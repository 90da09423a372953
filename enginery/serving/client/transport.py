"""Addresses of model servers, their failures, retries, and tritonclient's two protocols behind one set of calls."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np

from components.common.contracts.errors import EngineryError, UserError
from components.common.registry.store import without_credentials
from enginery.serving.loading import loading_headers

_PROTOCOLS: dict[str, tuple[Literal["http", "grpc"], bool]] = {
    "http": ("http", False),
    "https": ("http", True),
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
}
_DEFAULT_PORTS = {"http": 8000, "grpc": 8001}  # Triton's own
_EXAMPLES = "write http://HOST:8000 or grpc://HOST:8001 (https and grpcs with TLS)"


@dataclass(frozen=True)
class ServerAddress:
    """Protocol, host with port, and whether the connection is encrypted."""

    protocol: Literal["http", "grpc"]
    target: str  # host:port
    tls: bool

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.target}"


def parse_address(url: str) -> ServerAddress:
    """An address as people write it: the scheme says the protocol; without one port 8001 is gRPC, any other HTTP.

    Raises:
        UserError: this is no address of a model server.
    """
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "", scheme
    url = f"{scheme}{separator}{without_credentials(f'//{rest}').removeprefix('//')}"  # as messages show it
    try:
        parts = urlsplit(f"//{rest}")
        port = parts.port
    except ValueError:  # the port is no number, or there is none so large; an IPv6 address without its end
        raise UserError(
            f"--url {url}: that has no usable host and port; {_EXAMPLES}", code="invalid-address", setting="url"
        ) from None
    if scheme and scheme.lower() not in _PROTOCOLS:
        raise UserError(
            f"--url {url}: the scheme {scheme!r} is unknown; {_EXAMPLES}", code="invalid-address", setting="url"
        )
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment or "@" in rest:
        message = f"--url {url}: an address is a host and a port, nothing more; {_EXAMPLES}"
        raise UserError(message, code="invalid-address", setting="url")
    if not scheme:
        scheme = "grpc" if port == _DEFAULT_PORTS["grpc"] else "http"
    protocol, tls = _PROTOCOLS[scheme.lower()]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return ServerAddress(protocol=protocol, target=f"{host}:{port or _DEFAULT_PORTS[protocol]}", tls=tls)


Kind = Literal["unreachable", "overloaded", "timeout", "refused", "failed"]
_OVERLOADED_STATUS = ("503", "StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED")
_REFUSED_STATUS = ("400", "404", "413", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
_UNREACHED = (
    "failed to connect",
    "connection refused",
    "connection reset",
    "socket closed",
    "recvmsg",
    "dns",
    "resolving",
)
_MAX_MESSAGE = 400  # characters of what the server said


class ServingError(EngineryError):
    """A request had no answer. `kind` says in one word why, as the counts of a load test have it."""

    kind: ClassVar[Kind] = "failed"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message, code=f"server-{self.kind}")


class ServerUnreachable(ServingError):
    """Nothing answers at the address, or the connection broke. Tried again."""

    kind = "unreachable"
    retriable = True


class ServerOverloaded(ServingError):
    """The server is there and has no room for more. Tried again."""

    kind = "overloaded"
    retriable = True


class ServerTimeout(ServingError):
    """No answer within the time that was given. Not tried again: it would only add load."""

    kind = "timeout"


class RequestRefused(ServingError, UserError):
    """The server says that the request is wrong: not an image, an unknown model, another shape."""

    kind = "refused"


def failure(error: BaseException, address: ServerAddress, timeout_s: float) -> ServingError:
    """Return our error for one of tritonclient, aiohttp or asyncio.

    Args:
        error: as it was raised.
        address: whom the request was sent to.
        timeout_s: how long an answer was waited for.
    """
    if isinstance(error, asyncio.TimeoutError):
        return ServerTimeout(
            f"{address} did not answer within {timeout_s:g} s; give it more with --timeout, or look at its load"
        )
    if isinstance(error, OSError):  # aiohttp's connection errors are OSErrors, too, but for the next
        return _unreachable(address, error)
    if type(error).__name__ == "ClientResponseError":  # aiohttp's, for an answer that is not HTTP
        return ServingError(f"what answers at {address} does not speak HTTP; for gRPC write grpc://{address.target}")
    status, message = _status_and_message(error)
    if status is None and type(error).__module__.startswith("aiohttp"):
        return _unreachable(address, error)
    if status is None:
        return ServingError(f"{address} does not answer as a model server does ({message}); name one with --url")
    return status_failure(status, message, address)


def status_failure(status: str, message: str, address: ServerAddress) -> ServingError:
    """Return our error for an answer with another status than success.

    Args:
        status: HTTP's number or the name of gRPC's code, as tritonclient has them.
        message: what the server said.
        address: the server.
    """
    message = _short(message)
    if "restricted, expecting header" in message:  # 403, or of all things gRPC's UNAVAILABLE
        return RequestRefused(
            f"{address} does that only for clients with its key ({message}); name the model with --model, or set "
            "ENGINERY_LOADING_KEY to the server's key where models are to be loaded"
        )
    if status in _REFUSED_STATUS:
        return RequestRefused(f"{address} refused it: {message}")
    if status in _OVERLOADED_STATUS:
        if any(word in message.lower() for word in _UNREACHED):
            return _unreachable(address, message)
        return ServerOverloaded(f"{address} takes no more at the moment: {message}; send less, or start more servers")
    return ServingError(f"{address} failed: {message}; its log says more")


def _unreachable(address: ServerAddress, reason: object) -> ServerUnreachable:
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__  # aiohttp's str adds "ssl:default"
    fix = "start one with `enginery serve NAME@champion`, or name another with --url"
    if "HTTP/2" in text or "Socket closed" in text:
        fix = f"if its port is for HTTP, write http://{address.target}"
    return ServerUnreachable(f"no model server answers at {address} ({_short(text)}); {fix}")


def _status_and_message(error: BaseException) -> tuple[str | None, str]:
    """Status and message of tritonclient's InferenceServerException, without importing it; others have no status."""
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    if callable(status) and callable(message):
        return status(), _short(str(message()))
    return None, _short(f"{type(error).__name__}: {error}")


def _short(message: str) -> str:
    line = " ".join(message.split()).rstrip(".;")
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 1]}…"


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Time limit of an answer, and the time in which a request is sent again.

    Only what a repeated request can fix is repeated: no connection, and a server that is full. The pauses double,
    each drawn between half of it and all of it, so that many clients do not come back at the same moment.
    """

    timeout_s: float = 10.0  # of one attempt
    retry_s: float = 10.0  # from the first attempt to the last; 0 tries once
    first_pause_s: float = 0.1
    most_pause_s: float = 2.0


async def with_retries(
    call: Callable[[], Awaitable[Result]], retry: RetryPolicy, address: ServerAddress, note_retry: Callable[[], None]
) -> Result:
    """The call's result, in as many attempts as retry allows.

    Args:
        call: one attempt.
        retry: how long.
        address: for the messages.
        note_retry: called before each further attempt, to count them.

    Raises:
        ServingError: the last attempt's failure.
    """
    clock, pause_s = asyncio.get_running_loop().time, retry.first_pause_s
    started = clock()
    while True:
        try:
            async with asyncio.timeout(retry.timeout_s):
                return await call()
        except EngineryError:
            raise  # what we found out ourselves of an answer
        except Exception as error:
            failed = failure(error, address, retry.timeout_s)
            wait_s = pause_s * random.uniform(0.5, 1)
            if not failed.retriable or clock() + wait_s - started > retry.retry_s:
                raise failed from error
        await asyncio.sleep(wait_s)
        note_retry()
        pause_s = min(2 * pause_s, retry.most_pause_s)


_MISSING = "the client library of the model server is not installed; run `pip install 'enginery[serve]'`"
# aiohttp would ask for compressed answers, which cost the server more than the few bytes of a prediction are worth.
PLAIN = {"Accept-Encoding": "identity"}
_HTTP_TIMEOUT_S = 24 * 3600.0  # the caller has its own; tritonclient's would also end long downloads
# gRPC waits up to two minutes before it tries to connect again, which is longer than a server takes to restart.
# And it would go through the environment's http_proxy, also to this machine, where HTTP here goes straight.
CHANNEL = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Transport:
    """KServe v2 over HTTP/1.1 or gRPC by tritonclient, to be used within the running event loop.

    Errors are those of the libraries below: see `failure`.

    Args:
        address: the server; nothing is sent yet.
        loading_key: sent with requests that a server which lets models be loaded keeps for those who have it.

    Raises:
        EngineryError: tritonclient is not installed.
    """

    def __init__(self, address: ServerAddress, loading_key: str = "") -> None:
        self._is_grpc = address.protocol == "grpc"
        options = {"channel_args": CHANNEL} if self._is_grpc else {"conn_limit": 0, "conn_timeout": _HTTP_TIMEOUT_S}
        try:
            self._library = import_module(f"tritonclient.{address.protocol}.aio")
            self._client = self._library.InferenceServerClient(address.target, ssl=address.tls, **options)
        except (ImportError, RuntimeError) as error:  # tritonclient turns a missing part into a RuntimeError
            reason = " ".join(str(error).split())
            raise EngineryError(f"{_MISSING} ({reason})", code="no-client-library") from None
        if not self._is_grpc:
            self._client._stub.trace_configs.append(_redirects_refused(address))
        self._json = {"as_json": True} if self._is_grpc else {}
        self._loading = loading_headers(address.protocol, loading_key)

    async def ready(self) -> bool:
        """Return True if the server and all its models are ready."""
        return bool(await self._client.is_server_ready())

    async def server(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return await self._client.get_server_metadata(**self._json)

    async def index(self) -> list[dict[str, Any]]:
        """Return the models of the repository: name, version, state."""
        index = await self._client.get_model_repository_index(headers=self._loading, **self._json)
        return index.get("models", []) if self._is_grpc else index

    async def metadata(self, model: str) -> dict[str, Any]:
        """Return names, types and shapes of a model's inputs and outputs."""
        return await self._client.get_model_metadata(model, **self._json)

    async def config(self, model: str) -> dict[str, Any]:
        """Return a model's configuration, by the names of Triton's schema."""
        config = await self._client.get_model_config(model, **self._json)
        return config["config"] if self._is_grpc else config

    async def statistics(self, model: str) -> dict[str, Any]:
        """Return the counters of a model since it was loaded, as in Triton's statistics extension."""
        return await self._client.get_inference_statistics(model, **self._json)

    async def load(self, model: str, config: Mapping[str, Any]) -> None:
        """Load a model again with this configuration, which it then keeps until it is given another."""
        await self._client.load_model(model, headers=self._loading, config=json.dumps(config))

    async def infer(self, model: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return outputs by name. Inputs: float32 as FP32, objects as BYTES."""
        sent = input_tensors(self._library, inputs)
        headers = None if self._is_grpc else {**PLAIN}  # to which tritonclient adds
        result = await self._client.infer(model, sent, headers=headers)
        response = result.get_response()
        names = (
            [entry.name for entry in response.outputs]
            if self._is_grpc
            else [entry["name"] for entry in response["outputs"]]
        )
        return {name: result.as_numpy(name) for name in names}

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()


def _redirects_refused(address: ServerAddress) -> Any:
    """Return a hook for aiohttp, which would take images and the key for loading to any host that an answer names."""
    import aiohttp

    async def refuse(_: object, __: object, found: aiohttp.TraceRequestRedirectParams) -> None:
        place = found.response.headers.get("Location", "")
        raise ServingError(f"{address} leads to {_short(place)}, which nobody named; name the model server itself")

    traces = aiohttp.TraceConfig()
    traces.on_request_redirect.append(refuse)
    traces.freeze()
    return traces


def input_tensors(library: Any, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    """Return arrays as inputs of tritonclient's HTTP or gRPC library: FP32, or BYTES for objects."""
    tensors = []
    for name, values in inputs.items():
        datatype = "BYTES" if values.dtype == np.object_ else "FP32"
        tensors.append(library.InferInput(name, list(values.shape), datatype))
        tensors[-1].set_data_from_numpy(values)
    return tensors
