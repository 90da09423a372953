"""CSV and Parquet tables as a source."""

import csv
import os
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from components.common.contracts.errors import UserError
from components.preprocess.sources import Source, Unreadable, find_samples

WriteTree = Callable[..., Path]
Rows = Sequence[Sequence[Any]]


def find(data: Path | str, **options: Any) -> Source:
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(str(data), scratch=Path("none"), **settings)


def contents(source: Source) -> dict[str, dict[str, tuple[str, bytes]]]:
    storage = pickle.loads(pickle.dumps(source.storage))
    return {
        split: {sample.path: (source.classes[sample.label], storage.read(sample)) for sample in samples}
        for split, samples in source.splits.items()
    }


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
def test_a_table_of_class_folders_is_as_the_folders(
    tmp_path: Path, write_tree: WriteTree, suffix: str, form: str
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5, "dog/more": 1})
    prefix = {"relative": "", "dotted": "./", "absolute": f"{root}/", "uri": f"file://{root}/"}[form]
    rows = [(prefix + path, label) for path, label in reversed(rows_of(root))]
    table = write(root / f"images{suffix}", ("path", "label"), [*rows, rows[0]])  # one row twice
    source, plain = find(table), find(root)
    assert source.classes == plain.classes
    assert contents(source) == contents(plain)
    assert {(s.path, s.size_bytes) for s in source.splits["train"]} == {
        (s.path, s.size_bytes) for s in plain.splits["train"]
    }


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_split_column_is_taken_as_it_is(tmp_path: Path, write_tree: WriteTree, suffix: str) -> None:
    root = write_tree(tmp_path / "images", {"x": 6})
    splits = ("train", "val", "validation", "train", "train", "val")
    rows = [(f"i{n}", f"x/00{n}.png", n % 2, split) for n, split in enumerate(splits)]
    source = find(write(root / f"t{suffix}", ("id", "path", "label", "split"), rows))
    assert source.classes == ("0", "1")
    assert [(s.path, s.label) for s in source.splits["train"]] == [("x/000.png", 0), ("x/004.png", 0), ("x/003.png", 1)]
    assert [(s.path, s.label) for s in source.splits["val"]] == [("x/002.png", 0), ("x/001.png", 1), ("x/005.png", 1)]


def test_class_names_file_orders_the_labels_of_a_table(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    table = write(root / "t.csv", ("path", "label"), rows_of(root))
    names = tmp_path / "names.txt"
    names.write_text("b\nc\na\n")
    source = find(table, class_names_file=str(names))
    assert source.classes == ("b", "c", "a")
    assert {path: name for path, (name, _) in (contents(source)["train"] | contents(source)["val"]).items()} == dict(
        rows_of(root)
    )
    names.write_text("b\nc\n")
    with pytest.raises(UserError, match=r"t\.csv has labels that class_names_file does not name: a\. Add them"):
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
def test_integer_labels_are_in_the_order_of_their_values(
    tmp_path: Path, write_tree: WriteTree, suffix: str, labels: list[Any], expected: tuple[str, ...]
) -> None:
    root = write_tree(tmp_path / "images", {"a": 2 * len(labels)})
    rows = [(f"a/{index:03d}.png", labels[index // 2]) for index in range(2 * len(labels))]
    assert find(write(root / f"t{suffix}", ("path", "label"), rows)).classes == expected


HEADER = ("path", "label", "split")
GOOD: Rows = (("a/0.png", "a", "train"), ("b/0.png", "b", "train"), ("a/1.png", "a", "val"))
WRONG: dict[str, tuple[Sequence[str], Rows, str]] = {
    "no header": (GOOD[0], GOOD[1:], "t has no column 'path'; its first row must name .*It names: 'a/0.png', 'a', 'tr"),
    "no label column": (("path", "class"), (("a", "b"),), "t has no column 'label'"),
    "other separator": (("path;label",), (("a;b",),), "with commas between them. It names: 'path;label'"),
    "no label": (HEADER, (*GOOD, ("b/1.png", "", "val")), "t, row 5 has no label; write the class name"),
    "no path": (HEADER, (GOOD[0], ("", "b", "val"), *GOOD), "t, row 3 has no path"),
    "no split": (HEADER, (*GOOD, ("b/1.png", "b", "")), "t, row 5 has no split; write train, val, valid or validation"),
    "test": (
        HEADER,
        (*GOOD, ("b/1.png", "b", "test")),
        "t, row 5 has the split 'test'; write train, val, valid or validation",
    ),
    "short row": (HEADER, (*GOOD, ("b/1.png",)), "t, row 5 has no label"),
    "two labels": (
        HEADER,
        (*GOOD, ("a/0.png", "b", "train")),
        "t, row 5 names 'a/0.png' again with another label or split",
    ),
    "two splits": (HEADER, (*GOOD, ("./a/0.png", "a", "val")), "t, row 5 names 'a/0.png' again"),
    "above": (HEADER, (*GOOD, ("../x.png", "b", "val")), r"t, row 5 leads out of the table's folder: '\.\./x\.png'"),
    "up and down": (HEADER, (*GOOD, ("a/../../t/x.png", "b", "val")), "t, row 5 leads out of the table's folder"),
    "absolute": (
        HEADER,
        (*GOOD, ("/etc/passwd", "b", "val")),
        "t, row 5 leads out of the table's folder: '/etc/passwd'",
    ),
    "other uri": (HEADER, (*GOOD, ("s3://b/x.png", "b", "val")), "t, row 5 leads out of the table's folder: 's3://b"),
    "file uri": (HEADER, (*GOOD, ("file:///etc/passwd", "b", "val")), "t, row 5 leads out of the table's folder"),
    "one class": (HEADER, (GOOD[0], GOOD[2]), "t has only the class 'a'; a classifier needs at least two"),
    "no rows": (HEADER, (), "t has no class"),
    "no val": (HEADER, GOOD[:2], "t has a column split but no row of val; add some, or drop the column"),
    "one file": (HEADER[:2], (("a/0.png", "a"), ("a/1.png", "a"), ("b/0.png", "b")), r"class 'b' has 1 file"),
}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("name", WRONG)
def test_tables_that_cannot_be_used(tmp_path: Path, name: str, suffix: str) -> None:
    header, rows, message = WRONG[name]
    table = write(tmp_path / f"t{suffix}", header, rows)
    with pytest.raises(
        UserError, match=message.replace("t has", rf"t\{suffix} has").replace("t, row", rf"t\{suffix}, row")
    ):
        find(table)


def test_a_folder_whose_name_begins_as_the_tables_is_outside(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path / "images-2", {"a": 1})
    (tmp_path / "images").mkdir()
    table = write(tmp_path / "images" / "t.csv", ("path", "label"), [(f"{tmp_path}/images-2/a/000.png", "a")])
    with pytest.raises(UserError, match="row 2 leads out of the table's folder"):
        find(table)


def test_missing_files_and_links_out_are_left_to_reading(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    (tmp_path / "outside.png").write_bytes(b"secret")
    (root / "a" / "link.png").symlink_to(tmp_path / "outside.png")
    os.mkfifo(root / "a" / "pipe.png")
    odd = os.fsdecode(b"a/caf\xe9.png")
    (root / odd).write_bytes(b"odd")
    rows = [*rows_of(root), ("a/absent.png", "a"), ("b", "b"), ("\n a/new,line.png ", "b")]
    source = find(write(root / "t.csv", ("path", "label"), rows))
    errors = {}
    for sample in source.splits["train"] + source.splits["val"]:
        try:
            data = source.storage.read(sample)
            assert data == (root / sample.path).read_bytes()
        except (OSError, Unreadable) as error:
            errors[sample.path] = str(error)
    assert errors["a/link.png"] == "a link out of the data folder"
    assert errors["a/pipe.png"] == errors["b"] == "not a regular file"
    assert "No such file" in errors["a/absent.png"]
    assert set(errors) == {"a/link.png", "a/pipe.png", "b", "a/absent.png", "a/new,line.png"}


def test_what_editors_make_of_a_csv(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    lines = ["path , label", *(f'"{path}", {label} ' for path, label in rows_of(root))]
    (root / "t.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    assert contents(find(root / "t.csv")) == contents(find(root))
    (root / "t.csv").write_text('path,label\na/000.png,a\n"a/001.png,a\n')
    with pytest.raises(UserError, match=r"t\.csv is no CSV after row 2 .*write it anew with quotes closed"):
        find(root / "t.csv")
    (root / "t.csv").write_bytes(b"path,label\na/000.png,caf\xe9\n")
    with pytest.raises(UserError, match="row 2 has a label that is not UTF-8"):
        find(root / "t.csv")


@pytest.mark.parametrize(
    ("label", "message"), [(1.5, "row 2 has the label 1.5; write strings or integers"), (True, "has the label True")]
)
def test_types_of_a_parquet_file(tmp_path: Path, label: Any, message: str) -> None:
    table = write(tmp_path / "t.parquet", ("path", "label"), [("a", label), ("b", label)])
    with pytest.raises(UserError, match=message):
        find(table)


def test_integers_that_became_floats_and_dictionaries_of_a_parquet_file(tmp_path: Path) -> None:
    paths = pyarrow.array(["a", "b", "c", "d"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"path": paths, "label": [0.0, 0.0, 3.0, 3.0]}), tmp_path / "t.parquet")
    assert find(tmp_path / "t.parquet").classes == ("0", "3")


def test_parquet_needs_pyarrow_and_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"path,label\n")
    with pytest.raises(UserError, match=r"t\.parquet is no Parquet file that can be read"):
        find(tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"t\.parquet needs a package that is not installed: pip install pyarrow"):
        find(tmp_path / "t.parquet")


def test_tables_of_few_bytes_that_claim_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without end takes no memory, nor do rows that are one value again and again."""
    long = tmp_path / "t.csv"
    long.write_text("path,label\n")
    os.truncate(long, 400 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"t\.csv has a line of more than 1,048,576 characters"):
            find(long)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000_000
    many = write(tmp_path / "t.parquet", ("path", "label"), [("a/0.png", "a")] * 1000)
    assert many.stat().st_size < 5000
    for name, limit in (("_MAX_ROWS", 999), ("_MAX_GROUP_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(f"components.preprocess.sources.tables.{name}", limit)
            with pytest.raises(UserError, match=r"t\.parquet claims 1,000 rows; supported are"):
                find(many)
