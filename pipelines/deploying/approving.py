"""Whether a registered version may be deployed: by its files in the registry, not by what somebody says of it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from components.common.errors import EngineryError, GateFailed, UserError
from components.common.settings import resolve
from pipelines.deploying.environments import Environment, Pins, is_digest

if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry import RegisteredVersion, Registry


def approve(registry: "Registry", version: "RegisteredVersion", environment: str) -> str:
    """Read bundle, report and verdict of a version from the registry, each file by its digest, and who approved it.

    Returns:
        The bundle's digest.

    Raises:
        GateFailed: its gate did not let it through.
        EngineryError: its files are gone, or are not what was measured and promoted; or no key of the machine's policy
            approved it for the environment.
    """
    from pipelines.serving.sources import registered_chain

    with registered_chain(registry, version, environment) as chain:
        return chain.bundle.digest


def approve_repository(
    registry: "Registry", version: "RegisteredVersion", folder: Path, environment: str
) -> tuple[str, str]:
    """The same, and see that a folder is what `enginery serve export` writes for the version: it is written again.

    Returns:
        The digests of the bundle and of the repository.

    Raises:
        GateFailed: see `approve`.
        EngineryError: see `approve`; or the folder holds something else, such as a model.py of somebody's own.
    """
    from components.common.triton.opening import open_repository
    from components.common.trust import check_folder
    from pipelines.serving.repository import RepositoryConfig, write_repository
    from pipelines.serving.sources import of_chain, registered_chain

    found = open_repository(folder)
    check_folder(f"the model repository {folder}", folder)
    with registered_chain(registry, version, environment) as chain, TemporaryDirectory(prefix="enginery-") as temporary:
        source = of_chain(chain, version.name, version.number, found.manifest.precision, {})
        config = resolve(RepositoryConfig, "serve", found.manifest.config)
        again = write_repository(source, Path(temporary) / "models", config)
        own, due = (entry.manifest.model_dump(exclude={"seal", "environment"}) for entry in (found, again))
        differing = [name for name in due["files"] | own["files"] if own["files"].get(name) != due["files"].get(name)]
        if differing or own != due:
            what = ", ".join(differing) or ", ".join(name for name in due if own[name] != due[name])
            raise EngineryError(
                f"{folder} is not what `enginery serve export` writes for {version.label}: {what} differ. Write it "
                f"again with this enginery: enginery serve export {version.name}/{version.number} DIR"
            )
        return chain.bundle.digest, found.digest


def approve_pins(registry: "Registry", pins: Pins, where: str, environment: str) -> None:
    """The same of what an environment's file names.

    Raises:
        GateFailed: see `approve`.
        UserError: the file names no version, or another digest than the registry's.
        EngineryError: see `approve`.
    """
    if not (pins.model and pins.version and is_digest(pins.digest) and is_digest(pins.repository_digest)):
        raise UserError(
            f"{where} serves name {pins.model!r}, version {pins.version!r}, digest {pins.digest!r}, repositoryDigest "
            f"{pins.repository_digest!r}; all four must be there. Let `enginery deploy --env ENV NAME@champion "
            "--repository DIR` write them"
        )
    digest = approve(registry, registry.version(pins.model, pins.version), environment)
    if digest != pins.digest:
        raise GateFailed(
            f"{where} serves {pins.digest} as {pins.label}, and the registry has {digest} under that name. "
            f"Deploy what is registered: enginery deploy --env ENV {pins.model}/{pins.version} --repository DIR"
        )


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
            approve_pins(registry, pins, environment.name, environment.name)
        except EngineryError as error:
            problems.append(f"{environment.name}: {error}")
            worst = error if not isinstance(worst, GateFailed) else worst
        else:
            lines[environment.name] = f"serves {pins.label}, which passed its gate ({pins.digest})"
    if problems:
        raise type(worst)("\n".join(problems))
    return lines
