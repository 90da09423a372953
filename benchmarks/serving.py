"""Cost of Triton over the runner, gain of dynamic batching, and the knee.

    python -m benchmarks.serving --source digits-resnet50@champion --bundle DIR --machine cpu-2core

Server and load generator each have a core of their own; the runner is measured on the server's, in turns with it.
benchmarks/soak.py holds 80 % of the knee that is found here.
"""

import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.results import Results, result_options
from components.common.contracts.manifests import Artifact, BundleManifest, load
from components.common.runtimes.openvino import OpenVINORunner
from enginery.serving.client.client import AsyncClient, Client
from enginery.serving.client.transport import RetryPolicy, ServingError
from enginery.serving.loading import loading_key
from enginery.serving.loadtest import generator
from enginery.serving.loadtest.generator import bind
from enginery.serving.loadtest.measuring import LoadPlan, run_load_test
from enginery.serving.loadtest.results import LoadTest, find_knee

_HTTP = 18300
URL = f"http://127.0.0.1:{_HTTP}"
_CLIENTS = 32
_BATCH = 16
_BATCH_CLIENTS = 4  # so that a request waits whenever one is done
_NAME = "digits"
_OPTIONS = ("--name", _NAME, "--allow-loading")


@dataclass(frozen=True, kw_only=True)
class Setup:
    source: str
    bundle: Artifact[BundleManifest]
    server_core: int
    client_core: int
    seconds: float
    turns: int
    budget_ms: float


@click.command()
@click.option("--source", required=True, help="What `enginery serve` takes.")
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="Of the same model.")
@click.option("--server-core", default=0, show_default=True)
@click.option("--client-core", default=1, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Of each measurement.")
@click.option("--turns", default=3, show_default=True, help="Of all measurements.")
@click.option("--budget", "budget_ms", default=100.0, show_default=True, help="For p99, in milliseconds.")
@result_options
def main(bundle: Path, results: Results, **options: Any) -> None:
    setup = Setup(bundle=load(bundle, BundleManifest), **options)
    bind([setup.client_core])
    runs: list[Any] = []
    with served(setup.source, [setup.server_core]):
        version = _triton_version()
        measures = _speed(setup, runs)
        test = _load_test(setup)
        measures |= _knees(test)
    notes = (
        f"{setup.bundle.manifest.architecture} at {setup.bundle.manifest.shapes.height} px, INT8 by OpenVINO. Server "
        f"(Triton {version}) on core {setup.server_core}, load generator on core {setup.client_core}, runner on core "
        f"{setup.server_core} in turns with the server; medians of {setup.turns} turns of {setup.seconds:g} s. "
        "serve_over_runner: "
        f"requests of {_BATCH} tensors from {_BATCH_CLIENTS} clients, each computed alone, over the runner at batch "
        f"{_BATCH}. "
        f"dynamic_batching_over_runner_gain: what {_CLIENTS} clients with one tensor each get with dynamic batching "
        f"over what they get without, divided by the runner's gain from batch 1 to {_BATCH}. Latency budget: p99 of "
        f"{setup.budget_ms:g} ms."
    )
    results.write("serving", measures=measures, runs=runs, notes=notes)


@contextmanager
def served(
    source: str, cores: Sequence[int], options: Sequence[str] = _OPTIONS, *, http_port: int = _HTTP
) -> Iterator[subprocess.Popen[bytes]]:
    """`enginery serve` on its cores, ready; for gRPC and metrics at the next two ports."""
    ports = [f"--{kind}-port={http_port + index}" for index, kind in enumerate(("http", "grpc", "metrics"))]
    command = [sys.executable, "-m", "enginery.cli.main", "serve", source, *options, *ports]
    process = subprocess.Popen(command, preexec_fn=lambda: bind(cores))
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{http_port}")
        yield process
    finally:
        process.terminate()
        process.wait(90)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    with Client(url, retry=RetryPolicy(timeout_s=5, retry_s=0)) as client:
        while process.poll() is None:
            try:
                if client.is_ready():
                    return
            except ServingError:
                time.sleep(0.05)
    raise SystemExit("the server did not start")


def _measure_runner(path: Path, bundle: Path, batch_size: int, seconds: float) -> dict[str, float]:
    shapes = load(bundle, BundleManifest).manifest.shapes
    runner = OpenVINORunner(path, shapes)
    timing = runner.measure(batch_size, warmup_s=0.5, duration_s=seconds, min_iterations=10)
    return {"images_per_s": timing.images_per_s, "p50_ms": timing.percentile_ms(50), "p99_ms": timing.percentile_ms(99)}


def _speed(setup: Setup, runs: list[Any]) -> dict[str, float]:
    onnx = setup.bundle.file(setup.bundle.manifest.models["int8"])
    found: dict[str, list[float]] = {}

    def note(turn: int, what: str, measured: dict[str, Any]) -> None:
        runs.append({"turn": turn, "what": what, **measured})
        print(turn, what, {key: value for key, value in measured.items() if key in _SHOWN}, flush=True)
        for key, value in measured.items():
            if isinstance(value, float):
                found.setdefault(f"{what}_{key}", []).append(value)

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=bind, initargs=([setup.server_core],)) as pool:
        for turn in range(setup.turns):
            for batch in (1, _BATCH):
                arguments = (onnx, setup.bundle.path, batch, setup.seconds)
                note(turn, f"runner_b{batch}", pool.submit(_measure_runner, *arguments).result())
            note(turn, "served_dynamic", _closed(setup, _CLIENTS, 1))
            with _no_batching():
                note(turn, "served_single", _closed(setup, _CLIENTS, 1))
                note(turn, f"served_b{_BATCH}", _closed(setup, _BATCH_CLIENTS, _BATCH))
    median = {key: statistics.median(values) for key, values in found.items()}
    served, runner = median[f"served_b{_BATCH}_images_per_s"], median[f"runner_b{_BATCH}_images_per_s"]
    dynamic, single = median["served_dynamic_images_per_s"], median["served_single_images_per_s"]
    gain = runner / median["runner_b1_images_per_s"]
    return {
        **{key: value for key, value in median.items() if key.endswith(("images_per_s", "p50_ms", "p99_ms"))},
        "serve_over_runner": served / runner,
        "runner_gain": gain,
        "dynamic_batching_gain": dynamic / single,
        "dynamic_batching_over_runner_gain": dynamic / single / gain,
        f"dynamic_batching_over_runner_b{_BATCH}": dynamic / runner,
        "latency_budget_ms": setup.budget_ms,
        "served_dynamic_within_budget": float(median["served_dynamic_p99_ms"] <= setup.budget_ms),
    }


_SHOWN = ("images_per_s", "p50_ms", "p99_ms", "mean_batch", "errors")


@contextmanager
def _no_batching() -> Iterator[None]:
    """Without dynamic batching, by the server's own interface, until the end."""

    async def loaded_with(config: Mapping[str, Any]) -> Mapping[str, Any]:
        async with _loading_client() as client:
            network = await client.network()
            if config:
                await client.load(network.name, config)
                assert (await client.network()).batches == ("dynamic_batching" in config)
            return network.config

    before = asyncio.run(loaded_with({}))
    asyncio.run(loaded_with({key: value for key, value in before.items() if key != "dynamic_batching"}))
    try:
        yield
    finally:
        asyncio.run(loaded_with(before))


def _closed(setup: Setup, clients: int, images: int) -> dict[str, Any]:
    """Tensors from clients that wait for their answers. This process is on the load generator's core."""
    plan = _plan(setup, concurrencies=(clients,), rates=(), images=images)
    level = _run(setup, plan).series[0].closed[0]
    return {**level.model_dump(), "mean_batch": level.mean_batch}


def _plan(
    setup: Setup, *, concurrencies: tuple[int, ...], rates: tuple[float, ...] | None, images: int = 1
) -> LoadPlan:
    return LoadPlan(
        concurrencies=concurrencies,
        rates=rates,
        seconds=setup.seconds,
        latency_budget_ms=setup.budget_ms,
        compare_batching=rates is None,
        cores=(setup.client_core,),
        timeout_s=5.0,
        tensors=True,
        images_per_request=images,
    )


def _loading_client() -> AsyncClient:
    return AsyncClient(URL, model=_NAME, retry=RetryPolicy(timeout_s=60), loading_key=loading_key("localhost"))


def _run(setup: Setup, plan: LoadPlan) -> LoadTest:
    def make(about: Any) -> generator.Payload:
        return generator.tensors(_loading_client().address, about.network, plan.images_per_request)

    return run_load_test(_loading_client, plan, make, lambda _: None)


def _load_test(setup: Setup) -> LoadTest:
    test = _run(setup, _plan(setup, concurrencies=(1, 2, 4, 8, 16, 32, 64), rates=None))
    for series in test.series:
        print(series.name, series.knee, flush=True)
    return test


def _knees(test: LoadTest) -> dict[str, float]:
    knees = [find_knee(series.open, test.latency_budget_ms) for series in test.series]
    if knees[0] is None or knees[1] is None:
        raise SystemExit("a server without a knee: was the machine quiet?")
    return {
        "knee_requests_per_s": knees[0].request_rate,
        "knee_images_per_s": knees[0].images_per_s,
        "knee_p99_ms": knees[0].p99_ms,
        "knee_images_per_s_without_batching": knees[1].images_per_s,
    }


def _triton_version() -> str:
    async def ask() -> str:
        async with AsyncClient(URL, model=_NAME, retry=RetryPolicy(retry_s=0)) as client:
            return (await client.server())["version"]

    return asyncio.run(ask())


if __name__ == "__main__":
    main()
