"""Whether an artifact is what its manifest says, and the manifest what was sealed."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.common.digests import canonical_json, digest_file, digest_json
from components.common.errors import EngineryError, UserError

SCHEMA_VERSION = 2  # of manifests; 1 had no seal, and `migrated` reads it
# Kind of an artifact -> the step that writes it.
_STEPS = {
    "dataset": "preprocess",
    "dataset_part": "preprocess --part",
    "checkpoint": "train",
    "bundle": "export",
    "report": "validate",
    "verdict": "gate",
    "promotion": "promote",
}


def writer_of(kind: str) -> str:
    """The command of the step that writes a kind of artifact."""
    if kind == "repository":
        return "`enginery serve export`"
    return f"`python -m components.{_STEPS.get(kind, kind)}`"


def how_to_renew(kind: str) -> str:
    """What to do about an artifact that is of no use."""
    if kind == "repository":
        return f"write it again with {writer_of(kind)}"
    return f"write it again with {writer_of(kind)} (in a pipeline: enginery run ... --no-reuse)"


def read_manifest(file: Path, kind: str) -> bytes:
    """A manifest as it is on disk.

    Raises:
        UserError: there is none, or it can't be read.
    """
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{file.parent} is no finished {kind}: it has no {file.name}. Name the output of a finished step, "
            f"here of {writer_of(kind)}"
        ) from None
    except OSError as error:
        raise UserError(f"can't read {file}: {error.strerror}; make it readable for you") from None


def seal_of(record: dict[str, Any]) -> str:
    """The seal that belongs to a manifest: the digest of all its other fields."""
    return digest_json({name: value for name, value in record.items() if name != "seal"})


def claims_of(data: bytes) -> dict[str, Any]:
    """What a manifest says of itself, unchecked; nothing where it is too damaged to say."""
    try:
        record = json.loads(data, parse_constant=_refuse)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def first_problem(error: ValidationError) -> str:
    """What is wrong with a manifest, behind the field that it is about; no field where it is no JSON at all."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def migrated(record: dict[str, Any], file: Path, kind: str) -> dict[str, Any]:
    """A manifest in today's schema.

    Raises:
        UserError: its schema version is unknown.
    """
    if not record:
        return record
    version = record.get("schema_version")
    if version is not None and type(version) is not int:  # true is an int, too
        raise UserError(
            f"{file} has schema_version {json.dumps(version)}, which must be a whole number without quotes. "
            f"No enginery wrote it so; {how_to_renew(kind)}"
        )
    if version == SCHEMA_VERSION:
        return record
    if version == 1:  # the same without a seal
        return {**record, "schema_version": SCHEMA_VERSION}
    reads = f"{file} has schema_version {'none' if version is None else version}, and this enginery reads 1 to"
    if version is not None and version > SCHEMA_VERSION:
        raise UserError(
            f"{reads} {SCHEMA_VERSION}: a newer enginery wrote it. Update enginery (git pull, then make install), "
            f"or {how_to_renew(kind)}"
        )
    raise UserError(f"{reads} {SCHEMA_VERSION}. No enginery wrote it so; {how_to_renew(kind)}")


def check_seal(data: bytes, file: Path, kind: str) -> None:
    """Whether a valid manifest is, to the byte, what was sealed: its bytes are the artifact's identity.

    Raises:
        EngineryError: it was edited since.
    """
    record = claims_of(data)
    if problem := _seal_problem(record, data):
        raise EngineryError(
            f"{file} was edited after it was sealed: {problem}. Put the original back, or {how_to_renew(kind)}"
        )


def _seal_problem(record: dict[str, Any], data: bytes) -> str:
    seal = record.get("seal")
    if record.get("schema_version") == 1:
        return "" if "seal" not in record else f"it says schema_version 1, which had no seal, and has the seal {seal}"
    try:
        if seal == seal_of(record):
            return "" if data == canonical_json(record) else "its content is the same, its layout is not"
    except ValueError:  # what has no canonical form, such as 1e999, was never sealed
        pass
    return f"its content does not fit its seal {seal or '(empty)'}"


def file_problem(path: Path, name: str, size_bytes: int, digest: str | None) -> str:
    """What is wrong with one file of the artifact at `path`; empty when nothing is. No `digest`: the size alone."""
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()):
        return f"the manifest of {path} names a file outside the artifact: {name}"
    if not file.is_file():
        return f"{path} is damaged: {name} is missing"
    found_bytes = file.stat().st_size
    if found_bytes != size_bytes:
        return f"{path} is damaged: {name} has {found_bytes} bytes, its manifest says {size_bytes}"
    if digest is not None and (found := digest_file(file)) != digest:
        return f"{file} was changed after it was sealed: {found}, its manifest says {digest}"
    return ""
