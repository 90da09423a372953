"""The tracking store's address, and a SQLite store that is made whole or not at all."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from components.common.store import beside_database, prepare_sqlite, without_credentials, without_folders


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("http://user:secret@mlflow:5000/a", "http://***@mlflow:5000/a"),
        ("postgresql+psycopg2://user:s@cret@db/mlflow?x=1", "postgresql+psycopg2://***@db/mlflow?***"),
        ("postgresql://db/mlflow?user=u&password=secret", "postgresql://db/mlflow?***"),
        ("https://mlflow:5000/?token=secret", "https://mlflow:5000/?***"),
        ("http://user:se/c#r?t@mlflow", "http://***@mlflow"),  # not quoted as it should be
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("databricks", "databricks"),
    ],
)
def test_what_is_shown_of_an_address(uri: str, shown: str) -> None:
    assert without_credentials(uri) == shown
    assert without_credentials(shown) == shown


def test_what_leaves_the_machine_names_no_folder() -> None:
    assert without_folders("sqlite:////home/me/mlflow.db?timeout=3") == "sqlite:///mlflow.db"
    assert without_folders("http://mlflow:5000") == "http://mlflow:5000"


def test_files_go_beside_a_database_and_wherever_a_server_says(tmp_path: Path) -> None:
    assert beside_database(f"sqlite:///{tmp_path}/mlflow.db") == (tmp_path / "mlartifacts").as_uri()
    assert beside_database("http://mlflow:5000") is None


def test_a_store_that_could_not_be_made_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "new/mlflow.db"

    def fails(uri: str) -> None:
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            connection.execute("CREATE TABLE half (a)")
        raise OSError("killed")

    def makes(uri: str) -> None:
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            connection.execute("CREATE TABLE whole (a)")

    with pytest.raises(OSError, match="killed"):
        prepare_sqlite(f"sqlite:///{file}", fails)
    assert not file.exists()
    prepare_sqlite(f"sqlite:///{file}", makes)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("whole",)]
    prepare_sqlite(f"sqlite:///{file}", fails)  # there already: nothing to make
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("text " * 1000)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        prepare_sqlite(f"sqlite:///{tmp_path / 'mlflow.db'}", lambda _: None)
