"""The wheel: it runs the pipelines by name where there is no clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import enginery
from tests.pipelines.running import ROOT as REPOSITORY
from tests.pipelines.test_chain import SMALL, TRAINING

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and nothing of the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("components", "enginery", "pipelines"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("enginery-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    shutil.rmtree(source)
    return folder / "site"


def test_the_pipelines_run_by_name(installed: Path, few_digits: Path, tmp_path: Path) -> None:
    """resnet50 with a ready file of settings, then quantize on what it trained."""
    environment = os.environ | {"PYTHONPATH": str(installed), "ENGINERY_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "enginery.cli.main"]

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [*command, "run", *arguments, "--data", str(few_digits)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("resnet50", "--config", "digits", *TRAINING, *SMALL, "--summary", "first.json")
    first = enginery.load_summary(tmp_path / "first.json")
    (checkpoint,) = Path(first.run_directory).glob("artifacts/*/train/checkpoint")
    run("quantize", "--model", str(checkpoint), *SMALL, "--summary", "second.json")
    assert [enginery.load_summary(tmp_path / f"{name}.json").status for name in ("first", "second")] == ["done", "done"]
    code = "import components, enginery, pipelines; print(components.__file__, enginery.__file__, pipelines.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert all(file.startswith(str(installed)) for file in found.stdout.split())
