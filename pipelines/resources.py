"""What a step asks of a cluster. A local run ignores all of it."""

from kfp import dsl, kubernetes

_SHARED_MEMORY = "8Gi"  # DALI and torchrun share batches through /dev/shm; a pod's default of 64 MB is too small


def needs_gpu(task: dsl.PipelineTask, *, num_gpus: int = 1) -> dsl.PipelineTask:
    """Give a step NVIDIA GPUs and the shared memory that GPU steps need; let it onto nodes kept for GPUs."""
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(num_gpus)
    kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=_SHARED_MEMORY)
    kubernetes.add_toleration(task, key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
    return task
