"""The images that containers/smoke has built, and how a careful user runs them. Nothing here is skipped."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = ("preprocess", "train", "export", "validate", "analyze", "promote")
IMAGES = (*STEPS, "serve", "mlflow", "cli")
UID = 54_321  # of nobody
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
HARDENED_ALONE = (*HARDENED, "--network", "none", "--user", f"{UID}:{UID}")


def image(name: str) -> str:
    return f"{os.environ['REGISTRY']}/{name}:{os.environ['TAG']}"


def base_of(name: str) -> str:
    return os.environ["TRITON" if name == "serve" else "SLIM" if name in ("promote", "mlflow", "cli") else "PYTORCH"]


def docker(*arguments: str, timeout_s: float = 300, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def inspect(reference: str) -> dict[str, Any]:
    found = json.loads(docker("image", "inspect", reference).stdout)
    assert len(found) == 1
    return found[0]


def mount(path: Path, *, read_only: bool) -> tuple[str, str]:
    return "--volume", f"{path}:{path}:{'ro' if read_only else 'rw'}"


def show(path: Path) -> None:
    """Let every UID see pytest's folder of a test."""
    for parent in (path, path.parent, path.parent.parent):
        parent.chmod(0o755)


def open_folder(path: Path) -> Path:
    """A folder that any UID may write to, as a volume of a cluster is."""
    show(path.parent)
    path.mkdir()
    path.chmod(0o777)
    return path


@contextmanager
def running(name: str, *options: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """A container of an image in the background, by its name; removed in the end."""
    container = f"enginery-{name}-{os.getpid()}"
    docker("run", "--detach", "--name", container, *options, image(name), *arguments)
    try:
        yield container
    finally:
        docker("rm", "--force", container)


def state(container: str) -> dict[str, Any]:
    return json.loads(docker("inspect", "--format", "{{json .State}}", container).stdout)


def wait_for_health(container: str) -> None:
    def say() -> str:
        return docker("logs", container).stderr[-3000:]

    wait_until(lambda: state(container)["Health"]["Status"] == "healthy", say, seconds=240)


def run_step(name: str, arguments: Sequence[str], *options: str) -> "subprocess.CompletedProcess[str]":
    return docker("run", "--rm", *HARDENED_ALONE, *options, image(name), *arguments, check=False)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in digits, readable for every UID."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert run_python("-m", "enginery.cli.main", "data", "digits", folder).returncode == 0
    folder.chmod(0o755)
    show(folder.parent)
    return folder


@pytest.fixture(scope="session")
def dataset(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of the preprocess image for them, as a UID without a name, on a read-only root, without a network."""
    output = open_folder(tmp_path_factory.mktemp("dataset") / "output") / "dataset"
    limits = ("--memory", "1500m", *mount(digits, read_only=True), *mount(output.parent, read_only=False))
    done = run_step("preprocess", ["--data", str(digits), "--output", str(output)], *limits)
    assert done.returncode == 0, done.stderr[-3000:]
    return output
