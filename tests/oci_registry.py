"""An OCI registry for tests: the distribution API as its specification has it, and ways to misbehave."""

import base64
import hashlib
import json
import re
import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.serving import QuietHandler, listening

USER, PASSWORD, TOKEN = "robot", "the-password-of-robot", "the-token-of-robot"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@dataclass(kw_only=True)
class Registry:
    """Contents, requests, and lies of the registry."""

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # by "repository/tag" and "repository/sha256:..."
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Authorization
    realm: str = ""  # where tokens come from; empty: nobody needs one
    served: dict[str, bytes] = field(default_factory=dict)  # in place of what lies at a digest
    redirects: str = ""  # where blobs lie instead

    def tag(self, repository: str, name: str, digest: str) -> None:
        """Move a tag, as who may write can."""
        self.manifests[f"{repository}/{name}"] = self.manifests[f"{repository}/{digest}"]

    def put(self, repository: str, manifest: object) -> str:
        """A manifest as somebody wrote it; its digest."""
        data = json.dumps(manifest).encode()
        digest = digest_of(data)
        self.manifests[f"{repository}/{digest}"] = data
        return digest


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class _Handler(QuietHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        authorization = self.headers.get("Authorization", "")
        self.registry.asked.append((self.command, self.path, authorization))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path == "/token":
            granted = authorization == BASIC
            return self.reply(200 if granted else 401, json.dumps({"token": TOKEN} if granted else {}).encode())
        if self.registry.realm and authorization != f"Bearer {TOKEN}":
            challenge = f'Bearer realm="{self.registry.realm}",service="test",scope="repository:x:pull,push"'
            return self.reply(401, authorization.encode(), {"WWW-Authenticate": challenge})
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+|uploads/.*)", parts.path)
        if found is None:
            return self.reply(404)
        repository, kind, name = found.groups()
        if kind == "manifests":
            return self.manifest(repository, name, body)
        return self.blob(name, parse_qs(parts.query), body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def manifest(self, repository: str, name: str, body: bytes) -> None:
        held = self.registry.manifests
        if self.command == "PUT":
            record = json.loads(body)
            for blob in (record["config"], *record["layers"]):
                if len(self.registry.blobs.get(blob["digest"], b"")) != blob["size"]:
                    return self.reply(400, b"MANIFEST_BLOB_UNKNOWN")
            assert self.headers["Content-Type"] == record["mediaType"]
            digest = digest_of(body)
            held[f"{repository}/{name}"] = held[f"{repository}/{digest}"] = body
            return self.reply(201, b"", {"Location": f"/v2/{repository}/manifests/{digest}"})
        data = self.registry.served.get(name, held.get(f"{repository}/{name}"))
        return self.reply(404) if data is None else self.reply(200, data)

    def blob(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if self.command == "POST":
            place = f"/v2/upload/blobs/uploads/{uuid.uuid4()}?_state=a%3D%3D"
            return self.reply(202, b"", {"Location": place})
        if self.command == "PUT":
            if digest_of(body) != query["digest"][0]:
                return self.reply(400, b"DIGEST_INVALID")
            self.registry.blobs[query["digest"][0]] = body
            return self.reply(201)
        if name not in self.registry.blobs:
            return self.reply(404)
        if self.registry.redirects and self.command == "GET":
            return self.reply(307, b"", {"Location": f"{self.registry.redirects}/v2/x/blobs/{name}"})
        return self.reply(200, self.registry.served.get(name, self.registry.blobs[name]))


@contextmanager
def oci_registry(tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    """A registry on the loopback. With TLS under a name for which nobody leaves that out."""
    registry = Registry()
    with listening(type("Configured", (_Handler,), {"registry": registry}), tls=tls) as server:
        registry.address = f"{'127.0.0.1' if tls is None else 'Localhost'}:{server.server_port}"
        yield registry
