"""Fetch an artifact or a release from a store, a registry or a volume: nothing but what its digest covers."""

import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

from components.common.contracts.digests import digest_bytes, digest_file
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    check_seal,
    claims_of,
    file_problem,
    is_plain_path,
    read_manifest,
)
from components.common.contracts.records import FileEntry
from components.common.registry.trust import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE,
    check_chain,
    check_folder,
    find_policy,
    read_statements,
    statement_names,
)
from enginery.new_folders import check_new, check_room, finish, temporary_folder
from enginery.release.verify import OLD_SIGNATURE, SUMS, copy_release, read_list, read_sums

OCI = "oci://"
_KIND = re.compile(r"[a-z][a-z0-9_]{0,40}")  # stands in messages
_NUM_DOWNLOADS = 8  # at once


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Kind, digest and files of an artifact of any kind, or of a release, by its manifest."""

    kind: str
    digest: str  # of the manifest or of SHA256SUMS, which cover every file
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
            "what `enginery serve export` wrote",
            code="no-artifact",
        )
    data = read_manifest(file, "artifact")
    record = claims_of(data)
    try:
        files = {str(name): FileEntry.model_validate(entry) for name, entry in record["files"].items()}
        kind, inputs = record["kind"], {str(name): str(digest) for name, digest in record["inputs"].items()}
        if not _KIND.fullmatch(kind):
            raise ValueError("no kind of artifact")
    except (KeyError, AttributeError, TypeError, ValueError):  # of which pydantic's errors are
        raise EngineryError(
            f"{file} is no manifest of enginery, or is damaged. Write the artifact again", code="manifest-damaged"
        ) from None
    check_seal(record, data, file, kind)
    for name in files:
        if not is_plain_path(name) or name == MANIFEST:
            raise EngineryError(
                f"{file} names a file outside the artifact: {name}. Write the artifact again", code="file-outside"
            )
    return Identity(kind=kind, digest=digest_bytes(data), inputs=inputs, files=files)


def fetch(source: str, target: Path, digest: str = "") -> Identity:
    """Bring an artifact or a release from `source` to the new folder `target`, complete or not at all.

    Files that its manifest does not list stay behind. Where `target` is there already and right, nothing is done, so
    that a pod that is started again resumes.

    Args:
        source: a folder, a URI that MLflow can download (s3://, gs://, mlflow-artifacts:/ and others), or an address in
            an OCI registry.
        target: where it is to be.
        digest: of its manifest; of a release, of SHA256SUMS. What the manifest says of its inputs is a claim that
            anybody can make. Empty for an address that ends with @sha256:...

    Raises:
        UserError: there is no such artifact, or `target` is something else.
        EngineryError: it is another one than asked for, is damaged, or can't be downloaded.
    """
    if not digest and not (source.startswith(OCI) and "@sha256:" in source):
        message = f"{source} may hold anything; say what is asked for with --digest sha256:..."
        raise UserError(message, code="no-digest", setting="--digest")
    if target.exists() and digest:
        return _checked(target, digest, str(target))
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    check_new(target, "an artifact")
    with temporary_folder(target) as folder:
        copy = folder / "copy"
        pulled = source.startswith(OCI)
        if urlparse(source).scheme and not pulled:
            _download(source.rstrip("/"), copy, digest)
        else:
            origin = _pull(source, folder / "all", digest) if pulled else Path(source)
            if not is_release(origin):
                _copy(origin, copy, source, digest, pulled)
            elif pulled:
                origin.rename(copy)
            else:
                copy_release(origin, copy, source)
        found = _checked(copy, digest, source)
        try:
            finish(copy, target)
        except UserError:
            if not target.exists():
                raise
            return _checked(target, found.digest, str(target))  # another process was faster
    return found


def _copy(origin: Path, copy: Path, source: str, digest: str, remote: bool) -> None:
    """Copy what the manifest lists, the signature and the statements."""
    found = read_identity(origin)
    _check_digest(found, digest, source)
    for name, entry in {**found.files, MANIFEST: None}.items():
        if entry is not None and (problem := file_problem(origin, name, entry.size_bytes, None)):
            raise EngineryError(f"{problem}. Upload the artifact to {source} again", code="file-damaged")
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if remote:
            (origin / name).rename(copy / name)
        else:
            shutil.copyfile(origin / name, copy / name)
    for file in (SIGNATURE, *read_statements(origin)):
        if (origin / file).is_file() and not (origin / file).is_symlink():  # whose target nobody asked for
            shutil.copyfile(origin / file, copy / file)


def is_release(folder: Path) -> bool:
    """True if a folder is what `enginery release` wrote."""
    return (folder / SUMS).is_file() and not (folder / MANIFEST).is_file()


def _checked(folder: Path, digest: str, source: str) -> Identity:
    """Return what a folder holds, all of it as its digest says and trusted."""
    if is_release(folder):
        return _checked_release(folder, digest, source)
    found = read_identity(folder)
    _check_digest(found, digest, source)
    for name, entry in found.files.items():
        if problem := file_problem(folder, name, entry.size_bytes, entry.digest):
            raise EngineryError(
                f"what lies at {source} is not what was sealed: {problem}. Upload it again", code="file-damaged"
            )
    what = f"the {found.kind} at {source}"
    check_folder(what, folder)
    parts = {**found.inputs, found.kind: found.digest}
    digests: dict[str, str] = {part: parts[part] for part in ("bundle", "report", "verdict") if part in parts}
    policy = find_policy()
    if "bundle" in digests or (policy is not None and policy.environment):
        check_chain(what, digests, read_statements(folder), say=lambda text: None)
    return found


def _checked_release(folder: Path, digest: str, source: str) -> Identity:
    from enginery.serving.sources import open_release

    files, _ = read_sums(read_list(folder))
    entries = {
        name: FileEntry(size_bytes=(folder / name).stat().st_size, digest=listed)
        for name, listed in files.items()
        if (folder / name).is_file()
    }
    found = Identity(kind="release", digest=digest_file(folder / SUMS), inputs={}, files=entries)
    _check_digest(found, digest, source)
    open_release(folder, source)
    return found


def _check_digest(found: Identity, digest: str, source: str) -> None:
    if digest and digest != found.digest:
        raise EngineryError(
            f"{source} holds the {found.kind} {found.digest}, and {digest} is asked for. Upload the right one, or ask "
            "for another",
            code="other-digest",
        )


def _pull(source: str, folder: Path, digest: str) -> Path:
    from enginery.release.oci import pull, read_address

    folder.mkdir()
    address = read_address(source)
    if not (address.tag or address.digest):  # as `enginery push` names it
        address = replace(address, tag=digest.removeprefix("sha256:"))
    pull(address, folder)
    return folder


def _download(source: str, folder: Path, digest: str) -> None:
    """Bring from a store what the manifest lists, once that is the one asked for, and what is signed beside it.

    No file is brought that is larger than its manifest says, or than the disk has room for; a store whose listing
    tells another size than it then sends is found out only by the digests.
    """
    from components.common.registry.model_registry import check_client
    from components.common.registry.tracking import DOWNLOAD_LIMITS, request_limits

    folder.mkdir()
    try:
        with request_limits(DOWNLOAD_LIMITS):  # of the whole process, for all threads
            _download_listed(source, folder, digest)
    except EngineryError:
        raise
    except Exception as error:  # each store's client has its own
        check_client(source, error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"can't download {source}: {reason}. Is the artifact there, and may these credentials read it?"
        raise EngineryError(message, code="download-failed") from error


def _download_listed(source: str, folder: Path, digest: str) -> None:
    from components.common.registry.model_registry import download, list_files
    from components.common.registry.tracking import check_credentials

    check_credentials(source)
    there = list_files(source)
    main = MANIFEST if MANIFEST in there else SUMS
    _check_sizes(source, folder, {main: MAX_MANIFEST_BYTES}, there)
    download(f"{source}/{main}", folder / main)
    if main == SUMS:
        listed = [*read_sums(read_list(folder))[0]]
        found = Identity(kind="release", digest=digest_file(folder / SUMS), inputs={}, files={})
    else:
        found = read_identity(folder)
        listed = [*found.files]
    _check_digest(found, digest, source)
    for parent in {PurePosixPath(name).parent for name in listed} - {PurePosixPath(".")}:
        there |= {f"{parent}/{name}": size_bytes for name, size_bytes in list_files(f"{source}/{parent}").items()}
    most = {name: found.files[name].size_bytes if found.files else there.get(name, 0) for name in listed}
    signed = [name for name in (SIGNATURE, OLD_SIGNATURE) if name in there] + statement_names(there)
    most |= dict.fromkeys(signed, MAX_SIGNATURE_BYTES)
    _check_sizes(source, folder, most, there)
    for name in most:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
        list(pool.map(lambda name: download(f"{source}/{name}", folder / name), most))


def _check_sizes(source: str, folder: Path, most: Mapping[str, int], there: Mapping[str, int]) -> None:
    """Refuse what is missing in a store, or larger than `most`, before any of it is brought."""
    for name, size_bytes in most.items():
        if not 0 <= there.get(name, -1) <= size_bytes:
            has = f"{there[name]:,} bytes" if there.get(name, -1) >= 0 else "no such file"
            message = f"{name} can have {size_bytes:,} bytes, and {source} has {has}. Upload the artifact again"
            raise EngineryError(message, code="file-damaged")
    check_room(source, sum(there[name] for name in most), folder)
