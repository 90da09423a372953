"""What can go wrong between a client and a model server, each with a message that says what to do."""

import asyncio
from typing import ClassVar, Literal

from components.common.errors import EngineryError, UserError
from pipelines.client.addresses import Address

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


class ServerUnreachable(ServingError):
    """Nothing answers at the address, or the connection broke. Tried again."""

    kind = "unreachable"
    retriable = True


class ServerOverloaded(ServingError):
    """The server is there and has no room for more. Tried again."""

    kind = "overloaded"
    retriable = True


class AnswerLate(ServingError):
    """No answer within the time that was given. Not tried again: it would only add load."""

    kind = "timeout"


class RequestRefused(ServingError, UserError):
    """The server says that the request is wrong: not an image, an unknown model, another shape."""

    kind = "refused"


def failure(error: BaseException, address: Address, timeout_s: float) -> ServingError:
    """What an error of tritonclient, aiohttp or asyncio means.

    Args:
        error: as it was raised.
        address: whom the request was sent to.
        timeout_s: how long an answer was waited for.
    """
    if isinstance(error, asyncio.TimeoutError):
        return AnswerLate(
            f"{address} did not answer within {timeout_s:g} s; give it more with --timeout, or look at its load"
        )
    if isinstance(error, OSError):  # aiohttp's connection errors are OSErrors, too, but for the next
        return _unreachable(address, error)
    if type(error).__name__ == "ClientResponseError":  # aiohttp's, for an answer that is not HTTP
        return ServingError(f"what answers at {address} does not speak HTTP; for gRPC write grpc://{address.target}")
    status, message = _status_and_message(error)
    if status is None:
        known = type(error).__module__.startswith("aiohttp")
        return _unreachable(address, error) if known else ServingError(f"{address} failed: {message}")
    return status_failure(status, message, address)


def status_failure(status: str, message: str, address: Address) -> ServingError:
    """What an answer with another status than success means.

    Args:
        status: HTTP's number or the name of gRPC's code, as tritonclient has them.
        message: what the server said.
        address: the server.
    """
    message = _short(message)
    if "restricted, expecting header" in message:  # 403, or of all things gRPC's UNAVAILABLE
        return RequestRefused(
            f"{address} does that only for who has its key ({message}); name the model with --model, or set "
            "ENGINERY_LOADING_KEY to the server's key where models are to be loaded"
        )
    if status in _REFUSED_STATUS:
        return RequestRefused(f"{address} refused it: {message}")
    if status in _OVERLOADED_STATUS:
        if any(word in message.lower() for word in _UNREACHED):
            return _unreachable(address, message)
        return ServerOverloaded(f"{address} takes no more at the moment: {message}; send less, or start more servers")
    return ServingError(f"{address} failed: {message}; its log says more")


def _unreachable(address: Address, reason: object) -> ServerUnreachable:
    return ServerUnreachable(
        f"no model server answers at {address} ({_short(str(reason) or type(reason).__name__)}); start one with "
        "`enginery serve NAME@champion`, or name another with --url"
    )


def _status_and_message(error: BaseException) -> tuple[str | None, str]:
    """Of tritonclient's InferenceServerException, without importing it; of others there is no status."""
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    if callable(status) and callable(message):
        return status(), _short(str(message()))
    return None, _short(f"{type(error).__name__}: {error}")


def _short(message: str) -> str:
    line = " ".join(message.split()).rstrip(".;")
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 1]}…"
