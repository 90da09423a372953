"""Damaged bytes for the parsers of foreign ones: how many cases went wrong, how long they took, how memory grew.

python -m benchmarks.fuzz parsers --machine cpu-2core
python -m benchmarks.fuzz requests --machine cpu-2core --source NAME@champion

Runs of other seeds stay in the result, so that many cases may come from several runs.
"""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from benchmarks.results import Results, current_commit, result_options
from tests.fuzz import images, parsers, releases, requests, shards
from tests.fuzz.running import MAX_SECONDS, run_cases

_NAME = "digits"
_HTTP = 18330
_FILES = {"images": images, "parsers": parsers, "releases": releases, "shards": shards}
_OF_REQUESTS = (
    "request; one that is slow is sent a second time, and what counts is that. They go to `enginery serve` of the "
    "source; bytes: by which its processes grew; foreign: what a good request after 50 cases was answered that "
    "was right when it was sent again, by the first case"
)
_OF_FILES = (
    "case, over 60 s without a word from a worker, and a worker's growth by over 1 GB; bytes: the most that a worker "
    "had over what it had before its first case, libraries that it then loaded included"
)


@click.command()
@click.argument("target", type=click.Choice([*_FILES, "requests"]))
@click.option("--source", default="", help="Of requests: what `enginery serve` takes.")
@click.option("--num-cases", default=10000, show_default=True, help="For each kind of file, or each protocol.")
@click.option("--seed", default=0, show_default=True)
@click.option("--num-workers", default=1, show_default=True, help="Of files: processes among which cases are shared.")
@result_options
def main(target: str, source: str, num_cases: int, seed: int, num_workers: int, results: Results) -> None:
    of_files, commit = target in _FILES, current_commit()
    own = [_files(target, num_cases, seed, num_workers)] if of_files else [*_requests(source, num_cases, seed)]
    runs = [run for run in results.earlier(f"fuzz_{target}")["runs"] if run.get("seed", seed) != seed]
    runs += [{"seed": seed, "commit": commit, **run} for run in own]
    kinds = list(_FILES[target].originals()) if target in ("parsers", "releases") else []
    results.write(
        f"fuzz_{target}",
        measures={
            "num_cases": sum(run["num_cases"] for run in runs),
            "num_wrong": sum(len(run["wrong"]) for run in runs),
            "worker_growth_bytes" if of_files else "server_growth_bytes": max(run["bytes"] for run in runs),
        },
        runs=runs,
        notes="Each run names its seed and commit; wrong is a crash, an exception that is none of ours, "
        f"over {MAX_SECONDS:g} s for a {_OF_FILES if of_files else _OF_REQUESTS}"
        f"{'; kinds: ' if kinds else ''}{', '.join(kinds)}",
    )
    sys.exit(1 if any(run["wrong"] for run in own) else 0)


def _files(target: str, num_cases: int, seed: int, num_workers: int) -> dict[str, Any]:
    """Cases of every kind of file, each in its turn; neighbours run in one worker."""
    module = _FILES[target]
    num_kinds = len(module.originals()) if target in ("parsers", "releases") else 1
    started = time.monotonic()
    wrong: dict[int, str] = {}
    growths = [0]
    cases = range(num_cases * num_kinds)
    size = -(-len(cases) // num_workers)

    def run(share: range) -> None:
        for number, what in run_cases(share, seed, module.check_batch, module.BATCH, growths):
            wrong[number] = what
            print(f"case {number}: {what}", flush=True)

    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(run, (cases[start : start + size] for start in range(0, len(cases), size))))
    return _run(target, num_cases * num_kinds, wrong, started, max(growths))


def _requests(source: str, num_cases: int, seed: int) -> Iterator[dict[str, Any]]:
    from benchmarks.serving import served  # which needs OpenVINO

    cores = sorted(os.sched_getaffinity(0))
    with served(source, cores, ("--name", _NAME), http_port=_HTTP) as server:
        protocols: dict[requests.Protocol, int] = {"http": _HTTP, "grpc": _HTTP + 1}
        for protocol, port in protocols.items():
            started = time.monotonic()
            wrong, foreign, grown = requests.run_requests(num_cases, seed, port, _NAME, server.pid, protocol)
            yield {**_run(protocol, num_cases, wrong, started, grown), "foreign": foreign}


def _run(target: str, num_cases: int, wrong: dict[int, str], started: float, num_bytes: int) -> dict[str, Any]:
    seconds = round(time.monotonic() - started, 1)
    run = {"target": target, "num_cases": num_cases, "wrong": wrong, "seconds": seconds, "bytes": num_bytes}
    print(run, flush=True)
    return run


if __name__ == "__main__":
    main()
