"""`enginery promote`: point an alias to a version."""

import click

from components.common.registry.promotions import CHAMPION, check_alias
from enginery.cli.audit import changed_text, why_option
from enginery.formats import new_console
from enginery.registry.models import open_registry


def _alias(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return check_alias(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("name")
@click.argument("version")
@click.option(
    "--to",
    "alias",
    default=CHAMPION,
    show_default=True,
    metavar="ALIAS",
    callback=_alias,
    help="The alias that is to point to it.",
)
@why_option(required=True)
@click.option("--force", is_flag=True, help="Take a worse champion all the same; the audit log says so.")
def promote(name: str, version: str, alias: str, why: str, force: bool) -> None:
    """Point an alias of the registered model NAME to VERSION, a number.

    To be the champion a version must be no worse than the present champion on the same validation images. --force
    overrules that, and nothing else: the version must have passed its gate, and be what was measured and promoted.
    """
    registry = open_registry()
    from enginery.registry.promote import promote_manually

    console = new_console()
    with registry.reached(f"{name}@{alias} may not be changed"):
        entry = promote_manually(registry, name, version, alias, why, force=force)
    console.print(changed_text(entry))
