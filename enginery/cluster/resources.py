"""What a step asks of a cluster. A local run ignores all of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kfp import dsl, kubernetes

from components.common.contracts.container_images import image_for
from components.train.train_job import JOB_VARIABLE, NAMESPACE_VARIABLE, POD_VARIABLE, TrainJobRequest
from enginery.cluster.settings import (
    PRODUCT_LABEL,
    ClusterSettings,
    Gpu,
    GpuPlacement,
    Placement,
    Toleration,
    TrainPlacement,
)

RUN_VARIABLE = "ENGINERY_KFP_RUN_ID"  # read by components.common.registry.tracking, whose import would bring MLflow
_GPU_TAINT = Toleration(key="nvidia.com/gpu", effect="NoSchedule")
# A pod that only waits for a TrainJob: it imports torch and copies files.
_WAITING_CPU, _WAITING_MEMORY = "1", "4Gi"
_settings: ContextVar[ClusterSettings | None] = ContextVar("cluster settings", default=None)


@contextmanager
def on_cluster(settings: ClusterSettings) -> Iterator[None]:
    """What `place` reads while a pipeline file is loaded."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def place(task: dsl.PipelineTask, step: str) -> dsl.PipelineTask:
    """Give a step its image, resources, volumes, secrets and place.

    A step with GPUs gets the shared memory that it needs and may run on nodes that are kept for GPUs, unasked.
    """
    settings = _settings.get() or ClusterSettings()
    placed = settings.of(step)
    task.set_caching_options(placed.caching)
    if _settings.get() is not None:
        _identify(task, step, settings)
    _let_in(task, placed, settings)
    if isinstance(placed, TrainPlacement) and placed.num_nodes > 1:
        _wait_only(task, placed, settings)
        return task
    gpu = placed.gpu if isinstance(placed, GpuPlacement) else Gpu(count=0)
    if gpu.count:
        task.set_accelerator_type(gpu.resource).set_accelerator_limit(gpu.count)
    _size(task, placed.cpu, placed.memory)
    if placed.shm:
        kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=placed.shm)
    for label, value in selector_of(placed).items():
        kubernetes.add_node_selector(task, label, value)
    for toleration in tolerations_of(placed):
        kubernetes.add_toleration(task, **toleration_of(toleration))
    return task


def selector_of(placed: Placement) -> dict[str, str]:
    """Labels of the nodes that a step may run on."""
    gpu = placed.gpu if isinstance(placed, GpuPlacement) else Gpu(count=0)
    product = {PRODUCT_LABEL: gpu.product} if gpu.count and gpu.product else {}
    return {**product, **placed.node_selector}


def tolerations_of(placed: Placement) -> tuple[Toleration, ...]:
    """Of the file, and of GPU nodes where the step has GPUs."""
    has_gpu = isinstance(placed, GpuPlacement) and placed.gpu.count
    return (_GPU_TAINT, *placed.tolerations) if has_gpu else placed.tolerations


def toleration_of(toleration: Toleration) -> dict[str, str]:
    """As Kubernetes writes it: what is empty is left out."""
    return {name: value for name, value in toleration.model_dump().items() if value}


def _identify(task: dsl.PipelineTask, step: str, settings: ClusterSettings) -> None:
    if settings.image(step) != image_for(step):
        task.set_container_image(settings.image(step))
    if settings.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(settings.image_pull_secrets))
    # What the step's run in MLflow is tagged with.
    kubernetes.use_field_path_as_env(task, RUN_VARIABLE, "metadata.labels['pipeline/runid']")


def _let_in(task: dsl.PipelineTask, placed: Placement, settings: ClusterSettings) -> None:
    """What a step sees and how long it may take, wherever it works."""
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


def _size(task: dsl.PipelineTask, cpu: str, memory: str) -> None:
    if cpu:
        task.set_cpu_request(cpu).set_cpu_limit(cpu)
    if memory:
        task.set_memory_request(memory).set_memory_limit(memory)


def _wait_only(task: dsl.PipelineTask, placed: TrainPlacement, settings: ClusterSettings) -> None:
    """The step's own pod starts a TrainJob and waits: the GPUs are those of the job's pods."""
    volume = settings.train_job.volume
    assert volume is not None  # the settings' own check
    if volume not in placed.volumes:
        kubernetes.mount_pvc(task, volume.claim, volume.mount_path, volume.sub_path)
    _size(task, _WAITING_CPU, _WAITING_MEMORY)
    for label, value in placed.node_selector.items():
        kubernetes.add_node_selector(task, label, value)
    for toleration in placed.tolerations:
        kubernetes.add_toleration(task, **toleration_of(toleration))
    kubernetes.use_field_path_as_env(task, POD_VARIABLE, "metadata.name")
    kubernetes.use_field_path_as_env(task, NAMESPACE_VARIABLE, "metadata.namespace")
    task.set_env_variable(JOB_VARIABLE, _request(placed, settings).model_dump_json())


def _request(placed: TrainPlacement, settings: ClusterSettings) -> TrainJobRequest:
    volume = settings.train_job.volume
    assert volume is not None
    return TrainJobRequest(
        num_nodes=placed.num_nodes,
        num_gpus=placed.gpu.count,
        gpu_resource=placed.gpu.resource,
        image=settings.image("train"),
        runtime=settings.train_job.runtime,
        cpu=placed.cpu,
        memory=placed.memory,
        shm=placed.shm,
        node_selector=selector_of(placed),
        tolerations=tuple(toleration_of(toleration) for toleration in tolerations_of(placed)),
        env=placed.env,
        secrets={variable: (secret.name, key) for secret in placed.secrets for variable, key in secret.env.items()},
        volumes=tuple((v.claim, v.mount_path, v.sub_path) for v in dict.fromkeys((volume, *placed.volumes))),
        shared=volume.mount_path,
        image_pull_secrets=settings.image_pull_secrets,
        service_account=settings.train_job.service_account,
        timeout_s=placed.timeout_s,
    )
