"""`enginery fetch`: an artifact from a store or a registry, checked by digest."""

from pathlib import Path

import click

from enginery.cli.options import PATH
from enginery.formats import echo
from enginery.new_folders import translate_errors
from enginery.release.deploy import is_digest


def _digest(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value and not is_digest(value):
        raise click.BadParameter(f"a digest is sha256: and 64 hexadecimal digits; got {value!r}")
    return value


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--digest",
    default="",
    callback=_digest,
    metavar="sha256:...",
    help="Of manifest.json; of a release, of SHA256SUMS.",
)
def fetch(source: str, directory: Path, digest: str) -> None:
    """Fetch an artifact, such as a model repository or a release, into the new folder DIR, and check every file.

    SOURCE is a folder, a URI such as s3://bucket/path, or oci://registry/repository with :TAG or @sha256:... behind it;
    the latter needs no --digest. Files that the artifact's manifest does not list are left out. With --digest nothing
    is done where DIR holds the right artifact already.
    """
    from enginery.release.fetch import fetch as bring

    with translate_errors(directory):
        found = bring(source, directory, digest)
    echo(f"{directory}: {found.kind} {found.digest}, {len(found.files)} files, all as sealed")
