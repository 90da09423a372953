"""Every image, on the stand-in bases, as a real engine runs it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from components.common.contracts.digests import digest_file
from tests.containers.conftest import (
    HARDENED_ALONE,
    IMAGES,
    REPOSITORY,
    STEPS,
    UID,
    base_of,
    docker,
    image,
    inspect,
    mount,
    open_folder,
    run_step,
    running,
    state,
)
from tests.waiting import wait_until

SECRET = "enginery-test-secret-4f9c2e"


@pytest.mark.parametrize("step", STEPS)
def test_help_as_anybody(step: str) -> None:
    done = run_step(step, ["--help"], "--memory", "1g")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"Usage: python -m components.{step} [OPTIONS]")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("promote", "components.gate.run, components.promote.run, kfp.dsl.executor_main"),
        ("cli", "boto3, google.cloud.storage, kfp.kubernetes, mlflow.artifacts"),
    ],
)
def test_what_a_slim_image_must_import(name: str, modules: str) -> None:
    options = ("--env", "_KFP_RUNTIME=true") if name == "promote" else ()
    docker("run", "--rm", *HARDENED_ALONE, "--entrypoint", "python", *options, image(name), "-c", f"import {modules}")


def test_the_command_line_of_a_cluster(dataset: Path, tmp_path: Path) -> None:
    done = run_step("cli", ["submit", "pipelines/resnet50.py", "--help"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--endpoint URL" in done.stdout
    target = open_folder(tmp_path / "models")
    digest = digest_file(dataset / "manifest.json")
    mounts = (*mount(dataset, read_only=True), *mount(target, read_only=False))
    done = run_step("cli", ["fetch", str(dataset), str(target / "repository"), "--digest", digest], *mounts)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (target / "repository/manifest.json").read_bytes() == (dataset / "manifest.json").read_bytes()


def test_a_step_as_a_uid_without_a_name(dataset: Path) -> None:
    manifest = dataset / "manifest.json"
    assert json.loads(manifest.read_bytes())["schema_version"] >= 1
    assert manifest.stat().st_uid == UID


def test_too_little_memory_leaves_no_manifest(digits: Path, tmp_path: Path) -> None:
    output = open_folder(tmp_path / "output") / "dataset"
    limits = ("--memory", "32m", "--memory-swap", "32m")
    mounts = (*mount(digits, read_only=True), *mount(output.parent, read_only=False))
    done = run_step("preprocess", ["--data", str(digits), "--output", str(output)], *limits, *mounts)
    assert done.returncode == 137
    assert not (output / "manifest.json").exists()


def test_sigterm_ends_training_with_75(dataset: Path, tmp_path: Path) -> None:
    """As the container's first process, which the kernel spares every signal that it does not handle."""
    output = open_folder(tmp_path / "output") / "checkpoint"
    settings = ["--image-size", "32", "--epochs", "500", "--global-batch-size", "32", "--num-processes", "1"]
    mounts = (*mount(dataset, read_only=True), *mount(output.parent, read_only=False))
    arguments = ["--dataset", str(dataset), "--output", str(output), *settings]
    with running("train", *HARDENED_ALONE, *mounts, arguments=arguments) as name:
        wait_until(lambda: "train: training" in docker("logs", name).stderr, seconds=180)
        docker("stop", "--time", "240", name)  # saved at once, but a busy machine ends it late
        assert state(name)["ExitCode"] == 75, docker("logs", name).stderr[-2000:]


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_says_of_itself(name: str) -> None:
    config = inspect(image(name))["Config"]
    assert config["User"] == "10001:0"
    start = ["/opt/enginery/start"]
    entry = {"serve": start, "mlflow": start, "cli": ["python", "-m", "enginery.cli.main"]}
    assert config["Entrypoint"] == entry.get(name, ["python", "-m", f"components.{name}"])
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == f"enginery {name}"
    assert {"description", "licenses", "base.name", "revision", "version"} <= set(labels)
    assert ("Healthcheck" in config) == (name in ("serve", "mlflow"))


@pytest.mark.parametrize("name", IMAGES)
def test_size_above_the_base(name: str) -> None:
    text = (REPOSITORY / "containers/versions.hcl").read_text()
    budget_mb = int(text.split(f'"{name.upper()}_BUDGET_MB" {{ default = "')[1].split('"')[0])
    added_mb = (inspect(image(name))["Size"] - inspect(base_of(name))["Size"]) / 1e6
    print(f"{name}: {added_mb:.0f} MB above its base")
    assert added_mb <= budget_mb


@pytest.mark.parametrize("step", STEPS)
def test_no_tool_of_the_build_is_left(step: str) -> None:
    """No installers and caches that the base has not, and our code is what is installed, not what was copied."""
    script = "find /opt/enginery -maxdepth 2 -name 'setuptools*' -o -maxdepth 2 -name 'pip*'; find /root/.cache -type f"
    assert (
        docker("run", "--rm", "--user", "0", "--entrypoint", "sh", image(step), "-c", script, check=False).stdout == ""
    )
    script = "import components; print(components.__file__)"
    done = docker("run", "--rm", *HARDENED_ALONE, "--entrypoint", "python", image(step), "-c", script)
    assert done.stdout.strip() == "/opt/enginery/code/components/__init__.py"


def lines_in_layers(reference: str, text: str) -> int:
    """Number of lines of an image's layers and record that hold a text."""
    with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE) as saved:
        count = ["grep", "--text", "--count", text]
        found = subprocess.run(count, stdin=saved.stdout, capture_output=True, text=True)
    assert saved.returncode == 0
    return int(found.stdout)


def test_a_secret_in_the_context_is_in_no_layer(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    context = tmp_path / "context"
    for name in filter(None, files.split("\0")):
        if (REPOSITORY / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, context / name)
    for place in (".env", "id_rsa", "components/.netrc", "components/common/registry.key", "components/notes.txt"):
        (context / place).write_text(SECRET)
    tag = f"{image('promote')}-secret"
    build = [context / "containers/build", "promote", "-t", tag]
    subprocess.run([*build, "--build-arg", f"BASE_IMAGE={os.environ['SLIM']}", "."], cwd=context, check=True)
    try:
        assert lines_in_layers(tag, "Image reference of a step, such as") > 0  # what is there is found
        assert lines_in_layers(tag, SECRET) == 0
    finally:
        docker("rmi", tag)


def added_layers(reference: str, base: str) -> list[str]:
    """Digests of the layers that we add, uncompressed, as they lie in the image's own record."""
    of_base, of_image = (inspect(name)["RootFS"]["Layers"] for name in (base, reference))
    assert of_image[: len(of_base)] == of_base
    return of_image[len(of_base) :]


def test_the_steps_share_the_layer_common() -> None:
    first = {
        added_layers(image(step), base_of(step))[0] for step in ("preprocess", "train", "export", "validate", "analyze")
    }
    assert len(first) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["promote", "train", "mlflow"])
def test_the_same_sources_give_the_same_layers(name: str) -> None:
    """Bytes, modes, owners and times of all that we add, by a build that takes no layer from the cache."""
    again = f"{image(name)}-again"
    build = [REPOSITORY / "containers/build", name, "--no-cache", "-t", again]
    subprocess.run([*build, "--build-arg", f"BASE_IMAGE={base_of(name)}", "."], cwd=REPOSITORY, check=True)
    try:
        first, second = (added_layers(reference, base_of(name)) for reference in (image(name), again))
        assert len(first) >= 2
        assert first == second
    finally:
        docker("rmi", again)
