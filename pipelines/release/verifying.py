"""Checks a release folder without a network, a registry or anything but its own files and the signer's public key."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from components.common.errors import EngineryError, UserError
from components.common.integrity import first_problem
from components.common.records import GateCheck
from components.common.trust import SIGNATURE, STATEMENTS, folder_problem, public_pem
from pipelines.release.chain import Chain, contradictions, load_chain, unlisted
from pipelines.release.layout import (
    BOM,
    BUNDLE,
    CARD,
    OLD_SIGNATURE,
    RECORD,
    REPORT,
    REPORT_CARD,
    REQUIRED,
    ROOT_FILES,
    SUMS,
    VERDICT,
    ReleaseRecord,
)
from pipelines.release.signing import PublicKey, fingerprint, is_signed_by
from pipelines.release.sums import check_files, read_sums

LOADER = "components.promote.pyfunc"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found; valid where there are no problems."""

    problems: tuple[str, ...]
    record: ReleaseRecord | None = None
    num_files: int = 0
    signature: str = ""
    """What can be said of it, for a person."""
    checks: tuple[GateCheck, ...] = ()
    """The gate's, each with what was measured and its threshold."""


def verify(folder: Path, key: PublicKey | None = None) -> Verification:
    """Check signature, files, and the chain from data set to verdict. Nothing in the release is run.

    Args:
        folder: what `enginery release` wrote.
        key: the signer's; with it, a missing signature is a problem. Without it the caller asks the machine's policy.

    Raises:
        UserError: it is no release.
    """
    listed = _read_list(folder)
    problems, signature = _check_signature(folder, listed, key)
    entries, wrong = read_sums(listed)
    problems += wrong
    problems += [f"{name} is not listed in {SUMS}; every release has one" for name in REQUIRED if name not in entries]
    problems += [f"{name} has no place in a release" for name in entries if not _has_a_place(name)]
    problems += check_files(folder, entries)
    if problems:  # what the files say means something only where they are those of the list
        return Verification(problems=tuple(problems), signature=signature, num_files=len(entries))
    try:
        record = ReleaseRecord.model_validate_json((folder / RECORD).read_bytes())
        chain = load_chain(*(folder / part for part in (BUNDLE, REPORT, VERDICT)))
    except ValidationError as error:
        return Verification(problems=(f"{RECORD} is not valid: {first_problem(error)}",), signature=signature)
    except EngineryError as error:
        return Verification(problems=(str(error),), signature=signature)
    found = [*unlisted(chain), *contradictions(chain), *_record_problems(folder, record, chain)]
    found += [*_model_problems(folder, chain), *_bom_problems(folder, chain)]
    return Verification(
        problems=tuple(found),
        record=record,
        num_files=len(entries),
        signature=signature,
        checks=chain.verdict.manifest.checks,
    )


def _read_list(folder: Path) -> bytes:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one that `enginery release` wrote")
    file = folder / SUMS
    if file.is_symlink():
        raise EngineryError(f"{file} is a symbolic link; a release holds plain files")
    if not file.is_file():
        raise UserError(f"{folder} is no release: it has no {SUMS}. Name a folder that `enginery release` wrote")
    return file.read_bytes()


def _check_signature(folder: Path, listed: bytes, key: PublicKey | None) -> tuple[list[str], str]:
    """What is wrong with the signature, and what to say of it."""
    name = OLD_SIGNATURE if isinstance(key, Ed25519PublicKey) else SIGNATURE
    files = [folder / name] if key is not None else [folder / SIGNATURE, folder / OLD_SIGNATURE]
    signed = any(file.is_file() and not file.is_symlink() for file in files)
    if key is None:
        if signed:
            return [], "NOT CHECKED: name the signer's public key with --key"
        return [], "none: this release is not signed, so whoever could write it could also change it"
    if not signed:
        return [f"{name} is missing: this release is not signed"], "missing"
    if not isinstance(key, Ed25519PublicKey):
        problem = folder_problem(folder, public_pem(key))
    else:
        valid = is_signed_by(key, files[0].read_bytes(), listed)
        problem = "" if valid else f"{name} is no signature of {SUMS} by that key"
    if problem:
        return [f"{problem} ({fingerprint(key)})"], "wrong"
    return [], f"valid, by the key {fingerprint(key)}"


def _has_a_place(name: str) -> bool:
    return (
        name in ROOT_FILES
        or fnmatch(name, STATEMENTS)
        or (name.split("/")[0] in (BUNDLE, REPORT, VERDICT) and "/" in name)
    )


def _record_problems(folder: Path, record: ReleaseRecord, chain: Chain) -> Iterator[str]:
    for name, digest in chain.digests.items():
        if record.digests.get(name) != digest:
            yield f"{RECORD} says {name} {record.digests.get(name)}, and it is {digest}"
    passed = chain.verdict.manifest.passed
    if record.passed != passed:
        yield f"{RECORD} says passed {json.dumps(record.passed)}, and the verdict says {json.dumps(passed)}"
    if not passed and record.forced is None:
        yield "verdict/manifest.json is not a pass, and nobody is recorded to have overruled it"
    if record.precision != chain.verdict.manifest.served_precision:
        yield f"{RECORD} says {record.precision}, and the verdict's choice is {chain.verdict.manifest.served_precision}"
    if record.architecture != chain.bundle.manifest.architecture:
        yield f"{RECORD} says {record.architecture}, and the bundle is {chain.bundle.manifest.architecture}"
    if chain.report.manifest.files.get(REPORT_CARD) is None:
        yield f"{REPORT}/{REPORT_CARD} is missing, which every report has"
    elif (folder / CARD).read_bytes() != (folder / REPORT / REPORT_CARD).read_bytes():
        yield f"{CARD} is not the report's model_card.md"


def _model_problems(folder: Path, chain: Chain) -> Iterator[str]:
    """Whether loading the folder with MLflow runs our loader on this bundle, and nothing else."""
    try:
        description = yaml.safe_load((folder / "MLmodel").read_bytes())
        flavors = description["flavors"]
        own = flavors["python_function"]
        config = own["config"]
        said = {"flavors": sorted(flavors), "loader_module": own.get("loader_module"), "data": own.get("data")}
        said |= {name: config.get(name) for name in ("bundle_digest", "precision")}
        extra = sorted(own.keys() - {"loader_module", "data", "config", "python_version", "env"})
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError):
        yield "MLmodel is not the description of a model that enginery wrote"
        return
    due: dict[str, Any] = {"flavors": ["python_function"], "loader_module": LOADER, "data": BUNDLE}
    due |= {"bundle_digest": chain.bundle.digest, "precision": chain.verdict.manifest.served_precision}
    for name, value in due.items():
        if said[name] != value:
            yield f"MLmodel says {name} {said[name]}, and it must be {value}"
    if extra:
        yield f"MLmodel has {', '.join(extra)}, which no release has"


def _bom_problems(folder: Path, chain: Chain) -> Iterator[str]:
    try:
        bom = json.loads((folder / BOM).read_bytes())
        listed = {entry["bom-ref"]: entry for entry in (*bom["components"], bom["metadata"]["component"])}
        said = {name: f"sha256:{listed[name]['hashes'][0]['content']}" for name in ("dataset", "model", BUNDLE)}
    except (ValueError, KeyError, IndexError, TypeError):
        yield f"{BOM} is not the list of a release: data set, model and bundle with their digests"
        return
    for name, digest in said.items():
        if digest != chain.digests[name]:
            yield f"{BOM} says {name} {digest}, and it is {chain.digests[name]}"
