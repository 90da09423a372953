"""`enginery doctor --cluster`: whether a cluster can run the pipelines as a settings file asks."""

import base64
import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import yaml
from kubernetes import client

from components.common.contracts.container_images import IMAGE_OF
from components.common.contracts.errors import EXIT_FAILURE, EngineryError
from enginery.cluster.server import KFP_NAMESPACE, KfpServer
from enginery.cluster.settings import Volume
from enginery.doctor import cluster_nodes
from enginery.doctor.access import LIMIT_S, ClusterAccess
from enginery.doctor.checks import Check, Diagnosis, Finding, Planned, absent, missing, ok, warning
from enginery.doctor.machine import server
from enginery.release.oci import Address, manifest_status


def diagnose_cluster(cluster: ClusterAccess) -> Diagnosis:
    """Run all checks. A check that breaks is a line of its own; the others still run."""
    return conclude([planned.run() for planned in all_checks(cluster)])


def all_checks(cluster: ClusterAccess) -> list[Planned]:
    """Every check of a cluster. Those with a subject need Kubernetes' API and the right to read it."""
    rows = (
        ("cluster", "Kubernetes API", kubernetes_api, ""),
        ("cluster", "namespace", namespace, "namespaces"),
        ("services", "Kubeflow Pipelines", pipelines_server, ""),
        ("services", "retries", retries, "config maps"),
        ("services", "MLflow", tracking, ""),
        ("GPUs", "GPU nodes", cluster_nodes.gpu_nodes, "nodes"),
        ("GPUs", "GPU drivers", cluster_nodes.drivers, "nodes"),
        ("GPUs", "shared memory", cluster_nodes.shared_memory, "nodes and limit ranges"),
        ("GPUs", "GPU quota", cluster_nodes.quota, "resource quotas"),
        ("storage", "storage classes", storage_classes, "storage classes"),
        ("storage", "volumes", volumes, "persistent volume claims"),
        ("storage", "secrets", secrets, "secrets"),
        ("storage", "artifacts", artifacts, "config maps"),
        ("images", "pull secrets", pull_secrets, "secrets"),
        ("images", "image pull", pull, ""),
        ("several nodes", "Kubeflow Trainer", cluster_nodes.trainer, "the Trainer's kinds"),
        ("several nodes", "rights of the step", cluster_nodes.rights, "rights of service accounts"),
    )
    planned = []
    for group, name, find, subject in rows:
        check = partial(find, cluster)
        planned.append(Planned(group, name, partial(cluster.guard, subject, check) if subject else check, True))
    return planned


def conclude(checks: Sequence[Check]) -> Diagnosis:
    """Say what follows."""
    broken = [check.name for check in checks if check.status == "missing"]
    if broken:
        text = f"A run would not work here before this is fixed: {', '.join(broken)}."
        return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=EXIT_FAILURE)
    unknown = [check.name for check in checks if check.status == "warning"]
    text = "Nothing is in the way of a run here"
    text += f", as far as could be seen; look at: {', '.join(unknown)}." if unknown else "."
    return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=0)


def kubernetes_api(cluster: ClusterAccess) -> Finding:
    """The API server's answer."""
    if cluster.unreachable:
        return missing(
            f"Kubernetes' API does not answer: {cluster.unreachable}",
            "name a working cluster in KUBECONFIG or choose one (kubectl config use-context NAME), and log in to it",
        )
    return ok(f"{cluster.get('/version')['gitVersion']} at {cluster.api.configuration.host}")


def namespace(cluster: ClusterAccess) -> Finding:
    """The namespace of runs."""
    found = cluster.find(cluster.core.read_namespace, cluster.namespace, _request_timeout=LIMIT_S)
    if found is None:
        return missing(
            f"there is no namespace {cluster.namespace}",
            "set `namespace` in the settings to yours, or install Kubeflow Pipelines",
        )
    if found.metadata.deletion_timestamp:
        return missing(f"the namespace {cluster.namespace} is being deleted", "wait for that, and make it again")
    return ok(cluster.namespace)


def pipelines_server(cluster: ClusterAccess) -> Finding:
    """KFP where the user says that it answers, or else its service."""
    if cluster.endpoint:
        try:
            KfpServer(endpoint=cluster.endpoint, login=cluster.login, ca_file=cluster.ca_file).client()
        except EngineryError as error:
            text, _, fix = str(error).partition(". ")
            return missing(text, fix or "see Kubeflow Pipelines' own log (kubectl -n kubeflow logs deploy/ml-pipeline)")
        return ok(f"{cluster.endpoint} answers" + (f" to {cluster.login.source}" if cluster.login.source else ""))
    if cluster.unreachable:
        return absent("needs --endpoint or Kubernetes' API")
    return cluster.guard("services", lambda: _service_of_kfp(cluster))


def _service_of_kfp(cluster: ClusterAccess) -> Finding:
    for name in dict.fromkeys((cluster.namespace, KFP_NAMESPACE)):
        read = cluster.core.read_namespaced_service
        if cluster.find(read, "ml-pipeline", name, _request_timeout=LIMIT_S) is not None:
            return warning(
                f"the service ml-pipeline is in {name}; whether it answers was not asked",
                "name it with --endpoint; from outside, kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80",
            )
    return missing(
        f"there is no service ml-pipeline in {KFP_NAMESPACE}",
        "install Kubeflow Pipelines (https://www.kubeflow.org/docs/components/pipelines/), or name it with --endpoint",
    )


_ARGO_SETTINGS = "workflow-controller-configmap"


def retries(cluster: ClusterAccess) -> Finding:
    """Argo's policy for the retries of the settings, which KFP leaves to it: KFP 2.17 installs OnError."""
    if not any(cluster.settings.of(step).retries.times for step in IMAGE_OF):
        return absent("the settings ask for none")
    found = cluster.find(cluster.core.read_namespaced_config_map, _ARGO_SETTINGS, KFP_NAMESPACE)
    defaults = yaml.safe_load((found.data or {}).get("workflowDefaults", "") if found else "") or {}
    strategy = defaults.get("spec", {}).get("templateDefaults", {}).get("retryStrategy", {})
    policy = strategy.get("retryPolicy") or ("Always" if strategy.get("expression") else "OnFailure")
    if policy == "Always":
        if cluster.settings.of("train").retries.times and cluster.settings.train_job.volume is None:
            return warning(
                "another try of train begins at its first epoch: its checkpoints go with its pod",
                "set train_job.volume in the settings",
            )
        return ok(f"Argo tries again {strategy.get('expression') or 'always'}")
    missed = "that is stopped, evicted or fails" if policy == "OnError" else "whose pod or node is lost"
    return warning(
        f"Argo's retryPolicy here is {policy}, so a step {missed} is not tried again",
        f"in the ConfigMap {_ARGO_SETTINGS} of {KFP_NAMESPACE}, set workflowDefaults.spec.templateDefaults."
        "retryStrategy as docs/submit.md shows",
    )


_TRACKING = "MLFLOW_TRACKING_URI"


def tracking(cluster: ClusterAccess) -> Finding:
    """The tracking server's answer: from here, or, if only the cluster can resolve its name, from there."""
    uri = cluster.settings.of("promote").env.get(_TRACKING, "")
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
    # A name that only the cluster resolves: SERVICE, SERVICE.NAMESPACE and so on.
    name = re.fullmatch(r"([a-z0-9-]+)(?:\.([a-z0-9-]+))?(?:\.svc(?:\.cluster\.local)?)?", parts.hostname or "")
    if name is None or parts.hostname == "localhost":
        return server(uri)
    if cluster.unreachable:
        return absent(f"{uri} is a name of the cluster's; needs Kubernetes' API")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    service, of_namespace = name[1], name[2] or cluster.namespace
    return cluster.guard(
        "services through the API (services/proxy)", lambda: _ask_service(cluster, uri, service, of_namespace, port)
    )


def _ask_service(cluster: ClusterAccess, uri: str, name: str, of_namespace: str, port: int) -> Finding:
    try:
        found = cluster.core.read_namespaced_service(name, of_namespace)
        cluster.core.connect_get_namespaced_service_proxy_with_path(
            f"{name}:{port}", of_namespace, "health", _preload_content=False, _request_timeout=LIMIT_S
        )
    except client.ApiException as error:
        if error.status == 404:
            if (elsewhere := server(uri)).status == "ok":  # a short name of the world's
                return elsewhere
            text = f"{uri}: there is no service {name} in {of_namespace}"
            return missing(text, "install the chart, or fix the address")
        if error.status in (502, 503, 504):
            return missing(f"{uri}: nothing answers behind it", f"kubectl -n {of_namespace} get endpoints,pods")
        raise
    host = urlsplit(uri).netloc
    for allowed in _allowed_hosts(cluster, found, of_namespace):
        if allowed and not any(fnmatch(host, pattern.strip()) for pattern in allowed.split(",")):
            return missing(
                f"{uri} answers 403: {_ALLOWED} is {allowed}", f"add {host} (mlflow.allowedHosts of the chart)"
            )
    return ok(f"{uri} answers in the cluster")


_ALLOWED = "MLFLOW_SERVER_ALLOWED_HOSTS"


def _allowed_hosts(cluster: ClusterAccess, service: Any, of_namespace: str) -> set[str]:
    """The names that the pods behind a service answer to; /health is answered by any, and the API's proxy has its own.

    Empty where pods may not be read.
    """
    selector = ",".join(f"{key}={value}" for key, value in (service.spec.selector or {}).items())
    if not selector:
        return set()
    try:
        pods = cluster.core.list_namespaced_pod(of_namespace, label_selector=selector, _request_timeout=LIMIT_S).items
    except client.ApiException:
        return set()
    containers = [container for pod in pods for container in pod.spec.containers]
    return {entry.value or "" for one in containers for entry in one.env or () if entry.name == _ALLOWED}


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def storage_classes(cluster: ClusterAccess) -> Finding:
    """A default class, without which claims that name none get no volume."""
    found = client.StorageV1Api(cluster.api).list_storage_class().items
    names = [entry.metadata.name for entry in found]
    default = [e.metadata.name for e in found if (e.metadata.annotations or {}).get(_DEFAULT_CLASS) == "true"]
    if default:
        return ok(f"{', '.join(names)}; {default[0]} is the default")
    return warning(
        f"no default among {', '.join(names) or 'no storage classes'}",
        f"kubectl annotate storageclass NAME {_DEFAULT_CLASS}=true, or name a class in each claim",
    )


def volumes(cluster: ClusterAccess) -> Finding:
    """The claims of the settings: there, bound, and as shareable as they must be."""
    settings = cluster.settings
    # Volume: True if several nodes write to it at once.
    wanted: dict[Volume, bool] = {volume: False for step in IMAGE_OF for volume in settings.of(step).volumes}
    for shared in filter(None, (settings.train_job.volume, settings.dataset_volume)):
        wanted[shared] = settings.train.num_nodes > 1
    if not wanted:
        return absent("the settings name no volumes")
    pending = []
    for volume, is_shared in wanted.items():
        where = f"claim {volume.claim} in {cluster.namespace}"
        claim = cluster.find(cluster.core.read_namespaced_persistent_volume_claim, volume.claim, cluster.namespace)
        if claim is None:
            return missing(f"there is no {where}", "make it, or fix its name")
        modes = claim.spec.access_modes or ()
        if is_shared and "ReadWriteMany" not in modes:
            return missing(
                f"the {where} is {', '.join(modes)}, and several nodes write to it",
                "make it of a class that can ReadWriteMany (NFS, CephFS, FSx, Filestore)",
            )
        if claim.status.phase == "Lost":
            return missing(f"the {where} has lost its volume", "restore the volume, or make the claim again")
        if claim.status.phase != "Bound":
            pending.append(volume.claim)
    if pending:
        return warning(
            f"not bound yet: {', '.join(pending)}",
            "nothing, if its class waits for the first pod; else kubectl describe pvc says why",
        )
    return ok(", ".join(sorted({volume.claim for volume in wanted})) + " are bound")


def secrets(cluster: ClusterAccess) -> Finding:
    """The Secrets of the settings, and the keys that steps take of them."""
    wanted: dict[str, set[str]] = {}
    for secret in (secret for step in IMAGE_OF for secret in cluster.settings.of(step).secrets):
        wanted.setdefault(secret.name, set()).update(secret.env.values())
    if not wanted:
        return absent("the settings name no secrets")
    for name, keys in wanted.items():
        found = cluster.find(cluster.core.read_namespaced_secret, name, cluster.namespace)
        if found is None:
            return missing(
                f"there is no secret {name} in {cluster.namespace}",
                f"kubectl -n {cluster.namespace} create secret generic {name} --from-literal=KEY=VALUE",
            )
        if lacking := sorted(keys - set(found.data or ())):
            return missing(
                f"the secret {name} has no {', '.join(lacking)}; it has {', '.join(sorted(found.data or ()))}",
                "fix the key in the settings, or add it to the secret",
            )
    return ok(", ".join(sorted(wanted)))


_LAUNCHER_SETTINGS = "kfp-launcher"


def artifacts(cluster: ClusterAccess) -> Finding:
    """The login for the place that the settings name for what steps write."""
    root = cluster.settings.pipeline_root
    scheme = root.partition("://")[0]
    if scheme not in ("s3", "gs"):
        return absent("the settings name no place with a login of its own; KFP's own is used")
    found = cluster.find(cluster.core.read_namespaced_config_map, _LAUNCHER_SETTINGS, cluster.namespace)
    if scheme in (yaml.safe_load((found.data or {}).get("providers", "") if found else "") or {}):
        return ok(f"{root} by the ConfigMap {_LAUNCHER_SETTINGS}")
    return warning(
        f"the ConfigMap {_LAUNCHER_SETTINGS} in {cluster.namespace} has no providers.{scheme}, so each step uploads to "
        f"{root} with what its own pod has of endpoint, region and login",
        "name endpoint and secret there, as docs/submit.md shows, unless pods have the cloud's identity",
    )


_TYPE = "kubernetes.io/dockerconfigjson"
_KEY = ".dockerconfigjson"
# Media types of a registry's answer: one image, or one per architecture.
_ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)


def image_address(reference: str) -> Address:
    """Parse a reference of an image as container engines do: without a host it is Docker Hub's."""
    name, _, digest = reference.partition("@")
    name, tag = name.rsplit(":", 1) if ":" in name.rsplit("/", 1)[-1] else (name, "latest")
    host, _, rest = name.partition("/")
    if not rest or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "registry-1.docker.io", name if rest else f"library/{name}"
    return Address(registry=host, repository=rest, tag=tag, digest=digest)


def pull_secrets(cluster: ClusterAccess) -> Finding:
    """The pull secrets of the settings: there, and for the images' registry."""
    names = cluster.settings.image_pull_secrets
    registry = image_address(cluster.settings.image("train")).registry
    if not names:
        return absent(f"the settings name no pull secret; {registry} must let everybody pull, or nodes log in")
    login = f"kubectl -n {cluster.namespace} create secret docker-registry NAME --docker-server={registry} ..."
    registries: list[str] = []
    for name in names:
        secret = cluster.find(cluster.core.read_namespaced_secret, name, cluster.namespace)
        if secret is None:
            return missing(f"there is no secret {name} in {cluster.namespace}", login.replace("NAME", name))
        if secret.type != _TYPE or _KEY not in (secret.data or {}):
            return missing(f"the secret {name} is of type {secret.type}, and must be {_TYPE}", login)
        registries += _logins(secret)
    if registry not in registries:
        return missing(f"none of {', '.join(names)} is for {registry}; they are for {', '.join(registries)}", login)
    return ok(f"{', '.join(names)} for {registry}")


def _login(cluster: ClusterAccess, registry: str) -> tuple[str, str] | None:
    """User and password for a registry, where they may be read."""
    for name in cluster.settings.image_pull_secrets if not cluster.unreachable else ():
        try:
            secret = cluster.core.read_namespaced_secret(name, cluster.namespace)
        except client.ApiException:
            continue
        if found := _logins(secret).get(registry):
            return found
    return None


def pull(cluster: ClusterAccess) -> Finding:
    """Ask the registry for each image, with the pull secret's login."""
    references = sorted({cluster.settings.image(step) for step in IMAGE_OF})
    registry = image_address(references[0]).registry  # all images are of one
    login = _login(cluster, registry)
    for reference in references:
        try:
            status = manifest_status(image_address(reference), _ACCEPT, login, LIMIT_S)
        except EngineryError as error:
            return warning(
                f"can't ask from here, and the cluster's nodes may: {error}",
                "try where the nodes are: kubectl run pull --image=IMAGE --command -- true",
            )
        if status in (401, 403):
            return missing(
                f"{registry} does not let {'the pull secret' if login else 'anybody'} pull {reference} ({status})",
                "name a secret with a login that may, in image_pull_secrets",
            )
        if status == 404:
            return missing(
                f"{registry} has no {reference}",
                "push it (make images, docker push), or fix images.registry, images.tag or images.digests",
            )
        if status >= 300:
            return warning(f"{registry} answers {status} for {reference}", "ask again later")
    return ok(f"{len(references)} images of {registry}")


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
