"""Folders in an OCI registry: each file a layer with its name as title, as ORAS does it, signed as cosign does it.

https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md is the protocol. No archive is ever unpacked.
Credentials are those of Docker's configuration ($DOCKER_CONFIG/config.json), and no one but the registry gets them.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import aiohttp
import yarl
from pydantic import BaseModel, Field, ValidationError

from components.common.contracts.digests import canonical_json, digest_bytes, digest_file
from components.common.contracts.errors import AddressRefused, EngineryError, UserError, without_secrets
from components.common.contracts.manifests import is_plain_path
from components.common.data.web import DOWNLOAD, open_session
from enginery.new_folders import check_room

SCHEME = "oci://"
_ADDRESS = re.compile(
    r"oci://(?P<registry>(?:[A-Za-z0-9.-]+|\[[0-9a-f:]+\])(?::\d+)?)"
    r"/(?P<repository>[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")  # without TLS, as Docker and cosign have it
# Registries whose tokens another host gives.
_TOKEN_HOSTS = {"registry-1.docker.io": "auth.docker.io", "registry.gitlab.com": "gitlab.com"}
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_ARTIFACT = "application/vnd.enginery.folder.v1"
_TITLE = "org.opencontainers.image.title"
_COSIGN_PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
_COSIGN_SIGNATURE = "dev.cosignproject.cosign/signature"
_MAX_ANSWER_BYTES = 4 << 20  # of a manifest, as the specification has it, and of a token
_MAX_FILES = 10_000
_MAX_NAME, _MAX_DEPTH = 1024, 32  # characters; folders and the file

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Address:
    """oci://registry/repository, a tag, and the digest of a manifest."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}{self.tag and ':' + self.tag}{self.digest and '@' + self.digest}"

    @property
    def name(self) -> str:
        """As cosign has it."""
        return f"{self.registry}/{self.repository}"

    @property
    def origin(self) -> yarl.URL:
        """Origin of the registry's server."""
        return yarl.URL(f"http{'' if _LOOPBACK.fullmatch(self.registry) else 's'}://{self.registry}")


def read_address(text: str) -> Address:
    """Parse an address.

    Raises:
        UserError: it is none.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        try:
            without_secrets(text)
        except ValueError as error:
            raise UserError(str(error), code="secret-in-address") from None
        raise UserError(
            f"{text} is no address in an OCI registry. It has the form oci://registry/repository, in small letters, "
            "with :tag or @sha256:... behind it; who may read it is in Docker's configuration (docker login)",
            code="invalid-address",
        )
    return Address(**{name: value or "" for name, value in found.groupdict().items()})


class _Descriptor(BaseModel):
    """A blob as a manifest describes it."""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    annotations: dict[str, str] = {}


class _Manifest(BaseModel):
    """The manifest of an image, which an artifact is, too."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    layers: list[_Descriptor] = Field(max_length=_MAX_FILES)


def pull(address: Address, folder: Path) -> None:
    """Bring every file of an artifact into an empty folder.

    Raises:
        EngineryError: the registry does not answer, refuses, leads to an inner network, or has not what digests say.
    """
    _run(address, _pull(address, folder))


def push(folder: Path, address: Address, key: Any) -> Address:
    """Write every file of a folder into a registry, and cosign's signature of it.

    Args:
        folder: of plain files.
        address: with a tag.
        key: private, ECDSA P-256.

    Returns:
        The address with the digest of what was written: the same for the same files.

    Raises:
        EngineryError: the registry does not answer or refuses.
    """
    return _run(address, _push(folder, address, key))


def manifest_status(address: Address, accept: str, login: tuple[str, str] | None, limit_s: float) -> int:
    """The status of a registry's answer for a manifest.

    Args:
        address: of the manifest.
        accept: its media types.
        login: user and password to ask with; None for nobody's.
        limit_s: time that the registry has, in seconds.

    Raises:
        EngineryError: the registry does not answer, or leads to an inner network.
    """

    async def ask() -> int:
        async with asyncio.timeout(limit_s), await _open(address) as session:
            basic = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}" if login else ""
            registry = _Registry(session, address, basic)
            path = f"manifests/{address.digest or address.tag}"
            async with await registry.call("HEAD", path, accept=accept) as answer:
                return answer.status

    return _run(address, ask())


async def _open(address: Address) -> aiohttp.ClientSession:
    return await open_session(named=str(address.origin), loop=asyncio.get_running_loop())


def _run(address: Address, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return asyncio.run(work)
    except AddressRefused as error:
        raise EngineryError(f"{address} can't be used: {error.strerror}", code="address-refused") from None
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "") or type(error.certificate_error).__name__
        raise EngineryError(
            f"the registry of {address} has no certificate that is trusted here: {reason}. Name the file of its "
            "authority, in PEM, in SSL_CERT_FILE",
            code="certificate-refused",
            setting="SSL_CERT_FILE",
        ) from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        if isinstance(error.__cause__, AddressRefused):
            raise EngineryError(
                f"{address} can't be used: {error.__cause__.strerror}", code="address-refused"
            ) from None
        words = f"{type(error).__name__} {getattr(error, 'os_error', '')}".strip()  # others may hold what was sent
        raise EngineryError(
            f"the registry of {address} does not answer as one does: {words}. Try again", code="registry-failed"
        ) from None


async def _pull(address: Address, folder: Path) -> None:
    async with await _open(address) as session:
        registry = _Registry(session, address)
        async with await registry.call("GET", f"manifests/{address.digest or address.tag}", accept=_MANIFEST) as answer:
            registry.check(answer, 200)
            data = await _bounded(answer)
        digest = digest_bytes(data)
        if address.digest and digest != address.digest:
            message = f"the registry has another manifest at {address}: {digest}. Push the artifact again"
            raise EngineryError(message, code="other-manifest")
        files = _files_of(address, data)
        check_room(str(address), sum(layer.size for layer in files.values()), folder)
        for name, layer in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            async with await registry.call("GET", f"blobs/{layer.digest}") as answer:
                registry.check(answer, 200)
                await _save(answer, file, layer, f"{name} of {address}")


def _files_of(address: Address, data: bytes) -> dict[str, _Descriptor]:
    """The layers by their names, which lead nowhere else than below a folder."""
    try:
        manifest = _Manifest.model_validate_json(data)
        files = {layer.annotations[_TITLE]: layer for layer in manifest.layers}
    except (ValidationError, KeyError):
        raise EngineryError(
            f"{address} is no artifact of files: push it with `enginery push`", code="not-an-artifact"
        ) from None
    # Of 120 KB, its parents alone would take gigabytes; and nobody counts the room that folders take.
    if any(len(name) > _MAX_NAME or name.count("/") >= _MAX_DEPTH for name in files):
        most = f"{_MAX_NAME:,} characters, or below more than {_MAX_DEPTH - 1} folders"
        raise EngineryError(f"{address} names a file by more than {most}", code="name-too-long")
    for name in files:
        if name != "." and not is_plain_path(name):
            raise EngineryError(f"{address} names a file outside of the artifact: {name!r}", code="file-outside")
        parents = map(str, PurePosixPath(name).parents)
        if taken := [parent for parent in parents if parent in files] or [name] * (name == "."):
            raise EngineryError(f"{address} has {taken[0]!r} as a file and as a folder", code="name-conflict")
    if len(files) != len(manifest.layers):
        raise EngineryError(f"{address} has two files of the same name", code="name-conflict")
    return files


async def _save(answer: aiohttp.ClientResponse, file: Path, layer: _Descriptor, what: str) -> None:
    size, found = 0, hashlib.sha256()
    with file.open("xb") as out:
        async for chunk in answer.content.iter_chunked(1 << 20):
            size += len(chunk)
            if size > layer.size:
                break
            found.update(chunk)
            out.write(chunk)
    if size != layer.size or f"sha256:{found.hexdigest()}" != layer.digest:
        raise EngineryError(
            f"{what} is not what its manifest says: {layer.size:,} bytes of {layer.digest}", code="blob-mismatch"
        )


async def _push(folder: Path, address: Address, key: Any) -> Address:
    async with await _open(address) as session:
        registry = _Registry(session, address)
        files = sorted(path for path in folder.rglob("*") if not path.is_dir())
        layers = []
        for file in files:
            layer = await registry.upload(file, "application/octet-stream")
            layers.append({**layer, "annotations": {_TITLE: file.relative_to(folder).as_posix()}})
        config = await registry.upload(b"{}", "application/vnd.oci.empty.v1+json")
        manifest = _manifest(config, layers, artifactType=_ARTIFACT)
        digest = digest_bytes(manifest)
        # The signature first: nobody finds the artifact without it.
        # https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
        critical = {
            "identity": {"docker-reference": address.name},
            "image": {"docker-manifest-digest": digest},
            "type": "cosign container image signature",
        }
        payload = canonical_json({"critical": critical, "optional": None})
        signature = await registry.upload(payload, _COSIGN_PAYLOAD)
        signature["annotations"] = {_COSIGN_SIGNATURE: base64.b64encode(_sign(key, payload)).decode()}
        image = {"architecture": "", "os": "", "rootfs": {"type": "layers", "diff_ids": [digest_bytes(payload)]}}
        config = await registry.upload(canonical_json(image), "application/vnd.oci.image.config.v1+json")
        await registry.put_manifest(f"{digest.replace(':', '-')}.sig", _manifest(config, [signature]))
        await registry.put_manifest(address.tag, manifest)
    return replace(address, digest=digest)


def _manifest(config: dict[str, Any], layers: list[dict[str, Any]], **more: str) -> bytes:
    return canonical_json({"schemaVersion": 2, "mediaType": _MANIFEST, **more, "config": config, "layers": layers})


def _sign(key: Any, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return bytes(key.sign(data, ECDSA(SHA256())))


class _Registry:
    """A repository of a registry, and what it is asked with.

    Args:
        session: that asks.
        address: of the repository.
        basic: header with credentials, "" for none; None for those of Docker's configuration.
    """

    def __init__(self, session: aiohttp.ClientSession, address: Address, basic: str | None = None) -> None:
        self.session = session
        self.address = address
        self.basic = basic
        self.authorization = ""

    async def call(
        self, method: str, path: str, body: Path | bytes | None = None, *, kind: str = "", accept: str = "*/*"
    ) -> aiohttp.ClientResponse:
        """The answer, after a token was fetched where one is asked for. `path`: below the repository, or absolute."""
        base = self.address.origin / "v2" / self.address.repository
        url = yarl.URL(path, encoded=True) if "://" in path else yarl.URL(f"{base}/{path}", encoded=True)
        for attempt in (1, 2):
            answer = await self.session.request(
                method,
                url,
                data=body.open("rb") if isinstance(body, Path) else body,
                headers={"Accept": accept, **({"Content-Type": kind} if kind else {})},
                allow_redirects=method in ("GET", "HEAD"),
                timeout=DOWNLOAD["timeout"],
                middlewares=[self._identify],
            )
            # Whom a redirect leads to may ask for anything.
            if answer.status != 401 or attempt == 2 or answer.url.origin() != self.address.origin:
                break
            challenges = answer.headers.getall("WWW-Authenticate", [])
            answer.release()
            self.authorization = await self._authorize(challenges)
        return answer

    async def _identify(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Every request passes here, those of redirects, too."""
        if self.authorization and request.url.origin() == self.address.origin:
            request.headers["Authorization"] = self.authorization
        return await send(request)

    async def _authorize(self, challenges: list[str]) -> str:
        basic = _credentials(self.address.registry) if self.basic is None else self.basic
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "basic" and basic:
                return basic
            fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if scheme.lower() != "bearer" or "realm" not in fields:
                continue
            realm = yarl.URL(fields["realm"])
            host = _TOKEN_HOSTS.get(self.address.registry, self.address.registry)
            if basic and realm.origin() not in (self.address.origin, yarl.URL(f"https://{host}")):
                raise EngineryError(
                    f"{self.address.registry} wants its credentials sent to {realm.host}, and they are for itself "
                    "alone. Use a registry that gives its tokens itself",
                    code="credentials-elsewhere",
                )
            query = {name: fields[name] for name in ("service", "scope") if name in fields}
            headers = {"Authorization": basic} if basic else {}
            async with self.session.get(realm.update_query(query), headers=headers, allow_redirects=False) as answer:
                if answer.status in (401, 403):
                    return ""  # the registry says for what
                self.check(answer, 200)
                try:
                    found = json.loads(await _bounded(answer))
                    return f"Bearer {found.get('token') or found['access_token']}"
                except (AttributeError, KeyError, RecursionError):
                    raise ValueError("the answer holds no token") from None
        return ""

    def check(self, answer: aiohttp.ClientResponse, *due: int) -> None:
        """Refuse an answer of another status. Its words are left out: it may repeat what it was sent."""
        if answer.status in due:
            return
        fix = {
            401: "give it credentials: `docker login`, or DOCKER_CONFIG",
            403: "these credentials don't suffice: see `docker login`",
            404: "check the address: nothing is there, or these credentials don't see it",
        }.get(answer.status, "it should not")
        message = f"{self.address}: {answer.method} was answered {answer.status} by {answer.url.host}; {fix}"
        raise EngineryError(message, code="registry-refused")

    async def upload(self, data: Path | bytes, kind: str) -> dict[str, Any]:
        """Write a blob where it is not there yet; its descriptor."""
        if isinstance(data, Path) and not data.stat().st_size:
            data = b""  # aiohttp would send an empty file without a length
        digest = digest_file(data) if isinstance(data, Path) else digest_bytes(data)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        async with await self.call("HEAD", f"blobs/{digest}") as answer:
            self.check(answer, 200, 404)
            found = answer.status == 200
        if not found:
            async with await self.call("POST", "blobs/uploads/") as answer:
                self.check(answer, 202)
                place = answer.url.join(yarl.URL(answer.headers.get("Location", ""), encoded=True))
            if place.origin() != self.address.origin:
                message = f"{self.address.registry} wants files sent to {place.host}, which is not itself"
                raise EngineryError(message, code="upload-elsewhere")
            put = f"{place}{'&' if place.query_string else '?'}digest={digest}"
            async with await self.call("PUT", put, data, kind="application/octet-stream") as answer:
                self.check(answer, 201)
        return {"mediaType": kind, "digest": digest, "size": size}

    async def put_manifest(self, name: str, data: bytes) -> None:
        async with await self.call("PUT", f"manifests/{name}", data, kind=_MANIFEST) as answer:
            self.check(answer, 201)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        found += chunk
        if len(found) > _MAX_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    return bytes(found)


def _credentials(registry: str) -> str:
    """The header for a registry, by Docker's configuration; empty where that has none.

    Raises:
        UserError: the configuration can't be read, or its helper failed.
    """
    file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not file.exists():
        return ""
    try:
        config = json.loads(file.read_bytes())
        entry = config.get("auths", {}).get(registry, {})
        if entry.get("auth"):
            return f"Basic {entry['auth']}"
        helper = config.get("credHelpers", {}).get(registry) or config.get("credsStore")
        if not helper:
            return ""
        command = [f"docker-credential-{PurePosixPath(helper).name}", "get"]
        done = subprocess.run(command, input=registry, capture_output=True, text=True, timeout=60)
        if done.returncode:  # so helpers say that they have none, too
            return ""
        found = json.loads(done.stdout)
        return "Basic " + base64.b64encode(f"{found['Username']}:{found['Secret']}".encode()).decode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, subprocess.SubprocessError) as error:
        message = f"can't read credentials for {registry} by {file} ({type(error).__name__}); correct it: docker login"
        raise UserError(message, code="credentials-unreadable") from None
