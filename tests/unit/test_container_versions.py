"""The check of versions.hcl finds what would break at a user's."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINERS = REPOSITORY / "containers"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CONTAINERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


CHECK = module("check_versions")
VERSIONS = CHECK.read_versions((CONTAINERS / "versions.hcl").read_text())
SAME = {"TRT_VERSION": f"{VERSIONS['PYTORCH_TENSORRT']}.2", "CUDA_VERSION": "13.4.1.012"}
# What NGC's PyTorch 26.08 says to importlib.metadata; DALI as in PyTorch 26.07 and Triton 26.08.
OF_NGC = {
    "numpy": "2.1.0",
    "nvidia-dali-cuda130": "2.2.0",
    "torch": "2.14.0a0+4fdf77b940.nv26.8.63802676",
    "torchvision": "0.29.0a0+0bc41e67.nv26.8.63802676",
}


def test_the_repository_passes() -> None:
    done = subprocess.run([sys.executable, CONTAINERS / "check_versions.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert VERSIONS["NGC_RELEASE"] in done.stdout


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"TRITON_TENSORRT": "10.16"}, "export has TensorRT 11.2.1 and serve 10.16"),
        ({"MIN_DRIVER": "575.51.03"}, "needs the driver 580.65.06, and 575.51.03 is documented"),
        ({"CUDA": "14.0"}, "CUDA is 14.0, whose driver is not in OLDEST_DRIVER"),
        ({"PYTORCH_DIGEST": "sha256:123"}, "PYTORCH_DIGEST is 'sha256:123', no digest"),
    ],
)
def test_what_is_said_must_fit(change: dict[str, str], word: str) -> None:
    assert CHECK.said_problems(VERSIONS) == []
    (problem,) = CHECK.said_problems({**VERSIONS, **change})
    assert word in problem


def test_a_release_wants_digests() -> None:
    pinned = dict.fromkeys(("PYTORCH_DIGEST", "TRITON_DIGEST", "PYTHON_DIGEST"), f"sha256:{'0' * 64}")
    assert CHECK.said_problems({**VERSIONS, **pinned}, release=True) == []
    problems = CHECK.said_problems({**VERSIONS, **pinned, "TRITON_DIGEST": ""}, release=True)
    assert problems == ["TRITON_DIGEST is empty, and a release is built on pinned bases only: run containers/pin"]


def test_a_budget_for_every_image() -> None:
    left = {name: value for name, value in VERSIONS.items() if name != "TRAIN_BUDGET_MB"}
    assert CHECK.said_problems(left) == ["TRAIN_BUDGET_MB is missing"]


def test_a_dockerfile_of_another_release() -> None:
    text = (CONTAINERS / "train/Dockerfile").read_text()
    assert CHECK.default_problems(VERSIONS, {"train": text}) == []
    (problem,) = CHECK.default_problems({**VERSIONS, "NGC_RELEASE": "26.09"}, {"train": text})
    assert "containers/train/Dockerfile has the base" in problem


def test_documents_name_the_driver() -> None:
    assert CHECK.document_problems(VERSIONS, {"a": "R580 or newer"}) == []
    assert CHECK.document_problems(VERSIONS, {"a": "R570"}) == ["a does not name the driver branch R580"]


@pytest.mark.parametrize(
    ("serve", "word"),
    [
        ({"TRT_VERSION": "11.3.0.1"}, "serve carries TensorRT 11.3.0.1"),
        ({"TRT_VERSION": "11.20.0.1"}, "serve carries TensorRT 11.20.0.1"),
        ({"TRT_VERSION": ""}, "serve carries TensorRT of no known version"),
        ({"CUDA_VERSION": "14.0"}, "serve's CUDA is 14.0"),
    ],
)
def test_images_that_carry_something_else(serve: dict[str, str], word: str) -> None:
    assert CHECK.image_problems(VERSIONS, {"export": SAME, "serve": SAME}) == []
    problems = CHECK.image_problems(VERSIONS, {"export": SAME, "serve": {**SAME, **serve}})
    assert any(word in problem for problem in problems)


def test_the_version_of_tensorrt_is_what_counts() -> None:
    built_for = {**SAME, "TRT_VERSION": f"{SAME['TRT_VERSION']}+cuda13.3"}
    assert CHECK.image_problems(VERSIONS, {"export": SAME, "serve": built_for}) == []


def test_the_pinned_release_brings_what_base_txt_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    base = module("check_base")
    monkeypatch.setattr(base.metadata, "version", OF_NGC.__getitem__)
    assert VERSIONS["NGC_RELEASE"] == "26.08"  # with another one, look up OF_NGC anew
    assert base.problems((CONTAINERS / "base.txt").read_text()) == []


def test_the_repository_can_be_released() -> None:
    assert CHECK.said_problems(VERSIONS, release=True) == []


def test_a_base_that_lacks_something() -> None:
    base = module("check_base")
    assert base.problems("# comment\n\nnumpy>=2\ntorch>=2.11\n") == []
    assert base.problems("numpy>=99") != []
    assert base.problems("no-such-distribution>=1") == [
        "no-such-distribution is not there, and no-such-distribution>=1 is needed"
    ]


def test_the_drivers_are_those_of_the_doctor() -> None:
    from enginery.doctor import gpu

    for major, driver in CHECK.OLDEST_DRIVER.items():
        assert gpu.OLDEST_DRIVER[int(major)] == driver
