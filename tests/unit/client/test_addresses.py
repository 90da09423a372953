"""How an address is read."""

import pytest

from components.common.contracts.errors import UserError
from enginery.serving.client.transport import parse_address


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
    ("url", "word"),
    [
        ("ftp://host", "scheme 'ftp'"),
        ("http://host:port", "usable host and port"),
        ("http://host:99999", "usable host and port"),
        ("http://[::1", "usable host and port"),
        ("http://host:1/v2/models", "nothing more"),
        ("http://user@host:1", "nothing more"),
        ("http://:8000", "nothing more"),
        ("", "nothing more"),
    ],
)
def test_what_is_no_address_is_refused_with_an_example(url: str, word: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_address(url)
    assert word in str(caught.value)
    assert "http://HOST:8000" in str(caught.value)
