"""`enginery loadtest`: throughput and latency of a model server by request rate."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import prepare_directory, write_atomically
from enginery.cli.options import PATH, comma_list, duration, finite, server_model, server_url, timeout
from enginery.formats import new_console, new_table, number

if TYPE_CHECKING:
    from enginery.serving.client.client import AsyncClient
    from enginery.serving.loadtest.generator import Payload
    from enginery.serving.loadtest.measuring import About, LoadPlan
    from enginery.serving.loadtest.results import Level, LoadTest

_clients = comma_list(
    int, range(1, 4097).__contains__, "whole numbers of 1 to 4096 with commas between, such as 1,8,32"
)
_rates = comma_list(
    float,
    lambda rate: 0 < rate <= 20_000,  # more than any of these processes sends
    "numbers above 0, up to 20000, with commas between, such as 10,100,500",
    automatic="auto",
)
_cores = comma_list(
    int,
    os.sched_getaffinity(0).__contains__,
    f"numbers of cores with commas between; there is {','.join(map(str, sorted(os.sched_getaffinity(0))))}",
)


@click.command()
@server_url
@server_model
@click.option("--data", type=PATH, metavar="DIR", help="Images to send.  [default: of noise]")
@click.option("--tensors", is_flag=True, help="Send normalized tensors to the network behind the model instead.")
@click.option(
    "--batch-size",
    "images_per_request",
    default=1,
    type=click.IntRange(1, 4096),
    show_default=True,
    help="Images per request.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,2,4,8,16,32",
    callback=_clients,
    show_default=True,
    help="Closed loop: clients that wait for their answers.",
)
@click.option(
    "--rates",
    default="auto",
    callback=_rates,
    show_default=True,
    help="Open loop: requests/s, arriving at random; auto searches for the knee.",
)
@click.option(
    "--seconds",
    default=5.0,
    type=click.FloatRange(0.2, 3600),
    callback=finite,
    show_default=True,
    help="Measured at each level.",
)
@click.option(
    "--latency-budget",
    "latency_budget_s",
    callback=duration("ms"),
    metavar="TIME",
    help="For the knee: what p99 may be, such as 7ms.  [default: 10 times the median of a single client]",
)
@click.option(
    "--compare-batching",
    is_flag=True,
    help="Measure without dynamic batching, too: the network is loaded with that setting, and afterwards as it was.",
)
@timeout(5.0)
@click.option(
    "--processes", "num_processes", default=1, type=click.IntRange(1, 64), show_default=True, help="That send requests."
)
@click.option("--cores", callback=_cores, metavar="0,1", help="Where these run; keep the server off them.")
@click.option("--output", default="loadtest", type=PATH, show_default=True, help="New folder.")
def loadtest(url: str, model: str | None, data: Path | None, timeout: float, output: Path, **options: Any) -> None:
    """Measure a model server: throughput and p50, p95 and p99 latency by request rate, and the knee.

    Writes loadtest.html and loadtest.json. The knee is the highest rate of random arrivals at which answers keep up,
    none is missing, and p99 is within the latency budget. Latency counts from when a request was due.
    """
    if options["tensors"] and data is not None:
        message = "--tensors sends random tensors, so it takes no --data; drop one of them"
        raise UserError(message, code="conflicting-options", setting="tensors")
    from enginery.serving.client.client import AsyncClient
    from enginery.serving.client.transport import RetryPolicy, parse_address
    from enginery.serving.loading import loading_key
    from enginery.serving.loadtest.measuring import LoadPlan, run_load_test
    from enginery.serving.loadtest.page import page

    budget_s = options.pop("latency_budget_s")
    plan = LoadPlan(timeout_s=timeout, latency_budget_ms=budget_s and 1e3 * budget_s, **options)
    key = loading_key(parse_address(url).target.rpartition(":")[0]) if plan.compare_batching else ""

    def client() -> AsyncClient:
        retry = RetryPolicy(timeout_s=max(timeout, 30.0), retry_s=5)
        return AsyncClient(url, model=model, retry=retry, loading_key=key)

    prepare_directory(output)
    console = new_console()
    with console.status("asking the server") as status:
        result = run_load_test(client, plan, lambda about: _payload(client(), plan, about, data), status.update)
    write_atomically(output / "loadtest.json", result.model_dump_json(indent=1).encode())
    write_atomically(output / "loadtest.html", page(result).encode())
    _print(result)
    click.echo(f"{output}/loadtest.html and loadtest.json written")


def _payload(client: "AsyncClient", plan: "LoadPlan", about: "About", data: Path | None) -> "Payload":
    from enginery.serving.loadtest import generator

    if plan.tensors:
        return generator.tensors(client.address, about.network, plan.images_per_request)
    return generator.images(
        client.address, about.model, about.image_input, about.network, data, plan.images_per_request
    )


def _print(result: "LoadTest") -> None:
    from enginery.serving.loadtest.page import knee_text, load_text

    console = new_console()
    for series in result.series:
        console.print(f"\n[bold]{escape(result.model)}[/], {escape(series.name)}")
        table = new_table("load", ">images/s", ">p50 ms", ">p95 ms", ">p99 ms", ">batch", ">errors")
        for level in (*series.closed, *series.open):
            table.add_row(load_text(level), *_cells(level))
        console.print(table)
        console.print(escape(knee_text(series, result.latency_budget_ms)))
    for reason, count in result.failures.items():
        console.print(f"no answer, {count:,} times: {escape(reason)}")
    console.print(f"sent: {escape(result.sent)}", style="dim")


def _cells(level: "Level") -> list[str]:
    times = [number(value, ",.1f") for value in (level.p50_ms, level.p95_ms, level.p99_ms)]
    return [f"{level.images_per_s:,.0f}", *times, number(level.mean_batch, ".1f"), str(level.num_errors or "")]
