"""Resources of the steps on a cluster. A local run ignores all of it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from kfp import dsl, kubernetes
from kfp.dsl import pipeline_context

from components.common.contracts.container_images import image_for
from components.common.contracts.environment import EXPERIMENT_VARIABLE, KFP_RUN_VARIABLE
from components.train.train_job import JOB_VARIABLE, NAMESPACE_VARIABLE, POD_VARIABLE, VOLUME_VARIABLE, TrainJobRequest
from enginery.cluster.settings import (
    PRODUCT_LABEL,
    ClusterSettings,
    Placement,
    Toleration,
    TrainPlacement,
    Volume,
    gpu_of,
)

_GPU_TAINT = Toleration(key="nvidia.com/gpu", effect="NoSchedule")
# A pod that only waits for a TrainJob: it imports torch and copies files.
_WAITING_CPU, _WAITING_MEMORY = "1", "4Gi"
_settings: ContextVar[ClusterSettings | None] = ContextVar("cluster settings", default=None)


@contextmanager
def on_cluster(settings: ClusterSettings) -> Iterator[None]:
    """Give the steps these resources while a pipeline file is loaded."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def apply_resources(task: dsl.PipelineTask, step: str) -> dsl.PipelineTask:
    """Give a step its image, resources, volumes, secrets and nodes.

    A step with GPUs gets the shared memory that it needs and may run on nodes that are kept for GPUs, unasked.
    """
    settings = _settings.get() or ClusterSettings()
    placed = settings.of(step)
    task.set_caching_options(placed.caching)
    if _settings.get() is not None:
        if settings.image(step) != image_for(step):
            task.set_container_image(settings.image(step))
        if settings.image_pull_secrets:
            kubernetes.set_image_pull_secrets(task, list(settings.image_pull_secrets))
        if settings.run_as_non_root:  # KFP sets the rest of what `restricted` asks for
            kubernetes.set_security_context(task, run_as_non_root=True)
        # By these the steps of one run find each other in MLflow.
        kubernetes.use_field_path_as_env(task, KFP_RUN_VARIABLE, "metadata.labels['pipeline/runid']")
        task.set_env_variable(EXPERIMENT_VARIABLE, pipeline_context.Pipeline.get_default_pipeline().name)
    _apply_environment(task, placed)
    if isinstance(placed, TrainPlacement) and (volume := settings.train_job.volume) is not None:
        if volume not in placed.volumes:
            kubernetes.mount_pvc(task, volume.claim, volume.mount_path, volume.sub_path)
        if placed.num_nodes > 1:
            _apply_train_job(task, placed, settings, volume)
            return task
        task.set_env_variable(VOLUME_VARIABLE, volume.mount_path)
    gpu = gpu_of(placed)
    if gpu.count:
        task.set_accelerator_type(gpu.resource).set_accelerator_limit(gpu.count)
    _apply_size(task, placed.cpu, placed.memory)
    if placed.shm:
        kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=placed.shm)
    _apply_nodes(task, selector_of(placed), tolerations_of(placed))
    return task


def selector_of(placed: Placement) -> dict[str, str]:
    """Labels of the nodes that a step may run on."""
    gpu = gpu_of(placed)
    product = {PRODUCT_LABEL: gpu.product} if gpu.count and gpu.product else {}
    return {**product, **placed.node_selector}


def tolerations_of(placed: Placement) -> tuple[Toleration, ...]:
    """Tolerations of the settings, and of GPU nodes where the step has GPUs."""
    return (_GPU_TAINT, *placed.tolerations) if gpu_of(placed).count else placed.tolerations


def _toleration_fields(toleration: Toleration) -> dict[str, str]:
    """Return the fields that Kubernetes writes: those that are not empty."""
    return {name: value for name, value in toleration.model_dump().items() if value}


def _apply_environment(task: dsl.PipelineTask, placed: Placement) -> None:
    """Variables, secrets, volumes, tries and time of a step, wherever it works."""
    for name, value in placed.env.items():
        task.set_env_variable(name, value)
    for secret in placed.secrets:
        # One call per variable, as two variables may come from one key.
        for variable, key in secret.env.items():
            kubernetes.use_secret_as_env(task, secret.name, {key: variable})
    for volume in placed.volumes:
        kubernetes.mount_pvc(task, volume.claim, volume.mount_path, volume.sub_path)
    if placed.retries.times:
        task.set_retry(
            placed.retries.times,
            backoff_duration=f"{placed.retries.wait_s}s",
            backoff_factor=placed.retries.factor,
            backoff_max_duration=f"{placed.retries.window(placed.timeout_s)}s",
        )
    if placed.timeout_s:
        kubernetes.set_timeout(task, placed.timeout_s)


def _apply_size(task: dsl.PipelineTask, cpu: str, memory: str) -> None:
    if cpu:
        task.set_cpu_request(cpu).set_cpu_limit(cpu)
    if memory:
        task.set_memory_request(memory).set_memory_limit(memory)


def _apply_nodes(task: dsl.PipelineTask, selector: Mapping[str, str], tolerations: Iterable[Toleration]) -> None:
    for label, value in selector.items():
        kubernetes.add_node_selector(task, label, value)
    for toleration in tolerations:
        kubernetes.add_toleration(task, **_toleration_fields(toleration))


def _apply_train_job(task: dsl.PipelineTask, placed: TrainPlacement, settings: ClusterSettings, volume: Volume) -> None:
    """The step's own pod starts a TrainJob and waits: the GPUs are those of the job's pods."""
    _apply_size(task, _WAITING_CPU, _WAITING_MEMORY)
    _apply_nodes(task, placed.node_selector, placed.tolerations)
    kubernetes.use_field_path_as_env(task, POD_VARIABLE, "metadata.name")
    kubernetes.use_field_path_as_env(task, NAMESPACE_VARIABLE, "metadata.namespace")
    request = TrainJobRequest(
        num_nodes=placed.num_nodes,
        num_gpus=placed.gpu.count,
        gpu_resource=placed.gpu.resource,
        image=settings.image("train"),
        runtime=settings.train_job.runtime,
        cpu=placed.cpu,
        memory=placed.memory,
        shm=placed.shm,
        node_selector=selector_of(placed),
        tolerations=tuple(_toleration_fields(toleration) for toleration in tolerations_of(placed)),
        env=placed.env,
        secrets={variable: (secret.name, key) for secret in placed.secrets for variable, key in secret.env.items()},
        volumes=tuple((v.claim, v.mount_path, v.sub_path) for v in dict.fromkeys((volume, *placed.volumes))),
        shared=volume.mount_path,
        image_pull_secrets=settings.image_pull_secrets,
        service_account=settings.train_job.service_account,
        timeout_s=placed.timeout_s,
    )
    task.set_env_variable(JOB_VARIABLE, request.model_dump_json())
