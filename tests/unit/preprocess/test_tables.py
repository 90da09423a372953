"""CSV and Parquet tables as a source."""

import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.unit.refusals import refuses

from .builders import contents, find, paths, peak_below, reasons, write_tree

Rows = Sequence[Sequence[Any]]
NAMES = "preprocess.class_names_file"


def write(file: Path, header: Sequence[str], rows: Rows) -> Path:
    if file.suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened:
            csv.writer(opened).writerows([header, *rows])
    else:
        columns = {name: [row[at] if at < len(row) else None for row in rows] for at, name in enumerate(header)}
        parquet.write_table(pyarrow.table(columns), file)
    return file


def rows_of(root: Path) -> list[tuple[str, str]]:
    return [(p.relative_to(root).as_posix(), p.parts[len(root.parts)]) for p in sorted(root.rglob("*.png"))]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("form", ["relative", "dotted", "absolute", "uri"])
def test_a_table_of_class_folders_is_as_the_folders(tmp_path: Path, suffix: str, form: str) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5, "dog/more": 1})
    prefix = {"relative": "", "dotted": "./", "absolute": f"{root}/", "uri": f"file://{root}/"}[form]
    rows = [(prefix + path, label) for path, label in reversed(rows_of(root))]
    source = find(write(root / f"t{suffix}", ("path", "label"), [*rows, rows[0]]))  # one row twice
    expected = find(root)
    assert source.classes == expected.classes
    assert contents(source) == contents(expected)
    for split in ("train", "val"):
        assert set(source.splits[split]) == set(expected.splits[split])  # sizes, too


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_split_column_is_taken_as_it_is(tmp_path: Path, suffix: str) -> None:
    root = write_tree(tmp_path / "images", {"x": 6})
    splits = ("train", "val", "validation", "train", "train", "val")
    rows = [(f"i{n}", f"x/00{n}.png", n % 2, split) for n, split in enumerate(splits)]
    source = find(write(root / f"t{suffix}", ("id", "path", "label", "split"), rows))
    assert source.classes == ("0", "1")
    found = {split: [(one.path, one.label) for one in samples] for split, samples in source.splits.items()}
    assert found["train"] == [("x/000.png", 0), ("x/004.png", 0), ("x/003.png", 1)]
    assert found["val"] == [("x/002.png", 0), ("x/001.png", 1), ("x/005.png", 1)]


def test_class_names_file_orders_the_labels_of_a_table(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    table = write(root / "t.csv", ("path", "label"), rows_of(root))
    names = tmp_path / "names.txt"
    names.write_text("b\nc\na\n")
    source = find(table, class_names_file=str(names))
    assert source.classes == ("b", "c", "a")
    found = contents(source)
    assert {path: name for path, (name, _) in (found["train"] | found["val"]).items()} == dict(rows_of(root))
    names.write_text("b\nc\n")
    with refuses("unknown-classes", NAMES):
        find(table, class_names_file=str(names))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([10, 9, 1, 2, 100], ("1", "2", "9", "10", "100")),
        ([0, -1, 10, 9], ("-1", "0", "9", "10")),
        (["10", "9", "nine"], ("10", "9", "nine")),
        (["02", "2", "1"], ("1", "02", "2")),
    ],
)
def test_integer_labels_are_in_order(tmp_path: Path, suffix: str, labels: list[Any], expected: tuple[str, ...]) -> None:
    rows = [(f"a/{index:03d}.png", labels[index // 2]) for index in range(2 * len(labels))]
    assert find(write(tmp_path / f"t{suffix}", ("path", "label"), rows)).classes == expected


HEADER = ("path", "label", "split")
GOOD: Rows = (("a/0.png", "a", "train"), ("b/0.png", "b", "train"), ("a/1.png", "a", "val"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("header", "rows", "code", "message"),
    [
        (GOOD[0], GOOD[1:], "missing-column", "It names: 'a/0.png', 'a', 'tr"),
        (("path", "class"), (("a", "b"),), "missing-column", "no column 'label'"),
        (("path;label",), (("a;b",),), "missing-column", "It names: 'path;label'"),
        *(((*HEADER[:2], name), GOOD, "unknown-split-column", repr(name)) for name in ("Split", "subset", "is_valid")),
        (HEADER, (*GOOD, ("b/1.png", "", "val")), "invalid-row", "row 5 has no label"),
        (HEADER, (GOOD[0], ("", "b", "val"), *GOOD), "invalid-row", "row 3 has no path"),
        (HEADER, (*GOOD, ("b/1.png", "b", "")), "invalid-row", "row 5 has no split"),
        (HEADER, (*GOOD, ("b/1.png", "b", "test")), "invalid-row", "row 5 has the split 'test'"),
        (HEADER, (*GOOD, ("b/1.png",)), "invalid-row", "row 5 has no label"),
        (HEADER, (*GOOD, ("a/0.png", "b", "train")), "invalid-row", "row 5 names 'a/0.png' again with another label"),
        (HEADER, (*GOOD, ("./a/0.png", "a", "val")), "invalid-row", "row 5 names 'a/0.png' again"),
        (HEADER, (*GOOD, ("../x.png", "b", "val")), "outside-path", "row 5 leads out"),
        (HEADER, (*GOOD, ("a/../../t/x.png", "b", "val")), "outside-path", "row 5"),
        (HEADER, (*GOOD, ("/etc/passwd", "b", "val")), "outside-path", "row 5"),
        (HEADER, (*GOOD, ("s3://b/x.png", "b", "val")), "outside-path", "row 5"),
        (HEADER, (*GOOD, ("file:///etc/passwd", "b", "val")), "outside-path", "row 5"),
        (HEADER, (GOOD[0], GOOD[2]), "too-few-classes", "only the class 'a'"),
        (HEADER, (), "too-few-classes", "no class"),
        (HEADER, GOOD[:2], "missing-split", "no row of val"),
        (HEADER[:2], (("a/0.png", "a"), ("a/1.png", "a"), ("b/0.png", "b")), "too-few-images", "'b' has 1 file"),
    ],
)
def test_unusable_tables(tmp_path, suffix: str, header: Sequence[str], rows: Rows, code: str, message: str) -> None:
    with refuses(code, says=message):
        find(write(tmp_path / f"t{suffix}", header, rows))


def test_a_folder_whose_name_begins_as_the_tables_is_outside(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with refuses("outside-path"):
        find(write(tmp_path / "images" / "t.csv", ("path", "label"), [(f"{tmp_path}/images-2/a/000.png", "a")]))


def test_missing_files_and_links_out_are_left_to_reading(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    (tmp_path / "outside.png").write_bytes(b"secret")
    (root / "a" / "link.png").symlink_to(tmp_path / "outside.png")
    os.mkfifo(root / "a" / "pipe.png")
    odd = os.fsdecode(b"a/caf\xe9.png")
    (root / odd).write_bytes(b"odd")
    rows = [*rows_of(root), ("a/absent.png", "a"), ("b", "b"), ("\n a/new,line.png ", "b")]
    source = find(write(root / "t.csv", ("path", "label"), rows))
    errors = reasons(source)
    assert errors.pop("a/link.png") == "a link out of the data folder"
    assert errors.pop("a/pipe.png") == errors.pop("b") == "not a regular file"
    assert set(errors) == {"a/absent.png", "a/new,line.png"}
    assert "No such file" in errors["a/absent.png"]
    assert odd in paths(source)


def test_what_editors_make_of_a_csv(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    table = root / "t.csv"
    lines = ["path , label", *(f'"{path}", {label} ' for path, label in rows_of(root))]
    table.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    assert contents(find(table)) == contents(find(root))
    for data, code in (
        (b'path,label\na/000.png,a\n"a/001.png,a\n', "damaged-table"),
        (b"path,label\na/000.png,caf\xe9\n", "not-utf8"),
        ("path,label\na/000.png,a\n".encode("utf-16"), "not-utf8"),  # a spreadsheet's "Unicode text"
        ("path,label\na/000.png,a\n".encode("utf-16-le"), "not-utf8"),
    ):
        table.write_bytes(data)
        with refuses(code):
            find(table)


def test_types_of_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t.parquet"
    for label in (1.5, True):
        with refuses("invalid-row"):
            find(write(table, ("path", "label"), [("a", label), ("b", label)]))
    dictionary = pyarrow.array(["a", "b", "c", "d"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"path": dictionary, "label": [0.0, 0.0, 3.0, 3.0]}), table)
    assert find(table).classes == ("0", "3")  # integers of a column that has gaps
    latin = pyarrow.array([b"caf\xe9", b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"path": latin, "label": ["a", "b"]}), table)
    with refuses("damaged-table"):
        find(table)
    table.write_bytes(b"path,label\n")
    with refuses("damaged-table"):
        find(table)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("missing-package"):
        find(table)


def test_tables_of_few_bytes_that_claim_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without end takes no memory, nor do rows that are one value again and again."""
    long = tmp_path / "t.csv"
    long.write_text("path,label\n")
    os.truncate(long, 400 << 20)
    with peak_below(20_000_000), refuses("table-too-large"):
        find(long)
    many = write(tmp_path / "t.parquet", ("path", "label"), [("a/0.png", "a")] * 1000)
    assert many.stat().st_size < 5000
    with monkeypatch.context() as patch, refuses("table-too-large"):
        patch.setattr("components.preprocess.sources.tables._MAX_ROWS", 999)
        find(many)
    again = write(tmp_path / "again.parquet", ("path", "label"), [("a/0.png", "a")] * 20_000)
    with refuses("invalid-row", says=f"{again}, row 10101: the rows so far name the same images again"):
        find(again)


@pytest.mark.parametrize("key", ["path", "label"])
def test_one_long_value_of_many_rows_takes_no_memory(tmp_path: Path, key: str) -> None:
    table = tmp_path / "t.parquet"
    columns: dict[str, Any] = {"path": ["a/0.png"] * 2_000, "label": ["a"] * 2_000, key: ["\U0001f600" * 5_000] * 2_000}
    parquet.write_table(pyarrow.table(columns), table, compression="zstd")
    assert table.stat().st_size < 5_000
    with peak_below(5_000_000), refuses("invalid-row") as caught:
        find(table)
    assert len(str(caught.value)) < 1_000


def test_what_a_few_bytes_of_parquet_could_blow_up_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, table = 10, tmp_path / "t.parquet"
    texts = pyarrow.array(["a"] * rows)
    for values in (
        pyarrow.array([["a"]] * rows),
        pyarrow.array([{"x": "a"}] * rows),
        texts.cast(pyarrow.binary()),
        texts.cast(pyarrow.binary()).cast(pyarrow.binary(1)),
    ):
        parquet.write_table(pyarrow.table({"path": texts, "label": values}), table)
        with refuses("invalid-row"):
            find(table)
    alike = pyarrow.array([f"{'a' * 1_000_000}{row}" for row in range(100)])  # of each, the file has what is new
    encodings = {"path": "DELTA_BYTE_ARRAY", "label": "PLAIN"}
    repeated = pyarrow.table({"path": alike, "label": ["a"] * 100})
    parquet.write_table(repeated, table, use_dictionary=False, column_encoding=encodings)
    assert table.stat().st_size < 5_000_000
    monkeypatch.setattr("components.preprocess.sources.tables._MAX_PARQUET_BYTES", 50 << 20)
    with refuses("damaged-table"):
        find(table)
    monkeypatch.undo()
    parquet.write_table(pyarrow.table({"path": texts, "label": texts}), table)
    data = table.read_bytes()
    required = data.replace(b"\x25\x02\x18\x05label", b"\x25\x00\x18\x05label")  # its statistics are of an optional one
    assert required != data
    table.write_bytes(required)
    with refuses("damaged-table"):
        find(table)
    parquet.write_table(pyarrow.table({"path": texts, "x" * 20_000: texts}), table)
    with refuses("missing-column") as caught:
        find(table)
    assert len(str(caught.value)) < 1_000
