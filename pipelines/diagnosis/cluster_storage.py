"""Checks of what a run's steps read and write on a cluster: tracking, volumes, secrets."""

import re
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client  # type: ignore[import-untyped]

from components.common.images import IMAGE_OF
from pipelines.cluster.settings import Volume
from pipelines.diagnosis.checks import Finding, absent, missing, ok, warning
from pipelines.diagnosis.cluster import View
from pipelines.diagnosis.storage import server

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_TRACKING = "MLFLOW_TRACKING_URI"


class StorageChecks:
    """Checks by the names that the settings give."""

    def __init__(self, view: View) -> None:
        self._view = view

    def tracking(self) -> Finding:
        """Whether the tracking server answers: from here, or, if only the cluster can resolve its name, from there."""
        uri = self._view.settings.of("promote").env.get(_TRACKING, "")
        if not uri:
            return warning(
                f"the settings name no {_TRACKING}, without which promote can't register",
                f"set every_step.env.{_TRACKING}, or switch on KFP's MLflow plugin with injectUserEnvVars",
            )
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https"):
            return missing(
                f"{_TRACKING} is {parts.scheme or 'no URL'}, and steps in different pods need a server",
                "name an MLflow server, such as http://enginery-mlflow.mlflow:5000",
            )
        service = self._service_of(parts.hostname or "")
        if service is None:
            return server(uri)
        if self._view.trouble:
            return absent(f"{uri} is a name of the cluster's; needs Kubernetes' API")
        name, place = service
        port = parts.port or (443 if parts.scheme == "https" else 80)
        look = self._view.asking("services through the API (services/proxy)", lambda: self._ask(uri, name, place, port))
        return look()

    def _service_of(self, host: str) -> tuple[str, str] | None:
        """(service, namespace) of a name that only the cluster resolves."""
        match = re.fullmatch(r"([a-z0-9-]+)(?:\.([a-z0-9-]+))?(?:\.svc(?:\.cluster\.local)?)?", host)
        if match is None or host == "localhost":
            return None
        return match[1], match[2] or self._view.namespace

    def _ask(self, uri: str, name: str, place: str, port: int) -> Finding:
        try:
            self._view.core.read_namespaced_service(name, place)
            self._view.core.connect_get_namespaced_service_proxy_with_path(
                f"{name}:{port}", place, "health", _preload_content=False, _request_timeout=10.0
            )
        except client.ApiException as error:
            if error.status == 404:
                if (elsewhere := server(uri)).status == "ok":  # a short name of the world's
                    return elsewhere
                return missing(
                    f"{uri}: there is no service {name} in {place}", "install the chart, or mend the address"
                )
            if error.status in (502, 503, 504):
                return missing(f"{uri}: nothing answers behind it", f"kubectl -n {place} get endpoints,pods")
            raise
        return ok(f"{uri} answers in the cluster")

    def classes(self) -> Finding:
        """Whether claims without a class get a volume."""
        found = client.StorageV1Api(self._view.api).list_storage_class().items
        names = [entry.metadata.name for entry in found]
        default = [e.metadata.name for e in found if (e.metadata.annotations or {}).get(_DEFAULT_CLASS) == "true"]
        if default:
            return ok(f"{', '.join(names)}; {default[0]} is the default")
        return warning(
            f"no default among {', '.join(names) or 'no storage classes'}",
            f"kubectl annotate storageclass NAME {_DEFAULT_CLASS}=true, or name a class in each claim",
        )

    def _volumes(self) -> dict[Volume, bool]:
        """Volumes of the settings, and whether several nodes write to them at once."""
        settings = self._view.settings
        found = dict.fromkeys((volume for step in IMAGE_OF for volume in settings.of(step).volumes), False)
        if settings.train_job.volume is not None:
            found[settings.train_job.volume] = True
        return found

    def volumes(self) -> Finding:
        """Whether the claims are there, bound, and as shareable as they must be."""
        volumes = self._volumes()
        if not volumes:
            return absent("the settings name no volumes")
        pending = []
        for volume, is_shared in volumes.items():
            where = f"the claim {volume.claim} in {self._view.namespace}"
            try:
                claim = self._view.core.read_namespaced_persistent_volume_claim(volume.claim, self._view.namespace)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return missing(f"there is no {where.removeprefix('the ')}", "make it (the chart can), or mend its name")
            if is_shared and "ReadWriteMany" not in (claim.spec.access_modes or ()):
                modes = ", ".join(claim.spec.access_modes or ())
                return missing(
                    f"{where} is {modes}, and several nodes write to it",
                    "make it of a class that can ReadWriteMany (NFS, CephFS, FSx, Filestore)",
                )
            if claim.status.phase == "Lost":
                return missing(f"{where} has lost its volume", "restore the volume, or make the claim anew")
            if claim.status.phase != "Bound":
                pending.append(volume.claim)
        if pending:
            return warning(
                f"not bound yet: {', '.join(pending)}",
                "nothing, if its class waits for the first pod; else kubectl describe pvc says why",
            )
        return ok(", ".join(sorted({volume.claim for volume in volumes})) + " are bound")

    def secrets(self) -> Finding:
        """Whether the Secrets have the keys that steps take."""
        settings = self._view.settings
        wanted: dict[str, set[str]] = {}
        for secret in (secret for step in IMAGE_OF for secret in settings.of(step).secrets):
            wanted.setdefault(secret.name, set()).update(secret.env.values())
        if not wanted:
            return absent("the settings name no secrets")
        for name, keys in wanted.items():
            found: Any
            try:
                found = self._view.core.read_namespaced_secret(name, self._view.namespace)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return missing(
                    f"there is no secret {name} in {self._view.namespace}",
                    f"kubectl -n {self._view.namespace} create secret generic {name} --from-literal=KEY=VALUE",
                )
            if lacking := sorted(keys - set(found.data or ())):
                return missing(
                    f"the secret {name} has no {', '.join(lacking)}; it has {', '.join(sorted(found.data or ()))}",
                    "mend the key in the settings, or add it to the secret",
                )
        return ok(", ".join(sorted(wanted)))
