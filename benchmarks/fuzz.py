"""Damaged bytes for every parser of foreign ones: how many cases went wrong, how long one took, how memory grew.

python -m benchmarks.fuzz --machine cpu-2core --source RELEASE
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
from typing import Any

import click

from benchmarks.results import RESULTS, write_result
from tests.fuzz import images, parsers, requests, shards

_HTTP, _GRPC, _METRICS = 8100, 8101, 8102
_NAME = "digits"
_START_S = 600


@click.command()
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option("--source", required=True, help="A release or bundle, as `enginery serve` takes them.")
@click.option(
    "--num-cases", default=10000, show_default=True, help="Of images and parsers; a tenth of them for shards."
)
@click.option("--num-requests", default=1000, show_default=True, help="To the server, by each protocol.")
@click.option("--seed", default=0, show_default=True)
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where results go.")
def main(machine: str, source: str, num_cases: int, num_requests: int, seed: int, results: Path) -> None:
    runs: list[dict[str, Any]] = []
    targets = {"images": (images, 1), "parsers": (parsers, 1), "shards": (shards, 10)}
    for name, (target, share) in targets.items():
        started = time.monotonic()
        wrong = dict(images.run_cases(num_cases // share, seed, target.check_batch, target.BATCH))
        runs.append({"target": name, "num_cases": num_cases // share, "wrong": wrong, "seconds": _since(started)})
        print(runs[-1], flush=True)
    workers_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    grown_bytes = 0
    protocols: dict[requests.Protocol, int] = {"http": _HTTP, "grpc": _GRPC}
    with served(source) as server:
        for protocol, port in protocols.items():
            started = time.monotonic()
            wrong, grown = requests.run_requests(num_requests, seed, port, _NAME, server, protocol)
            grown_bytes += grown
            runs.append({"target": protocol, "num_cases": num_requests, "wrong": wrong, "seconds": _since(started)})
            print(runs[-1], flush=True)
    write_result(
        machine,
        "fuzz",
        measures={
            "num_cases": sum(run["num_cases"] for run in runs),
            "num_wrong": sum(len(run["wrong"]) for run in runs),
            "largest_worker_bytes": workers_bytes,
            "server_growth_bytes": grown_bytes,
        },
        runs=runs,
        notes=f"seed {seed}; wrong is a crash, an exception that is none of ours, over {parsers.MAX_SECONDS:g} s for a "
        "case, over 60 s without a word from a worker, and for tables, archives, ONNX files and manifests growth by "
        "1 GB. parsers: tars, zips, compressed tars, CSV, Parquet, ONNX, manifests. http and grpc: requests to "
        "a Triton with the repository of the digits; one that is slow is sent a second time, and what counts is that.",
        directory=results,
    )
    sys.exit(1 if any(run["wrong"] for run in runs) else 0)


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


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
