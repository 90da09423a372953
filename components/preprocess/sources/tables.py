"""Tables that name images: CSV or Parquet files with the columns path,label and optionally split."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote

from components.common.contracts.errors import UserError
from components.common.data.places import (
    LocalPlace,
    Place,
    RemotePlace,
    is_uri,
    is_web,
    local_path,
    locate_file,
    plain_path,
    translate_errors,
)
from components.preprocess.sources.folders import safe_path
from components.preprocess.sources.samples import (
    NOT_SHOWN,
    VAL_NAMES,
    FileStorage,
    Options,
    Sample,
    Source,
    check_names_differ,
    check_two_classes,
    hold_out,
    plain_names,
    refuse_utf16,
)

_KEYS = ("path", "label", "split")
_SPLIT_COLUMNS = ("split", "set", "subset", "data set", "partition", "phase", "usage", "is_valid", "is_val", "is_test")
_SPLITS = {"train": "train", **dict.fromkeys(VAL_NAMES, "val")}
_MAX_LINE = 1 << 20  # characters of a CSV
_MAX_ROWS = 100_000_000  # of a Parquet file, which may claim any number in few bytes
_MAX_REPEATS, _FEW_IMAGES = 100, 100  # rows for each image, on average, where it has more images than these few
_MAX_CELL = 4096  # characters of one of its cells, as Linux' longest path
_MAX_PARQUET_BYTES = 1 << 30  # of memory that reading it takes
_MAX_SHOWN = 100  # characters of a cell
_INTEGER = re.compile("-?[0-9]{1,18}")


class TableRow(NamedTuple):
    """A row of a table."""

    number: int  # the header is row 1
    path: str
    label: str
    split: str | None = None  # None where there is no such column


class _Label(NamedTuple):
    label: str
    split: str


def table_source(rows: Callable[[Path, str], Iterator[TableRow]], data: str, scratch: Path, options: Options) -> Source:
    """List the images that a table names.

    Args:
        rows: reads the rows of a file, whose second argument is what messages call it.
        data: path or URI of the table.
        scratch: an empty folder for a table that must be fetched.
        options: what was asked of every kind of source.

    Raises:
        UserError: it can't be read, or a row of it can't be used.
    """
    place, file = locate_file(data)
    table = local_path(data) if not is_uri(data) else scratch / file
    with translate_errors(data):
        if isinstance(place, RemotePlace):
            place.download(file, table)
        entries, has_splits = _entries(rows(table, data), place, data)
        sizes = place.sizes(entries.keys())
    labels = {entry.label for entry in entries.values()}
    names = options.names or plain_names(_sorted(labels))
    if options.names is None:
        check_names_differ(names.names, data)
    if unknown := sorted(labels - set(names.labels)):
        which = ", ".join(_cut(label) for label in unknown[:5]) if not is_uri(data) else f"{len(unknown):,}"
        raise UserError(
            f"{data} has labels that class_names_file does not name: {which}. Add them to the file, or take the rows "
            "away",
            code="unknown-classes",
            setting="preprocess.class_names_file",
        )
    is_fetched = is_uri(data) and options.names is None
    check_two_classes(names.names, data, "Add rows of another class", is_fetched=is_fetched)
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for path, entry in sorted(entries.items(), key=lambda item: (names.labels[item[1].label], item[0])):
        sample = Sample(path=path, label=names.labels[entry.label], size_bytes=sizes.get(path, 0))
        splits[entry.split].append(sample)
    if not has_splits:
        splits = hold_out(splits["train"], names.names, options, is_fetched=is_fetched)
    elif missing := [split for split, found in splits.items() if not found]:
        raise UserError(
            f"{data} has a column split but no row of {missing[0]}; add some, or drop the column, and it is split for "
            "you",
            code="missing-split",
        )
    return Source(classes=names.names, splits=splits, storage=FileStorage(place))


def _sorted(labels: set[str]) -> list[str]:
    """Integers by their values, names by their letters."""
    if all(_INTEGER.fullmatch(label) for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _entries(rows: Iterator[TableRow], place: Place, name: str) -> tuple[dict[str, _Label], bool]:
    entries: dict[str, _Label] = {}
    has_splits = False
    for row in rows:
        where = f"{name}, row {row.number}"
        path = _relative(row.path, place, where)
        _check_label(row.label, where)
        if row.split is not None:
            has_splits = True
            if row.split not in _SPLITS:
                has = f"the split {_shown(row.split, name)}" if row.split else "no split"
                raise _invalid(f"{where} has {has}; write train, val, valid or validation, or take the row away")
        entry = _Label(row.label, _SPLITS[row.split or "train"])
        if entries.setdefault(path, entry) != entry:
            raise _invalid(f"{where} names {_shown(path, name)} again with another label or split; keep one row of it")
        if row.number > _MAX_REPEATS * (len(entries) + _FEW_IMAGES):  # few bytes of Parquet may be any number
            raise _invalid(f"{where}: the rows so far name the same images again and again; keep one row of each")
    return entries, has_splits


def _check_label(label: str, where: str) -> None:
    if not label:
        raise _invalid(f"{where} has no label; write the class name, or take the row away")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} has a label that is not UTF-8: {_shown(label, where)}; write the table in UTF-8", code="not-utf8"
        ) from None


def _relative(path: str, place: Place, where: str) -> str:
    """The path within the table's folder."""
    if not path:
        raise _invalid(f"{where} has no path; write it, or take the row away")
    inside, roots = path, [place.name]
    if isinstance(place, LocalPlace):
        inside, roots = plain_path(path), [place.name, place.root]
    for root in roots:
        if inside.startswith(root.rstrip("/") + "/"):
            inside = inside[len(root.rstrip("/")) + 1 :]
            inside = unquote(inside, errors="surrogateescape") if is_web(path) else inside
            break
    found = None if "://" in inside else safe_path(inside)
    if found is None:
        raise UserError(
            f"{where} leads out of the table's folder: {_shown(path, where)}; write paths within "
            f"{place.name}, or put the table in a folder above the images",
            code="outside-path",
        )
    return found


def csv_rows(table: Path, name: str) -> Iterator[TableRow]:
    """Rows of a CSV file. Raises UserError."""
    with table.open("rb") as binary:
        refuse_utf16(binary.read(4), name)
    # Paths need not be UTF-8.
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(_lines(file, name), strict=True)
        number = 1
        try:
            header = [cell.strip() for cell in next(reader, [])]
            columns = {key: header.index(key) for key in _columns(header, name)}
            for number, cells in enumerate(reader, 2):
                if cells:
                    row = {key: cells[at].strip() if at < len(cells) else "" for key, at in columns.items()}
                    yield TableRow(number, **row)
        except csv.Error as error:
            message = f"{name} is no CSV after row {number} ({error}); write it again with quotes closed"
            raise UserError(message, code="damaged-table") from None


def _lines(file: IO[str], name: str) -> Iterator[str]:
    """Lines that fit into memory."""
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            message = f"{name} has a line of more than {_MAX_LINE:,} characters; write one image per line"
            raise UserError(message, code="table-too-large")
        yield line


# A few bytes of Parquet may unpack to anything, and pyarrow 25 ends its process at some damaged files.
_READ_PARQUET = """
import json
import resource
import sys

from pyarrow import parquet

table, limit, *keys = sys.argv[1:]
with open("/proc/self/statm") as statm:
    most = int(statm.read().split()[0]) * resource.getpagesize() + int(limit)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    with parquet.ParquetFile(table) as file:
        names = file.schema_arrow.names
        print(json.dumps(names), flush=True)
        for batch in file.iter_batches(1024, columns=[key for key in keys if key in names], use_threads=False):
            for row in batch.to_pylist():
                print(json.dumps(row, default=lambda value: []))  # a list for bytes, which are no text either
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}"[:300])
"""
_OF_ALLOCATORS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}  # others reserve more than they use


def parquet_rows(table: Path, name: str) -> Iterator[TableRow]:
    """Rows of a Parquet file, which a process of its own reads with bounded memory. Raises UserError."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            f"reading {name} needs a package that is not installed: pip install pyarrow", code="missing-package"
        ) from None
    command = [sys.executable, "-P", "-c", _READ_PARQUET, str(table), str(_MAX_PARQUET_BYTES), *_KEYS]
    environment = {**os.environ, **_OF_ALLOCATORS}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environment, **pipes) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        try:
            lines = _lines(reader.stdout, name)
            if header := next(lines, ""):
                names = json.loads(header)
                columns = _columns(names, name)
                if any(names.count(key) > 1 for key in columns):
                    raise _invalid(f"{name} has {' or '.join(columns)} twice; take one of them away")
                for number, line in enumerate(lines, 2):
                    if number > _MAX_ROWS + 1:
                        raise UserError(
                            f"{name} has more than {_MAX_ROWS:,} rows; write several tables", code="table-too-large"
                        )
                    cells = json.loads(line)
                    yield TableRow(number, **{key: _cell(cells[key], f"{name}, row {number}", key) for key in columns})
            reason = reader.stderr.read().strip()
        finally:
            reader.kill()
    if reader.returncode:
        raise UserError(
            f"{name} is no Parquet file that can be read in {_MAX_PARQUET_BYTES:,} bytes of memory "
            f"({reason.rpartition(chr(10))[2] or 'it ends the process that reads it'}); write it again",
            code="damaged-table",
        )


def _columns(header: list[str], name: str) -> list[str]:
    """Those of ours that a table has."""
    for key in ("path", "label"):
        if key not in header:
            has = ", ".join(_shown(cell, name) for cell in header[:8]) or "none"
            raise UserError(
                f"{name} has no column {key!r}; its first row must name the columns path,label or path,label,split, "
                f"with commas between them. It names: {has}",
                code="missing-column",
            )
    if "split" not in header and (others := [cell for cell in header if cell.strip().lower() in _SPLIT_COLUMNS]):
        raise UserError(
            f"{name} has a column {_shown(others[0], name)}, as splits have, but none named 'split'; rename it and "
            "write train or val in it, or take it away",
            code="unknown-split-column",
        )
    return [key for key in _KEYS if key in header]


def _cell(value: Any, where: str, key: str) -> str:
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():  # integers of a column that has gaps
        return str(int(value))
    if isinstance(value, str | int) and not isinstance(value, bool):
        if len(text := str(value)) > _MAX_CELL:
            raise _invalid(
                f"{where} has a {key} of {len(text):,} characters; {_MAX_CELL:,} are read at most. Write a shorter "
                "one, or take its rows away"
            )
        return text.strip()
    raise _invalid(f"{where} has the {key} {_shown(value, where)}; write strings or integers")


def _invalid(message: str) -> UserError:
    return UserError(message, code="invalid-row")


def _shown(cell: object, where: str) -> str:
    """A cell as a message shows it; of a table that was fetched only that it is there, since it may be none of ours."""
    return NOT_SHOWN if is_uri(where) else _cut(repr(cell))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
