"""`enginery deploy`: what an environment runs, as a commit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from components.common.contracts.errors import UserError
from components.common.registry.trust import check_chain, find_policy
from enginery.cli.audit import why_option
from enginery.formats import echo
from enginery.registry.models import find_version, open_registry
from enginery.release.deploy import (
    ROLLBACK,
    Checkout,
    DeployEnvironment,
    Pins,
    approve_pins,
    approve_repository,
    check_environments,
    environment,
    environments,
    image_digests,
)

_Folder = click.Path(path_type=Path, file_okay=False)


@dataclass(frozen=True, kw_only=True)
class _Deployment:
    """A change that is to be committed."""

    pins: Pins
    subject: str
    body: tuple[str, ...] = ()


@click.command()
@click.argument("model", metavar="[NAME@ALIAS|NAME/VERSION]", default="")
@click.option("--env", "names", metavar="ENV", multiple=True, help="The environment; with --check several, or all.")
@click.option("--from", "origin", metavar="ENV", default="", help="Take what this environment runs, images included.")
@click.option("--rollback", is_flag=True, help="Go back to what the environment ran before; once more: further back.")
@click.option("--check", is_flag=True, help="Change nothing; refuse what did not pass its gate or is not registered.")
@click.option("--image", "images", metavar="REFERENCE", multiple=True,
              help="An image of the chart by digest: ghcr.io/team/serve@sha256:...; again for others.")  # fmt: skip
@click.option("--repository", type=_Folder, metavar="DIR",
              help="What `enginery serve export` wrote for the version: the repository that is served.")  # fmt: skip
@click.option("--directory", type=_Folder, default=Path("helm/environments"), show_default=True, metavar="DIR",
              help="Folder of the environments.")  # fmt: skip
@click.option("--require-shadow", "shadow", type=_Folder, is_flag=False, flag_value="shadow", metavar="[DIR]",
              help="Refuse a model without a good record of `enginery shadow` beside what the environment serves.  "
              "[without DIR: shadow]")  # fmt: skip
@click.option("--shadow-requests", "num_requests", default=1000, type=click.IntRange(1), show_default=True,
              help="Images that it must have compared.")  # fmt: skip
@click.option("--shadow-days", "days", default=7, type=click.IntRange(1), show_default=True,
              help="Days that it may be old.")  # fmt: skip
@click.option("--shadow-disagreement", "disagreement_pct", default=5.0, type=click.FloatRange(0, 100),
              metavar="PERCENT", show_default=True,
              help="Images that may have another class, by the upper end of the interval.")  # fmt: skip
@why_option(text="For the commit's message.")
def deploy(
    model: str,
    names: tuple[str, ...],
    origin: str,
    rollback: bool,
    check: bool,
    images: tuple[str, ...],
    repository: Path | None,
    directory: Path,
    shadow: Path | None,
    why: str,
    **limits: Any,
) -> None:
    """Write a registered version, by digest, into an environment's Helm values, and commit that file.

    Argo CD or Flux do the rest once it is pushed. The version must have passed its gate, and lie in the registry as it
    was measured: nothing overrules that. The repository is written again and compared. `--from staging --env prod`
    promotes what staging runs.
    """
    modes = [word for word, given in (("--check", check), ("--rollback", rollback), ("--from", origin)) if given]
    if len(modes) > 1 or (modes and model) or (modes and (images or repository)):
        raise UserError(
            f"{' and '.join(modes)} {'does' if len(modes) == 1 else 'do'} not go with "
            f"{'a model, --image or --repository' if len(modes) == 1 else 'each other'}; see `enginery deploy --help`",
            code="conflicting-options",
        )
    if shadow is not None and (check or rollback or not (model or origin)):
        message = "--require-shadow goes with a model or --from, and stands behind the model or as --require-shadow=DIR"
        raise UserError(message, code="conflicting-options", setting="--require-shadow")
    if check:
        _check(directory, names)
        return
    if len(names) != 1:
        raise UserError(
            f"name one environment: --env {'|'.join(environments(directory))}", code="no-environment", setting="--env"
        )
    if not (model or images or modes):
        raise UserError("name what to deploy: NAME@champion, --image, --from ENV or --rollback", code="nothing-named")
    target = environment(directory, names[0])
    checkout = Checkout.around(target.file)
    checkout.check_branch()
    checkout.check_clean(target.file)
    if rollback:
        deployment = _back(target, checkout)
    elif origin:
        deployment = _from(environment(directory, origin), target, checkout)
    else:
        deployment = _new(target, model, image_digests(images, target), repository)
    served = target.read()
    body = deployment.body
    champion = served.repository_digest if served.is_deployed else ""
    if shadow is not None and deployment.pins.repository_digest != champion:
        from enginery.serving.shadow_record import ShadowLimits, require_shadow

        challenger = deployment.pins.repository_digest
        record = require_shadow(shadow, champion, challenger, ShadowLimits(**limits), target.name)
        body = (*body, f"Shadow {record.digest}, {record.manifest.comparison.num_compared:,} images")
    if not target.write(deployment.pins):
        echo(f"{target.name} runs {target.read().label} already; nothing to commit")
        return
    reason = (f"Why: {why}",) if why else ()
    commit = checkout.commit(target.file, deployment.subject, (*reason, *body))
    echo(f"{deployment.subject} ({commit} in {target.file})")
    click.echo("Push it, and Argo CD or Flux roll it out: git push")


def _new(target: DeployEnvironment, model: str, images: dict[str, str], repository: Path | None) -> _Deployment:
    pins = target.read()
    pins = replace(pins, images={**pins.images, **images})
    if not model:
        return _Deployment(
            pins=pins, subject=f"Deploy the image{'s' * (len(images) > 1)} {', '.join(images)} to {target.name}"
        )
    if repository is None:
        raise UserError(
            f"name the model repository that serves {model}, as it lies in the store: write it with `enginery serve "
            f"export {model} DIR`, then deploy with --repository DIR",
            code="no-repository",
            setting="--repository",
        )
    registry = open_registry()
    with registry.reached("nothing was deployed"):
        version = find_version(registry, model)
        digest, own = approve_repository(registry, version, repository, target.name)
    pins = replace(pins, model=version.name, version=version.number, digest=digest, repository_digest=own)
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return _Deployment(
        pins=replace(pins, serving=True),
        subject=f"Deploy {version.label} to {target.name}",
        body=(f"Bundle {digest}{aliases}", f"Repository {own}"),
    )


def _from(origin: DeployEnvironment, target: DeployEnvironment, checkout: Checkout) -> _Deployment:
    if origin.name == target.name:
        raise UserError(
            f"--from and --env are both {target.name}; name two environments", code="same-environment", setting="--from"
        )
    checkout.check_clean(origin.file)
    pins = origin.read()
    if not pins.is_deployed:
        raise UserError(f"{origin.name} serves no model, so there is nothing to take from it", code="nothing-deployed")
    _approve(pins, origin.name, target)
    return _Deployment(
        pins=replace(pins, images={**target.read().images, **pins.images}),
        subject=f"Deploy {pins.label} to {target.name}, as it runs in {origin.name}",
        body=(f"Bundle {pins.digest}",),
    )


def _approve(pins: Pins, where: str, target: DeployEnvironment) -> None:
    """See that what an environment's file names may run in another, or in this one again."""
    registry = open_registry()
    with registry.reached("nothing was deployed"):
        approve_pins(registry, pins, where, target.name)


def _back(target: DeployEnvironment, checkout: Checkout) -> _Deployment:
    """Return what the environment ran before, if the trust policy still accepts it.

    Without a policy the registry is not asked: it was when this was committed, and may be what is down now.
    """
    past = [pins for pins in checkout.past(target.file) if pins.is_deployed]
    if len(past) < 2:
        whole = checkout.is_whole()
        raise UserError(
            f"{target.name} served {past[0].label if past else 'no model'} and nothing before, by its commits"
            f"{'' if whole else ', of which this checkout has the last ones alone'}. "
            f"{'Name a version' if whole else 'Fetch the others (git fetch --unshallow) or name a version'}: "
            f"enginery deploy --env {target.name} NAME/VERSION --repository DIR",
            code="no-past",
        )
    pins = past[-2]
    if not pins.repository_digest:
        raise UserError(
            f"{target.name} served {pins.label} without naming its repository's digest, so nothing says what that was. "
            f"Deploy it: enginery deploy --env {target.name} {pins.model}/{pins.version} --repository DIR",
            code="no-repository-digest",
        )
    if find_policy() is None:
        check_chain(pins.label, {"bundle": pins.digest}, {})
    else:
        _approve(pins, target.name, target)
    return _Deployment(
        pins=pins,
        subject=f"Roll back {target.name} to {pins.label}",
        body=(f"Bundle {pins.digest}", f"{ROLLBACK}: {target.name}"),
    )


def _check(directory: Path, names: tuple[str, ...]) -> None:
    found = [environment(directory, name) for name in names] or list(environments(directory).values())
    if not any(entry.read().is_deployed for entry in found):
        for entry in found:
            echo(f"{entry.name} serves no model")
        return
    registry = open_registry()
    with registry.reached("nothing was checked"):
        lines = check_environments(registry, found)
    for name, line in lines.items():
        echo(f"{name} {line}")
