"""Whether a registered version may be deployed: by its files in the registry, not by what somebody says of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.common.errors import EngineryError, GateFailed, UserError
from pipelines.deploying.environments import Environment, Pins, is_digest

if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry import RegisteredVersion, Registry


@dataclass(frozen=True, kw_only=True)
class Approval:
    """A version that may be deployed."""

    version: "RegisteredVersion"
    digest: str  # of its bundle


def approve(registry: "Registry", version: "RegisteredVersion") -> Approval:
    """Read bundle, report and verdict of a version from the registry, each file by its digest.

    Raises:
        GateFailed: its gate did not let it through. That somebody forced it in the registry changes nothing.
        EngineryError: its files are gone, or are not what was measured and registered.
    """
    from components.common.ledger import Ledger
    from components.common.standing import check_log, standing_of
    from pipelines.promoting import check_files

    if not version.tags.get("verdict_digest"):
        raise GateFailed(f"{version.label} has no verdict of enginery's gate, so it is not deployed")
    digests = check_files(registry, version)
    check_log(version, Ledger(registry.client, version.name).read(), digests)
    with standing_of(registry, version) as standing:
        if not standing.passed:
            failed = [check.explanation for check in standing.verdict.manifest.checks if check.verdict != "pass"]
            why = "; ".join(failed) or standing.verdict.manifest.note or "see `enginery audit`"
            raise GateFailed(f"{version.label} did not pass its gate, so it is not deployed: {why}")
    return Approval(version=version, digest=digests["bundle"])


def approve_pins(registry: "Registry", pins: Pins, where: str) -> Approval:
    """The same of what an environment's file names.

    Raises:
        GateFailed: see `approve`.
        UserError: the file names no version, or another digest than the registry's.
        EngineryError: see `approve`.
    """
    if not (pins.model and pins.version and is_digest(pins.digest)):
        raise UserError(
            f"{where} serves name {pins.model!r}, version {pins.version!r}, digest {pins.digest!r}; all three must be "
            "there. Let `enginery deploy --env ENV NAME@champion` write them"
        )
    approval = approve(registry, registry.version(pins.model, pins.version))
    if approval.digest != pins.digest:
        raise GateFailed(
            f"{where} serves {pins.digest} as {pins.label}, and the registry has {approval.digest} under that name. "
            f"Deploy what is registered: enginery deploy --env ENV {pins.model}/{pins.version}"
        )
    return approval


def check_environments(registry: "Registry", found: list[Environment]) -> dict[str, str]:
    """What each environment serves, all of it approved.

    Returns:
        A line for each, by its name.

    Raises:
        GateFailed: a gate did not pass, or a digest is not in the registry.
        EngineryError: something else is wrong. All problems are in one message.
    """
    lines, problems, worst = {}, [], EngineryError("")
    for environment in found:
        pins = environment.read()
        if not pins.is_deployed:
            lines[environment.name] = "serves no model"
            continue
        try:
            approve_pins(registry, pins, environment.name)
        except EngineryError as error:
            problems.append(f"{environment.name}: {error}")
            worst = error if not isinstance(worst, GateFailed) else worst
        else:
            lines[environment.name] = f"serves {pins.label}, which passed its gate ({pins.digest})"
    if problems:
        raise type(worst)("\n".join(problems))
    return lines
