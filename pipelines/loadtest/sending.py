"""Requests made ready once and sent many times, so that the load generator costs little beside the server."""

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from pipelines.client.addresses import Address
from pipelines.client.transport import PLAIN, datatype

_MAX_SAID = 300  # bytes of an error
_GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Sender(Protocol):
    """Sends what `prepare` made, within one event loop."""

    async def send(self, request: bytes) -> tuple[str, str] | None:
        """None for an answer; else the status, as `failures` knows it, and what was said.

        Raises:
            Exception: what the library below raises without an answer.
        """
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


def prepare(address: Address, model: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    """One inference request in the bytes that go over the wire, behind its header's length where it is HTTP."""
    if address.protocol == "http":
        import tritonclient.http as library

        body, header_length = library.InferenceServerClient.generate_request_body(_filled(library, inputs))
        return int(header_length or 0).to_bytes(8, "little") + bytes(body)
    import tritonclient.grpc as library
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    for entry in _filled(library, inputs):
        request.inputs.append(entry._get_tensor())
        request.raw_input_contents.append(entry._get_content())
    return bytes(request.SerializeToString())


def open_sender(address: Address, model: str) -> Sender:
    """A sender within the running event loop."""
    return HttpSender(address, model) if address.protocol == "http" else GrpcSender(address)


class HttpSender:
    """A connection for each request on its way, all kept open."""

    def __init__(self, address: Address, model: str) -> None:
        import aiohttp

        self._url = f"{address}/v2/models/{quote(model)}/infer"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def send(self, request: bytes) -> tuple[str, str] | None:
        """See Sender."""
        headers = {"Inference-Header-Content-Length": str(int.from_bytes(request[:8], "little")), **PLAIN}
        async with self._session.post(self._url, data=memoryview(request)[8:], headers=headers) as response:
            content = await response.read()
            ok = response.status == 200
            return None if ok else (str(response.status), content[:_MAX_SAID].decode(errors="replace"))

    async def close(self) -> None:
        """See Sender."""
        await self._session.close()


class GrpcSender:
    """One HTTP/2 connection for all requests."""

    def __init__(self, address: Address) -> None:
        import grpc

        from pipelines.client.transport import CHANNEL

        if address.tls:
            self._channel = grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(), options=CHANNEL)
        else:
            self._channel = grpc.aio.insecure_channel(address.target, options=CHANNEL)
        self._call = self._channel.unary_unary(_GRPC_METHOD)  # without serializers: bytes as they are
        self._error = grpc.aio.AioRpcError

    async def send(self, request: bytes) -> tuple[str, str] | None:
        """See Sender."""
        try:
            await self._call(request)
        except self._error as error:
            return str(error.code()), str(error.details())
        return None

    async def close(self) -> None:
        """See Sender."""
        await self._channel.close()


def _filled(library: Any, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    filled = []
    for name, values in inputs.items():
        entry = library.InferInput(name, list(values.shape), datatype(values))
        entry.set_data_from_numpy(values)
        filled.append(entry)
    return filled
