"""Folders that data lies in: on this machine, or behind a URI."""

import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote, urlsplit

from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class

from components.common.contracts.errors import AddressRefused, EngineryError, UserError, shortened, without_secrets
from components.common.contracts.foreign import MAX_FILE_BYTES

MAX_TEXT_BYTES = 1 << 25  # of a list of classes or labels


class Unreadable(Exception):
    """A file must not or can't be used; the message is the reason."""


def check_size(num_bytes: int, most_bytes: int = MAX_FILE_BYTES) -> None:
    """Raise Unreadable for a file that is too large for what it is to be."""
    if num_bytes > most_bytes:
        what = "an image" if most_bytes == MAX_FILE_BYTES else "a list"
        raise Unreadable(f"has {num_bytes:,} bytes, more than {what} may have")


_LINK_OUT = "a link out of the data folder"
_ATTEMPTS_S = (0.5, 2.0)  # waits before a remote file is tried again
_CHUNK_BYTES = 1 << 24
_SPARED_BYTES = 1 << 30  # of a disk that is written to
_MAX_LISTED = 10_000  # folders, each of which is a request or more
_NUM_LISTERS = 8
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Driver:
    """The package and credentials with which fsspec reads URIs of a scheme."""

    package: str = ""  # that is installed with pip
    credentials: str = "as the fsspec driver of this scheme documents"  # where it looks for them


_S3 = Driver("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
_GOOGLE = Driver("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS")
_WEB = Driver("aiohttp", "~/.netrc, or the file that NETRC names")
_AZURE = Driver("adlfs", "AZURE_STORAGE_CONNECTION_STRING")
_SSH = Driver("paramiko")
DRIVERS = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("http", "https"), _WEB),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("sftp", "ssh"), _SSH),
    "hf": Driver("huggingface_hub", "HF_TOKEN"),
    "memory": Driver(),
}


def is_uri(data: str) -> bool:
    """True if `data` is no path of this machine. file: URIs are paths: see local_path."""
    return "://" in data and scheme_of(data) not in ("file", "local")


def scheme_of(data: str) -> str:
    """Return the scheme of a URI, in lower case."""
    return data.partition("://")[0].lower()


def local_path(data: str) -> Path:
    """The absolute path that a path or a file: URI names; links stay as they are."""
    return Path(plain_path(data)).absolute()


def plain_path(data: str) -> str:
    """The path in a file: URI, which is file:/DIR, file:///DIR or file://localhost/DIR. Others stay as they are."""
    scheme, _, rest = data.partition(":")
    if scheme.lower() not in ("file", "local") or not rest.startswith("/"):
        return data
    host, slash, path = rest.removeprefix("//").partition("/")
    if rest.startswith("//"):
        rest = f"/{path}" if host.lower() == "localhost" else f"{host}{slash}{path}"
    return unquote(rest, errors="surrogateescape") if scheme.lower() == "file" else rest


def is_web(data: str) -> bool:
    """True if it lies on a web server, which lists no folders."""
    return "://" in data and scheme_of(data) in ("http", "https")


def file_name(data: str) -> str:
    """Return the name whose end shows the kind, in lower case: of a web address without the query."""
    return (urlsplit(data).path if is_web(data) else plain_path(data)).lower()


def check_uri(uri: str, setting: str) -> None:
    """See that a URI can be read here: its scheme, the package for it, and that it holds no secret.

    Raises:
        UserError: it can't.
    """
    scheme = scheme_of(uri)
    if "::" in uri:
        raise UserError(
            f"the URI of scheme {scheme} in {setting} chains several with '::', which is not read; name one of them",
            code="chained-uri",
            setting=setting,
        )
    try:
        without_secrets(uri)
    except ValueError as error:
        raise UserError(f"{error} ({_driver(uri).credentials})", code="secret-in-uri", setting=setting) from None
    if scheme not in DRIVERS:
        raise UserError(
            f"{setting} is {uri}, and the scheme {scheme} is not read; use a path, or a URI of file, s3, gs, http, "
            "https, az or hf",
            code="unknown-scheme",
            setting=setting,
        )
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        package = _driver(uri).package
        fix = f"pip install {package}" if package else str(error)
        raise UserError(
            f"reading {scheme}:// needs a package that is not installed: {fix}", code="missing-package"
        ) from None


def _driver(uri: str) -> Driver:
    return DRIVERS.get(scheme_of(uri), Driver())


@dataclass(frozen=True)
class LocalPlace:
    """A folder of this machine. Nothing that a link leads out of it is read.

    Paths are relative to it, with forward slashes.
    """

    root: str  # without links
    name: str  # in messages

    def resolved(self, path: str) -> str:
        """The regular file behind `path`."""
        full = os.path.realpath(os.path.join(self.root, path))
        if not is_below(full, self.root):
            raise Unreadable(_LINK_OUT)
        if not stat.S_ISREG(os.stat(full).st_mode):  # a pipe would let the step wait for ever
            raise Unreadable("not a regular file")
        return full

    def has_file(self, path: str) -> bool:
        """True if a regular file of this folder is behind `path`."""
        try:
            self.resolved(path)
        except (OSError, Unreadable):
            return False
        return True

    def read(self, path: str, size_bytes: int = 0, most_bytes: int = MAX_FILE_BYTES) -> bytes:
        """A whole file, of a size that may be known. Raises OSError or Unreadable."""
        full = self.resolved(path)
        check_size(size_bytes or os.stat(full).st_size, most_bytes)
        return Path(full).read_bytes()

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """A part of a file. Raises OSError or Unreadable."""
        with self.open(path) as file:
            file.seek(start)
            return _whole(file.read(num_bytes), num_bytes)

    def open(self, path: str) -> BinaryIO:
        """A file to seek and read in. Raises OSError or Unreadable."""
        return Path(self.resolved(path)).open("rb")

    def size_bytes(self, path: str) -> int:
        """Return the size of the file behind a link, 0 of one that is not there: reading rejects it."""
        try:
            return os.stat(os.path.join(self.root, path)).st_size
        except OSError:
            return 0

    def sizes(self, paths: Collection[str]) -> Mapping[str, int]:
        """Sizes of those of these files that are known without a request for each. Raises OSError."""
        return {path: self.size_bytes(path) for path in paths}


@dataclass(frozen=True)
class RemotePlace:
    """A folder behind an fsspec URI. Its driver takes credentials from the environment."""

    name: str  # the URI, without a closing slash
    file: str = ""  # a file whose address is not the sum of folder and name
    uri: str = ""  # that address

    def file_system(self, path: str = "") -> tuple[Any, str]:
        """The driver, and what it calls `path`. fsspec keeps one driver per process."""
        driver, root = url_to_fs(self.name, **_web_options(self.name))
        if self.uri and path == self.file:
            return driver, self.uri
        inside = quote(path, errors="surrogateescape") if is_web(self.name) else path
        return driver, f"{root.rstrip('/')}/{inside}" if path else root

    def read(self, path: str, size_bytes: int = 0, most_bytes: int = MAX_FILE_BYTES) -> bytes:
        """As LocalPlace. Of a web server nothing is read into memory without end, whatever it says."""

        def whole(driver: Any, full: str) -> bytes:
            asks = not size_bytes and not is_web(self.name)
            check_size(int(driver.info(full).get("size") or 0) if asks else size_bytes, most_bytes)
            data: bytes = driver.cat_file(full)
            check_size(len(data), most_bytes)
            return data

        return self._read(path, whole)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """As LocalPlace."""
        if not num_bytes:
            return b""
        end = start + num_bytes
        return _whole(self._read(path, lambda driver, full: driver.cat_file(full, start=start, end=end)), num_bytes)

    def open(self, path: str) -> BinaryIO:
        """As LocalPlace."""
        return self._read(path, lambda driver, full: driver.open(full, "rb"))

    def download(self, path: str, target: Path) -> None:
        """Copy a file to this machine."""
        from components.common.data.web import DOWNLOAD

        # Of a web server as a stream: it need not send parts, nor say how much comes.
        options = {"block_size": 0, "size": 1, **DOWNLOAD} if is_web(self.name) else {}

        def copy(driver: Any, full: str) -> None:
            with driver.open(full, "rb", **options) as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    keep_room(target.parent, self.name)
                    file.write(chunk)

        self._read(path, copy)

    def has_ranges(self, path: str) -> bool:
        """True if the server sends parts of a file. Simple web servers send the whole of it."""
        if not is_web(self.name):
            return True

        def ask(driver: Any, full: str) -> bool:
            # As a stream, of which nothing is fetched but the answer's head.
            with driver.open(full, "rb", block_size=0, size=1, headers={"Range": "bytes=0-0"}) as file:
                return bool(file.r.status == 206)

        return self._read(path, ask)

    def sizes(self, paths: Collection[str]) -> Mapping[str, int]:
        """As LocalPlace: by listing the folders of the files. A folder that may not be listed tells nothing."""
        folders = sorted({path.rpartition("/")[0] for path in paths})
        if is_web(self.name) or len(folders) > _MAX_LISTED:
            return {}
        found: dict[str, int] = {}
        with ThreadPoolExecutor(_NUM_LISTERS) as listers:
            for folder, entries in zip(folders, listers.map(self._list, folders), strict=True):
                for name, size_bytes in entries.items():
                    path = f"{folder}/{name}" if folder else name
                    if path in paths:
                        found[path] = size_bytes
        return found

    def _list(self, folder: str) -> dict[str, int]:
        """Sizes of the files in a folder by name."""

        def entries(driver: Any, full: str) -> list[dict[str, Any]]:
            try:
                listed: list[dict[str, Any]] = driver.ls(full, detail=True)
                driver.invalidate_cache(full)  # it would keep a kilobyte of each file
            except (NotImplementedError, NotADirectoryError):
                return []
            return listed

        try:
            listed = self._read(folder, entries)
        except (FileNotFoundError, PermissionError):
            return {}
        files = (entry for entry in listed if entry.get("type") == "file")
        return {str(entry["name"]).rpartition("/")[2]: int(entry.get("size") or 0) for entry in files}

    def _read(self, path: str, how: Callable[[Any, str], _Result]) -> _Result:
        driver, full = self.file_system(path)
        for wait_s in (*_ATTEMPTS_S, None):
            try:
                return how(driver, full)
            except (FileNotFoundError, PermissionError, IsADirectoryError, EngineryError, Unreadable):
                raise
            except Exception as error:  # drivers raise anything
                if isinstance(error.__cause__, AddressRefused):  # aiohttp's has it in its words
                    raise error.__cause__ from None
                if wait_s is None or _is_refusal(error):
                    raise _as_os_error(error) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


Place = LocalPlace | RemotePlace


def locate(data: str) -> Place:
    """The folder that a path or a URI names."""
    if is_uri(data):
        return RemotePlace(data if data.endswith("://") else data.rstrip("/"))
    path = local_path(data)
    return LocalPlace(os.path.realpath(path), str(path))


def locate_file(data: str) -> tuple[Place, str]:
    """The folder of the file that a path or a URI names, and the file's name."""
    if not is_uri(data):
        return local_file(local_path(data))
    folder, _, file = (data.partition("?")[0] if is_web(data) else data).rpartition("/")
    folder += "/" * folder.endswith(":/")
    if is_web(data):
        file = unquote(urlsplit(data).path).rpartition("/")[2]
    return RemotePlace(folder, file, data if is_web(data) else ""), file


def local_file(path: Path) -> tuple[LocalPlace, str]:
    """The folder of a file of this machine, and the file's name."""
    return LocalPlace(os.path.realpath(path.parent), str(path.parent)), path.name


def fetched(data: str, scratch: Path) -> Path:
    """The file that a path names, without links, or a copy in `scratch` of the one behind a URI."""
    if not is_uri(data):
        return Path(os.path.realpath(local_path(data)))
    place, file = locate_file(data)
    assert isinstance(place, RemotePlace)
    place.download(file, scratch / file)
    return scratch / file


def is_below(path: str, root: str) -> bool:
    """True if `path` lies in `root`; both without links."""
    return path.startswith(root.rstrip("/") + "/")


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Translate what goes wrong while a source is listed into one error with the fix.

    Raises:
        UserError: a file or server can't be read.
    """
    try:
        yield
    except EngineryError:
        raise
    except Unreadable as error:
        raise UserError(
            f"can't read {name}: {error}; put the file that is meant in its place", code="unreadable-file"
        ) from None
    except AddressRefused as error:
        raise UserError(f"can't read {name}: {error.strerror}", code="inner-address") from None
    except FileNotFoundError:
        raise nothing_at(name) from None
    except Exception as error:
        if not is_uri(name):
            if isinstance(error, OSError):
                raise UserError(
                    f"can't read {name}: {error.strerror or error}; make it readable for you", code="unreadable-file"
                ) from None
            raise
        text = shortened(error) or type(error).__name__
        if _is_refusal(error):
            raise UserError(
                f"no permission to read {name} ({text}); give credentials in the environment: "
                f"{_driver(name).credentials}",
                code="no-permission",
            ) from error
        raise UserError(
            f"can't read {name}: {text}; check the address and the network, then try again", code="unreadable-uri"
        ) from error


def nothing_at(name: str) -> UserError:
    """The error about data that is not there."""
    return UserError(f"there is nothing at {name}; check the spelling, and that this account sees it", code="no-data")


def _web_options(uri: str) -> dict[str, Any]:
    """Options of fsspec's driver of web servers."""
    if not is_web(uri):
        return {}
    from components.common.data.web import open_session

    parts = urlsplit(uri)
    return {"get_client": open_session, "client_kwargs": {"named": f"{parts.scheme}://{parts.netloc}"}}


def keep_room(folder: Path, name: str) -> None:
    """Leave a disk some room while something is written to it.

    Raises:
        EngineryError: there is too little.
    """
    if shutil.disk_usage(folder).free < _SPARED_BYTES:
        raise EngineryError(
            f"the disk of {folder} is too small for {name}: less than 1 GB is left. Free some, or unpack it elsewhere "
            "and name the folder",
            code="disk-full",
        )


def _is_refusal(error: BaseException) -> bool:
    """True if asking again is pointless for want of credentials."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", getattr(error, "code", None))
    return isinstance(error, PermissionError) or "NoCredentialsError" in names or status in (401, 403, "401", "403")


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, OSError):
        return error
    kind = PermissionError if _is_refusal(error) else OSError
    return kind(f"{type(error).__name__}: {shortened(error)}")


def _whole(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:
        raise OSError(f"{len(data)} of {num_bytes} bytes came; the archive is cut off or was changed meanwhile")
    return data
