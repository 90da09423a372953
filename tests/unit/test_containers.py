"""Images: what their builds get, versions that fit; and runs in containers as far as they need no Docker engine.

tests/containers has the rest, on one.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from components.common.contracts.errors import EngineryError
from enginery.doctor import gpu
from enginery.local.containers import RUN_LABEL, Containers, images_of
from enginery.local.parameters import PipelineFile, load_pipeline
from enginery.local.state import LOCK, RunDirectory, StateDirectory
from tests.processes import ROOT, run_python, start_python
from tests.unit.registered import enginery, refuses

CONTAINERS = ROOT / "containers"
STEPS = ("preprocess", "train", "export", "validate", "analyze")
CHAIN = STEPS[:-1]
TASKS = (*CHAIN, "gate", "promote")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CONTAINERS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


CHECK = module("check_versions")
VERSIONS = CHECK.read_versions((CONTAINERS / "versions.hcl").read_text())
SAME = {"TRT_VERSION": "11.2.1.2", "CUDA_VERSION": "13.4.1.012"}
# What NGC's PyTorch 26.08 says to importlib.metadata; DALI as in PyTorch 26.07 and Triton 26.08.
OF_NGC = {
    "numpy": "2.1.0",
    "nvidia-dali-cuda130": "2.2.0",
    "torch": "2.14.0a0+4fdf77b940.nv26.8.63802676",
    "torchvision": "0.29.0a0+0bc41e67.nv26.8.63802676",
}


def test_docker_gets_what_dockerfiles_copy() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    files = list(CONTAINERS.glob("**/Dockerfile"))
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("COPY ")]
    copied = {source for line in lines if "--from" not in line for source in line.split()[1:-1]}
    folders = {source.split("/")[0] for source in copied}
    assert {"components", "enginery"} < folders <= {line[1:] for line in ignored if line.startswith("!")}
    for step in STEPS:
        assert all((ROOT / source.replace("${STEP}", step)).exists() for source in copied)


def test_every_step_of_the_one_dockerfile_is_a_target_with_its_entry_point() -> None:
    text = (CONTAINERS / "steps/Dockerfile").read_text()
    targets = re.findall(r'^FROM step AS (\w+)\n(?:LABEL.*\n)ENTRYPOINT (.*)\nCMD \["--help"\]$', text, re.MULTILINE)
    assert targets == [(step, f'["python", "-m", "components.{step}"]') for step in STEPS]


@pytest.mark.parametrize(
    ("image", "options"),
    [
        ("train", "-f containers/steps/Dockerfile --target train --build-arg STEP=train"),
        ("serve", "-f containers/serve/Dockerfile"),
    ],
)
def test_an_images_name_stands_for_its_dockerfile(tmp_path: Path, image: str, options: str) -> None:
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [CONTAINERS / "build", image, "-t", "tag", "."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(f"{options} -t tag .")


@pytest.mark.parametrize("option", ["", "--model-control-mode=explicit", "--model-contr explicit"])
@pytest.mark.parametrize("key", ["", "the-key-of-a-load-test"])
def test_the_server_starts_closed_to_clients(tmp_path: Path, option: str, key: str) -> None:
    """Interfaces of Triton that change it have keys that nobody knows, or the operator's."""
    (tmp_path / "tritonserver").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "tritonserver").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **({"ENGINERY_LOADING_KEY": key} if key else {})}

    def given() -> list[str]:
        command = ["sh", str(CONTAINERS / "serve/start"), *option.split()]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()

    keys: dict[str, set[str]] = {}
    for line in given() + given():
        if found := re.fullmatch(r"--(http-restricted-api|grpc-restricted-protocol)=(.+):([a-z-]+)=(.{16,})", line):
            keys.setdefault(f"{found[1]} {found[2]}", set()).add(found[4])
    shut = {f"{way} logging,trace,shared-memory" for way in ("http-restricted-api", "grpc-restricted-protocol")}
    loading = {name.replace("logging,trace,shared-memory", "model-repository") for name in shut} if option else set()
    assert keys.keys() == shut | loading
    assert {len(keys[name]) for name in shut} == {2}  # another one at each start
    assert all(keys[name] == {key} if key else len(keys[name]) == 2 for name in loading)
    assert given()[-len(option.split()) or None :] == option.split() or not option


def test_no_list_of_processes_shows_the_password_of_the_tracking_database(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$*\"\n")
    (tmp_path / "python").chmod(0o755)
    names = ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_AUTH_DATABASE_URI")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | dict.fromkeys(names, "postgresql://u:secret@host/m")
    command = ["sh", str(CONTAINERS / "mlflow/start"), "migrate"]
    given = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert all(name in given for name in names)
    assert "secret" not in given


def test_the_repository_fits_and_can_be_released() -> None:
    done = run_python(CONTAINERS / "check_versions.py")
    assert done.returncode == 0, done.stderr
    assert VERSIONS["NGC_RELEASE"] in done.stdout
    assert CHECK.said_problems(VERSIONS, release=True) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"MIN_DRIVER": "575.51.03"}, "needs the driver 580.65.06, and 575.51.03 is documented"),
        ({"CUDA": "14.0"}, "CUDA is 14.0, whose driver is not in OLDEST_DRIVER"),
        ({"PYTORCH_DIGEST": "sha256:123"}, "PYTORCH_DIGEST is 'sha256:123', no digest"),
        ({"TRITON_DIGEST": ""}, "TRITON_DIGEST is empty, and a release is built on pinned bases only"),
        ({"TRAIN_BUDGET_MB": None}, "TRAIN_BUDGET_MB is missing"),
    ],
)
def test_versions_must_fit(change: dict[str, str | None], word: str) -> None:
    changed = {name: value for name, value in {**VERSIONS, **change}.items() if value is not None}
    (problem,) = CHECK.said_problems(changed, release=True)
    assert word in problem


def test_dockerfiles_and_documents_of_another_release() -> None:
    text = (CONTAINERS / "steps/Dockerfile").read_text()
    (problem,) = CHECK.default_problems({**VERSIONS, "NGC_RELEASE": "26.09"}, {"steps": text})
    assert "containers/steps/Dockerfile has the base" in problem
    assert CHECK.document_problems(VERSIONS, {"a": "R570"}) == ["a does not name the driver branch R580"]


@pytest.mark.parametrize(
    ("serve", "word"),
    [
        ({"TRT_VERSION": f"{SAME['TRT_VERSION']}+cuda13.3"}, ""),  # the version of TensorRT alone counts
        ({"TRT_VERSION": "11.3.0.1"}, "serve carries TensorRT 11.3.0.1"),
        ({"TRT_VERSION": "11.2.1.3"}, "serve carries TensorRT 11.2.1.3"),  # to the build
        ({"TRT_VERSION": "11.2.1"}, "serve carries TensorRT 11.2.1,"),
        ({"TRT_VERSION": ""}, "serve carries TensorRT of no known version"),
        ({"CUDA_VERSION": "14.0"}, "serve's CUDA is 14.0"),
    ],
)
def test_images_that_carry_something_else(serve: dict[str, str], word: str) -> None:
    problems = CHECK.image_problems(VERSIONS, {"export": SAME, "serve": {**SAME, **serve}})
    assert any(word in problem for problem in problems) if word else problems == []


@pytest.mark.parametrize("package", CHECK.PINNED)
def test_another_version_anywhere_than_the_one_that_is_pinned(package: str) -> None:
    files = {name: (ROOT / name).read_text() for names in CHECK.PINNED.values() for name in names}
    assert CHECK.pin_problems(files) == []
    pin = f"{package}=={CHECK.pinned(package)}"
    for file in CHECK.PINNED[package]:
        for other in (f"{package}==99.1", f"{pin}.post1", f"{package}>=1"):
            (problem,) = CHECK.pin_problems({**files, file: files[file].replace(pin, other)})
            assert problem.startswith(f"{file} has {package} {other.partition('==')[2] or 'of no version'}, and pypro")


def test_the_base_of_the_pinned_release_and_one_that_lacks_something(tmp_path: Path) -> None:
    assert VERSIONS["NGC_RELEASE"] == "26.08"  # with another one, look up OF_NGC and SAME again
    for name, version in OF_NGC.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def check(requirements: str) -> str:
        """The answer of a process of its own: after pip's import, setuptools and so torch.compile fail in a process."""
        (tmp_path / "base.txt").write_text(requirements)
        command = [sys.executable, CONTAINERS / "check_base.py", tmp_path / "base.txt"]
        done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == bool(done.stderr), done.stderr
        return done.stderr

    assert check((CONTAINERS / "base.txt").read_text()) == ""
    assert check("# comment\n\nnumpy>=99\nno-such-distribution>=1") == (
        "this base image can't carry enginery: numpy is 2.1.0, and >=99 is needed; "
        "no-such-distribution is not there, and no-such-distribution>=1 is needed. Take another as BASE_IMAGE\n"
    )


def test_the_drivers_are_those_of_the_doctor() -> None:
    for major, driver in CHECK.OLDEST_DRIVER.items():
        assert gpu.OLDEST_DRIVER[int(major)] == driver


@pytest.fixture(scope="module")
def file() -> PipelineFile:
    return load_pipeline(ROOT / "pipelines/resnet50.py")


@pytest.fixture
def containers(tmp_path: Path) -> Callable[..., Containers]:
    state = StateDirectory(path=tmp_path / "state")
    run = state.runs / "resnet50-1"
    run.mkdir(parents=True)

    def of(**arguments: object) -> Containers:
        return Containers(run_directory=run, state=state, arguments=arguments)

    return of


def test_each_step_has_its_image(file: PipelineFile) -> None:
    names = {image.rpartition("/")[2].partition(":")[0] for image in images_of(file)}
    assert names == {*CHAIN, "promote"}  # the gate runs in promote's


def test_without_an_engine_nothing_is_made(tmp_path: Path, few_digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    with refuses("no-docker"):
        options = ("--in-containers", "--data", few_digits, "--set", "gate.confident=false")
        enginery("run", ROOT / "pipelines/resnet50.py", *options)
    assert not (tmp_path / "home").exists()


def test_what_a_container_may_do(containers: Callable[..., Containers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    given = containers().runner({"MLFLOW_TRACKING_URI": "http://localhost:5000"}).container_run_args
    assert given["user"] == f"{os.getuid()}:{os.getgid()}"
    assert given["cap_drop"] == ["ALL"]
    assert given["read_only"] is True
    assert given["shm_size"] == "8g"
    assert given["labels"] == {RUN_LABEL: "resnet50-1"}
    assert given["environment"]["MLFLOW_TRACKING_URI"] == "http://localhost:5000"
    assert given["environment"]["AWS_ACCESS_KEY_ID"] == "a-key"
    assert "PYTHONPATH" not in given["environment"]


def test_inputs_are_mounted_to_be_read_only(containers: Callable[..., Containers], tmp_path: Path) -> None:
    images, model, weights = tmp_path / "images", tmp_path / "own/model.onnx", tmp_path / "weights/w.pt"
    images.mkdir()
    for file in (model, weights):
        file.parent.mkdir()
        file.touch()
    settings = {"preprocess": {"class_names_file": ""}, "train": {"pretrained": str(weights)}}
    made = containers(data=str(images), model=str(model), **settings)
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in made.runner({}).container_run_args["mounts"]}
    inputs = dict.fromkeys(map(str, (images, model.parent, weights.parent)), True)
    assert mounts == {str(tmp_path / "state"): False, **inputs}
    assert len(containers(data="s3://bucket/images").runner({}).container_run_args["mounts"]) == 1  # the state alone


@pytest.mark.parametrize("is_removed", [False, True])
def test_success_needs_manifests(containers: Callable[..., Containers], file: PipelineFile, is_removed: bool) -> None:
    made = containers()
    outputs = [made.run_directory / "artifacts/resnet50-now" / task / "output" for task in TASKS]
    for output in outputs:
        output.mkdir(parents=True)
        (output / "manifest.json").touch()
    made.check_manifests(file)
    (outputs[1] / "manifest.json").unlink()
    if is_removed:
        outputs[1].rmdir()
    with pytest.raises(EngineryError, match="the container of train ended without a manifest"):
        made.check_manifests(file)


def test_a_step_ends_when_the_lock_of_its_run_is_free(tmp_path: Path) -> None:
    """A step in a container has its parent's lock, which another process's end frees."""
    held = RunDirectory.hold(tmp_path)
    script = "import time; from components.common.process.lifetime import end_with_parent; end_with_parent(); "
    script += "print('ready', flush=True); time.sleep(60)"
    environment = {"ENGINERY_PARENT_LOCK": str(tmp_path / LOCK)}
    with start_python("-c", script, env=environment, stdout=subprocess.PIPE, stderr=None) as step:
        assert step.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            step.wait(0.5)
        os.close(held.lock)
        assert step.wait(600) == -signal.SIGKILL
