"""`enginery verify`: whether a release is what was released."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from components.common.contracts.errors import EngineryError
from enginery.cli.options import PATH
from enginery.formats import echo

if TYPE_CHECKING:
    from enginery.release.verify import Verification


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--key", type=PATH, metavar="FILE", help="The signer's public key in PEM.  [default: the machine's trust policy]"
)
def verify(directory: Path, key: Path | None) -> None:
    """Check a folder that `enginery release` wrote: every file, the chain from dataset to verdict, the signature.

    Needs no network and no registry. Ends with 1 and a line for each problem where something is wrong. Without --key
    and without a trust policy the signature is not checked, and only a signature shows who released it.
    """
    from components.common.registry.trust import check_chain, check_folder, find_policy, read_statements
    from enginery.release.verify import public_key
    from enginery.release.verify import verify as check

    checked = check(directory, public_key(key) if key is not None else None)
    for problem in checked.problems:
        click.secho("failed: ", fg="red", nl=False, err=True)
        echo(" ".join(problem.split()), err=True)
    what = f"the release {directory}"
    if key is None and not checked.problems and find_policy() is not None:  # else the line on the signature says it
        signer = check_folder(what, directory)
        checked = replace(checked, signature=f"valid, by {signer} of this machine's trust policy")
        record, chain = checked.record, checked.chain
        assert record is not None  # there where no problem is
        assert chain is not None
        statements = read_statements(directory)
        check_chain(what, chain.parts, statements, model=record.name, version=record.version)
    if checked.problems:
        number = len(checked.problems)
        raise EngineryError(
            f"{directory} is not as it was released: {number} problem{'s' if number > 1 else ''}. "
            "Get it again from who released it",
            code="release-changed",
        )
    click.echo(f"{directory} is as it was released")
    show(checked)


def show(checked: "Verification") -> None:
    """Print what a release is, for a person."""
    record, chain = checked.record, checked.chain
    assert record is not None  # there where no problem is
    assert chain is not None
    aliases = "".join(f" @{alias}" for alias in record.aliases)
    lines = {"release": f"{record.label}{aliases}, {record.architecture}, {record.precision.upper()}, {record.created}"}
    lines |= record.digests
    verdict = chain.verdict.manifest
    lines["gate"] = f"{verdict.word}: {'; '.join(check.explanation for check in verdict.checks)}"
    lines |= {"files": f"{checked.num_files}, as SHA256SUMS lists them", "signature": checked.signature}
    for name, text in lines.items():
        echo(f"{name + ':':<10} {' '.join(text.split())}")  # of a release that anybody wrote
