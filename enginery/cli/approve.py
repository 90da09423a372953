"""`enginery approve`: a signed statement that a version may run in an environment."""

import re
from pathlib import Path

import click

from enginery.cli.options import PATH
from enginery.registry.models import find_version, open_registry


@click.command()
@click.argument("model", metavar="NAME@ALIAS|NAME/VERSION")
@click.option("--env", "environment", required=True, metavar="ENV", help="The environment, such as production.")
@click.option("--key", required=True, type=PATH, metavar="FILE", help="Private key to sign with.")
@click.option("--days", type=click.IntRange(1, 36_500), default=365, show_default=True, help="How long it counts.")
def approve(model: str, environment: str, key: Path, days: int) -> None:
    """Sign that a registered version may run in the environment ENV, and put the statement beside its files.

    The version must lie in the registry as it was promoted, with a verdict that the machine's trust policy accepts, and
    FILE must be a key that may approve for ENV by that policy. An earlier approval for ENV is replaced. What serves in
    ENV refuses other versions where its own policy says so: docs/security.md. To go back to an older version, approve
    that again.
    """
    # MLflow takes seconds to import: mistakes are said before.
    from components.common.registry.keys import signing_key
    from components.common.registry.trust import approval_file, check_approval, sign_approval

    if not re.fullmatch(r"[\w-]{1,100}", environment):  # stands in a file's name
        wanted = "an environment is letters, digits, - and _, at most 100, such as production"
        raise click.BadParameter(f"{wanted}; got {environment!r}")
    signer = signing_key(key)
    registry = open_registry()
    from enginery.serving.sources import registered_chain

    with registry.reached("nothing was approved"):
        version = find_version(registry, model)
        with registered_chain(registry, version, environment="") as chain:
            digests = chain.parts
        statement = sign_approval(digests, version.name, version.number, environment, days, signer)
        subject = {"model": version.name, "version": version.number}
        check_approval(version.label, statement, environment, digests, **subject)  # before it replaces one that counts
        registry.add_statement(version, approval_file(environment), statement)
    click.echo(f"{version.label} is approved for {environment}, {days} days (bundle {digests['bundle']})")
