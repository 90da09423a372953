"""Pipelines in tests: read, compiled, and the whole chain as a process of its own, as quick as it gets."""

import functools
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from click.testing import CliRunner
from PIL import Image

from enginery.cli.commands import cli
from enginery.local.parameters import load_pipeline

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_YAML = str(ROOT / "pipelines/configs/cluster.yaml")
load_once = functools.cache(load_pipeline)  # KFP takes seconds to inspect a pipeline where much is imported
STEPS = ["preprocess", "train", "export", "validate", "gate", "promote"]
SETTINGS = [
    *("--architecture", "mobilenet_v3_small", "--image-size", "32", "--epochs", "1", "--global-batch-size", "32"),
    *("--num-calibration-images", "16", "--max-top1-drop-points", "100"),
    *("--set", "gate.min_relative_top1_pct=0", "--set", "gate.require_above_chance=false"),
    *("--set", "gate.min_validation_images=0", "--set", "validate.benchmark_seconds=0.1"),
    *("--set", "train.warmup_fraction=0"),
]


def compiled(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The YAML documents, pipeline and platform spec, that `enginery compile` writes."""
    output = folder / "compiled.yaml"
    arguments = ["compile", str(ROOT / f"pipelines/{name}.py"), "--output", str(output), *options]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    return list(yaml.safe_load_all(output.read_text()))


MESSAGE = "validation images are training images too"


def write_leaking(folder: Path) -> Path:
    """Data that ends a run in its first step: the validation image of each class is its training image."""
    for name, colour in (("a", "red"), ("b", "blue")):
        for split in ("train", "val"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), colour).save(folder / split / name / "0.png")
    return folder


def start(home: Path, data: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """`enginery run`. Data that does not exist is made so that it ends the run in its first step."""
    if not data.exists():
        write_leaking(data)
    command = [sys.executable, "-m", "enginery.cli.main", "run", "pipelines/resnet50.py", "--data", str(data)]
    return subprocess.Popen(
        [*command, *SETTINGS, *options],
        cwd=ROOT,
        env={**os.environ, "ENGINERY_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **variables},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 600) -> str:
    text = process.communicate(timeout=seconds)[0]
    assert "Traceback" not in text
    return text


def query(home: Path, text: str) -> list[tuple[str, ...]]:
    try:
        with closing(sqlite3.connect(f"file:{home / 'mlflow.db'}?mode=ro", uri=True, timeout=600)) as store:
            return store.execute(text).fetchall()
    except sqlite3.OperationalError:  # not made yet
        return []


def hold_in(process: subprocess.Popen[str], home: Path, step: str) -> psutil.Process:
    """Wait until a step is at work and stop the clock for it."""
    running = f"select name, status from runs where status = 'RUNNING' and name = '{step}'"
    deadline = time.monotonic() + 300
    while not query(home, running):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie
            command = child.cmdline()
            if "--function_to_execute" in command and "python" in child.name():
                child.suspend()
                return child
    raise AssertionError(f"{step} was over before it could be stopped")
