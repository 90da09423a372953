"""The GPUs that a process may use, by a driver that is not there, and how CUDA is to use them."""

import os
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from components.common.contracts.environment import gpus, keep_streams_apart

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.fixture(autouse=True)
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_uuid(uuid: str) -> str:
        if uuid != "MIG-cc44":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    answers = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: UUIDS[index],
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: handle,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * 10**9),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, UUIDS),
        ("", ()),
        ("-1", ()),
        ("1", ("GPU-aa22",)),
        ("2, 0", ("GPU-bb33", "GPU-aa11")),
        ("GPU-bb,GPU-aa1", ("GPU-bb33", "GPU-aa11")),
        ("GPU-aa", ()),  # which of the two?
        ("MIG-cc44", ("MIG-cc44",)),
        ("MIG-dd55", ()),
        ("1,7,0", ("GPU-aa22",)),  # CUDA stops at the first that is not there
        ("1,-1,0", ("GPU-aa22",)),
        ("0,0", ()),
        ("none", ()),
    ],
)
def test_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert tuple(gpu.name for gpu in gpus.__wrapped__()) == expected


def test_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jetson Orin and DGX Spark share the machine's memory, and NVML refuses to name it."""

    def refuse(handle: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert {gpu.memory_bytes for gpu in gpus.__wrapped__()} == {psutil.virtual_memory().total}


def test_queues_of_the_hardware_are_the_users_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    keep_streams_apart()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    keep_streams_apart()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is taken back
