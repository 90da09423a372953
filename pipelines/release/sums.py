"""SHA256SUMS, in the form of coreutils' `sha256sum`, and the files that it is about."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from components.common.digests import digest_file
from components.common.trust import SIGNATURE
from pipelines.release.layout import OLD_SIGNATURE, SUMS

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")
_UNLISTED = (SUMS, SIGNATURE, OLD_SIGNATURE)
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\\\\]+")  # names that sha256sum writes as they are


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
    if str(path) != name or name in (".", *_UNLISTED) or not _PLAIN.fullmatch(name):
        return "which is no plain name of a file in the release"
    return ""


def found_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file below a folder, as (name, what is wrong with its kind). Symbolic links are never followed."""
    yield from _walk(folder, "")


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    if prefix and not children:
        yield prefix.rstrip("/"), "is an empty folder, which no release has"
    for entry in children:
        name = prefix + entry.name
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(Path(entry.path), f"{name}/")
        elif stat.S_ISLNK(mode):
            yield name, "is a symbolic link; a release holds plain files"
        else:
            yield name, "" if stat.S_ISREG(mode) else "is no regular file; a release holds plain files"


def check_files(folder: Path, entries: dict[str, str]) -> Iterable[str]:
    """What differs between a folder and its list: a line per file."""
    seen = set()
    for name, problem in found_files(folder):
        seen.add(name)
        if problem:
            yield f"{name} {problem}"
        elif name in _UNLISTED:
            continue
        elif name not in entries:
            yield f"{name} is not listed in {SUMS}: it was added"
        elif (found := digest_file(folder / name)) != entries[name]:
            yield f"{name} was changed: its digest is {found}, {SUMS} says {entries[name]}"
    for name in sorted(entries.keys() - seen):
        yield f"{name} is missing"
