"""`enginery advise`: which GPU, how many, and what limits them, for one model."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.common.contracts.errors import UserError
from enginery.cli.options import PATH, duration, finite, given, write_output

if TYPE_CHECKING:
    from rich.table import Table

    from enginery.advise.answers import Question


def _decode_rate(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | str | None:
    if text is None or text in ("gpu", "none"):
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1e-3 <= rate < 1e12:
        message = f"--decode-rate {text}: write gpu, none, or JPEG files per second, such as 5000"
        raise UserError(message, code="invalid-numbers", setting="--decode-rate")
    return rate


_OF_WORKLOAD = {"serve": ("qps", "p99_s"), "train": ("images", "epochs", "deadline_s", "batch", "optimizer")}
_OF_DATA = ("config", "num_runs")


def _refuse_unused(workload: str, data: Path | None, images: int | None) -> None:
    """Refuse options that would change nothing.

    Raises:
        UserError: there are some.
    """
    other = "serve" if workload == "train" else "train"
    cases: dict[str, Sequence[str]] = {
        f"is for --workload {other}": _OF_WORKLOAD[other],
        "is for --how-much-data FOLDER": _OF_DATA,
        "needs --images, the number of an epoch": () if images else ("epochs", "deadline_s"),
        "is of the whole training: it needs --images": ("budget",) if workload == "train" and not images else (),
    }
    if data is not None:
        parameters = [each.name or "" for each in click.get_current_context().command.params]
        of_others = [each for each in parameters if each not in ("model", "data", "as_json", *_OF_DATA)]
        cases = {"is of no use with --how-much-data, which predicts nothing of GPUs; leave it out": of_others}
    for problem, names in cases.items():
        for option in given(*names):
            raise UserError(f"{option} {problem}", code="option-unused", setting=option)


@click.command()
@click.argument("model")
@click.option("--workload", default="serve", type=click.Choice(["train", "serve"]), show_default=True)
@click.option("--image-size", type=click.IntRange(16, 4096), help="Side, in pixels.  [default: the file's, or 224]")
@click.option(
    "--num-classes", default=0, type=click.IntRange(0, 10**6), help="Of a network.  [default: as its task usually has]"
)
@click.option(
    "--qps", type=click.FloatRange(0, 1e12, min_open=True), callback=finite, help="Images per second to serve."
)
@click.option(
    "--p99",
    "p99_s",
    default="7ms",
    callback=duration("ms"),
    metavar="TIME",
    show_default=True,
    help="In which 99 % of the requests are answered.",
)
@click.option("--images", type=click.IntRange(1, 10**12), help="Of an epoch, for training.")
@click.option("--epochs", default=90, type=click.IntRange(1, 10**6), show_default=True)
@click.option(
    "--deadline", "deadline_s", callback=duration("h"), metavar="TIME", help="Of the training, such as 8h or 2d."
)
@click.option("--batch", default=256, type=click.IntRange(1, 10**6), show_default=True, help="Of a training, per GPU.")
@click.option(
    "--optimizer", default="sgd", type=click.Choice(["sgd", "adamw", "lamb"]), show_default=True, help="Of a training."
)
@click.option(
    "--decode-rate",
    callback=_decode_rate,
    metavar="gpu|none|N",
    help="JPEG files per second that each device gets decoded: by its own decoders, or N.  "
    "[default: none, for decoded images; for training gpu]",
)
@click.option(
    "--prices", type=PATH, metavar="FILE.csv", help="Columns device and usd_per_hour.  [default: those shipped]"
)
@click.option(
    "--budget",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    help="Per hour of serving, or of the training: Max-Q is chosen within it.",
)
@click.option(
    "--how-much-data",
    "data",
    type=PATH,
    metavar="FOLDER",
    help="Instead: train MODEL on parts of these images, and say whether more of them would help.",
)
@click.option("--config", type=PATH, metavar="FILE.yaml", help="Settings of those trainings, as `enginery run` takes.")
@click.option("--num-runs", default=2, type=click.IntRange(1, 20), show_default=True, help="Of each number of images.")
@click.option("--html", type=PATH, metavar="FILE", help="Write a page with charts: cost, and the kernels' roofline.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def advise(
    model: str,
    workload: str,
    prices: Path | None,
    html: Path | None,
    data: Path | None,
    config: Path | None,
    num_runs: int,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict what MODEL needs on each GPU of a table of data sheets.

    MODEL is a network of torchvision, of timm as timm/NAME, of another task as detection/NAME, a bundle, or for
    serving an .onnx file. Predictions come as ranges: docs/advise.md says how often they held. Times take a unit: ms,
    s, min, h or d.
    """
    _refuse_unused(workload, data, options["images"])
    if data is not None:
        _how_much_data(model, data, config, num_runs, as_json=as_json)
        return
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        problem = "it is a folder; name a file in it" if html.is_dir() else f"there is no folder {html.parent}"
        raise UserError(f"--html {html}: {problem}", code="no-folder", setting="--html")
    from enginery.advise.answers import PRICES, Question, counted, read_prices, serving, training

    options["decode_rate"] = options["decode_rate"] or ("gpu" if workload == "train" else "none")
    question = Question(model=model, prices=read_prices(prices or PRICES), **options)
    text = counted(question).text
    rows = training(question) if workload == "train" else serving(question)
    prices_text = str(prices) if prices else "prices.csv of enginery/advise, whose rows name date and source"
    if html is not None:
        from enginery.advise.page import page

        write_output(html, page(rows, workload, question, prices_text).encode(), "--html")
    if as_json:
        asked = {"model": model, "counted": text, "workload": workload, **options}
        click.echo(json.dumps({**asked, "gpus": rows}, indent=1))
        return
    _print(rows, workload, question, text, prices_text)


def _how_much_data(model: str, data: Path, config: Path | None, num_runs: int, *, as_json: bool) -> None:
    from tempfile import TemporaryDirectory

    from enginery.advise.learning_curve import forecast, measure, miss, verdict

    with TemporaryDirectory(prefix="enginery-advise-") as folder:
        points, num_val = measure(
            data,
            model,
            Path(folder),
            config=config,
            num_runs=num_runs,
            on_progress=lambda line: click.echo(line, err=True),
        )
    largest = points[-1]
    foretold = forecast(points[:-1], num_val, largest.num_images)
    twice = forecast(points, num_val, 2 * largest.num_images)
    text = " ".join(filter(None, (verdict(twice), miss(foretold, largest, num_val))))
    if as_json:
        record = {"points": points, "num_val": num_val, "largest_foretold": foretold, "twice": twice}
        click.echo(json.dumps(record | {"verdict": text}, default=asdict, indent=1))
        return
    for point in points:
        errors = ", ".join(f"{100 * error:.2f}" for error in point.errors)
        click.echo(f"{point.num_images:>9,} images: {errors} % of {num_val:,} validation images wrong")
    click.echo(
        f"Without the last row, {foretold.error_pct[0]:.2f} to {foretold.error_pct[2]:.2f} % were foretold for it; "
        f"with {twice.num_images:,} images it would be {twice.error_pct[0]:.2f} to {twice.error_pct[2]:.2f} %."
    )
    click.echo(text)


# Columns: heading, keys, form of the number.
_SERVING = (
    ("precision", ("precision",), ""),
    ("batch", ("batch",), ""),
    ("streams", ("streams",), ""),
    ("images/s", ("images_per_s",), ",.0f"),
    ("range", ("low", "high"), ",.0f"),
    ("p99 ms", ("p99_ms_range",), ".3g"),
    ("devices", ("num_gpus",), ","),
    ("GB", ("memory_gb",), ".3g"),
    ("per million", ("cost_per_million",), ".2g"),
    ("per hour", ("cost_per_hour",), ".2f"),
    ("kWh per million", ("kwh_per_million_at_most",), ".2g"),
    ("img/s/W", ("images_per_s_per_w",), ".3g"),
    ("limit", ("limit",), ""),
    ("share", ("sharing",), ""),
)
_TRAINING = (
    ("batch", ("batch",), ","),
    ("largest", ("largest_batch",), ","),
    ("GB", ("memory_gb",), ".3g"),
    ("images/s", ("images_per_s",), ",.0f"),
    ("range", ("low", "high"), ",.0f"),
    ("hours on one", ("hours_on_one_range",), ".3g"),
    ("devices", ("num_gpus",), ","),
    ("kWh at most", ("kwh_at_most",), ".3g"),
    ("cost", ("cost_range",), ".3g"),
    ("img/s/W", ("images_per_s_per_w",), ".3g"),
    ("limit", ("limit",), ""),
)


# Columns that a narrow terminal is spared, the first one first.
_SPARED = (
    "img/s/W", "kWh per million", "GB", "kWh at most", "largest", "per million", "streams",
    "share", "p99 ms", "range", "per hour",
)  # fmt: skip
_LIMIT_WIDTH = 26  # wraps
_WIDEST = 1000


def _print(rows: list[dict[str, Any]], workload: str, question: "Question", counted: str, prices: str) -> None:
    from enginery.advise.answers import FITTED_ON, remarks
    from enginery.formats import new_console

    columns = [
        (heading, keys, form)
        for heading, keys, form in (_TRAINING if workload == "train" else _SERVING)
        if any(keys[0] in row for row in rows)
    ]
    spared: list[str] = []
    console = new_console()
    table = _table(rows, columns)
    for heading in _SPARED:
        if console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum <= console.width:
            break
        kept = [column for column in columns if column[0] != heading]
        if len(kept) < len(columns):
            columns, spared = kept, [*spared, heading]
            table = _table(rows, columns)
    console.print(f"{workload}: {counted}", markup=False)
    console.print(table)
    if spared:
        console.print(f"Left out for want of width, but in --json and --html: {', '.join(spared)}.")
    for line in remarks(rows, question):
        console.print(line)
    console.print(
        f"Fitted on an {FITTED_ON} and on two CPU cores; others follow from their data sheets. Ranges are meant for 9 "
        f"in 10 networks: docs/advise.md. Costs by {prices}.",
        style="dim",
    )


def _table(rows: list[dict[str, Any]], columns: Sequence[tuple[str, tuple[str, ...], str]]) -> "Table":
    from enginery.formats import new_table

    table = new_table("device", *(heading if not form else f">{heading}" for heading, _, form in columns))
    for column in table.columns:
        column.max_width = _LIMIT_WIDTH if column.header == "limit" else None
    for row in rows:
        cells = (_cell([row.get(key) for key in keys], form) for _, keys, form in columns)
        table.add_row(row["gpu"] + " Max-Q" * row["max_q"], *cells)
    return table


def _cell(values: list[Any], form: str) -> str:
    from enginery.formats import range_text

    parts = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if any(part is None for part in parts):
        return "-"
    return range_text(parts, form)
