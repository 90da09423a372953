"""`enginery release`: a registered version as a folder to ship."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from components.common.disk import explain
from components.common.errors import UserError
from pipelines.commands.verify import show
from pipelines.state import StateDirectory

if TYPE_CHECKING:
    from components.common.registered import Version

_PARTS = ("bundle", "report", "verdict")
_Folder = click.Path(path_type=Path)


@click.command()
@click.argument("directory", type=_Folder, metavar="DIR")
@click.argument("model", metavar="[NAME@ALIAS|NAME/VERSION]", default="")
@click.option("--bundle", type=_Folder, metavar="DIR", help="In place of a registered version: what export wrote.")
@click.option("--report", type=_Folder, metavar="DIR", help="What validate wrote on it.")
@click.option("--verdict", type=_Folder, metavar="DIR", help="What gate wrote on that.")
@click.option(
    "--key", type=_Folder, metavar="FILE", help="Ed25519 private key in PEM to sign with.  [default: unsigned]"
)
def release(
    directory: Path, model: str, bundle: Path | None, report: Path | None, verdict: Path | None, key: Path | None
) -> None:
    """Write a registered version into the new folder DIR, with model card, inputs, checksums and signature.

    `enginery verify DIR` checks it anywhere, without a network. `mlflow.pyfunc.load_model("DIR")` runs it.
    A model without a passed verdict is refused, unless the registry records that somebody overruled the gate.
    """
    named = {name: path for name, path in zip(_PARTS, (bundle, report, verdict), strict=True) if path is not None}
    if bool(model) == bool(named) or (named and len(named) < len(_PARTS)):
        raise UserError(
            "release takes a registered version, such as classifier@champion, or all of --bundle, --report and "
            "--verdict; see `enginery release --help`"
        )
    # MLflow takes seconds to import: mistakes are said before.
    from pipelines.release.signing import private_key

    signer = private_key(key) if key is not None else None
    from pipelines.release.writing import check_output, write_release

    check_output(directory)
    try:
        with _source(model, named) as (version, parts):
            name = version.name if version is not None else parts["bundle"].absolute().name
            checked = write_release(parts, directory, version=version, name=name, key=signer)
    except OSError as error:
        if told := explain(error, directory.absolute().parent):
            raise told from None
        raise UserError(f"can't write {directory}: {error}") from None
    click.echo(f"released to {directory}")
    show(checked)


@contextmanager
def _source(model: str, named: dict[str, Path]) -> "Iterator[tuple[Version | None, dict[str, Path]]]":
    """What to release: the version if it is a registered one, and the folders of its parts."""
    if named:
        yield None, named
        return
    from components.common.registered import opened_version

    with opened_version(StateDirectory.current().tracking_uri, model, _PARTS) as found:
        yield found
