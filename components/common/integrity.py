"""Whether an artifact is what its manifest says, and the manifest what was sealed."""

import json
from pathlib import Path
from typing import Any

from components.common.digests import digest_file, digest_json
from components.common.errors import UserError

SCHEMA_VERSION = 2  # of manifests; 1 had no seal, and `migrated` reads it
# Kind of an artifact -> the step that writes it.
_STEPS = {
    "dataset": "preprocess",
    "checkpoint": "train",
    "bundle": "export",
    "report": "validate",
    "verdict": "gate",
    "promotion": "promote",
}


def writer_of(kind: str) -> str:
    """The command of the step that writes a kind of artifact."""
    return f"`python -m components.{_STEPS.get(kind, kind)}`"


def how_to_renew(kind: str) -> str:
    """What to do about an artifact that is of no use."""
    return f"write it again with {writer_of(kind)} (in a pipeline: enginery run ... --no-reuse)"


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


def migrated(record: dict[str, Any], file: Path, kind: str) -> dict[str, Any]:
    """A manifest in today's schema.

    Raises:
        UserError: its schema version is unknown.
    """
    version = record.get("schema_version")
    if not record or version == SCHEMA_VERSION:
        return record
    if version == 1:  # the same without a seal
        current = {**record, "schema_version": SCHEMA_VERSION}
        return {**current, "seal": seal_of(current)}
    reads = f"{file} has schema_version {'none' if version is None else version}, and this enginery reads 1 to"
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"{reads} {SCHEMA_VERSION}: a newer enginery wrote it. Update enginery (git pull, then make install), "
            f"or {how_to_renew(kind)}"
        )
    raise UserError(f"{reads} {SCHEMA_VERSION}. No enginery wrote it so; {how_to_renew(kind)}")


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
