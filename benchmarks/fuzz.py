"""Damaged bytes for every parser of foreign ones: how many cases went wrong, how long they took, how memory grew.

python -m benchmarks.fuzz --machine cpu-2core
python -m benchmarks.fuzz --machine cpu-2core --source NAME@champion    # requests to a server of it
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from benchmarks.results import RESULTS, write_result
from tests.fuzz import images, parsers, releases, requests, shards

_HTTP, _GRPC, _METRICS = 8100, 8101, 8102
_NAME = "digits"
_START_S = 600
_OF_REQUESTS = (
    "one that is slow is sent a second time, and what counts is that. They go to a Triton with the repository of the "
    "digits; bytes: by which the server's processes grew"
)
_OF_FILES = (
    "over 60 s without a word from a worker, and for parsers and releases growth by 1 GB. parsers: {}; releases: {}; "
    "bytes: the most that a worker had, its libraries included"
)


@click.command()
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option("--source", default="", help="What `enginery serve` takes: requests to it, instead of files.")
@click.option(
    "--num-cases", default=10000, show_default=True, help="For each parser and protocol; a tenth of them for shards."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where results go.")
def main(machine: str, source: str, num_cases: int, seed: int, results: Path) -> None:
    runs = list(_requests(source, num_cases, seed) if source else _files(num_cases, seed))
    largest = max(run["bytes"] for run in runs)
    write_result(
        machine,
        "fuzz_requests" if source else "fuzz",
        measures={
            "num_cases": sum(run["num_cases"] for run in runs),
            "num_wrong": sum(len(run["wrong"]) for run in runs),
            "server_growth_bytes" if source else "largest_worker_bytes": largest,
        },
        runs=runs,
        notes=f"seed {seed}; wrong is a crash, an exception that is none of ours, over {parsers.MAX_SECONDS:g} s for a "
        + ("request; " + _OF_REQUESTS if source else "case, " + _OF_FILES.format(*map(_names, (parsers, releases)))),
        directory=results,
    )
    sys.exit(1 if any(run["wrong"] for run in runs) else 0)


def _names(target: ModuleType) -> str:
    return ", ".join(target.originals())


def _files(num_cases: int, seed: int) -> Iterator[dict[str, Any]]:
    """Cases of every file's parsers, each in its turn."""
    totals = {
        "images": (images, num_cases),
        "parsers": (parsers, num_cases * len(parsers.originals())),
        "releases": (releases, num_cases * len(releases.originals())),
        "shards": (shards, num_cases // 10),
    }
    for name, (target, total) in totals.items():
        started = time.monotonic()
        wrong = dict(images.run_cases(total, seed, target.check_batch, target.BATCH))
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        yield _run(name, total, wrong, started, most)


def _requests(source: str, num_cases: int, seed: int) -> Iterator[dict[str, Any]]:
    protocols: dict[requests.Protocol, int] = {"http": _HTTP, "grpc": _GRPC}
    with served(source) as server:
        for protocol, port in protocols.items():
            started = time.monotonic()
            wrong, grown = requests.run_requests(num_cases, seed, port, _NAME, server, protocol)
            yield _run(protocol, num_cases, wrong, started, grown)


def _run(target: str, num_cases: int, wrong: dict[int, str], started: float, num_bytes: int) -> dict[str, Any]:
    seconds = round(time.monotonic() - started, 1)
    run = {"target": target, "num_cases": num_cases, "wrong": wrong, "seconds": seconds, "bytes": num_bytes}
    print(run, flush=True)
    return run


@contextmanager
def served(source: str) -> Iterator[int]:
    """`enginery serve`, ready: the number of its process."""
    ports = ["--http-port", str(_HTTP), "--grpc-port", str(_GRPC), "--metrics-port", str(_METRICS)]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "enginery.cli.main", "serve", source, "--name", _NAME, *ports],
            env={"ENGINERY_HOME": home, **os.environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_until_ready(process)
            yield process.pid
        finally:
            process.terminate()
            process.wait(90)


def _wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{_HTTP}/v2/health/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
