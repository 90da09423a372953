"""Cost of `enginery shadow` for the answers of the champion: p99 with it and without, at half of the knee.

    python -m benchmarks.shadow --source digits-resnet50@champion --machine cpu-2core

Two servers of the same model wait on one core: one was exported with a share of 1 % and has a challenger in FP32 beside
it on that core, the other was exported without. They are loaded in turns by a generator on the other core.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.results import Results, result_options
from benchmarks.serving import served
from components.serve.shadow import SHADOW_VARIABLE
from enginery.serving.client.client import AsyncClient
from enginery.serving.client.transport import RetryPolicy
from enginery.serving.loadtest import generator
from enginery.serving.loadtest.generator import bind
from enginery.serving.loadtest.measuring import LoadPlan, run_load_test
from enginery.serving.loadtest.results import LoadTest

_HTTP_PORTS = {"without": 18310, "with": 18320}
_SHARE = 0.01
_ANY_BUDGET_MS = 1e6  # each level is held once, whatever its latency


@click.command()
@click.option("--source", required=True, help="What `enginery serve export` takes.")
@click.option("--server-core", default=0, show_default=True, help="Of both servers and the challenger.")
@click.option("--client-core", default=1, show_default=True)
@click.option("--pairs", default=10, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Of each measurement.")
@click.option("--knee-seconds", default=4.0, show_default=True, help="Of each level on the way to the knee.")
@click.option("--budget", "budget_ms", default=100.0, show_default=True, help="For p99 at the knee, in milliseconds.")
@result_options
def main(
    source: str,
    server_core: int,
    client_core: int,
    pairs: int,
    seconds: float,
    knee_seconds: float,
    budget_ms: float,
    results: Results,
) -> None:
    bind([client_core])
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="enginery-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        os.environ[SHADOW_VARIABLE] = str(folder / "s")
        _export(source, folder / "without")
        _export(source, folder / "with", "--shadow-share", str(_SHARE))
        _export(source, folder / "challenger", "--precision", "fp32")
        for name, port in _HTTP_PORTS.items():
            stack.enter_context(served(str(folder / name), [server_core], (), http_port=port))
        to_knee = LoadPlan(
            concurrencies=(1, 4, 16, 32),
            rates=None,
            seconds=knee_seconds,
            latency_budget_ms=budget_ms,
            cores=(client_core,),
            timeout_s=10.0,
        )
        test = _load("without", to_knee)
        if (knee := test.series[0].knee) is None:
            raise SystemExit("a server without a knee: was the machine quiet?")
        rate = knee.request_rate / 2
        print(f"knee {knee.request_rate:.0f} requests/s", flush=True)
        challenger = _challenger(folder, server_core)
        at_half = replace(to_knee, concurrencies=(), rates=(rate,), seconds=seconds, latency_budget_ms=_ANY_BUDGET_MS)
        _load("with", at_half)  # until the challenger is warm
        for pair in range(pairs):
            for name in ("without", "with") if pair % 2 else ("with", "without"):
                level = _load(name, at_half).series[0].open[0]
                runs.append({"pair": pair, "shadow": name, **level.model_dump(exclude={"batches"})})
                print(pair, name, level.p50_ms, level.p99_ms, level.num_errors, flush=True)
        challenger.send_signal(signal.SIGINT)
        record = json.loads(challenger.communicate(timeout=120)[0])
    ratios = {
        share: statistics.median(
            with_[f"{share}_ms"] / without[f"{share}_ms"]
            for with_, without in zip(_of(runs, "with"), _of(runs, "without"), strict=True)
        )
        for share in ("p50", "p99")
    }
    measures = {
        "knee_requests_per_s": knee.request_rate,
        "request_rate": rate,
        **{f"{share}_with_over_without": ratio for share, ratio in ratios.items()},
        **{
            f"{share}_ms_{name}": statistics.median(run[f"{share}_ms"] for run in _of(runs, name))
            for share in ("p50", "p99")
            for name in _HTTP_PORTS
        },
        "errors": float(sum(sum(run["errors"].values()) for run in runs)),
        **{f"images_{name}": float(record[f"num_{name}"]) for name in ("seen", "dropped", "unpaired")},
        "images_compared": float(record["comparison"]["num_compared"]),
    }
    notes = (
        f"{source}, images of noise as JPEG. Servers and challenger on core {server_core}, load generator on core "
        f"{client_core}. Poisson arrivals at half of the knee (p99 of {budget_ms:g} ms); {pairs} pairs of {seconds:g} "
        "s, which of the two comes first alternates. Ratios are medians over the pairs."
    )
    results.write("shadow", measures=measures, runs=runs, notes=notes)


def _of(runs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["shadow"] == name]


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "enginery.cli.main", *map(str, words)]


def _export(source: str, folder: Path, *options: str) -> None:
    subprocess.run(_command("serve", "export", source, folder, "--name", "m", *options), check=True)


def _challenger(folder: Path, core: int) -> "subprocess.Popen[str]":
    """`enginery shadow`, on the servers' core."""
    command = _command("shadow", folder / "challenger", "--requests", 10**7, "--output", folder / "record", "--json")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    assert process.stderr is not None
    if not any(line.startswith("waiting for samples") for line in process.stderr):
        raise SystemExit("the challenger did not start")
    return process


def _load(name: str, plan: LoadPlan) -> LoadTest:
    def client() -> AsyncClient:
        return AsyncClient(f"http://127.0.0.1:{_HTTP_PORTS[name]}", retry=RetryPolicy(timeout_s=60))

    def payload(about: Any) -> generator.Payload:
        return generator.images(client().address, about.model, about.image_input, about.network, None, 1)

    return run_load_test(client, plan, payload, lambda _: None)


if __name__ == "__main__":
    main()
