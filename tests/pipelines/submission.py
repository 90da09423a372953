"""What the tests of `enginery submit` share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from enginery.cli.compile import compile as compile_command
from enginery.local.parameters import load_pipeline

load_once = functools.cache(load_pipeline)  # KFP takes seconds to look at a pipeline where much is imported
REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER_YAML = str(REPOSITORY / "pipelines/configs/cluster.yaml")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Submit = Callable[..., Done]


def compiled(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    output = folder / "compiled.yaml"
    arguments = [str(REPOSITORY / f"pipelines/{name}.py"), "--output", str(output), *options]
    assert CliRunner().invoke(compile_command, arguments).exit_code == 0
    return list(yaml.safe_load_all(output.read_text()))


def one_message(done: Done, code: int) -> str:
    """The error. Checks the exit code, and that a person sees this one line alone."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr
