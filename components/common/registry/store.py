"""The tracking store's address, its SQLite file and its database server, as far as that needs no MLflow."""

import logging
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

# Files go through the tracking server, as it is set up for. MLflow's clients would ask it for addresses of the store
# behind it, which are made for the server's network, and fail where they lead nowhere (http_artifact_repo.py of 3.17).
for _way in ("UPLOAD", "DOWNLOAD"):
    os.environ.setdefault(f"MLFLOW_ENABLE_PROXY_MULTIPART_{_way}", "false")

# How an address begins that was typed with too few slashes: what follows may be a user all the same.
FEW_SLASHES = r"(?i:(?:https?|s3|gs|ftp):/?)(?=[^/])"
_CONNECT_S = 15  # a database server may take to answer
_OF_FILES = ("file:", "sqlite", "hdfs:", "unix:")  # how addresses begin, behind whose third slash a path begins
# How drivers name a connection that failed or was cut, as against a transaction that was refused: those have classes
# of their own below psycopg's and numbers of their own in MySQL.
_GONE = re.compile(
    r"\(psycopg2?\.OperationalError\)|\(psycopg2?\.errors\.(AdminShutdown|CrashShutdown|CannotConnectNow)\)|"
    r"\((pymysql\.err|MySQLdb)\.OperationalError\) \((2002|2003|2006|2013),"
)


def without_credentials(uri: str) -> str:
    """A URI without user, password and query, for files and screens.

    A password that should have been quoted may hold any character, so everything before the last @ goes. A query may
    hold a password (`?password=` of databases) or a token.
    """
    _, rest = split_scheme(uri)
    if rest is None:
        return uri
    head = uri[: len(uri) - len(rest)]
    if "@" in rest:
        rest = f"***@{rest.rpartition('@')[2]}"
    address, asks, _ = rest.partition("?")
    return f"{head}{address}{asks and '?***'}"


def split_scheme(uri: str) -> tuple[str, str | None]:
    """Scheme of an address, empty where it begins with //, and what follows the slashes; None of a path."""
    if found := re.match(FEW_SLASHES, uri):
        return found[0].rstrip(":/"), uri[found.end() :]
    scheme, mark, rest = uri.partition("//")
    is_path = not mark or (scheme and not scheme.endswith(":")) or (not scheme and rest.startswith("/"))
    # The path of a file, which may have an @. Others have no third slash, but somebody may have typed it.
    if is_path or (rest.startswith("/") and scheme.startswith(_OF_FILES)):
        return "", None
    return scheme.removesuffix(":"), rest.lstrip("/")


def without_folders(uri: str) -> str:
    """A URI as it may leave the machine: of a file no more than its name."""
    file = sqlite_file(uri)
    return uri if file is None else f"sqlite:///{file.name}"


def beside_database(uri: str) -> str | None:
    """Return the place of files of an SQLite store without a server; MLflow would take the current directory."""
    file = sqlite_file(uri)
    return None if file is None else (file.absolute().parent / "mlartifacts").as_uri()


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite database; None for other stores."""
    file = uri.removeprefix("sqlite:///").split("?")[0]
    return Path(file) if uri.startswith("sqlite:///") and file not in ("", ":memory:") else None


def is_new(uri: str) -> bool:
    """True for an SQLite store that has no file yet."""
    file = sqlite_file(uri)
    return file is not None and (not file.exists() or file.stat().st_size == 0)


def prepare_sqlite(uri: str, make_tables: Callable[[str], object]) -> None:
    """See that a SQLite store can be used, and make a new one whole: beside its place first, then renamed.

    MLflow would try again for minutes where it can't open the file, and could not use one that a killed process left
    with some of its tables.

    Args:
        uri: of the store; one that is no SQLite file is left alone.
        make_tables: makes the tables of a new store, whose URI it is given.

    Raises:
        OSError: of the directory.
        sqlite3.Error: the file is no database, or can't be written.
    """
    file = sqlite_file(uri)
    if file is None:
        return
    if is_new(uri):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".{file.name}.new")
        for left in (fresh, fresh.with_name(f"{fresh.name}-journal")):
            left.unlink(missing_ok=True)
        _try_sqlite(fresh)
        make_tables(f"sqlite:///{fresh}")
        fresh.replace(file)
    _try_sqlite(file)


def _try_sqlite(file: Path) -> None:
    with closing(sqlite3.connect(file, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE enginery_probe (room)")  # needs pages and a journal, so a full disk shows
        connection.rollback()


def try_database(uri: str) -> None:
    """Connect once to a store that is a database; MLflow would try ten times in silence, over 100 s and more.

    Args:
        uri: of the store; one that is neither a file of SQLite's nor on a server of PostgreSQL's or MySQL's is left
            alone. A `connect_timeout` in it wins.

    Raises:
        sqlite3.Error: the file can't be opened, or is no database.
        sqlalchemy.exc.SQLAlchemyError: the server can't be reached, or refuses.
        ModuleNotFoundError: its driver is not installed.
    """
    if (file := sqlite_file(uri)) is not None and file.exists():
        with closing(sqlite3.connect(file, timeout=20)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if uri.partition(":")[0].partition("+")[0] not in ("postgresql", "mysql"):
        return
    from sqlalchemy import NullPool, create_engine, make_url

    own = {} if "connect_timeout" in make_url(uri).query else {"connect_timeout": _CONNECT_S}
    create_engine(uri, poolclass=NullPool, connect_args=own).connect().close()


def database_is_gone(error: Exception) -> bool:
    """True if an error of MLflow or SQLAlchemy says that a database server can't be reached any more."""
    return _GONE.match(str(error)) is not None


def database_problem(text: str) -> str:
    """Return the message of a database's driver in one line: without SQLAlchemy's link, and what it was doing."""
    text = text.split("\n[SQL: ")[0].split("\n(Background on")[0].split("\n")[0]
    return re.sub(r"^\([\w.]+\) ", "", text).strip().rstrip(".:")


def quiet_mlflow() -> None:
    """No lines of MLflow's own between ours: addresses of runs, bars for each download, errors beside raising them."""
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
