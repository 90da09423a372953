"""Content digests: sha256 of files and of canonical JSON. A digest is written "sha256:<64 hex digits>"."""

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_bytes(data: bytes) -> str:
    """Digest of a byte string."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Digest of a file's content, read in chunks."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def short(digest: str) -> str:
    """The start of a digest, enough to tell it from others beside it."""
    return digest.removeprefix("sha256:")[:12]


def canonical_json(value: Any) -> bytes:
    """The one serialization of a JSON value that digests are taken of: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """Digest of a JSON value, independent of key order and layout."""
    return digest_bytes(canonical_json(value))
