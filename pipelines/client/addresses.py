"""Where a model server is, and which of its two protocols is spoken there."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from components.common.errors import UserError

_PROTOCOLS: dict[str, tuple[Literal["http", "grpc"], bool]] = {
    "http": ("http", False),
    "https": ("http", True),
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
}
_DEFAULT_PORTS = {"http": 8000, "grpc": 8001}  # Triton's own
_EXAMPLES = "write http://HOST:8000 or grpc://HOST:8001 (https and grpcs with TLS)"


@dataclass(frozen=True)
class Address:
    """Protocol, host with port, and whether the connection is encrypted."""

    protocol: Literal["http", "grpc"]
    target: str  # host:port
    tls: bool

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.target}"


def parse_address(url: str) -> Address:
    """An address as people write it: the scheme says the protocol; without one port 8001 is gRPC, any other HTTP.

    Raises:
        UserError: this is no address of a model server.
    """
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "", scheme
    try:
        parts = urlsplit(f"//{rest}")
        port = parts.port
    except ValueError:  # the port is no number, or there is none so large; an IPv6 address without its end
        raise UserError(f"--url {url}: that has no usable host and port; {_EXAMPLES}") from None
    if scheme and scheme.lower() not in _PROTOCOLS:
        raise UserError(f"--url {url}: the scheme {scheme!r} is unknown; {_EXAMPLES}")
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise UserError(f"--url {url}: an address is a host and a port, nothing more; {_EXAMPLES}")
    if not scheme:
        scheme = "grpc" if port == _DEFAULT_PORTS["grpc"] else "http"
    protocol, tls = _PROTOCOLS[scheme.lower()]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(protocol=protocol, target=f"{host}:{port or _DEFAULT_PORTS[protocol]}", tls=tls)
