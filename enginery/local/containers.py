"""Each step in its image on this machine: KFP's DockerRunner, and what it leaves to the caller.

KFP starts the containers and passes their output on. It may take a failed step for a success, and leaves a container
running when the run that started it is interrupted; so success is read from manifests, and containers are stopped here.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import kfp.local
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, Mount

from components.common.contracts.environment import gpus
from components.common.contracts.errors import EngineryError, UserError, shortened
from components.common.contracts.manifests import MANIFEST
from components.common.process.lifetime import PARENT_LOCK_VARIABLE
from components.common.process.step import DEBUG_VARIABLE
from components.common.process.steplog import EVENTS_VARIABLE
from enginery.local.parameters import PipelineFile
from enginery.local.state import LOCK, StateDirectory

RUN_LABEL = "enginery.run"
_SHARED_MEMORY = "8g"  # as on a cluster (enginery/cluster/resources.py); Docker's own 64 MB is too small
# Of the caller's variables those that say where things are and who asks.
_PASSED_ON = (
    "AWS_",
    "GOOGLE_",
    "MLFLOW_",
    "CUDA_VISIBLE_DEVICES",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    DEBUG_VARIABLE,
)
_PATH_SETTINGS = (("preprocess", "class_names_file"), ("train", "pretrained"), ("export", "cache"))


@contextmanager
def _engine() -> Iterator[Any]:
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        raise UserError(
            f"--in-containers needs a Docker engine, and none answers ({_reason(error)}). Start one (systemctl start "
            "docker), name another in DOCKER_HOST, or run without --in-containers",
            code="no-docker",
            setting="--in-containers",
        ) from error
    with contextlib.closing(client):
        yield client


def images_of(file: PipelineFile) -> list[str]:
    """The images that a pipeline's steps run in."""
    executors = file.pipeline.pipeline_spec.deployment_spec["executors"]
    return sorted({str(executor["container"]["image"]) for executor in executors.values()})


def check_images(file: PipelineFile, show: Callable[[str], None]) -> None:
    """See that every image is here, or fetch it, before the first step runs.

    Args:
        file: the pipeline.
        show: shows a line to a person, before something that takes minutes.

    Raises:
        UserError: no Docker engine answers, or an image is neither here nor to be had.
    """
    with _engine() as client:
        for image in images_of(file):
            try:
                client.images.get(image)
            except ImageNotFound:
                show(f"fetching {image}")
                try:
                    client.images.pull(image)
                except APIError as error:
                    raise UserError(
                        f"the image {image} is not on this machine and can't be pulled ({_reason(error)}). Build it "
                        "with `make images`, log in to its registry, or name others in ENGINERY_IMAGE_REGISTRY and "
                        "ENGINERY_IMAGE_TAG",
                        code="no-image",
                    ) from error


def _reason(error: Exception) -> str:
    return shortened(getattr(error, "explanation", None) or error).rstrip(".")


@dataclass(frozen=True, kw_only=True)
class Containers:
    """The containers of one run."""

    run_directory: Path
    state: StateDirectory
    arguments: Mapping[str, Any]

    def runner(self, variables: Mapping[str, str]) -> kfp.local.DockerRunner:
        """KFP's runner: the host's GPUs, user and network, this run's files, and nothing else to write to."""
        devices = [DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpus() else []
        return kfp.local.DockerRunner(
            entrypoint=["/usr/bin/env"],  # KFP's command stands for itself, and not for arguments of the image's
            environment=self._environment(variables),
            labels={RUN_LABEL: self.run_directory.name},
            mounts=list(self._mounts()),
            device_requests=devices,
            shm_size=_SHARED_MEMORY,
            tmpfs={"/tmp": "exec,mode=1777"},
            user=f"{os.getuid()}:{os.getgid()}",  # files belong to who started the run
            network_mode="host",  # MLflow and stores at localhost are the user's
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            init=True,
        )

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        passed = {name: value for name, value in os.environ.items() if name.upper().startswith(_PASSED_ON)}
        lock = str(self.run_directory / LOCK)
        return {**passed, **variables, EVENTS_VARIABLE: "1", PARENT_LOCK_VARIABLE: lock}

    def _mounts(self) -> Iterator[Mount]:
        """Folders that the steps read and write, at the same paths as outside."""
        yield _bind(self.state.path, read_only=False)
        values = [str(self.arguments.get(name) or "") for name in ("data", "model")]
        values += [str(self.arguments.get(step, {}).get(name) or "") for step, name in _PATH_SETTINGS]
        named = [Path(value).absolute() for value in values if value and "://" not in value]
        # A table names images beside and below it.
        for path in sorted({path.parent if path.is_file() else path for path in named}):
            if path.exists() and not path.is_relative_to(self.state.path):
                yield _bind(path, read_only=True)

    def stop(self, grace_s: int) -> None:
        """Stop what still runs: an interrupt of this process does not reach the containers."""
        with contextlib.suppress(UserError), _engine() as client:
            for container in client.containers.list(filters={"label": f"{RUN_LABEL}={self.run_directory.name}"}):
                with contextlib.suppress(NotFound, APIError):  # it ended by itself
                    container.stop(timeout=grace_s)

    def check_manifests(self, file: PipelineFile) -> None:
        """Believe in success only where the artifacts say so.

        Raises:
            EngineryError: a step left no manifest.
        """
        artifacts = self.run_directory / "artifacts"
        root = file.pipeline.pipeline_spec
        for name, task in root.root.dag.tasks.items():
            if not root.components[task.component_ref.name].output_definitions.artifacts:
                continue
            outputs = [path for path in artifacts.glob(f"*/{name}/*") if path.is_dir()]
            if not outputs or not all((path / MANIFEST).is_file() for path in outputs):
                raise EngineryError(
                    f"the container of {name} ended without a manifest in {artifacts}, so it failed, whatever Docker "
                    f"said of it; {self.run_directory / 'run.log'} holds its output",
                    code="no-manifest",
                )


def _bind(path: Path, *, read_only: bool) -> Mount:
    return Mount(target=str(path), source=str(path), type="bind", read_only=read_only)
