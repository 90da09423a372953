"""Checks of a cluster's nodes: GPUs, their drivers, memory for /dev/shm, quotas."""

from typing import Any

from pipelines.cluster.settings import GPU_STEPS, GpuPlacement, Placement, Toleration, TrainPlacement, size_bytes
from pipelines.diagnosis.checks import Finding, absent, missing, ok, warning
from pipelines.diagnosis.cluster import View
from pipelines.diagnosis.gpu import OLDEST_DRIVER, driver_number
from pipelines.formats import size_text
from pipelines.resources import selector_of, tolerations_of

_CUDA = 13  # of the images: containers/versions.hcl
# Labels that NVIDIA's GPU feature discovery gives to nodes, now and before.
_DRIVER_LABELS = (
    ("nvidia.com/cuda.driver-version.full",),
    *(
        tuple(f"nvidia.com/cuda.{prefix}.{part}" for part in parts)
        for prefix, parts in (("driver-version", ("major", "minor", "revision")), ("driver", ("major", "minor", "rev")))
    ),
)
_OPERATOR = (
    "install NVIDIA's GPU operator, or its device plugin and GPU feature discovery (docs.nvidia.com/datacenter/"
    "cloud-native/gpu-operator)"
)


class NodeChecks:
    """The checks share the list of nodes."""

    def __init__(self, view: View) -> None:
        self._view = view

    def _gpu_steps(self) -> dict[str, GpuPlacement]:
        """Steps that ask for GPUs."""
        placed = {step: self._view.settings.of(step) for step in GPU_STEPS}
        return {step: one for step, one in placed.items() if isinstance(one, GpuPlacement) and one.gpu.count}

    def gpu_nodes(self) -> Finding:
        """Whether each GPU step fits a node."""
        steps = self._gpu_steps()
        if not steps:
            return absent("no step asks for a GPU")
        with_gpus = [node for node in self._view.nodes if any(_gpus(node, one.gpu.resource) for one in steps.values())]
        if not with_gpus:
            resources = ", ".join(sorted({one.gpu.resource for one in steps.values()}))
            return missing(
                f"of {len(self._view.nodes)} nodes none offers {resources}",
                f"{_OPERATOR}, or set gpu.count: 0 for {', '.join(steps)} to work on CPUs",
            )
        for step, placed in steps.items():
            wanted = placed.num_nodes if isinstance(placed, TrainPlacement) else 1
            if len(_fitting(with_gpus, placed)) < wanted:
                return _why_none(step, placed, with_gpus, wanted)
        kinds = {_product(node) for node in with_gpus}
        counts = "; ".join(
            f"{sum(_gpus(node, 'nvidia.com/gpu') for node in with_gpus if _product(node) == kind)} x {kind}"
            for kind in sorted(kinds)
        )
        return ok(f"{len(with_gpus)} nodes with {counts}; {', '.join(steps)} fit")

    def drivers(self) -> Finding:
        """Whether the drivers of the nodes that GPU steps may run on can run the images' CUDA."""
        steps = self._gpu_steps()
        nodes = {node.metadata.name: node for one in steps.values() for node in _fitting(self._view.nodes, one)}
        if not nodes:
            return absent("needs nodes that GPU steps fit")
        drivers = {name: _driver(node) for name, node in nodes.items()}
        oldest = OLDEST_DRIVER[_CUDA]
        old = {name: text for name, text in drivers.items() if text and driver_number(text) < driver_number(oldest)}
        if old:
            told = ", ".join(f"{name} has {text}" for name, text in sorted(old.items()))
            return missing(
                f"the images' CUDA {_CUDA} needs driver {oldest} or newer: {told}",
                "update the driver (GPU operator: driver.version), or keep steps off these nodes with node_selector",
            )
        if unknown := sorted(name for name, text in drivers.items() if not text):
            return warning(
                f"no label says which driver {', '.join(unknown)} has; CUDA {_CUDA} needs {oldest}", _OPERATOR
            )
        return ok(f"{', '.join(sorted(set(drivers.values())))} (CUDA {_CUDA} needs {oldest})")

    def shared_memory(self) -> Finding:
        """Whether /dev/shm fits into the memory that a GPU step has: its own, the namespace's default, or a node's."""
        steps = {step: one for step, one in self._gpu_steps().items() if one.shm}
        if not steps:
            return absent("no step asks for shared memory")
        default = self._default_memory()
        for step, placed in steps.items():
            shm = size_bytes(placed.shm)
            if not placed.memory and default and size_bytes(default) <= shm:
                return missing(
                    f"a limit range of {self._view.namespace} gives containers {default} of memory, and {step} has "
                    f"{placed.shm} of /dev/shm, which counts as memory",
                    f"set {step}.memory to more than that in the settings",
                )
            sizes = [size_bytes(node.status.allocatable["memory"]) for node in _fitting(self._view.nodes, placed)]
            if sizes and max(sizes) <= shm:
                return missing(
                    f"{step} has {placed.shm} of /dev/shm, and its largest node {size_text(int(max(sizes)))} of memory",
                    f"set {step}.shm to less",
                )
        return ok(", ".join(f"{step} {one.shm}" for step, one in steps.items()) + ", in memory")

    def quota(self) -> Finding:
        """Whether the namespace may have as many GPUs."""
        quotas = self._view.core.list_namespaced_resource_quota(self._view.namespace).items
        for step, placed in self._gpu_steps().items():
            number = placed.gpu.count * (placed.num_nodes if isinstance(placed, TrainPlacement) else 1)
            key = f"requests.{placed.gpu.resource}"
            for quota in quotas:
                hard = (quota.status.hard or {}) if quota.status else {}
                if key in hard and int(hard[key]) < number:
                    return missing(
                        f"the quota {quota.metadata.name} of {self._view.namespace} allows {hard[key]} of "
                        f"{placed.gpu.resource}, and {step} asks for {number}",
                        f"have the quota raised, or lower {step}.gpu.count",
                    )
        return ok(f"{len(quotas)} quotas in {self._view.namespace}, none too small")

    def _default_memory(self) -> str:
        """What a container gets that does not say; "" for no limit."""
        ranges = self._view.core.list_namespaced_limit_range(self._view.namespace).items
        for limit in (limit for entry in ranges for limit in entry.spec.limits if limit.type == "Container"):
            if memory := (limit.default or {}).get("memory"):
                return str(memory)
        return ""


def _gpus(node: Any, resource: str) -> int:
    return int((node.status.allocatable or {}).get(resource, 0))


def _product(node: Any) -> str:
    return str((node.metadata.labels or {}).get("nvidia.com/gpu.product", "GPU of unknown type"))


def _driver(node: Any) -> str:
    """A node's driver, such as "580.95.05"; "" where no label says."""
    labels = node.metadata.labels or {}
    for names in _DRIVER_LABELS:
        if all(name in labels for name in names):
            return ".".join(str(labels[name]) for name in names)
    return ""


def _fitting(nodes: list[Any], placed: GpuPlacement) -> list[Any]:
    """Nodes that a step may run on and that are large enough when nothing else runs there."""
    return [
        node
        for node in nodes
        if _matches(node, placed)
        and not _repelling(node, placed)
        and _gpus(node, placed.gpu.resource) >= placed.gpu.count
        and (not placed.memory or size_bytes(node.status.allocatable["memory"]) >= size_bytes(placed.memory))
        and (not placed.cpu or _cores(node.status.allocatable["cpu"]) >= _cores(placed.cpu))
    ]


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _matches(node: Any, placed: Placement) -> bool:
    labels = node.metadata.labels or {}
    return all(labels.get(name) == value for name, value in selector_of(placed).items())


def _repelling(node: Any, placed: Placement) -> list[Any]:
    """A node's taints that a step does not tolerate."""
    taints = [taint for taint in node.spec.taints or () if taint.effect != "PreferNoSchedule"]
    return [taint for taint in taints if not any(_tolerates(one, taint) for one in tolerations_of(placed))]


def _tolerates(toleration: Toleration, taint: Any) -> bool:
    return (
        toleration.key in ("", taint.key)
        and toleration.effect in ("", taint.effect)
        and (toleration.operator == "Exists" or toleration.value == (taint.value or ""))
    )


def _why_none(step: str, placed: GpuPlacement, nodes: list[Any], wanted: int) -> Finding:
    """Say what keeps a step off the GPU nodes, from what is chosen to what is there."""
    need = f"{step} needs {wanted} nodes" if wanted > 1 else f"{step} needs a node"
    matching = [node for node in nodes if _matches(node, placed)]
    if len(matching) < wanted:
        kinds = ", ".join(sorted({_product(node) for node in nodes}))
        chosen = ", ".join(f"{name}={value}" for name, value in selector_of(placed).items()) or "any labels"
        return missing(
            f"{need} with {chosen}, and {len(matching)} of {len(nodes)} GPU nodes have them (GPUs here: {kinds})",
            f"mend {step}.gpu.product or {step}.node_selector in the settings; kubectl get nodes --show-labels",
        )
    allowed = [node for node in matching if not _repelling(node, placed)]
    if len(allowed) < wanted:
        taints = sorted({f"{t.key}={t.value or ''}:{t.effect}" for node in matching for t in _repelling(node, placed)})
        return missing(
            f"{need}, and taints keep it off: {', '.join(taints)}",
            f"add them to {step}.tolerations in the settings",
        )
    largest = max(_gpus(node, placed.gpu.resource) for node in allowed)
    asked = ", ".join(filter(None, (f"{placed.gpu.count} GPUs", placed.cpu and f"{placed.cpu} CPUs", placed.memory)))
    return missing(
        f"{need} with {asked}, and too few of the {len(allowed)} that it may use are that large (most GPUs of one: "
        f"{largest})",
        f"lower {step}.gpu.count, cpu or memory in the settings",
    )
