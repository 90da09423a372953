"""`enginery run --in-containers` as far as it needs no Docker engine; tests/containers runs the rest on one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError, UserError
from enginery.local.containers import RUN_LABEL, Containers, check_images, images_of
from enginery.local.parameters import PipelineFile, load_pipeline
from enginery.local.state import LOCK, RunDirectory, StateDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = ("preprocess", "train", "export", "validate", "gate", "promote")


def test_docker_gets_what_dockerfiles_copy() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    lines = [line for file in REPOSITORY.glob("containers/**/Dockerfile") for line in file.read_text().splitlines()]
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = {source.split("/")[0] for sources in copies for source in sources if not sources[0].startswith("--from")}
    assert {"components", "enginery"} < copied <= {line[1:] for line in ignored if line.startswith("!")}


@pytest.fixture
def file() -> PipelineFile:
    return load_pipeline(REPOSITORY / "pipelines/resnet50.py")


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
    assert names == {"preprocess", "train", "export", "validate", "promote"}  # the gate runs in promote's


def test_without_an_engine_the_fix_is_named(
    file: PipelineFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(UserError, match="needs a Docker engine, and none answers"):
        check_images(file, print)


def test_the_command_says_so_before_anything_is_made(tmp_path: Path, few_digits: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/no.sock", "ENGINERY_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "enginery.cli.main", "run", "pipelines/resnet50.py", "--in-containers"]
    done = subprocess.run(
        [*command, "--data", str(few_digits), "--set", "gate.confident=false"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs a Docker engine" in done.stderr
    assert not (tmp_path / "home").exists()


def test_what_a_container_may_do(containers: Callable[..., Containers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    made = containers()
    given = made.runner({"MLFLOW_TRACKING_URI": "http://localhost:5000"}).container_run_args
    assert given["user"] == f"{os.getuid()}:{os.getgid()}"
    assert given["cap_drop"] == ["ALL"]
    assert given["read_only"] is True
    assert given["shm_size"] == "8g"
    assert given["labels"] == {RUN_LABEL: "resnet50-1"}
    assert given["environment"]["MLFLOW_TRACKING_URI"] == "http://localhost:5000"
    assert given["environment"]["AWS_ACCESS_KEY_ID"] == "a-key"
    assert "PYTHONPATH" not in given["environment"]


def test_inputs_are_mounted_to_be_read_only(containers: Callable[..., Containers], tmp_path: Path) -> None:
    images, model = tmp_path / "images", tmp_path / "own/model.onnx"
    images.mkdir()
    model.parent.mkdir()
    model.touch()
    made = containers(data=str(images), model=str(model), preprocess={"class_names_file": ""})
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in made.runner({}).container_run_args["mounts"]}
    assert mounts == {str(tmp_path / "state"): False, str(images): True, str(model.parent): True}


def test_data_behind_a_uri_is_not_mounted(containers: Callable[..., Containers]) -> None:
    mounts = containers(data="s3://bucket/images").runner({}).container_run_args["mounts"]
    assert len(mounts) == 1


def test_success_is_believed_only_with_all_manifests(containers: Callable[..., Containers], file: PipelineFile) -> None:
    made = containers()
    outputs = [made.run_directory / "artifacts/resnet50-now" / task / "output" for task in TASKS]
    for output in outputs:
        output.mkdir(parents=True)
        (output / "manifest.json").touch()
    made.check_manifests(file)
    (outputs[1] / "manifest.json").unlink()
    with pytest.raises(EngineryError, match="the container of train ended without a manifest"):
        made.check_manifests(file)
    outputs[1].rmdir()
    with pytest.raises(EngineryError, match="the container of train ended without a manifest"):
        made.check_manifests(file)


def test_a_step_ends_when_the_lock_of_its_run_is_free(tmp_path: Path) -> None:
    """What a step in a container has of its parent: the lock, which another process's end frees."""
    held = RunDirectory.hold(tmp_path)
    script = "import time; from components.common.process.lifetime import end_with_parent; end_with_parent(); "
    script += "print('ready', flush=True); time.sleep(60)"
    environment = {**os.environ, "ENGINERY_PARENT_LOCK": str(tmp_path / LOCK)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None
        assert step.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            step.wait(0.5)
        os.close(held.lock)
        assert step.wait(600) == -signal.SIGKILL
