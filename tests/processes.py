"""Processes of this Python in the checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def start_python(*words: object, env: Mapping[str, str] = {}, **options: Any) -> "subprocess.Popen[str]":
    """One that is not waited for, with further variables, and what it writes to standard error; `options` of Popen."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, variables = [sys.executable, *map(str, words)], {**os.environ, "PYTHONPATH": search, **env}
    return subprocess.Popen(command, env=variables, text=True, **{"cwd": ROOT, "stderr": subprocess.PIPE, **options})


def run_python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """One with further variables, once it has ended."""
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)


def on_small_disk(size: str) -> tuple[str, ...]:
    """The beginning of a command that sees a disk of this size at /mnt."""
    script = f'mount -t tmpfs -o size={size} none /mnt && exec "$@"'
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    return prefix
