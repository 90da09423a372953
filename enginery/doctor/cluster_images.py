"""Checks of a cluster's right to pull the images: the pull secrets, and what the registries say to them."""

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

import requests  # type: ignore[import-untyped]
from kubernetes import client  # type: ignore[import-untyped]

from components.common.contracts.container_images import IMAGE_OF
from enginery.doctor.checks import Finding, absent, missing, ok, warning
from enginery.doctor.cluster import View

_LIMIT_S = 10.0
_TYPE = "kubernetes.io/dockerconfigjson"
_KEY = ".dockerconfigjson"
# What a registry may answer with: one image, or one per architecture.
_ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)


@dataclass(frozen=True)
class ImageName:
    """The parts of an image reference."""

    registry: str
    repository: str
    version: str  # tag or digest

    @classmethod
    def parse(cls, reference: str) -> "ImageName":
        """As container engines read it: without a host it is Docker Hub's."""
        name, _, digest = reference.partition("@")
        name, tag = name.rsplit(":", 1) if ":" in name.rsplit("/", 1)[-1] else (name, "latest")
        host, _, rest = name.partition("/")
        if rest and ("." in host or ":" in host or host == "localhost"):
            return cls(host, rest, digest or tag)
        return cls("registry-1.docker.io", name if rest else f"library/{name}", digest or tag)


class ImageChecks:
    """The checks share what the pull secrets hold."""

    def __init__(self, view: View) -> None:
        self._view = view

    def pull_secrets(self) -> Finding:
        """Whether the pull secrets are there and are for the images' registry."""
        names = self._view.settings.image_pull_secrets
        registry = ImageName.parse(self._view.settings.image("train")).registry
        if not names:
            return absent(f"the settings name no pull secret; {registry} must let everybody pull, or nodes log in")
        place = self._view.namespace
        login = f"kubectl -n {place} create secret docker-registry NAME --docker-server={registry} ..."
        registries: list[str] = []
        for name in names:
            try:
                secret = self._view.core.read_namespaced_secret(name, place)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return missing(f"there is no secret {name} in {place}", login.replace("NAME", name))
            if secret.type != _TYPE or _KEY not in (secret.data or {}):
                return missing(f"the secret {name} is of type {secret.type}, and must be {_TYPE}", login)
            registries += _logins(secret)
        if registry not in registries:
            return missing(f"none of {', '.join(names)} is for {registry}; they are for {', '.join(registries)}", login)
        return ok(f"{', '.join(names)} for {registry}")

    def _login(self, registry: str) -> tuple[str, str] | None:
        """User and password for a registry, where they may be read."""
        for name in self._view.settings.image_pull_secrets if not self._view.trouble else ():
            try:
                secret = self._view.core.read_namespaced_secret(name, self._view.namespace)
            except client.ApiException:
                continue
            if found := _logins(secret).get(registry):
                return found
        return None

    def pull(self) -> Finding:
        """Ask the registry for each image, with the pull secret's login."""
        references = sorted({self._view.settings.image(step) for step in IMAGE_OF})
        for reference in references:
            image = ImageName.parse(reference)
            try:
                status = _ask(image, self._login(image.registry))
            except requests.RequestException as error:
                reason = str(getattr(error, "args", [error])[0])
                cause = re.search(r"(Connection refused|timed out|Name or service not known|certificate[^)']*)", reason)
                return warning(
                    f"{image.registry} can't be reached from here ({cause[1] if cause else type(error).__name__}); "
                    "the cluster's nodes may reach it",
                    "try where the nodes are: kubectl run pull --image=IMAGE --command -- true",
                )
            if status in (401, 403):
                return missing(
                    f"{image.registry} does not let {'the pull secret' if self._login(image.registry) else 'anybody'} "
                    f"pull {reference} ({status})",
                    "name a secret with a login that may, in image_pull_secrets",
                )
            if status == 404:
                return missing(
                    f"{image.registry} has no {reference}",
                    "push it (make images, docker push), or mend images.registry, images.tag or images.digests",
                )
            if status >= 300:
                return warning(f"{image.registry} answers {status} for {reference}", "ask again later")
        return ok(f"{len(references)} images of {ImageName.parse(references[0]).registry}")


def _logins(secret: Any) -> dict[str, tuple[str, str]]:
    """(user, password) by host, of a secret as `kubectl create secret docker-registry` makes it."""
    try:
        entries = json.loads(base64.b64decode(secret.data[_KEY]))["auths"]
    except (ValueError, KeyError, TypeError):
        return {}
    found = {}
    for address, entry in entries.items():
        host = re.sub(r"^https?://", "", address).split("/")[0]
        host = "registry-1.docker.io" if host == "index.docker.io" else host
        user, _, password = base64.b64decode(entry.get("auth", "")).decode(errors="replace").partition(":")
        found[host] = (entry.get("username") or user, entry.get("password") or password)
    return found


def _ask(image: ImageName, login: tuple[str, str] | None) -> int:
    """The status of an image's manifest, by the registry API's own way of logging in (OCI distribution)."""
    is_local = image.registry.split(":")[0] in ("localhost", "127.0.0.1")
    base = f"{'http' if is_local else 'https'}://{image.registry}/v2"
    url = f"{base}/{image.repository}/manifests/{image.version}"
    headers = {"Accept": _ACCEPT}
    answer = requests.head(url, headers=headers, timeout=_LIMIT_S, allow_redirects=True)
    challenge = answer.headers.get("WWW-Authenticate", "")
    if answer.status_code != 401 or not challenge:
        return int(answer.status_code)
    if challenge.lower().startswith("basic"):
        if login is None:
            return 401
        return int(requests.head(url, headers=headers, auth=login, timeout=_LIMIT_S).status_code)
    told = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = {"service": told.get("service", ""), "scope": f"repository:{image.repository}:pull"}
    granted = requests.get(told.get("realm", ""), params=query, auth=login, timeout=_LIMIT_S)
    if granted.status_code != 200:
        return int(granted.status_code)
    token = granted.json().get("token") or granted.json().get("access_token", "")
    headers["Authorization"] = f"Bearer {token}"
    return int(requests.head(url, headers=headers, timeout=_LIMIT_S, allow_redirects=True).status_code)
