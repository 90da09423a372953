"""Promotions, keys and forgeries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from components.common.contracts.digests import canonical_json
from components.common.contracts.manifests import seal_of
from components.common.process.steplog import StepLog
from components.common.registry.tracking import step_run
from components.promote.config import PromoteConfig
from components.promote.run import run as promote

NAME = "digits"


def promote_parts(parts: dict[str, Path], dataset: Path, output: Path) -> None:
    with step_run("promote") as run:
        promote(PromoteConfig(registered_model=NAME), StepLog("promote", run), **parts, dataset=dataset, output=output)


def reseal(manifest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest as a forger would, with a seal that fits."""
    record = json.loads(manifest.read_bytes())
    change(record)
    if "seal" in record:
        record["seal"] = seal_of(record)
    manifest.write_bytes(canonical_json(record))


def write_keys(stem: Path, passphrase: bytes = b"") -> tuple[Path, Path]:
    key = generate_private_key(SECP256R1())
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    private, public = stem.with_suffix(".key"), stem.with_suffix(".pub")
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
