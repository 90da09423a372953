"""Write what an environment runs as Helm values in git: approval, editing of single values, and commits."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.foreign import BoundedLoader
from components.common.contracts.manifests import write_atomically
from components.common.contracts.settings import resolve

KeyPath = tuple[str, ...]
Scalar = str | bool


def set_values(text: str, values: Mapping[KeyPath, Scalar], file: str) -> str:
    """The text with values set, each at a path of keys. What is not there yet is added behind its neighbours.

    Raises:
        UserError: the file is no YAML map, or is written so that a value can't be set in place.
    """
    wanted = _unshared(parse(text, file))
    for path, value in values.items():
        text = _set(text, path, value, file)
        _put(wanted, path, value)
    if parse(text, file) != wanted:
        message = f"{file} is written so that {', '.join(map('.'.join, values))} can't be set in place. {_PLAINLY}"
        raise UserError(message, code="value-not-settable")
    return text


_PLAINLY = "Write these keys as plain lines, one below the other, as helm/environments/staging/values.yaml has them"


def parse(text: str, file: str) -> dict[str, Any]:
    """The file's content.

    Raises:
        UserError: it is no YAML map.
    """
    try:
        data = yaml.load(text, BoundedLoader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())}. Correct it", code="invalid-yaml") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(
            f"{file} holds a {type(data).__name__}; Helm's values are a map of keys. Correct it", code="invalid-yaml"
        )
    return data


def get_value(data: Mapping[str, Any], path: KeyPath) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return None
        data = data[key]
    return data


def _unshared(data: Any) -> Any:
    """A copy in which what an alias shares is there twice: to set one must not change the other."""
    return {key: _unshared(value) for key, value in data.items()} if isinstance(data, dict) else data


def _put(data: dict[str, Any], path: KeyPath, value: Scalar) -> None:
    *parents, last = path
    for key in parents:
        data = data.setdefault(key, {})
    data[last] = value


def _set(text: str, path: KeyPath, value: Scalar, file: str) -> str:
    node, depth = yaml.compose(text), 0
    while isinstance(node, yaml.MappingNode) and depth < len(path):
        child = next((entry for key, entry in node.value if key.value == path[depth]), None)
        if child is None:
            break
        node, depth = child, depth + 1
    written = json.dumps(value, ensure_ascii=False)  # which is YAML, too
    if node is None:  # nothing but comments
        separator = "" if not text or text.endswith("\n") else "\n"
        return text + separator + _lines(path, written, 0)
    if depth == len(path) and isinstance(node, yaml.ScalarNode):
        start, end = node.start_mark.index, node.end_mark.index
        return text[:start] + (" " if start == end else "") + written + text[end:]
    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        message = f"{'.'.join(path)} can't be set in {file}, line {node.start_mark.line + 1}. {_PLAINLY}"
        raise UserError(message, code="value-not-settable")
    column = node.value[0][0].start_mark.column
    end_of_line = text.find("\n", _end(node))
    at = len(text) if end_of_line < 0 else end_of_line
    return text[:at] + "\n" + _lines(path[depth:], written, column).rstrip("\n") + text[at:]


def _end(node: yaml.Node) -> int:
    """Return the index of a node's last character; a block's own end mark lies behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    return int(node.end_mark.index)


def _lines(path: KeyPath, written: str, column: int) -> str:
    *parents, last = path
    lines = [f"{' ' * (column + 2 * depth)}{key}:" for depth, key in enumerate(parents)]
    return "\n".join([*lines, f"{' ' * (column + 2 * len(parents))}{last}: {written}"]) + "\n"


VALUES = "values.yaml"
IMAGES = ("cli", "mlflow", "serve")  # that the chart runs
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(r"(?:(?P<place>[^@\s]+)/)?(?P<name>[a-z]+)@(?P<digest>sha256:[0-9a-f]{64})")


_PATHS: dict[str, KeyPath] = {  # in a values file, of the fields of `Pins`
    "model": ("serve", "model", "name"),
    "version": ("serve", "model", "version"),
    "digest": ("serve", "model", "digest"),
    "repository_digest": ("serve", "model", "repositoryDigest"),
}


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Model and images of an environment, by digest. Empty if nothing is said."""

    model: str = ""
    version: str = ""
    digest: str = ""  # of the version's bundle
    repository_digest: str = ""  # of the model repository that Triton reads
    images: dict[str, str] = field(default_factory=dict)  # digest by name, of IMAGES
    serving: bool = False

    @property
    def label(self) -> str:
        """Name and version, for a person."""
        return f"{self.model} version {self.version}" if self.model else "no model"

    @property
    def is_deployed(self) -> bool:
        """True if a model is served."""
        return self.serving and bool(self.model or self.digest)


def image_digests(references: tuple[str, ...], target: "DeployEnvironment") -> dict[str, str]:
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
                f"ghcr.io/team/serve@sha256:...; got {reference!r}. The images of steps are in submit.settings",
                code="invalid-image",
                setting="--image",
            )
        if place and match["place"] and match["place"] != place:
            raise UserError(
                f"{reference} is in {match['place']}, and {target.name} pulls from images.registry {place}. Push it "
                f"there and name {place}/{match['name']}@{match['digest']}, or change images.registry in {target.file}",
                code="other-image-registry",
                setting="--image",
            )
        found[match["name"]] = match["digest"]
    return found


@dataclass(frozen=True, kw_only=True)
class DeployEnvironment:
    """One environment."""

    name: str
    file: Path

    def read(self) -> Pins:
        """Return what it runs, by its file.

        Raises:
            UserError: the file can't be read.
        """
        return pins_of(self._text(), str(self.file))

    def _text(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = "it is no text in UTF-8; correct it" if isinstance(error, ValueError) else error.strerror
            raise UserError(f"can't read {self.file}: {why}", code="unreadable-file") from None

    def registry(self) -> str:
        """Return the registry of its images; "" where the file leaves that to the chart."""
        return str(get_value(parse(self._text(), str(self.file)), ("images", "registry")) or "")

    def write(self, pins: Pins) -> bool:
        """Set what it runs. False where the file says so already."""
        before = self._text()
        values: dict[KeyPath, Scalar] = {path: getattr(pins, name) for name, path in _PATHS.items()}
        values["serve", "enabled"] = pins.serving
        values |= {("images", "digests", name): pins.images.get(name, "") for name in IMAGES}
        data = parse(before, str(self.file))
        # An empty value that is not there is the chart's own default.
        changed = {path: value for path, value in values.items() if (get_value(data, path) or "") != value}
        if not changed:
            return False
        write_atomically(self.file, set_values(before, changed, str(self.file)).encode())
        return True


def pins_of(text: str, file: str) -> Pins:
    """Return the pins of a values file."""
    data = parse(text, file)
    images = {name: str(get_value(data, ("images", "digests", name)) or "") for name in IMAGES}
    return Pins(
        **{name: str(get_value(data, path) or "") for name, path in _PATHS.items()},
        images={name: digest for name, digest in images.items() if digest},
        serving=bool(get_value(data, ("serve", "enabled"))),
    )


def is_digest(text: str) -> bool:
    """True if a text is a digest in full."""
    return _DIGEST.fullmatch(text) is not None


def environments(directory: Path) -> dict[str, DeployEnvironment]:
    """Every environment of a directory, by name.

    Raises:
        UserError: there is none.
    """
    found = {
        file.parent.name: DeployEnvironment(name=file.parent.name, file=file) for file in directory.glob(f"*/{VALUES}")
    }
    if not found:
        raise UserError(
            f"{directory} holds no environments, which are folders with a {VALUES}. Run this in your checkout, or "
            "name the directory: --directory DIR",
            code="no-environment",
            setting="--directory",
        )
    return dict(sorted(found.items()))


def environment(directory: Path, name: str) -> DeployEnvironment:
    """One of them.

    Raises:
        UserError: there is no such environment.
    """
    found = environments(directory)
    if name not in found:
        message = f"there is no environment {name!r} in {directory}; there are {', '.join(found)}"
        raise UserError(message, code="no-environment", setting="--env")
    return found[name]


if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry.model_registry import RegisteredVersion, Registry


def approve_repository(
    registry: "Registry", version: "RegisteredVersion", folder: Path, environment: str
) -> tuple[str, str]:
    """See that a version may run in an environment, and that a folder is what `enginery serve export` writes for it.

    Bundle, report and verdict are read from the registry, each file by its digest. The repository is written again.

    Returns:
        The digests of the bundle and of the repository.

    Raises:
        GateFailed: its gate did not let it through.
        EngineryError: its files are gone, or are not what was measured and promoted; no key of the machine's policy
            approved it for the environment; or the folder holds something else, such as a model.py of somebody's own.
    """
    from components.common.registry.trust import check_folder
    from components.serve.repository_check import open_repository
    from enginery.serving.repository import RepositoryConfig, write_repository
    from enginery.serving.sources import of_chain, registered_chain

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
                f"again with this enginery: enginery serve export {version.name}/{version.number} DIR",
                code="other-repository",
                setting="--repository",
            )
        return chain.bundle.digest, found.digest


def approve_pins(registry: "Registry", pins: Pins, where: str, environment: str) -> None:
    """The same of what an environment's file names, as far as the registry can say.

    Raises:
        GateFailed: its gate did not let it through, or the file names another digest than the registry's.
        UserError: the file names no version.
        EngineryError: see `approve_repository`.
    """
    if not (pins.model and pins.version and is_digest(pins.digest) and is_digest(pins.repository_digest)):
        raise UserError(
            f"{where} serves name {pins.model!r}, version {pins.version!r}, digest {pins.digest!r}, repositoryDigest "
            f"{pins.repository_digest!r}; all four must be there. Let `enginery deploy --env ENV NAME@champion "
            "--repository DIR` write them",
            code="pins-incomplete",
        )
    from enginery.serving.sources import registered_chain

    with registered_chain(registry, registry.version(pins.model, pins.version), environment) as chain:
        digest = chain.bundle.digest
    if digest != pins.digest:
        raise GateFailed(
            f"{where} serves {pins.digest} as {pins.label}, and the registry has {digest} under that name. "
            f"Deploy what is registered: enginery deploy --env ENV {pins.model}/{pins.version} --repository DIR",
            code="pins-not-registered",
        )


def check_environments(registry: "Registry", found: list[DeployEnvironment]) -> dict[str, str]:
    """Check that all that environments serve is approved.

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
        raise type(worst)("\n".join(problems), code=worst.code)
    return lines


ROLLBACK = "Enginery-Rollback"  # trailer of a commit that goes back
_MAX_COMMITS = 1000  # of a file, that are looked through


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A work tree of git."""

    root: Path

    @classmethod
    def around(cls, file: Path) -> "Checkout":
        """The one that a file is in.

        Raises:
            UserError: there is none, git is not installed, or the file is not in git.
        """
        folder = file.resolve().parent
        try:
            done = _git(folder, "rev-parse", "--show-toplevel")
        except FileNotFoundError:
            raise UserError("git is not installed, and deployments are commits; install it", code="no-git") from None
        if done.returncode:
            raise UserError(
                f"{folder} is in no git repository ({done.stderr.strip()}), and deployments are commits. Run this in "
                "your checkout",
                code="no-checkout",
            )
        checkout = cls(root=Path(done.stdout.strip()))
        if _git(checkout.root, "ls-files", "--error-unmatch", "--", str(file.resolve())).returncode:
            raise UserError(f"{file} is not in git yet; commit it first: git add {file}", code="not-in-git")
        return checkout

    def check_branch(self) -> None:
        """A commit that is on no branch is on nobody's way to the cluster.

        Raises:
            UserError: HEAD is detached, as after `git checkout COMMIT`, in a rebase, and in most CI systems.
        """
        if _git(self.root, "symbolic-ref", "--quiet", "HEAD").returncode:
            raise UserError(
                f"{self.root} is on no branch (HEAD is detached), so the commit of a deployment would be lost. "
                "Switch to the branch that the cluster follows, or one for a review: git switch BRANCH",
                code="detached-head",
            )

    def is_whole(self) -> bool:
        """True if all commits are here; CI systems often fetch the last one alone."""
        return self._asked("rev-parse", "--is-shallow-repository").strip() != "true"

    def check_clean(self, file: Path) -> None:
        """Refuse a file with other changes: a commit must be this change alone.

        Raises:
            UserError: the file has changes that are not committed.
        """
        status = self._asked("status", "--porcelain", "--", str(file.resolve())).strip()
        if status:
            raise UserError(
                f"{file} has changes that are not committed ({status.split()[0]}), and a deployment is a commit of its "
                f"own. Commit them, or take them back: git checkout -- {file}",
                code="uncommitted-changes",
            )

    def commit(self, file: Path, subject: str, body: Sequence[str]) -> str:
        """Commit one file, whatever else is staged.

        Returns:
            The commit's id.

        Raises:
            EngineryError: git refused. The file is then as it was committed before, if git lets it be set back.
        """
        message = "\n\n".join([subject, *body])
        done = _git(self.root, "commit", "--quiet", "--only", "--message", message, "--", str(file.resolve()))
        if done.returncode:
            undone = _git(self.root, "checkout", "--quiet", "HEAD", "--", str(file.resolve())).returncode == 0
            state = "which is now as before" if undone else f"take its change back by git checkout -- {file}"
            reason = " ".join((done.stderr or done.stdout).split())
            raise EngineryError(f"git did not commit {file}, {state}: {reason}", code="commit-refused")
        return self._asked("rev-parse", "--short", "HEAD").strip()

    def past(self, file: Path) -> list[Pins]:
        """Return what an environment has run, the oldest first, the present last, without what a rollback undid."""
        name = file.resolve().relative_to(self.root.resolve()).as_posix()
        form = f"%H %(trailers:key={ROLLBACK},valueonly,separator=%x2C)"
        log = self._asked("log", f"--max-count={_MAX_COMMITS}", f"--format={form}", "--", name)
        stack: list[Pins] = []
        for line in reversed(log.splitlines()):
            commit, _, trailer = line.partition(" ")
            shown = _git(self.root, "show", f"{commit}:{name}")
            if shown.returncode:  # deleted in this commit
                continue
            try:
                pins = pins_of(shown.stdout, f"{commit[:10]}:{name}")
            except UserError:  # somebody committed a broken file, and fixed it later
                continue
            if stack and stack[-1] == pins:
                continue
            if trailer and pins in stack:
                del stack[len(stack) - stack[::-1].index(pins) :]
            else:
                stack.append(pins)
        return stack

    def _asked(self, *arguments: str) -> str:
        done = _git(self.root, *arguments)
        if done.returncode:
            raise EngineryError(
                f"git {arguments[0]} failed in {self.root}: {' '.join(done.stderr.split())}", code="git-failed"
            )
        return done.stdout


def _git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
