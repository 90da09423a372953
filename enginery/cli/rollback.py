"""`enginery rollback`: make the champion before the present one champion again."""

import click

from enginery.cli.audit import changed_text, why_option
from enginery.formats import new_console
from enginery.registry.models import open_registry


@click.command()
@click.argument("name")
@why_option()
def rollback(name: str, why: str) -> None:
    """Make the previous champion of the registered model NAME champion again; once more goes one further back.

    A bundle that was rolled back from does not become champion by itself any more.
    """
    registry = open_registry()
    from enginery.registry.promote import roll_back

    console = new_console()
    with registry.reached(f"{name}@champion may not be changed"):
        entry = roll_back(registry, name, why)
    console.print(changed_text(entry))
