"""`enginery video`: what a model sees in videos and live streams."""

from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from components.common.contracts.errors import UserError
from components.common.contracts.records import PRECISIONS, Precision
from components.common.contracts.settings import resolve
from enginery.cli.options import PATH, finite
from enginery.formats import new_console, new_table, number
from enginery.local.runs import latest_bundle
from enginery.local.state import StateDirectory

_MOST_ROWS = 40  # of the table; streams with a problem come first


@click.command()
@click.argument("sources", nargs=-1, metavar="SOURCE [SOURCE ...]")
@click.option(
    "--model",
    metavar="MODEL",
    help="NAME@ALIAS, NAME/VERSION, or the folder of a release or of a bundle.  [default: the last run's bundle]",
)
@click.option("--out", type=PATH, metavar="DIR", default=Path("video"), show_default=True, help="Empty or new folder.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of the model.  [default: what its verdict says]")
@click.option("--annotate", is_flag=True, help="Write each stream with its labels, boxes or masks.")
@click.option("--hold-frames", default=5, type=click.IntRange(1), show_default=True, help="Until a class is held.")
@click.option("--every", default=1, type=click.IntRange(1), show_default=True, help="Label each so-many-th frame.")
@click.option(
    "--live",
    default="auto",
    type=click.Choice(["auto", "always", "never"]),
    show_default=True,
    help="Whether to drop frames that come too fast: of live addresses (auto), or of all.",
)
@click.option("--decoder", default="auto", type=click.Choice(["auto", "cpu", "cuda"]), show_default=True)
@click.option(
    "--max-seconds", default=0.0, type=click.FloatRange(0), callback=finite, help="End after this time.  [default: no]"
)
def video(sources: tuple[str, ...], model: str | None, out: Path, precision: Precision | None, **settings: Any) -> None:
    """Label the frames of videos: files, folders, - for the standard input, and live addresses such as rtsp://.

    Frames get the classes, boxes or masks that MODEL finds. DIR gets a page with timelines (index.html), a line per
    frame (frames.jsonl), events, and a summary. Ctrl-C ends it with whole files. User and password of an address
    belong in ~/.netrc.
    """
    if not sources:
        raise UserError(
            "video takes one or more videos: enginery video SOURCE [SOURCE ...], each a file, a folder, - or an "
            "address such as rtsp://HOST/PATH",
            code="no-video",
        )
    # Imports of PyAV, DALI and runtimes take seconds: mistakes are said before.
    from components.analyze.config import AnalyzeConfig

    config = resolve(AnalyzeConfig, "video", {"sources": list(sources), **settings})
    from components.analyze.labelling import NO_FRAME
    from components.analyze.run import analyze, outcome
    from components.common.process.disk import out_of_space
    from components.common.process.steplog import StepLog
    from enginery.serving.sources import find_source

    text = model or str(latest_bundle(StateDirectory.current().runs))
    with find_source(text, precision) as source:
        chosen = config.model_copy(update={"precision": source.precision})
        try:
            analysis = analyze(chosen, source.bundle, out, StepLog("video"))
        except OSError as error:
            if full := out_of_space(error, out):
                raise full from None
            raise
    console = new_console()
    table = new_table("stream", ">frames", ">dropped", "frames that show", ">p99 ms")
    streams = analysis.manifest.streams
    for stream in sorted(streams, key=lambda stream: not stream.problem)[:_MOST_ROWS]:
        shares = ", ".join(f"{name} {pct:.1f} %" for name, pct in list(stream.shares_pct.items())[:3])
        frames, dropped = f"{stream.num_labelled:,}", f"{stream.num_dropped:,}"
        said = shares or stream.problem
        table.add_row(escape(stream.name), frames, dropped, escape(said), number(stream.latency_p99_ms, ",.0f"))
    console.print(table)
    if len(streams) > _MOST_ROWS:
        console.print(f"and {len(streams) - _MOST_ROWS:,} more; summary.json has all")
    console.print(escape(outcome(analysis)))
    console.print(f"page: {escape(str(out / 'index.html'))}")
    if unread := [stream.name for stream in streams if not stream.num_labelled and stream.problem != NO_FRAME]:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise UserError(f"no frame of {unread[0]}{more} could be read; the page says why", code="unread-videos")
