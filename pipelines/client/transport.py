"""tritonclient's two protocols behind one set of calls. The only import of tritonclient."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from components.common.errors import EngineryError
from pipelines.client.addresses import Address
from pipelines.serving.loading import loading_headers

MISSING = "the client library of the model server is not installed; run `pip install 'enginery[serve]'`"
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


class Transport(Protocol):
    """What is asked of a server. Errors are those of the libraries below: see `failures.failure`."""

    async def ready(self) -> bool:
        """Whether the server and all its models are ready."""
        ...

    async def server(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        ...

    async def index(self) -> list[dict[str, Any]]:
        """The models of the repository: name, version, state."""
        ...

    async def metadata(self, model: str) -> dict[str, Any]:
        """Names, types and shapes of a model's inputs and outputs."""
        ...

    async def config(self, model: str) -> dict[str, Any]:
        """A model's configuration, by the names of Triton's schema."""
        ...

    async def statistics(self, model: str) -> dict[str, Any]:
        """What a model has done since it was loaded, as in Triton's statistics extension."""
        ...

    async def load(self, model: str, config: Mapping[str, Any]) -> None:
        """Load a model anew with this configuration, which it then keeps until it is given another."""
        ...

    async def infer(self, model: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Inputs: float32 as FP32, objects as BYTES."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


def open_transport(address: Address, loading_key: str = "") -> Transport:
    """A connection to be used within the running event loop; nothing is sent yet.

    Args:
        address: the server.
        loading_key: sent with what a server that lets models be loaded keeps for those who have it.

    Raises:
        EngineryError: tritonclient is not installed.
    """
    try:
        headers = loading_headers(address.protocol, loading_key)
        return (HttpTransport if address.protocol == "http" else GrpcTransport)(address, headers)
    except (ImportError, RuntimeError) as error:  # tritonclient turns a missing part into a RuntimeError
        raise EngineryError(f"{MISSING} ({' '.join(str(error).split())})") from None


def datatype(values: np.ndarray) -> str:
    """KServe's name of an array's type: FP32, or BYTES for objects."""
    return "BYTES" if values.dtype == np.object_ else "FP32"


class HttpTransport:
    """KServe v2 over HTTP/1.1."""

    def __init__(self, address: Address, loading: dict[str, str]) -> None:
        import tritonclient.http.aio as library

        self._library, self._loading = library, loading
        self._client = library.InferenceServerClient(
            address.target, conn_limit=0, conn_timeout=_HTTP_TIMEOUT_S, ssl=address.tls
        )

    async def ready(self) -> bool:
        """See Transport."""
        return bool(await self._client.is_server_ready())

    async def server(self) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_server_metadata()

    async def index(self) -> list[dict[str, Any]]:
        """See Transport."""
        return await self._client.get_model_repository_index(headers=self._loading)

    async def metadata(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_model_metadata(model)

    async def config(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_model_config(model)

    async def statistics(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_inference_statistics(model)

    async def load(self, model: str, config: Mapping[str, Any]) -> None:
        """See Transport."""
        await self._client.load_model(model, headers=self._loading, config=json.dumps(config))

    async def infer(self, model: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Transport."""
        sent = [_filled(self._library.InferInput, name, values) for name, values in inputs.items()]
        result = await self._client.infer(model, sent, headers=PLAIN)
        return {entry["name"]: result.as_numpy(entry["name"]) for entry in result.get_response()["outputs"]}

    async def close(self) -> None:
        """See Transport."""
        await self._client.close()


class GrpcTransport:
    """KServe v2 over gRPC."""

    def __init__(self, address: Address, loading: dict[str, str]) -> None:
        import tritonclient.grpc.aio as library

        self._library, self._loading = library, loading
        self._client = library.InferenceServerClient(address.target, ssl=address.tls, channel_args=CHANNEL)

    async def ready(self) -> bool:
        """See Transport."""
        return bool(await self._client.is_server_ready())

    async def server(self) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_server_metadata(as_json=True)

    async def index(self) -> list[dict[str, Any]]:
        """See Transport."""
        return (await self._client.get_model_repository_index(headers=self._loading, as_json=True)).get("models", [])

    async def metadata(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_model_metadata(model, as_json=True)

    async def config(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return (await self._client.get_model_config(model, as_json=True))["config"]

    async def statistics(self, model: str) -> dict[str, Any]:
        """See Transport."""
        return await self._client.get_inference_statistics(model, as_json=True)

    async def load(self, model: str, config: Mapping[str, Any]) -> None:
        """See Transport."""
        await self._client.load_model(model, headers=self._loading, config=json.dumps(config))

    async def infer(self, model: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Transport."""
        sent = [_filled(self._library.InferInput, name, values) for name, values in inputs.items()]
        result = await self._client.infer(model, sent)
        return {entry.name: result.as_numpy(entry.name) for entry in result.get_response().outputs}

    async def close(self) -> None:
        """See Transport."""
        await self._client.close()


def _filled(kind: Any, name: str, values: np.ndarray) -> Any:
    entry = kind(name, list(values.shape), datatype(values))
    entry.set_data_from_numpy(values)
    return entry
