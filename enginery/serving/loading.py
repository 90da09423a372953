"""The key with which a client may have the server load models.

What is loaded may hold code, so whoever may load runs code as the server's account.
"""

import os
import re
import secrets
from contextlib import suppress
from ipaddress import ip_address

from components.common.contracts.errors import UserError
from enginery.local.state import StateDirectory

VARIABLE = "ENGINERY_LOADING_KEY"
HEADER = "enginery-loading"  # of HTTP; gRPC has it behind _GRPC_PREFIX, as Triton wants it
_GRPC_PREFIX = "triton-grpc-protocol-"
_KEY = re.compile(r"[A-Za-z0-9_-]{16,}")


def loading_key(host: str) -> str:
    """$ENGINERY_LOADING_KEY; on this machine else a random one, which the state directory keeps for this account alone.

    Args:
        host: that the server listens on, or that a client asks: an address or a name.

    Raises:
        UserError: the variable can't be used, or is missing for a server that others reach.
    """
    how = f"export {VARIABLE}=$(openssl rand -hex 16), for the server and for who loads"
    if (key := os.environ.get(VARIABLE)) is not None:
        if not _KEY.fullmatch(key):
            message = f"{VARIABLE} must be 16 or more letters, digits, - and _, got {len(key)} characters; {how}"
            raise UserError(message, code="invalid-loading-key", setting="ENGINERY_LOADING_KEY")
        return key
    if not _is_loopback(host):
        raise UserError(
            f"loading models through {host}, which is not this machine's loopback address, needs a key, since who may "
            f"load may run code there; {how}, or use 127.0.0.1",
            code="no-loading-key",
            setting="ENGINERY_LOADING_KEY",
        )
    file = StateDirectory.current().path / "loading.key"
    with suppress(FileExistsError):
        fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(secrets.token_hex(16))
            os.link(fresh, file)  # whole, or not there
        finally:
            fresh.unlink(missing_ok=True)
    return file.read_text()


def loading_headers(protocol: str, key: str) -> dict[str, str]:
    """Headers of a request to load, or for the index of models; empty without a key."""
    return {(_GRPC_PREFIX if protocol == "grpc" else "") + HEADER: key} if key else {}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
