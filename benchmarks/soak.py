"""A server at 80 % of its knee for minutes: errors, latency by minute, and the memory of its processes.

    python -m benchmarks.soak --source digits-resnet50@champion --machine cpu-2core

The knee is that of the result of benchmarks/serving.py on the same machine.
"""

import asyncio
import itertools
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import psutil

from benchmarks.results import Results, result_options
from benchmarks.serving import URL, served
from enginery.serving.client.client import AsyncClient
from enginery.serving.loadtest import generator
from enginery.serving.loadtest.generator import Load, RequestSamples, bind, generate, get_ready
from enginery.serving.loadtest.results import summarize

_SHARE = 0.8  # of the knee
_NOTHING: dict[str, Any] = {"batches": {}, "queue_ms": None, "compute_ms": None}


@click.command()
@click.option("--source", required=True, help="What `enginery serve` takes.")
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--server-core", default=0, show_default=True)
@click.option("--client-core", default=1, show_default=True)
@result_options
def main(source: str, minutes: float, server_core: int, client_core: int, results: Results) -> None:
    bind([client_core])
    knee = results.earlier("serving")["measures"]["knee_requests_per_s"]
    with served(source, [server_core]) as process:
        samples, memory, start_at = _hold(process.pid, _SHARE * knee, 60 * minutes, client_core)
    end = start_at + 60 * minutes
    edges = [start_at + 60 * minute for minute in range(int(minutes) + 1)]
    windows = list(itertools.pairwise(edges)) or [(start_at, end)]
    how: dict[str, Any] = {"images_per_request": 1, "server": _NOTHING, "request_rate": _SHARE * knee}
    levels = [summarize(samples, window=window, **how) for window in windows]
    whole = summarize(samples, window=(start_at, end), **how)
    early = statistics.median([value for when, value in memory if 60 <= when <= 120] or [memory[0][1]])
    late = statistics.median([value for when, value in memory if when >= 60 * minutes - 60])
    measures = {
        "soak_minutes": minutes,
        "soak_requests_per_s": _SHARE * knee,
        "soak_requests": float(whole.num_requests),
        "soak_errors": float(whole.num_errors),
        "soak_p50_ms": whole.p50_ms or 0.0,
        "soak_p99_ms": whole.p99_ms or 0.0,
        "soak_max_ms": whole.max_ms or 0.0,
        "soak_memory_mb_second_minute": early,
        "soak_memory_mb_last_minute": late,
        "soak_memory_growth_mb": late - early,
    }
    print(measures, whole.errors, flush=True)
    notes = (
        "80 % of the knee of serving.json, Poisson arrivals of one tensor each. Memory: what the processes of the "
        "server have for themselves (unique set size), every 5 s; medians of the second and the last minute."
    )
    runs = [{"minute": index, **level.model_dump()} for index, level in enumerate(levels)]
    rounded = [(round(when, 1), round(value, 2)) for when, value in memory]
    results.write("serving_soak", measures=measures, runs=[*runs, {"memory_mb": rounded}], notes=notes)


def _hold(pid: int, rate: float, seconds: float, core: int) -> tuple[RequestSamples, list[tuple[float, float]], float]:
    """The outcome of the requests, the server's memory by time, and when it began."""
    address, network = asyncio.run(_about())
    spawn = multiprocessing.get_context("spawn")
    memory = []
    with ProcessPoolExecutor(1, spawn, initializer=bind, initargs=([core],)) as pool:
        pool.submit(get_ready, address).result()
        load = Load(
            address=address,
            model=network.name,
            requests=generator.tensors(address, network, 1).requests,
            request_rate=rate,
            start_at=time.monotonic() + 0.5,
            duration_s=seconds,
            timeout_s=5.0,
            seed=1,
        )
        future = pool.submit(generate, load)
        while not future.done():
            memory.append((time.monotonic() - load.start_at, _memory_mb(pid)))
            time.sleep(5)
        return future.result(), memory, load.start_at


async def _about() -> tuple[Any, Any]:
    """The server's address, and what its network takes."""
    async with AsyncClient(URL) as client:
        return client.address, await client.network()


def _memory_mb(pid: int) -> float:
    """Memory of the server and of all that it started, without what they share with others."""
    server = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in [server, *server.children(recursive=True)]) / 1e6


if __name__ == "__main__":
    main()
