"""Pipelines in tests: read, compiled, and the whole chain as a process of its own, as quick as it gets."""

import functools
import json
import os
import sqlite3
import subprocess
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from click.testing import CliRunner
from PIL import Image

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import MANIFEST
from enginery.cli.commands import cli
from enginery.local.parameters import load_pipeline
from tests.processes import ROOT, start_python
from tests.waiting import wait_until

CLUSTER_YAML = str(ROOT / "pipelines/configs/cluster.yaml")
load_once = functools.cache(load_pipeline)  # KFP takes seconds to inspect a pipeline where much is imported
STEPS = ["preprocess", "train", "export", "validate", "gate", "promote"]
SETTINGS = [
    *("--architecture", "mobilenet_v3_small", "--image-size", "32", "--epochs", "1", "--global-batch-size", "32"),
    *("--num-calibration-images", "16", "--max-drop-points", "100", "--set", "export.mixed_engines=0"),
    *("--set", "gate.min_relative_score_pct=0", "--set", "gate.require_above_chance=false"),
    *("--set", "gate.min_validation_images=0", "--set", "validate.benchmark_seconds=0.1"),
    *("--set", "train.warmup_fraction=0"),
]


def compiled(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The YAML documents, pipeline and platform spec, that `enginery compile` writes."""
    output = folder / "compiled.yaml"
    arguments = ["compile", str(ROOT / f"pipelines/{name}.py"), "--output", str(output), *options]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    return list(yaml.safe_load_all(output.read_text()))


STARTED: list[subprocess.Popen[str]] = []  # what a test leaves running is killed after it
MESSAGE = "validation images are training images too"


def write_leaking(folder: Path) -> Path:
    """Data that ends a run in its first step: the validation image of each class is its training image."""
    for name, colour in (("a", "red"), ("b", "blue")):
        for split in ("train", "val"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), colour).save(folder / split / name / "0.png")
    return folder


def start(home: Path, data: Path, *options: str, held: str = "", **variables: str) -> subprocess.Popen[str]:
    """`enginery run`. Data that does not exist is made so that it ends the run in its first step.

    A step that is to be `held` stops itself when its work begins: see `hold_in`.
    """
    if not data.exists():
        write_leaking(data)
    if held:
        search = os.pathsep.join([str(Path(__file__).parent / "held"), os.environ.get("PYTHONPATH", "")])
        variables |= {"HELD_STEP": held, "PYTHONPATH": search}
    variables = {"ENGINERY_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **variables}
    words = ("-m", "enginery.cli.main", "run", "pipelines/resnet50.py", "--data", data, *SETTINGS, *options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = start_python(*words, env=variables, start_new_session=True, **pipes)
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], seconds: float = 600) -> str:
    text = process.communicate(timeout=seconds)[0]
    assert "Traceback" not in text
    assert "Exception ignored" not in text
    return text


def check_artifacts(directories: Iterable[Path]) -> set[str]:
    """Everything of some runs that has a manifest is whole, to the last byte. Returns the steps that are finished."""
    finished = set()
    for manifest in (found for directory in directories for found in directory.glob(f"artifacts/**/{MANIFEST}")):
        for name, entry in json.loads(manifest.read_text())["files"].items():
            assert digest_file(manifest.parent / name) == entry["digest"], manifest.parent / name
        finished.add(manifest.parent.parent.name)
    return finished


def query(home: Path, text: str, timeout: float = 600) -> list[tuple[str, ...]] | None:
    """Rows of the tracking store; None where it is not made yet, or locked for longer than the timeout."""
    try:
        with closing(sqlite3.connect(f"file:{home / 'mlflow.db'}?mode=ro", uri=True, timeout=timeout)) as store:
            return store.execute(text).fetchall()
    except sqlite3.OperationalError:
        return None


def worker_of(process: subprocess.Popen[str], step: str) -> psutil.Process:
    """The process of a step. The first from the top: while it starts something, that has its command line, too."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, ValueError):  # a zombie, or another command
            command = child.cmdline()
            if "python" in child.name() and step in command[command.index("--function_to_execute") + 1]:
                return child
    raise AssertionError(f"{step} is not at work")


def hold_in(process: subprocess.Popen[str], home: Path, step: str) -> psutil.Process:
    """Wait until a step that is to be held is at work, stands still, and its run in MLflow has begun."""
    begun_ms = int(psutil.Process(process.pid).create_time() * 1000)
    running = (
        "select name from runs join tags on tags.run_uuid = runs.run_uuid "
        f"where runs.status = 'RUNNING' and start_time > {begun_ms} and key = 'enginery.step' and value = '{step}'"
    )
    wait_until(lambda: query(home, running), lambda: process.communicate()[0][-3000:], process=process)
    worker = worker_of(process, step)
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, process=process)
    return worker
