"""`enginery push`: a signed folder into an OCI registry."""

from dataclasses import replace
from pathlib import Path

import click

from components.common.contracts.errors import EngineryError, UserError
from enginery.cli.options import PATH


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("address", metavar="oci://REGISTRY/REPOSITORY[:TAG]")
@click.option("--key", required=True, type=PATH, metavar="FILE", help="Private key that signed DIR.")
def push(directory: Path, address: str, key: Path) -> None:
    """Write a release or a model repository, signed with --key, into an OCI registry.

    Each file is a layer, and the artifact gets a signature that `cosign verify --key PUBLIC
    --insecure-ignore-tlog=true` checks. Without a TAG it is named by the 64 digits of the digest that `enginery fetch`
    and the chart ask for. Credentials are those of `docker login`.
    """
    from components.common.contracts.digests import digest_file
    from components.common.registry.keys import public_pem, signing_key
    from components.common.registry.trust import SIGNATURE, folder_problem
    from enginery.release import oci
    from enginery.release.fetch import is_release, read_identity
    from enginery.release.verify import SUMS

    signer, target = signing_key(key), oci.read_address(address)
    if target.digest:
        raise UserError(
            f"{target} names a digest, which is known only when it is pushed; leave it out", code="digest-given"
        )
    digest = digest_file(directory / SUMS) if is_release(directory) else read_identity(directory).digest
    if not (directory / SIGNATURE).is_file():
        raise UserError(
            f"{directory} is not signed ({SIGNATURE} is not there). Write it again with --key", code="not-signed"
        )
    if problem := folder_problem(directory, public_pem(signer.public_key())):
        raise EngineryError(
            f"{directory} is not pushed: {problem}. Write it again with --key {key}", code="signature-mismatch"
        )
    pushed = oci.push(directory, replace(target, tag=target.tag or digest.removeprefix("sha256:")), signer)
    click.echo(f"pushed to {pushed}, signed")
    click.echo(f"  fetch it: enginery fetch {replace(pushed, tag='')} DIR")
