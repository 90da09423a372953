"""Environments as folders of Helm values: what each runs, read and written."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.artifacts import write_atomically
from components.common.errors import UserError
from pipelines.deploying.editing import get_value, parse, set_values

VALUES = "values.yaml"
IMAGES = ("cli", "mlflow", "serve")  # that the chart runs
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(r"(?:(?P<place>[^@\s]+)/)?(?P<name>[a-z]+)@(?P<digest>sha256:[0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What an environment runs, by digest. Empty where nothing is said."""

    model: str = ""
    version: str = ""
    digest: str = ""  # of the version's bundle
    repository_digest: str = ""  # of the model repository that Triton reads
    images: dict[str, str] = field(default_factory=dict)  # digest by name, of IMAGES
    serving: bool = False

    @property
    def label(self) -> str:
        """For a person."""
        return f"{self.model} version {self.version}" if self.model else "no model"

    @property
    def is_deployed(self) -> bool:
        """Whether a model is served."""
        return self.serving and bool(self.model or self.digest)


def image_digests(references: tuple[str, ...], target: "Environment") -> dict[str, str]:
    """Digests by image, from references such as ghcr.io/team/serve@sha256:...

    Raises:
        UserError: one has no digest, names no image of the chart, or lies elsewhere than the environment's images.
    """
    found: dict[str, str] = {}
    place = target.registry() if references else ""
    for reference in references:
        match = _REFERENCE.fullmatch(reference.strip())
        if match is None or match["name"] not in IMAGES:
            raise UserError(
                f"--image takes one of the chart's images ({', '.join(IMAGES)}) by digest, such as "
                f"ghcr.io/team/serve@sha256:...; got {reference!r}. The images of steps are in submit.settings"
            )
        if place and match["place"] and match["place"] != place:
            raise UserError(
                f"{reference} is in {match['place']}, and {target.name} pulls from images.registry {place}. Push it "
                f"there and name {place}/{match['name']}@{match['digest']}, or change images.registry in {target.file}"
            )
        found[match["name"]] = match["digest"]
    return found


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment."""

    name: str
    file: Path

    def read(self) -> Pins:
        """What it runs, by its file.

        Raises:
            UserError: the file can't be read.
        """
        try:
            return pins_of(self.file.read_text(encoding="utf-8"), str(self.file))
        except OSError as error:
            raise UserError(f"can't read {self.file}: {error.strerror}") from None

    def registry(self) -> str:
        """Where its images are; "" where the file leaves that to the chart."""
        return str(
            get_value(parse(self.file.read_text(encoding="utf-8"), str(self.file)), ("images", "registry")) or ""
        )

    def write(self, pins: Pins) -> bool:
        """Set what it runs. False where the file says so already."""
        before = self.file.read_text(encoding="utf-8")
        values: dict[tuple[str, ...], str | bool] = {
            ("serve", "enabled"): pins.serving,
            ("serve", "model", "name"): pins.model,
            ("serve", "model", "version"): pins.version,
            ("serve", "model", "digest"): pins.digest,
            ("serve", "model", "repositoryDigest"): pins.repository_digest,
        }
        values |= {("images", "digests", name): pins.images.get(name, "") for name in IMAGES}
        data = parse(before, str(self.file))
        # An empty value that is not there is the chart's own default.
        changed = {path: value for path, value in values.items() if (get_value(data, path) or "") != value}
        if not changed:
            return False
        write_atomically(self.file, set_values(before, changed, str(self.file)).encode())
        return True


def pins_of(text: str, file: str) -> Pins:
    """What a values file says is run."""
    data = parse(text, file)

    def at(*path: str) -> Any:
        return get_value(data, path)

    images = {name: str(at("images", "digests", name) or "") for name in IMAGES}
    return Pins(
        model=str(at("serve", "model", "name") or ""),
        version=str(at("serve", "model", "version") or ""),
        digest=str(at("serve", "model", "digest") or ""),
        repository_digest=str(at("serve", "model", "repositoryDigest") or ""),
        images={name: digest for name, digest in images.items() if digest},
        serving=bool(at("serve", "enabled")),
    )


def is_digest(text: str) -> bool:
    """Whether a text is a digest in full."""
    return _DIGEST.fullmatch(text) is not None


def environments(directory: Path) -> dict[str, Environment]:
    """Every environment of a directory, by name.

    Raises:
        UserError: there is none.
    """
    found = {file.parent.name: Environment(name=file.parent.name, file=file) for file in directory.glob(f"*/{VALUES}")}
    if not found:
        raise UserError(
            f"{directory} holds no environments, which are folders with a {VALUES}. Run this in your checkout, or "
            "name the directory: --directory DIR"
        )
    return dict(sorted(found.items()))


def environment(directory: Path, name: str) -> Environment:
    """One of them.

    Raises:
        UserError: there is no such environment.
    """
    found = environments(directory)
    if name not in found:
        raise UserError(f"there is no environment {name!r} in {directory}; there are {', '.join(found)}")
    return found[name]
