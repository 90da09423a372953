"""Tables that name images: CSV or Parquet files with the columns path,label and optionally split."""

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO
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
    check_two_classes,
    hold_out,
    plain_names,
)

_SPLITS = {"train": "train", **dict.fromkeys(VAL_NAMES, "val")}
_MAX_LINE = 1 << 20  # characters of a CSV
_MAX_ROWS = 100_000_000  # of a Parquet file, which may claim any number in few bytes
_MAX_REPEATS, _FEW_IMAGES = 100, 100  # rows for each image, on average, where it has more images than these few
_MAX_GROUP_BYTES = 1 << 30  # of one of its row groups, unpacked
_MAX_CELL_BYTES = 4096  # of one of its cells, as Linux' longest path
_NUM_ENCODED = 1 << 18  # of its rows read at once, a number each
_NUM_DECODED = 1 << 10  # of those written out at once
_NUMBERS = ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")
_TEXTS = ("string", "large_string", "dictionary")
_MAX_SHOWN = 100  # characters of a cell
_INTEGER = re.compile("-?[0-9]{1,18}")


class TableRow(NamedTuple):
    """A row of a table."""

    number: int  # the header is row 1
    path: str
    label: str
    split: str | None  # None where there is no such column


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
    inside = path
    if isinstance(place, LocalPlace):
        inside = plain_path(path)
        roots = [place.name, place.root]
    else:
        roots = [place.name]
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
                    yield TableRow(number, row["path"], row["label"], row.get("split"))
        except csv.Error as error:
            raise UserError(
                f"{name} is no CSV after row {number} ({error}); write it again with quotes closed",
                code="damaged-table",
            ) from None


def _lines(file: TextIO, name: str) -> Iterator[str]:
    """Lines that fit into memory."""
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise UserError(
                f"{name} has a line of more than {_MAX_LINE:,} characters; write one image per line",
                code="table-too-large",
            )
        yield line


_READ_METADATA = """
import sys
from pyarrow import parquet

metadata = parquet.read_metadata(sys.argv[1])
for group in map(metadata.row_group, range(metadata.num_row_groups)):
    for at in range(group.num_columns):
        group.column(at)
"""


def parquet_rows(table: Path, name: str) -> Iterator[TableRow]:
    """Rows of a Parquet file. Raises UserError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"reading {name} needs a package that is not installed: pip install pyarrow", code="missing-package"
        ) from None
    # pyarrow 25 ends the process where a column's statistics do not fit its schema.
    if subprocess.run([sys.executable, "-c", _READ_METADATA, table], capture_output=True, check=False).returncode < 0:
        raise UserError(
            f"{name} is damaged: reading what its Parquet columns are ended the process that did it; write it again",
            code="damaged-table",
        )
    try:
        with parquet.ParquetFile(table) as file:
            groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
            if file.metadata.num_rows > _MAX_ROWS or any(group.total_byte_size > _MAX_GROUP_BYTES for group in groups):
                raise UserError(
                    f"{name} claims {file.metadata.num_rows:,} rows; supported are {_MAX_ROWS:,}, in row groups of at "
                    f"most {_MAX_GROUP_BYTES:,} bytes. Write it again with smaller ones, or several tables",
                    code="table-too-large",
                )
            columns = _columns(file.schema_arrow.names, name)
            _check_encodings(file, columns, name)
            metadata = file.metadata
        # Each value once: a row of it takes few bytes in the file, and would take all of them in memory.
        with parquet.ParquetFile(table, read_dictionary=columns, metadata=metadata) as file:
            number = 1
            for batch in file.iter_batches(_NUM_ENCODED, columns=columns):
                _check_cells(batch, name)
                for start in range(0, len(batch), _NUM_DECODED):
                    for cells in _decoded(batch.slice(start, _NUM_DECODED)):
                        number += 1
                        row = {key: _cell(cells[key], f"{name}, row {number}", key) for key in columns}
                        yield TableRow(number, row["path"], row["label"], row.get("split"))
    # The last two: of texts that are not UTF-8, and of pages in another encoding than the metadata say.
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        raise UserError(
            f"{name} is no Parquet file that can be read ({error}); write it again", code="damaged-table"
        ) from None


def _check_encodings(file: Any, columns: list[str], name: str) -> None:
    """Refuse columns of which a few bytes may be written out to any number."""
    leaves = [file.schema.column(at) for at in range(len(file.schema))]
    own = [at for at, leaf in enumerate(leaves) if leaf.path.split(".")[0] in columns]
    if len(own) > len(columns) or not all(_is_plain(leaves[at], file.schema_arrow) for at in own):
        raise _invalid(f"{name} has {' or '.join(columns)} twice, or of another type; write strings or integers")
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if any("DELTA_BYTE_ARRAY" in group.column(at).encodings for at in own):
            raise UserError(
                f"{name} keeps {' or '.join(columns)} in the encoding DELTA_BYTE_ARRAY, which is not read, since a few "
                "bytes of it may be any number; write it again with dictionaries, as pandas does",
                code="unsupported-encoding",
            )


def _is_plain(leaf: Any, schema: Any) -> bool:
    """True for a column of strings or numbers."""
    if leaf.path not in schema.names or leaf.max_repetition_level:
        return False
    kind = str(schema.field(leaf.path).type)
    return leaf.physical_type in _NUMBERS or (leaf.physical_type == "BYTE_ARRAY" and kind.startswith(_TEXTS))


def _check_cells(batch: Any, name: str) -> None:
    from pyarrow import compute, types

    for key, column in zip(batch.schema.names, batch.columns, strict=True):
        if types.is_dictionary(column.type):
            longest = compute.max(compute.binary_length(column.dictionary)).as_py() or 0
            if longest > _MAX_CELL_BYTES:
                raise _invalid(
                    f"{name} has a {key} of {longest:,} bytes; {_MAX_CELL_BYTES:,} are read at most. Write a shorter "
                    "one, or take its rows away"
                )


def _decoded(batch: Any) -> Iterator[dict[str, Any]]:
    from pyarrow import types

    columns = (column.dictionary_decode() if types.is_dictionary(column.type) else column for column in batch.columns)
    values = zip(*(column.to_pylist() for column in columns), strict=True)
    return (dict(zip(batch.schema.names, cells, strict=True)) for cells in values)


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
    return [key for key in ("path", "label", "split") if key in header]


def _cell(value: Any, where: str, key: str) -> str:
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():  # integers of a column that has gaps
        return str(int(value))
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value).strip()
    raise _invalid(f"{where} has the {key} {_shown(value, where)}; write strings or integers")


def _invalid(message: str) -> UserError:
    return UserError(message, code="invalid-row")


def _shown(cell: object, where: str) -> str:
    """A cell as a message shows it; of a table that was fetched only that it is there, since it may be none of ours."""
    return NOT_SHOWN if is_uri(where) else _cut(repr(cell))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
