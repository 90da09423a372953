"""What to do when the training processes can't talk to each other, from what NCCL or gloo says."""

import os
import re
import shutil

# Signs in the message -> what is wrong and what to do. The first that fits counts.
_KNOWN = (
    (
        r"Duplicate GPU detected",
        "two processes use one GPU: start one process per GPU, told apart by LOCAL_RANK or CUDA_VISIBLE_DEVICES",
    ),
    (
        r"No space left on device|/dev/shm|shared memory|shmget|Error while creating shared memory",
        "the shared memory of this container is too small: docker run --shm-size=8g or --ipc=host, in Kubernetes an "
        "emptyDir of medium Memory at /dev/shm",
    ),
    (
        r"address already in use|EADDRINUSE",
        "the port is taken, perhaps by an earlier run: end it, or choose another port (torchrun --master-port)",
    ),
    (
        r"getaddrinfo|gai error|Name or service not known|could not resolve|hostname",
        "a host name is unknown: MASTER_ADDR must be a name or address that every machine can reach",
    ),
    (
        r"no (socket )?interface|Bootstrap|socketStartConnect|Connection refused|No route|unable to find address",
        "the network between the processes does not work: name the right interface (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME; ip addr lists them) and open the ports between the machines",
    ),
    (
        r"peer access|P2P|cudaIpc|invalid device function",
        "the GPUs can't reach each other's memory: try NCCL_P2P_DISABLE=1; if that helps, PCIe access control (ACS) or "
        "the virtual machine is in the way",
    ),
    (
        r"nvls|multicast",
        "NVLink multicast does not work here: set NCCL_NVLS_ENABLE=0",
    ),
    (
        r"out of memory",
        "a GPU has no memory left: nvidia-smi shows what else uses it",
    ),
    (
        r"driver version|CUDA driver|no kernel image",
        "the NVIDIA driver does not fit this CUDA: enginery doctor shows both versions",
    ),
    (
        r"timed? ?out|did not end within|Connection closed|Connection reset|not all .* joined|DistStoreError",
        "a process is missing or stuck: see whether all have started, and its own output for an error; "
        "NCCL_DEBUG=INFO tells where NCCL waits",
    ),
)
_SMALL_BYTES = 128 << 20  # Docker's default is 64 MiB


def diagnose(message: str, rank: int, world_size: int) -> str:
    """What the user should read when an all-reduce between the processes failed: the cause, if known, and a fix."""
    text = " ".join(message.split())
    advice = next((advice for signs, advice in _KNOWN if re.search(signs, text, re.IGNORECASE)), "")
    if not advice:
        advice = "set NCCL_DEBUG=INFO and run again: the lines before the error name what failed"
    return (
        f"the {world_size} training processes can't work together (rank {rank} of them says so): {advice}.{_facts()} "
        f"The library says: {text[:300]}"
    )


def _facts() -> str:
    """What of this machine is known to make trouble."""
    facts = []
    try:
        shared_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        facts.append("there is no /dev/shm")
    else:
        if shared_bytes < _SMALL_BYTES:
            facts.append(f"/dev/shm has only {shared_bytes / 1e6:.0f} MB")
    facts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))]
    return f" Here {', '.join(facts)}." if facts else ""
