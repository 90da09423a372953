"""Check a release folder offline: layout, SHA256SUMS, signatures; bundle, report and verdict belong together."""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from pydantic import Field, ValidationError

from components.common.contracts.digests import digest_bytes, digest_file
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.foreign import read_yaml
from components.common.contracts.manifests import (
    ALL_FILES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Artifact,
    BundleManifest,
    ReportManifest,
    VerdictManifest,
    first_problem,
    is_plain_path,
    load,
)
from components.common.contracts.records import Precision, Record
from components.common.contracts.verdict import Thresholds, run_checks
from components.common.registry.keys import load_public_key, public_pem, read_key
from components.common.registry.trust import SIGNATURE, STATEMENTS, folder_problem
from components.common.runtimes import measured_plans

BUNDLE: Final = "bundle"
REPORT: Final = "report"
VERDICT: Final = "verdict"
PARTS: Final = (BUNDLE, REPORT, VERDICT)  # folders, each an artifact with its manifest
RECORD = "release.json"
BOM = "inputs.cdx.json"
CARD = "MODEL_CARD.md"
REPORT_CARD = "model_card.md"  # what it is a copy of
MODEL_FILES = ("MLmodel", "requirements.txt", "python_env.yaml")  # the release is a model of MLflow, too
SUMS = "SHA256SUMS"
OLD_SIGNATURE = "SHA256SUMS.sig"  # Ed25519, of releases up to version 0.1
_OLD_BYTES = 64
ROOT_FILES = (RECORD, BOM, CARD, *MODEL_FILES)  # what SUMS lists besides the three artifacts
REQUIRED = (*ROOT_FILES, *(f"{part}/{MANIFEST}" for part in PARTS))


class ReleaseRecord(Record):
    """release.json: which model this is."""

    schema_version: Literal[1] = 1
    name: str = Field(description="Of the registered model.")
    version: str = Field(description="In the registry; empty for a bundle that was named by its path.")
    aliases: tuple[str, ...] = Field(description="Of the version, when it was released.")
    registry: str = Field(
        description="Where it was registered, of a file its name alone; empty for a bundle that was named by its path."
    )
    created: str = Field(description="When it was released, in UTC: YYYY-MM-DDThh:mm:ssZ.")
    enginery: str = Field(description="Version of the package that wrote the release.")
    architecture: str
    precision: Precision = Field(description="What `mlflow.pyfunc.load_model` runs.")
    passed: bool = Field(description="Whether the verdict is a pass.")
    forced: None = Field(None, description="Of version 0.1.0, which wrote nothing else.")
    digests: dict[str, str] = Field(
        description="Manifest digests of dataset, model (what was exported), bundle, report and verdict."
    )
    key_fingerprint: str = Field("", description="Of the public key that belongs to the signature; empty for none.")

    @property
    def label(self) -> str:
        """Name and version, for a person."""
        return f"{self.name} version {self.version}" if self.version else self.name


_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")
_MAX_SUMS_BYTES = 1 << 20  # thousands of files
_UNLISTED = (SUMS, SIGNATURE, OLD_SIGNATURE)


def write_sums(folder: Path) -> bytes:
    """The content of SHA256SUMS for all files of a folder."""
    names = sorted(name for name, problem in found_files(folder) if not problem and name not in _UNLISTED)
    lines = [f"{digest_file(folder / name).removeprefix('sha256:')}  {name}\n" for name in names]
    return "".join(lines).encode()


def read_sums(data: bytes) -> tuple[dict[str, str], list[str]]:
    """Digest by file name, and what is wrong with the list itself."""
    entries: dict[str, str] = {}
    problems: list[str] = []
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        return {}, [f"{SUMS} is not text in UTF-8"]
    if lines.pop() != "":
        problems.append(f"{SUMS} ends in the middle of a line: it was cut")
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            problems.append(f"{SUMS} line {number} is not '<sha256>  <file>': {line[:80]!r}")
            continue
        name = match["name"]
        if problem := _name_problem(name):
            problems.append(f"{SUMS} line {number} names {name!r}, {problem}")
        elif name in entries:
            problems.append(f"{SUMS} line {number} names {name!r} a second time")
        else:
            entries[name] = "sha256:" + match["digest"]
    return entries, problems


def _name_problem(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "which leads out of the release"
    if name in _UNLISTED or not is_plain_path(name):
        return "which is no plain name of a file in the release"
    return ""


def found_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every file below a folder, as (name, what is wrong with its kind). Symbolic links are never followed."""
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    if prefix and not children:
        yield prefix.rstrip("/"), "is an empty folder, which no release has"
    for entry in children:
        name = prefix + entry.name
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield from found_files(Path(entry.path), f"{name}/")
        elif stat.S_ISLNK(mode):
            yield name, "is a symbolic link; a release holds plain files"
        else:
            yield name, "" if stat.S_ISREG(mode) else "is no regular file; a release holds plain files"


def copy_release(folder: Path, copy: Path, shown: str) -> Path:
    """Copy a release to where nobody can swap what is checked then.

    Args:
        folder: of the release, which anybody may have written: devices and files beside its list have no end.
        copy: a new folder.
        shown: where it is from, for people.

    Raises:
        UserError: it is no release.
        EngineryError: it holds other files than its list, or more than there is room for.
    """
    entries, problems = read_sums(read_list(folder))
    if problems := [*problems, *check_files(folder, entries, content=False)]:
        raise EngineryError(f"the release {shown} is refused: {'; '.join(problems)}", code="release-refused")
    needed = sum((folder / name).stat().st_size for name, _ in found_files(folder))
    if needed > (free := shutil.disk_usage(copy.parent).free):
        where = copy.absolute().parents[1]
        message = f"the release {shown} has {needed:,} bytes, and {where} has room for {free:,}; make room there"
        raise EngineryError(message, code="no-space")
    return shutil.copytree(folder, copy, symlinks=True)


def check_files(folder: Path, entries: dict[str, str], *, content: bool = True) -> Iterable[str]:
    """Yield a line for each file that differs between a folder and its list; without `content` by names and kinds."""
    seen = set()
    for name, problem in found_files(folder):
        seen.add(name)
        if problem:
            yield f"{name} {problem}"
        elif name in _UNLISTED:
            continue
        elif name not in entries:
            yield f"{name} is not listed in {SUMS}: it was added"
        elif content and (found := digest_file(folder / name)) != entries[name]:
            yield f"{name} was changed: its digest is {found}, {SUMS} says {entries[name]}"
    for name in sorted(entries.keys() - seen):
        yield f"{name} is missing"


PublicKey = EllipticCurvePublicKey | Ed25519PublicKey


def public_key(file: Path) -> PublicKey:
    """The key to check a release with: PEM.

    Raises:
        UserError: the file is no such key.
    """
    data = read_key(file)
    if b"PRIVATE KEY" in data:
        raise UserError(
            f"{file} is a private key, which only the signer should have; a signature is checked with the public "
            f"one: `openssl pkey -in {file} -pubout -out enginery.pub`",
            code="private-key-given",
            setting="--key",
        )
    with suppress(ValueError, UnsupportedAlgorithm):
        if isinstance(key := load_pem_public_key(data), Ed25519PublicKey):
            return key
    try:
        return load_public_key(data, str(file))
    except ValueError as error:
        raise UserError(str(error), code="not-a-public-key", setting="--key") from None


def fingerprint(key: PublicKey) -> str:
    """Return the fingerprint of a key: the digest of its DER form, as `openssl pkey -pubin -outform DER` writes it."""
    return digest_bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def is_signed_by(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    """True if the key's owner signed exactly these bytes."""
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The three artifacts of a release, loaded with all digests checked."""

    bundle: Artifact[BundleManifest]
    report: Artifact[ReportManifest]
    verdict: Artifact[VerdictManifest]

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the artifacts, from the dataset on."""
        return {
            "dataset": self.report.manifest.inputs.get("dataset", ""),
            "model": self.bundle.manifest.inputs.get("model", ""),
            BUNDLE: self.bundle.digest,
            REPORT: self.report.digest,
            VERDICT: self.verdict.digest,
        }

    @property
    def parts(self) -> dict[str, str]:
        """Digests of the three alone."""
        return {part: self.digests[part] for part in PARTS}


def load_chain(bundle: Path, report: Path, verdict: Path) -> Chain:
    """Read the three artifacts and check every file of each.

    Raises:
        EngineryError: one of them is not what its manifest says.
    """
    return Chain(
        bundle=load(bundle, BundleManifest, verify=ALL_FILES),
        report=load(report, ReportManifest, verify=ALL_FILES),
        verdict=load(verdict, VerdictManifest, verify=ALL_FILES),
    )


def contradictions(chain: Chain) -> Iterator[str]:
    """Yield the contradictions between the three, a line each. A verdict that is no pass is none of these."""
    bundle, report, verdict = chain.bundle, chain.report, chain.verdict
    accuracy, benchmark = report.manifest.accuracy, report.manifest.benchmark
    links = (
        ("report/manifest.json", "bundle", report.manifest.inputs.get("bundle"), bundle.digest),
        ("report/manifest.json", "bundle (accuracy)", accuracy.bundle_digest, bundle.digest),
        ("report/manifest.json", "bundle (speed)", benchmark.bundle_digest, bundle.digest),
        ("report/manifest.json", "dataset", report.manifest.inputs.get("dataset"), accuracy.dataset_digest),
        ("verdict/manifest.json", "report", verdict.manifest.inputs.get("report"), report.digest),
        ("verdict/manifest.json", "bundle", verdict.manifest.inputs.get("bundle"), bundle.digest),
    )
    for file, name, said, found in links:
        if said != found:
            yield f"{file} is about another {name}: it says {said}, here is {found}"
    if "model" not in bundle.manifest.inputs:
        yield "bundle/manifest.json does not say what it was exported from"
    measured = measured_plans(accuracy)
    for engine in bundle.manifest.engines:
        if engine.file not in measured:
            yield f"bundle/{engine.file} was not measured: report/manifest.json has no row of TensorRT on it"
    yield from _verdict_problems(chain)


def _verdict_problems(chain: Chain) -> Iterator[str]:
    """Yield what the report contradicts in this verdict: the checks are run again, by the thresholds it names."""
    decision, accuracy = chain.verdict.manifest, chain.report.manifest.accuracy
    try:
        thresholds = Thresholds.model_validate(decision.config)
    except ValidationError as error:
        yield f"verdict/manifest.json names thresholds that are none: {error.errors()[0]['msg']}"
        return
    if thresholds.precision != decision.precision:
        yield f"verdict/manifest.json is on {decision.precision} by thresholds for {thresholds.precision}"
    present = {row.precision for row in accuracy.rows}
    if missing := {"fp32", thresholds.precision} - present:
        yield f"report/manifest.json has no row of {', '.join(sorted(missing))}, so no verdict follows from it"
        return
    checks = run_checks(thresholds, accuracy, chain.report.manifest.benchmark)
    again = {check.name: check.verdict for check in checks}
    said = {check.name: check.verdict for check in decision.checks}
    if again != said:
        different = sorted(name for name in again.keys() | said.keys() if again.get(name) != said.get(name))
        own, due = (values.get(different[0], "no such check") for values in (said, again))
        yield f"verdict/manifest.json does not follow from the report: {different[0]} is {own}, and must be {due}"
    if decision.passed != all(value == "pass" for value in said.values()):
        yield f"verdict/manifest.json says passed {json.dumps(decision.passed)}, and its checks say otherwise"


def unlisted(chain: Chain) -> Iterator[str]:
    """Files in the artifacts' folders that their manifests don't name."""
    for part, artifact in ((BUNDLE, chain.bundle), (REPORT, chain.report), (VERDICT, chain.verdict)):
        for file in sorted(artifact.path.rglob("*")):
            name = file.relative_to(artifact.path).as_posix()
            if not file.is_dir() and name != MANIFEST and name not in artifact.manifest.files:
                yield f"{part}/{name} is not named in {part}/{MANIFEST}: it was added"


_MAX_SHOWN = 100  # characters of a foreign text in a message
LOADER = "components.promote.pyfunc"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a check; the release is valid if there are no problems."""

    problems: tuple[str, ...]
    record: ReleaseRecord | None = None
    num_files: int = 0
    signature: str = ""
    """Its state, for a person."""
    chain: Chain | None = None
    """As it was read for this, so that nobody needs to read it again."""


def verify(folder: Path, key: PublicKey | None = None) -> Verification:
    """Check signature, files, and the chain from dataset to verdict. Nothing in the release is run.

    Args:
        folder: what `enginery release` wrote.
        key: the signer's; with it, a missing signature is a problem. Without it the caller asks the machine's policy.

    Raises:
        UserError: it is no release.
    """
    listed = read_list(folder)
    problems, signature = _check_signature(folder, listed, key)
    entries, wrong = read_sums(listed)
    problems += wrong
    problems += [f"{name} is not listed in {SUMS}; every release has one" for name in REQUIRED if name not in entries]
    problems += [f"{name} has no place in a release" for name in entries if not _has_a_place(name)]
    problems += check_files(folder, entries)
    problems += [
        f"{name} has more than {MAX_MANIFEST_BYTES:,} bytes"
        for name in (name for name in ROOT_FILES if (folder / name).is_file())
        if (folder / name).stat().st_size > MAX_MANIFEST_BYTES
    ]
    if problems:  # what the files say means something only where they are those of the list
        return Verification(problems=tuple(problems), signature=signature, num_files=len(entries))
    try:
        record = ReleaseRecord.model_validate_json((folder / RECORD).read_bytes())
        chain = load_chain(*(folder / part for part in PARTS))
    except ValidationError as error:
        return Verification(problems=(f"{RECORD} is not valid: {first_problem(error)}",), signature=signature)
    except EngineryError as error:
        return Verification(problems=(str(error),), signature=signature)
    found = [*unlisted(chain), *contradictions(chain), *_record_problems(folder, record, chain)]
    found += [*_model_problems(folder, chain), *_bom_problems(folder, chain)]
    return Verification(problems=tuple(found), record=record, num_files=len(entries), signature=signature, chain=chain)


def read_list(folder: Path) -> bytes:
    """The content of a release's SHA256SUMS.

    Raises:
        UserError: there is none.
        EngineryError: it is a link, or larger than that of any release.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one that `enginery release` wrote", code="not-a-release")
    file = folder / SUMS
    if file.is_symlink():
        raise EngineryError(f"{file} is a symbolic link; a release holds plain files", code="symbolic-link")
    if not file.is_file():
        message = f"{folder} is no release: it has no {SUMS}. Name a folder that `enginery release` wrote"
        raise UserError(message, code="not-a-release")
    if file.stat().st_size > _MAX_SUMS_BYTES:
        raise EngineryError(f"{file} has more than {_MAX_SUMS_BYTES:,} bytes, as no release has", code="not-a-release")
    return file.read_bytes()


def _check_signature(folder: Path, listed: bytes, key: PublicKey | None) -> tuple[list[str], str]:
    """Return problems of the signature, and its state for a person."""
    name = OLD_SIGNATURE if isinstance(key, Ed25519PublicKey) else SIGNATURE
    files = [folder / name] if key is not None else [folder / SIGNATURE, folder / OLD_SIGNATURE]
    signed = any(file.is_file() and not file.is_symlink() for file in files)
    if key is None:
        if signed:
            return [], "NOT CHECKED: name the signer's public key with --key"
        return [], "none: this release is not signed, so whoever could write it could also change it"
    if not signed:
        other = (folder / (SIGNATURE if name == OLD_SIGNATURE else OLD_SIGNATURE)).is_file()
        why = "it was signed by a key of another kind" if other else "this release is not signed"
        return [f"{name} is missing: {why}"], "missing"
    if not isinstance(key, Ed25519PublicKey):
        problem = folder_problem(folder, public_pem(key))
    else:
        valid = files[0].stat().st_size == _OLD_BYTES and is_signed_by(key, files[0].read_bytes(), listed)
        problem = "" if valid else f"{name} is no signature of {SUMS} by that key"
    if problem:
        return [f"{problem} ({fingerprint(key)})"], "wrong"
    return [], f"valid, by the key {fingerprint(key)}"


def _has_a_place(name: str) -> bool:
    return (
        name in ROOT_FILES
        or ("/" not in name and fnmatch(name, STATEMENTS))
        or (name.split("/")[0] in PARTS and "/" in name)
    )


def _record_problems(folder: Path, record: ReleaseRecord, chain: Chain) -> Iterator[str]:
    for name in {**chain.digests, **record.digests}:
        said, digest = record.digests.get(name), chain.digests.get(name)
        if said != digest:
            yield f"{RECORD} says {name} {said}, and it is {digest}"
    passed = chain.verdict.manifest.passed
    if record.passed != passed:
        yield f"{RECORD} says passed {json.dumps(record.passed)}, and the verdict says {json.dumps(passed)}"
    if not passed:
        yield "verdict/manifest.json is not a pass"
    if record.precision != chain.verdict.manifest.served_precision:
        yield f"{RECORD} says {record.precision}, and the verdict's choice is {chain.verdict.manifest.served_precision}"
    if record.architecture != chain.bundle.manifest.architecture:
        yield f"{RECORD} says {record.architecture}, and the bundle is {chain.bundle.manifest.architecture}"
    if chain.report.manifest.files.get(REPORT_CARD) is None:
        yield f"{REPORT}/{REPORT_CARD} is missing, which every report has"
    elif (folder / CARD).read_bytes() != (folder / REPORT / REPORT_CARD).read_bytes():
        yield f"{CARD} is not the report's model_card.md"


def _model_problems(folder: Path, chain: Chain) -> Iterator[str]:
    """Yield what would make MLflow run something else than our loader on this bundle."""
    try:
        description = read_yaml(folder / "MLmodel")
        flavors = description["flavors"]
        own = flavors["python_function"]
        config = own["config"]
        said = {"flavors": ", ".join(sorted(flavors)), **{name: own.get(name) for name in ("loader_module", "data")}}
        said |= {name: config.get(name) for name in ("bundle_digest", "precision")}
        extra = ", ".join(sorted(own.keys() - {"loader_module", "data", "config", "python_version", "env"}))
    except (AttributeError, KeyError, TypeError, ValueError):
        yield "MLmodel is not the description of a model that enginery wrote"
        return
    due: dict[str, Any] = {"flavors": "python_function", "loader_module": LOADER, "data": BUNDLE}
    due |= {"bundle_digest": chain.bundle.digest, "precision": chain.verdict.manifest.served_precision}
    for name, value in due.items():
        if said[name] != value:
            own_value = said[name][:_MAX_SHOWN] if isinstance(said[name], str) else "no text"
            yield f"MLmodel says {name} {own_value}, and it must be {value}"
    if extra:
        yield f"MLmodel has {extra[:_MAX_SHOWN]}, which no release has"


def _bom_problems(folder: Path, chain: Chain) -> Iterator[str]:
    try:
        bom = json.loads((folder / BOM).read_bytes())
        listed = {entry["bom-ref"]: entry for entry in (*bom["components"], bom["metadata"]["component"])}
        said = {name: "sha256:" + listed[name]["hashes"][0]["content"] for name in ("dataset", "model", BUNDLE)}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        yield f"{BOM} is not the list of a release: dataset, model and bundle with their digests"
        return
    for name, digest in said.items():
        if digest != chain.digests[name]:
            yield f"{BOM} says {name} {digest[:_MAX_SHOWN]}, and it is {chain.digests[name]}"
