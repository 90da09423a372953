"""`enginery shadow`: a challenger beside the champion on live requests."""

import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from components.common.contracts.errors import UserError
from components.common.contracts.settings import resolve
from enginery.cli.options import PATH, finite
from enginery.formats import echo, echo_json, new_console, new_table
from enginery.new_folders import check_new, translate_errors

if TYPE_CHECKING:
    from enginery.serving.shadow_record import ShadowManifest

_MAX_ROWS = 10


@click.command()
@click.argument("folder", type=PATH, metavar="REPOSITORY|RECORD")
@click.option(
    "--requests", "num_requests", default=1000, type=click.IntRange(1), show_default=True, help="Images to compare."
)
@click.option("--minutes", default=60.0, type=click.FloatRange(0.01), callback=finite, show_default=True,
              help="Longest time to wait for them; Ctrl-C ends it earlier. What was compared is written.")  # fmt: skip
@click.option("--url", default="", help="A server that serves REPOSITORY, such as one on a GPU.  [default: this CPU]")
@click.option("--labels", type=PATH, metavar="FILE.csv",
              help="Right classes, as ID,CLASS: a request's id or an image's digest. Also for a RECORD.")  # fmt: skip
@click.option("--priority", type=click.Choice(["idle", "normal"]), default="idle", show_default=True,
              help="idle: compute only where no other process wants to; normal: where cores are to spare.")  # fmt: skip
@click.option("--key", type=PATH, metavar="FILE", help="Private key to sign the record with.  [default: unsigned]")
@click.option("--output", default="shadow", type=PATH, show_default=True, help="New folder of the record.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def shadow(
    folder: Path, url: str, labels: Path | None, key: Path | None, output: Path, as_json: bool, **settings: Any
) -> None:
    """Run an exported model repository beside the served one, on a sample of its live requests, and compare.

    The champion is what `enginery serve` runs here with --shadow-share above 0. It hands copies of that share of its
    images to this command, and never waits for it. Images are not kept; the record names them by digest. It says on
    how many images the classes differ, which classes, who is right where labels are known, and how fast both are.
    `enginery deploy --require-shadow` asks for it.
    """
    from components.common.registry.keys import signing_key
    from components.common.registry.trust import check_shadow, read_statements
    from enginery.release.fetch import read_identity
    from enginery.serving.shadow import ShadowConfig
    from enginery.serving.shadow_record import ShadowManifest, read_labels, read_record, with_labels, write_record

    check_new(output, "a shadow record", "--output")
    signer = signing_key(key) if key is not None else None
    known = read_labels(labels) if labels is not None else {}
    if read_identity(folder).kind == ShadowManifest.model_fields["kind"].default:
        if labels is None:
            message = f"{folder} is a finished record: judge it with --labels, or name the repository of a challenger"
            raise UserError(message, code="no-labels", setting="--labels")
        record, answers = read_record(folder)
        fields: dict[str, Any] = dict(record.manifest)
        if signer is not None:  # else whoever made up the record would get it signed
            digests = {**record.manifest.inputs, "shadow": record.digest}
            check_shadow(f"the shadow record {folder}", digests, read_statements(folder))
        config: Any = resolve(ShadowConfig, "shadow", record.manifest.config)
    else:
        config = resolve(ShadowConfig, "shadow", settings)
        answers, fields = _collect(folder, url, config)
    if known:
        answers = with_labels(answers, known)
    with translate_errors(output):
        manifest = write_record(output, answers, signer, config, fields).manifest
    if as_json:
        echo_json(manifest)
    else:
        _print(manifest)
        deploy = shlex.join(["enginery", "deploy", "--require-shadow", str(output)])
        click.echo(f"{output} written; to deploy the challenger: {deploy} ...")


def _collect(folder: Path, url: str, config: Any) -> tuple[Any, dict[str, Any]]:
    """Compare until it is enough, or the first Ctrl-C or SIGTERM; the second ends at once."""
    from enginery.serving.server import shadow_socket
    from enginery.serving.shadow import open_challenger, run_shadow

    asked: list[int] = []

    def stop(signum: int, frame: object) -> None:
        asked.append(signum)
        if len(asked) > 1:
            sys.exit(130)

    challenger = open_challenger(folder)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_shadow(challenger, shadow_socket(), url, config, partial(echo, err=True), lambda: bool(asked))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(manifest: "ShadowManifest") -> None:
    found = manifest.comparison
    console = new_console()
    names = [f"{m.name} {m.version or m.repository_digest[:14]}" for m in (manifest.champion, manifest.challenger)]
    console.print(f"\n[bold]{escape(names[1])}[/] beside {escape(names[0])}, {found.num_compared:,} images")
    console.print(
        f"labels differ on {found.num_differing:,} ({found.differing_pct:.2f} %; {found.low_pct:.2f} to "
        f"{found.high_pct:.2f} %)" + (f", {found.num_unanswered:,} unanswered" if found.num_unanswered else "")
    )
    if found.classes:
        table = new_table("class", ">champion", ">challenger", ">alone", ">alone", ">p")
        for entry in found.classes[:_MAX_ROWS]:
            counts = entry.num_champion, entry.num_challenger, entry.num_left, entry.num_entered
            mark = " *" if entry.is_significant else ""
            table.add_row(escape(entry.name), *(f"{count:,}" for count in counts), f"{entry.p_corrected:.3g}{mark}")
        console.print(table)
        most = [f"{pair.champion} > {pair.challenger or 'no answer'} ({pair.num_images:,})" for pair in found.pairs[:5]]
        console.print(f"most frequent: {escape(', '.join(most))}")
    if found.labelled is not None:
        right = found.labelled
        console.print(
            f"of {found.num_labelled:,} with labels the champion alone is right on {right.num_regressed:,}, the "
            f"challenger alone on {right.num_improved:,} (McNemar p {right.mcnemar_p:.3g}); top-1 changes by "
            f"{right.low_points:+.2f} to {right.high_points:+.2f} points"
        )
    if found.speed is not None:
        speed = found.speed
        console.print(
            f"one image takes {speed.challenger_ms:.2f} ms, the champion {speed.champion_ms:.2f} ms: "
            f"{speed.ratio:.2f} times ({speed.low:.2f} to {speed.high:.2f})"
        )
    console.print(
        f"seen {manifest.num_seen:,}, dropped {manifest.num_dropped:,}, unpaired {manifest.num_unpaired:,}", style="dim"
    )
