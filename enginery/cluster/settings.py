"""The settings file of a cluster: where the images are, and what each step gets."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.contracts.container_images import IMAGE_OF, REGISTRY, TAG, reference
from components.common.contracts.errors import UserError, holds_secret
from components.common.contracts.settings import format_errors, inner_model, load_yaml, show_value
from components.common.process.dataset_volume import VARIABLE as DATASETS_VARIABLE

GPU_STEPS = ("train", "export", "validate", "analyze")
PRODUCT_LABEL = "nvidia.com/gpu.product"
SHARED_MEMORY = "8Gi"  # DALI and torchrun share batches through /dev/shm; a pod's default of 64 MB is too small
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_SMALLEST_BYTES = 2**20
_LONGEST_TRY_S, _LONGEST_WINDOW_S = 30 * 86400, 365 * 86400


def size_bytes(quantity: str) -> float:
    """Kubernetes' "64Gi" in bytes."""
    number = re.match(r"[0-9.]+", quantity)
    assert number is not None  # the fields' pattern
    return float(number[0]) * _UNITS[quantity[number.end() :]]


def _with_unit(quantity: str) -> str:
    if quantity and size_bytes(quantity) < _SMALLEST_BYTES:
        raise ValueError(f"{quantity} is {size_bytes(quantity):.0f} bytes; write its unit, such as {quantity}Gi")
    return quantity


# Kubernetes' own forms; KFP's compiler takes the same of processors and memory.
Cpu = Annotated[str, Field(pattern=r"^([0-9]*\.)?[0-9]+m?$|^$")]
Memory = Annotated[str, Field(pattern=r"^[0-9]+(M|G|T|Mi|Gi|Ti)?$|^$"), AfterValidator(_with_unit)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
# KFP gives the pod's volume the claim's name, and those have no dots.
ClaimName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
# Parts of the names of variables whose values are secrets; of a file with one, the name may be said.
_SECRET_PARTS = {"PASSWORD", "PASSWD", "SECRET", "TOKEN", "CREDENTIAL", "CREDENTIALS"}


def _no_secrets(variables: dict[str, str]) -> dict[str, str]:
    """A value of `env` stands in the pipeline's YAML, in KFP's database and in TrainJobs."""
    for name, value in variables.items():
        parts = name.upper().split("_")
        is_secret = _SECRET_PARTS.intersection(parts) and parts[-1] not in ("FILE", "PATH", "URL", "URI")
        if (is_secret and not value.startswith("/")) or holds_secret(value):
            raise ValueError(f"{name} holds a secret in the clear; put it into a Secret and name that in secrets")
    return variables


Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OptionalName = Annotated[str, Field(pattern=r"^$|^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
SecretKey = Annotated[str, Field(pattern=r"^[-._A-Za-z0-9]+$")]
_NAME_IN_PATH = r"([^/:.][^/:]*|\.[^/:.][^/:]*|\.\.[^/:]+)"  # none of them is ".."
# In a volume: neither absolute nor outside.
SubFolder = Annotated[str, Field(pattern=rf"^$|^{_NAME_IN_PATH}(/{_NAME_IN_PATH})*/?$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Folder = Annotated[str, Field(pattern=r"^/[^:]+$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True)


class Images(_Part):
    """Registry and versions of the images."""

    registry: str = Field(
        REGISTRY,
        pattern=r"^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$",
        description="Registry and namespace, such as registry.example.com/team.",
    )
    tag: str = Field(TAG, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$", description="Tag of the images.")
    digests: dict[Literal["preprocess", "train", "export", "validate", "analyze", "promote"], Digest] = Field(
        {}, description="Digests (sha256:...) by image, which count instead of the tag."
    )


class Toleration(_Part):
    """Lets pods onto nodes with a taint."""

    key: str = Field("", description="Key of the taint; empty, with operator Exists, for all taints.")
    operator: Literal["Exists", "Equal"] = Field("Exists", description="Whether value must be the taint's.")
    value: str = Field("", description="Value of the taint, with operator Equal.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="Effect of the taint; empty for all."
    )

    @model_validator(mode="after")
    def _fits(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise ValueError("a toleration with operator Exists takes no value; set operator: Equal")
        if self.operator == "Equal" and not self.key:
            raise ValueError("a toleration with operator Equal needs a key")
        return self


class Secret(_Part):
    """Entries of a Kubernetes Secret as environment variables."""

    name: Name = Field(description="Name of the Secret, in the namespace of the run.")
    env: dict[Variable, SecretKey] = Field(
        min_length=1, description="Environment variable: key in the Secret, such as AWS_ACCESS_KEY_ID: accesskey."
    )


class Volume(_Part):
    """A PersistentVolumeClaim that steps see as a folder."""

    claim: ClaimName = Field(description="Name of the PersistentVolumeClaim, in the namespace of the run.")
    mount_path: Folder = Field(description="Folder at which the steps see it, such as /mnt/images.")
    sub_path: SubFolder = Field("", description="Folder of the volume to mount; empty for its root.")


class GpuResources(_Part):
    """GPUs of a step, on each node."""

    count: int = Field(1, ge=0, le=16, description="GPUs; 0 for none, so that the step works on the CPU.")
    resource: str = Field(
        "nvidia.com/gpu",
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
        description="Kubernetes' name of the resource; parts of a GPU are such as nvidia.com/mig-3g.40gb.",
    )
    product: LabelValue = Field(
        "",
        description="GPU type as the node label nvidia.com/gpu.product has it, such as NVIDIA-H100-80GB-HBM3; empty "
        "for any.",
    )


class Retries(_Part):
    """Further tries of a step, as the cluster's Argo allows them."""

    times: int = Field(0, ge=0, le=100, description="Tries after the first one; gate takes none from `every_step`.")
    wait_s: int = Field(60, ge=0, le=_LONGEST_WINDOW_S, description="Seconds before the second try.")
    factor: int = Field(2, ge=1, description="What the wait is multiplied by with each try; Argo takes whole numbers.")
    window_s: int = Field(
        0,
        ge=0,
        le=_LONGEST_WINDOW_S,
        description="Seconds from the start of the first try after which there is no other one and what runs is ended; "
        "0 for as long as all tries and waits may take.",
    )

    def window(self, timeout_s: int) -> int:
        """Seconds for all tries. KFP calls it the longest backoff, and its own default of an hour ends long steps."""
        waits = sum(self.wait_s * self.factor**number for number in range(self.times))
        whole = (self.times + 1) * (timeout_s or _LONGEST_TRY_S) + waits
        return self.window_s or int(min(whole, _LONGEST_WINDOW_S))


class Placement(_Part):
    """Resources of a step. An empty one is that of every_step; env, secrets and the like are added to those."""

    cpu: Cpu = Field("", description="Processors, such as 8 or 500m, as request and limit; empty for what is left.")
    memory: Memory = Field("", description="Memory, such as 64Gi, as request and limit; empty for what is left.")
    shm: Memory = Field(
        "", description=f"Size of /dev/shm, such as 16Gi; it counts as memory. Empty: {SHARED_MEMORY} for GPU steps."
    )
    node_selector: dict[LabelKey, LabelValue] = Field({}, description="Labels that nodes must have.")
    tolerations: tuple[Toleration, ...] = Field(
        (), description="Taints to tolerate, each with key, operator, value, effect. GPU steps tolerate nvidia.com/gpu."
    )
    env: Annotated[dict[Variable, str], AfterValidator(_no_secrets)] = Field(
        {}, description="Environment variables, such as MLFLOW_TRACKING_URI; nothing secret."
    )
    secrets: tuple[Secret, ...] = Field(
        (), description="Secrets as environment variables: a list of name and env (variable: key in the Secret)."
    )
    volumes: tuple[Volume, ...] = Field(
        (), description="PersistentVolumeClaims as folders: a list of claim, mount_path, sub_path."
    )
    retries: Retries = Field(Retries(), description="Tries after a failure.")
    timeout_s: int = Field(
        0, ge=0, le=_LONGEST_WINDOW_S, description="Seconds after which a step is ended, in each try; 0 for no limit."
    )
    caching: bool = Field(
        False,
        description="Let KFP reuse a finished step of the same image, inputs and settings. It does not look "
        "behind a URI or a path: changed images in the same place go unseen.",
    )


class GpuPlacement(Placement):
    """Resources of a step with GPUs."""

    gpu: GpuResources = Field(GpuResources(), description="GPUs on each node.")


def gpu_of(placed: Placement) -> GpuResources:
    """GPUs of any step; of most none."""
    return placed.gpu if isinstance(placed, GpuPlacement) else GpuResources(count=0)


class TrainPlacement(GpuPlacement):
    """Resources of training."""

    num_nodes: int = Field(
        1, ge=1, le=1024, description="Nodes to train on. From 2 on the step is a Kubeflow Trainer TrainJob."
    )


class TrainJobSettings(_Part):
    """Training that is tried again, or on several nodes."""

    runtime: Name = Field("torch-distributed", description="Name of the Trainer's ClusterTrainingRuntime.")
    volume: Volume | None = Field(
        None,
        description="Claim, with its mount_path, for checkpoints of an unfinished training: another try resumes from "
        "them, which else die with the pod. Several nodes need one that all can write at the same time "
        "(ReadWriteMany), and the dataset is copied there, once.",
    )
    service_account: OptionalName = Field(
        "", description="Service account of the training pods; empty for the runtime's."
    )


class ClusterSettings(_Part):
    """The settings file: how a pipeline's steps run on a cluster."""

    namespace: OptionalName = Field("", description="Your namespace, where KFP serves several users.")
    service_account: OptionalName = Field(
        "", description="Service account of the run; empty for KFP's own (pipeline-runner)."
    )
    pipeline_root: str = Field(
        "",
        pattern=r"^$|^(s3|gs|minio|oci)://.+",
        description="Where KFP keeps what steps write, such as s3://bucket/folder; empty for KFP's own place.",
    )
    dataset_volume: Volume | None = Field(
        None,
        description="Claim, with its mount_path, where preprocess and merge put datasets and other steps read them; "
        "KFP's store then keeps the manifests alone. ReadWriteMany where steps run on several nodes.",
    )
    image_pull_secrets: tuple[Name, ...] = Field((), description="Secrets to pull images with.")
    run_as_non_root: bool = Field(
        False,
        description="Have the steps say that they run as no root, which namespaces that enforce PodSecurity restricted "
        "ask for; KFP 2.16 or newer.",
    )
    images: Images = Field(Images(), description="Registry and versions of the images.")
    every_step: Placement = Field(Placement(), description="What all steps get that do not say otherwise.")
    preprocess: Placement = Field(Placement(), description="What preprocess gets, its parts too.")
    merge: Placement = Field(Placement(), description="What merge gets, which joins parts.")
    train: TrainPlacement = Field(TrainPlacement(), description="What train gets, on each node.")
    export: GpuPlacement = Field(GpuPlacement(), description="What export gets.")
    validate_: GpuPlacement = Field(GpuPlacement(), alias="validate", description="What validate gets.")
    gate: Placement = Field(Placement(), description="What gate gets.")
    promote: Placement = Field(Placement(), description="What promote gets.")
    analyze: GpuPlacement = Field(GpuPlacement(), description="What analyze gets, which labels videos.")
    train_job: TrainJobSettings = Field(
        TrainJobSettings(), description="Where training keeps checkpoints, and how several nodes train."
    )

    @model_validator(mode="after")
    def _fits(self) -> "ClusterSettings":
        if self.every_step.caching or self.promote.caching:
            where = "promote" if self.promote.caching else "every_step"
            raise ValueError(f"{where}.caching: promote acts on the registry, so it always runs; set it per step")
        for step in IMAGE_OF:
            placed = self.of(step)
            if placed.memory and placed.shm and size_bytes(placed.memory) <= size_bytes(placed.shm):
                raise ValueError(
                    f"{step}: its memory {placed.memory} must be more than its shm {placed.shm}, which counts as memory"
                )
            volumes = list(placed.volumes)
            shared = self.train_job.volume if step == "train" else None
            if shared is not None and shared not in volumes:
                volumes.append(shared)
            folders = [volume.mount_path.rstrip("/") for volume in volumes]
            folders += ["/dev/shm"] if placed.shm else []
            for folder, number in Counter(folders).items():
                if number > 1:
                    raise ValueError(f"{step}: {number} volumes have the mount_path {folder}; give each its own folder")
            self._check_variables(step, placed)
            gpu = gpu_of(placed)
            if gpu.product and placed.node_selector.get(PRODUCT_LABEL, gpu.product) != gpu.product:
                raise ValueError(
                    f"{step}: gpu.product is {gpu.product}, and node_selector has {PRODUCT_LABEL} "
                    f"{placed.node_selector[PRODUCT_LABEL]}; leave one out"
                )
        if self.train.num_nodes > 1 and self.train_job.volume is None:
            raise ValueError(
                "train.num_nodes above 1 needs train_job.volume: a claim that all nodes can write (ReadWriteMany)"
            )
        return self

    @staticmethod
    def _check_variables(step: str, placed: Placement) -> None:
        from_secrets = [variable for secret in placed.secrets for variable in secret.env]
        for variable, number in Counter([*placed.env, *from_secrets]).items():
            if number > 1:
                raise ValueError(
                    f"{step}: the variable {variable} is set {number} times, by env and secrets of the step and of "
                    "every_step; leave all but one out"
                )

    def of(self, step: str) -> Placement:
        """Resources of one step, those of `every_step` among them."""
        own: Placement = getattr(self, "validate_" if step == "validate" else step)
        merged: dict[str, Any] = {}
        for name in Placement.model_fields:
            mine, common = getattr(own, name), getattr(self.every_step, name)
            if isinstance(mine, dict):
                merged[name] = {**common, **mine}
            elif isinstance(mine, tuple):
                merged[name] = (*common, *(entry for entry in mine if entry not in common))
            else:
                merged[name] = mine if name in own.model_fields_set else common
        if step == "gate" and "retries" not in own.model_fields_set:
            merged["retries"] = Retries(times=0)  # a verdict stays what it is
        if self.dataset_volume is not None and step not in ("gate", "analyze"):  # which read no dataset
            merged["volumes"] = tuple(dict.fromkeys((*merged["volumes"], self.dataset_volume)))
            merged["env"] = {**merged["env"], DATASETS_VARIABLE: self.dataset_volume.mount_path}
        if step in GPU_STEPS and not merged["shm"]:
            merged["shm"] = SHARED_MEMORY
        return own.model_copy(update=merged)

    def image(self, step: str) -> str:
        """The image that a step runs in."""
        name = IMAGE_OF[step]
        return reference(name, self.images.registry, self.images.tag, dict(self.images.digests).get(name, ""))  # type: ignore[call-overload]


def load_settings(path: Path | None, *, num_nodes: int | None = None) -> ClusterSettings:
    """Read a settings file; without one, what the steps get by default.

    Args:
        path: YAML; None for the defaults.
        num_nodes: instead of the file's `train.num_nodes`.

    Raises:
        UserError: unknown keys, values that can't be, or no such file; all mistakes in one message.
    """
    values = load_yaml(path) if path else {}
    if num_nodes is not None:
        train = values.get("train") or {}
        values = {**values, "train": {**train, "num_nodes": num_nodes} if isinstance(train, dict) else train}
    try:
        return ClusterSettings.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        where = path or "--num-nodes"
        problems = format_errors(error, ClusterSettings)
        text = "\n".join(f"{where}: {message}" for _, message in problems)
        raise UserError(text, code="bad-cluster-settings", setting=problems[0][0]) from None


def settings_rows(model: type[BaseModel] = ClusterSettings, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every key of a settings file: (key, default, meaning). Keys of all steps come once, under `every_step`."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = inner_model(field.annotation)
        if inner is None:
            default = "" if field.is_required() else show_value(field.default)
            shown = {"{}": "none", "[]": "none", "empty": "", "None": ""}.get(default, default)
            yield key, shown, str(field.description)
            continue
        is_list = get_origin(field.annotation) is tuple
        if issubclass(inner, Placement) and key != "every_step":
            yield f"{key}.*", "", f"{field.description} The keys of every_step."
            own = {own for own in inner.model_fields if own not in Placement.model_fields}
            yield from (row for row in settings_rows(inner, f"{key}.") if row[0].split(".")[1].rstrip("[]") in own)
            continue
        yield from settings_rows(inner, f"{key}[]." if is_list else f"{key}.")
