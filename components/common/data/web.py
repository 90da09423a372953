"""HTTP for addresses that people name: nothing leads into the networks of this machine, and nothing is without end.

fsspec's driver asks by the session that is made here.
"""

import asyncio
import errno
import os
import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
import yarl

from components.common.contracts.errors import AddressRefused, UserError
from components.common.contracts.foreign import MAX_FILE_BYTES

ALLOWED = "ENGINERY_ALLOWED_NETWORKS"
_CONNECT_S = 30.0
_SILENCE_S = 60.0  # without a byte
_TOTAL_S = 300.0
DOWNLOAD = {"timeout": aiohttp.ClientTimeout(total=24 * 3600.0, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)}
_PORTS = {"http": 80, "https": 443}
# IPv4 addresses are behind the last 32 bits of these; the second is deprecated, and holds :: and ::1, too.
_NAT64, _COMPATIBLE = IPv6Network("64:ff9b::/96"), IPv6Network("::/96")
# As link-local ones not even if they are named: clouds' services for credentials, and IPv6 that may lead to any IPv4.
_NEVER = [
    ip_network(text)
    for text in (
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.0/24",
        "fd00:42::42",
        "fd00:ec2::254",
        "fd20:ce::254",
        "64:ff9b:1::/48",
        "::ffff:0:0:0/96",
        "2002::/16",
    )
]
_UNICAST = IPv6Network("2000::/3")  # all that is public in IPv6; Python's is_global takes what is not given out, too
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

Endpoint = tuple[str, int]  # address and port
Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address


class _Pinned(aiohttp.ThreadedResolver):
    """Names as the system resolves them, but one as it was resolved when its addresses were trusted.

    Whoever owns the name could else lead there what was let through to another address.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, endpoints: set[Endpoint]) -> None:
        super().__init__(loop=loop)
        self._name, self._addresses = name, sorted(address for address, _ in endpoints)

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
    has no others. Behind a proxy, which resolves names itself, the URI's host is checked as it resolves here, and a
    redirect to a name that does not resolve here is refused.

    Args:
        named: the URI.
        loop: that it runs in.
    """
    networks, names = _allowed()
    proxies = {uri for scheme, uri in getproxies().items() if scheme in ("http", "https", "all")}
    own = await _endpoints(named, loop)
    private = {endpoint for endpoint in own if not _is_never_trusted(_real_address(endpoint[0]))}
    if any(_is_public(_real_address(address)) for address, _ in own):
        private = set()
    trusted = set(private)
    trusted |= {endpoint for uri in proxies for endpoint in await _endpoints(uri, loop)}

    def check(endpoint: Endpoint) -> None:
        address = _real_address(endpoint[0])
        if _is_public(address) or endpoint in trusted or any(address in network for network in networks):
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

    async def check_target(target: yarl.URL) -> None:
        host = _host(target)
        if host in names:
            return
        endpoints = await _endpoints(str(target), loop)
        if not endpoints and host != _host(yarl.URL(named)):
            raise AddressRefused(
                errno.EACCES,
                f"it leads to {host}, which does not resolve here and may be an inner host; where it may be read, name "
                f"it itself, or add {host} to {ALLOWED}",
            )
        for endpoint in endpoints:
            check(endpoint)

    async def check_request(_: object, __: SimpleNamespace, found: aiohttp.TraceRequestStartParams) -> None:
        await check_target(found.url)

    async def check_redirect(_: object, __: SimpleNamespace, found: aiohttp.TraceRequestRedirectParams) -> None:
        await check_target(found.url.join(yarl.URL(found.response.headers.get("Location", ""), encoded=True)))

    traces = aiohttp.TraceConfig()
    if proxies:  # it is the proxy that connects
        traces.on_request_start.append(check_request)
        traces.on_request_redirect.append(check_redirect)
    return aiohttp.ClientSession(
        loop=loop,
        trust_env=True,  # proxies and .netrc
        response_class=_Response,
        auto_decompress=False,  # a small answer may unpack to anything
        headers={"Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
        connector=aiohttp.TCPConnector(socket_factory=connect, resolver=_Pinned(loop, _host(yarl.URL(named)), private)),
        trace_configs=[traces],
    )


def _host(uri: yarl.URL) -> str:
    return (uri.raw_host or "").rstrip(".").lower()


async def _endpoints(uri: str, loop: asyncio.AbstractEventLoop) -> set[Endpoint]:
    """The addresses of a URI's host; none where it has no such name."""
    try:
        parts = urlsplit(uri if "://" in uri else f"http://{uri}")
        port = parts.port or _PORTS.get(parts.scheme, 80)
        found = await loop.getaddrinfo(parts.hostname or "", port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return set()
    return {(str(entry[4][0]), port) for entry in found}


def _is_public(address: Address) -> bool:
    is_given_out = isinstance(address, IPv4Address) or address in _UNICAST
    return is_given_out and address.is_global and not _is_never_trusted(address)


def _is_never_trusted(address: Address) -> bool:
    return address.is_link_local or any(address in network for network in _NEVER)


def _real_address(text: str) -> Address:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _allowed() -> tuple[list[Network], set[str]]:
    """Networks and names of hosts that redirects may lead to."""
    networks: list[Network] = []
    names: set[str] = set()
    for part in filter(None, (part.strip().lower() for part in os.environ.get(ALLOWED, "").split(","))):
        try:
            networks.append(ip_network(part, strict=False))
        except ValueError as error:
            if not _NAME.fullmatch(part) or part.rpartition(".")[2].isdigit():
                raise UserError(
                    f"{ALLOWED} must hold networks, or names of hosts behind a proxy, with commas between, such as "
                    f"10.0.0.0/8,files.example.com: {error}",
                    code="invalid-networks",
                    setting=ALLOWED,
                ) from None
            names.add(part)
    return networks, names
