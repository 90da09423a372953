"""`enginery release`: a registered version as a folder to ship."""

from contextlib import ExitStack
from pathlib import Path

import click

from components.common.contracts.errors import UserError
from enginery.cli.options import PATH, signing_key
from enginery.cli.verify import show
from enginery.new_folders import check_new, translate_errors
from enginery.registry.models import find_version, open_registry


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("model", metavar="[NAME@ALIAS|NAME/VERSION]", default="")
@click.option("--bundle", type=PATH, metavar="DIR", help="In place of a registered version: what export wrote.")
@click.option("--report", type=PATH, metavar="DIR", help="What validate wrote on it.")
@click.option("--verdict", type=PATH, metavar="DIR", help="What gate wrote on that.")
@signing_key
def release(
    directory: Path, model: str, bundle: Path | None, report: Path | None, verdict: Path | None, key: Path | None
) -> None:
    """Write a registered version into the new folder DIR, with model card, inputs, checksums and signature.

    `enginery verify DIR` checks it anywhere, without a network. `mlflow.pyfunc.load_model("DIR")` runs it.
    A model without a passed verdict is refused.
    """
    given = {"bundle": bundle, "report": report, "verdict": verdict}
    named = {part: path for part, path in given.items() if path is not None}
    if bool(model) == bool(named) or (named and len(named) < len(given)):
        raise UserError(
            "release takes a registered version, such as classifier@champion, or all of --bundle, --report and "
            "--verdict; see `enginery release --help`",
            code="nothing-named",
        )
    # MLflow takes seconds to import: mistakes are said before.
    from components.common.registry.trust import check_signer, read_statements

    if key is not None:
        check_signer(key)
    from components.common.registry.audit_log import AuditLog
    from components.common.registry.model_registry import PARTS
    from components.common.registry.store import without_folders
    from enginery.release.writing import write_release

    check_new(directory, "a release")
    with translate_errors(directory), ExitStack() as stack:
        if named:
            name, statements = named["bundle"].absolute().name, read_statements(named["verdict"])
            checked = write_release(named, directory, name=name, statements=statements, key=key)
        else:
            registry = open_registry()
            version = find_version(registry, model)
            with registry.reached("nothing was released"):
                parts: dict[str, Path] = {part: stack.enter_context(registry.files(version, part)) for part in PARTS}
                entries = AuditLog(registry.client, version.name).read()
                statements = registry.statements(version)
            checked = write_release(
                parts,
                directory,
                name=version.name,
                version=version,
                registry=without_folders(registry.uri),
                entries=entries,
                statements=statements,
                key=key,
            )
    click.echo(f"released to {directory}")
    show(checked)
