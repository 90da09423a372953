"""Fetch an artifact from a store or a volume, and let nothing through but what its digest covers."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

from pydantic import ValidationError

from components.common.artifacts import MANIFEST
from components.common.digests import digest_bytes
from components.common.errors import EngineryError, UserError
from components.common.integrity import check_seal, claims_of, file_problem, read_manifest
from components.common.records import FileEntry
from components.common.trust import SIGNATURE, check_chain, check_folder, read_statements


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the manifest of an artifact of any kind says of itself."""

    kind: str
    digest: str  # of the manifest, which covers every file
    inputs: Mapping[str, str]
    files: Mapping[str, FileEntry]


def read_identity(folder: Path) -> Identity:
    """Read a manifest of any kind and check its seal.

    Raises:
        UserError: there is none.
        EngineryError: it is damaged, was edited, or names files elsewhere.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(
            f"there is no finished artifact in {folder}: it has no {MANIFEST}. Name the folder that holds one, such as "
            "what `enginery serve export` wrote"
        )
    data = read_manifest(file, "artifact")
    record = claims_of(data)
    try:
        files = {str(name): FileEntry.model_validate(entry) for name, entry in record["files"].items()}
        kind, inputs = str(record["kind"]), {str(name): str(digest) for name, digest in record["inputs"].items()}
    except (KeyError, AttributeError, ValidationError):
        raise EngineryError(f"{file} is no manifest of enginery, or is damaged. Write the artifact anew") from None
    check_seal(data, file, kind)
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name == MANIFEST:
            raise EngineryError(f"{file} names a file outside the artifact: {name}. Write the artifact anew")
    return Identity(kind=kind, digest=digest_bytes(data), inputs=inputs, files=files)


def fetch(source: str, target: Path, digest: str) -> Identity:
    """Bring an artifact from `source` to the new folder `target`, complete or not at all.

    Files that its manifest does not list stay behind. Where `target` is there already and right, nothing is done, so
    that a pod that is started again goes on.

    Args:
        source: a folder, or a URI that MLflow can download: s3://, gs://, mlflow-artifacts:/ and others.
        target: where it is to be.
        digest: of its manifest. What the manifest says of its inputs is a claim that anybody can make.

    Raises:
        UserError: there is no such artifact, or `target` is something else.
        EngineryError: it is another one than asked for, is damaged, or can't be downloaded.
    """
    if target.exists():
        found = read_identity(target)
        _check(target, found, digest, str(target))
        _check_trusted(target, found, str(target))
        return found
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
        copy = Path(folder, "copy")
        remote = bool(urlparse(source).scheme)
        origin = _download(source, Path(folder, "all")) if remote else Path(source)
        found = read_identity(origin)
        _check_digest(found, digest, source)
        for name, entry in {**found.files, MANIFEST: None}.items():
            if entry is not None and (problem := file_problem(origin, name, entry.size_bytes, None)):
                raise EngineryError(f"{problem}. Upload the artifact to {source} again")
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if remote:
                (origin / name).rename(copy / name)
            else:
                shutil.copyfile(origin / name, copy / name)
        for file in (SIGNATURE, *read_statements(origin)):
            if (origin / file).is_file():
                shutil.copyfile(origin / file, copy / file)
        _check(copy, read_identity(copy), digest, source)
        _check_trusted(copy, found, source)
        copy.rename(target)
    return found


def _check(folder: Path, found: Identity, digest: str, source: str) -> None:
    _check_digest(found, digest, source)
    for name, entry in found.files.items():
        if problem := file_problem(folder, name, entry.size_bytes, entry.digest):
            raise EngineryError(f"what lies at {source} is not what was sealed: {problem}. Upload it again")


def _check_trusted(folder: Path, found: Identity, source: str) -> None:
    what = f"the {found.kind} at {source}"
    check_folder(what, folder)
    parts = {**found.inputs, found.kind: found.digest}
    digests: dict[str, str] = {part: parts[part] for part in ("bundle", "report", "verdict") if part in parts}
    if "bundle" in digests:
        check_chain(what, digests, read_statements(folder), say=lambda text: None)


def _check_digest(found: Identity, digest: str, source: str) -> None:
    if digest != found.digest:
        raise EngineryError(
            f"{source} holds the {found.kind} {found.digest}, and {digest} is asked for. Upload the right one, or ask "
            "for another"
        )


def _download(source: str, folder: Path) -> Path:
    from components.common.registry import download

    folder.mkdir()
    try:
        return download(source, folder)
    except Exception as error:  # each store's client has its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EngineryError(
            f"can't download {source}: {reason}. Is the artifact there, and may these credentials read it?"
        ) from error
