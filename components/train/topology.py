"""How the GPUs of this machine are connected, from NVML."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pynvml

# NVML's levels of the topology -> words, as `nvidia-smi topo -m` explains them.
_PATHS = {
    "NVML_TOPOLOGY_INTERNAL": "one board",
    "NVML_TOPOLOGY_SINGLE": "one PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "several PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "a PCIe host bridge",
    "NVML_TOPOLOGY_NODE": "PCIe inside a NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "PCIe and the link between NUMA nodes",
}


def describe_links(uuids: Sequence[str]) -> str:
    """How each pair of GPUs is connected, in one line such as "NVLink (6 pairs)"; empty where NVML can't tell.

    Args:
        uuids: of the GPUs, with NVML's prefix "GPU-".
    """
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        paths = Counter(_path(first, second) for first, second in combinations(handles, 2))
    except pynvml.NVMLError:
        return ""
    return ", ".join(f"{path} ({number} pair{'s' if number > 1 else ''})" for path, number in paths.most_common())


def _path(first: Any, second: Any) -> str:
    status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return next((words for name, words in _PATHS.items() if getattr(pynvml, name) == level), f"level {level}")
