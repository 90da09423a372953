"""HTTP for addresses that people name: nothing leads into the networks of this machine, and nothing is without end.

fsspec's driver asks by the session that is made here.
"""

import asyncio
import errno
import os
import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
import yarl

from components.common.contracts.errors import UserError
from components.preprocess.sources.samples import MAX_FILE_BYTES, AddressRefused

ALLOWED = "ENGINERY_ALLOWED_NETWORKS"
_CONNECT_S = 30.0
_SILENCE_S = 60.0  # without a byte
_TOTAL_S = 300.0
DOWNLOAD = {"timeout": aiohttp.ClientTimeout(total=24 * 3600.0, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)}
_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")  # IPv4 addresses are behind its last 32 bits

Endpoint = tuple[str, int]  # address and port


class _Pinned(aiohttp.ThreadedResolver):
    """Names as the system resolves them, but one as it was resolved when its addresses were trusted.

    Whoever owns the name could else lead there what was let through to another address.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, endpoints: set[Endpoint]) -> None:
        super().__init__(loop=loop)
        self._name, self._addresses = name.rstrip("."), sorted(address for address, _ in endpoints)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        if not self._addresses or host.rstrip(".").lower() != self._name:
            return await super().resolve(host, port, family)
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]


class _Response(aiohttp.ClientResponse):
    """An answer of bounded length, whatever its header says."""

    async def read(self) -> bytes:
        if self._body is None:
            found = bytearray()
            async for chunk in self.content.iter_chunked(1 << 20):
                found += chunk
                if len(found) > MAX_FILE_BYTES:
                    self.close()
                    raise OSError(f"the answer has more than {MAX_FILE_BYTES:,} bytes")
            self._body = bytes(found)
        return self._body


async def open_session(*, named: str, loop: asyncio.AbstractEventLoop) -> aiohttp.ClientSession:
    """A session for what lies at a URI.

    It connects to the endpoint that the URI names, to a proxy of the environment, and where an answer redirects it to
    public addresses. What counts is the address that is connected to, not the name; a name that has public addresses
    has no others.

    Args:
        named: the URI.
        loop: that it runs in.
    """
    networks = _allowed_networks()
    proxies = {uri for scheme, uri in getproxies().items() if scheme in ("http", "https", "all")}
    own = await _endpoints(named, loop)
    # A cloud's service for credentials is at a link-local address.
    private = {endpoint for endpoint in own if not _real_address(endpoint[0]).is_link_local}
    if any(_real_address(address).is_global for address, _ in own):
        private = set()
    trusted = set(private)
    trusted |= {endpoint for uri in proxies for endpoint in await _endpoints(uri, loop)}

    def check(endpoint: Endpoint) -> None:
        address = _real_address(endpoint[0])
        if address.is_global or endpoint in trusted or any(address in network for network in networks):
            return
        raise AddressRefused(
            errno.EACCES,
            f"{endpoint[0]} port {endpoint[1]} is no public address and not the one that was named; where it may be "
            f"read, name it itself, or set {ALLOWED} to its network, such as {endpoint[0]}",
        )

    def connect(info: tuple) -> socket.socket:  # type: ignore[type-arg]  # as getaddrinfo gives it
        check(info[4][:2])
        made = socket.socket(*info[:3])
        made.setblocking(False)
        return made

    async def check_redirect(_: object, __: SimpleNamespace, found: aiohttp.TraceRequestRedirectParams) -> None:
        """Behind a proxy it is the proxy that connects."""
        target = found.url.join(yarl.URL(found.response.headers.get("Location", ""), encoded=True))
        if target.origin() != found.url.origin():
            for endpoint in await _endpoints(str(target), loop):
                check(endpoint)

    traces = aiohttp.TraceConfig()
    if proxies:
        traces.on_request_redirect.append(check_redirect)
    return aiohttp.ClientSession(
        loop=loop,
        trust_env=True,  # proxies and .netrc
        response_class=_Response,
        auto_decompress=False,  # a small answer may unpack to anything
        headers={"Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
        connector=aiohttp.TCPConnector(
            socket_factory=connect, resolver=_Pinned(loop, yarl.URL(named).raw_host or "", private)
        ),
        trace_configs=[traces],
    )


async def _endpoints(uri: str, loop: asyncio.AbstractEventLoop) -> set[Endpoint]:
    """The addresses of a URI's host; none where it has no such name."""
    try:
        parts = urlsplit(uri if "://" in uri else f"http://{uri}")
        port = parts.port or _PORTS.get(parts.scheme, 80)
        found = await loop.getaddrinfo(parts.hostname or "", port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return set()
    return {(str(entry[4][0]), port) for entry in found}


def _real_address(text: str) -> IPv4Address | IPv6Address:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _allowed_networks() -> list:  # type: ignore[type-arg]
    text = os.environ.get(ALLOWED, "")
    try:
        return [ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(
            f"{ALLOWED} must hold networks with commas between, such as 10.0.0.0/8: {error}",
            code="invalid-networks",
            setting=ALLOWED,
        ) from None
