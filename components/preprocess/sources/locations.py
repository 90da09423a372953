"""Where the data lies and what kind it is: folders of this machine, or behind a URI."""

import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit

from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class

from components.common.contracts.errors import EngineryError, UserError, without_secrets
from components.preprocess.sources.samples import AddressRefused, Sample, Unreadable

Kind = Literal["folder", "tar", "compressed tar", "zip", "csv", "parquet"]

_SUFFIXES: dict[str, Kind] = {
    ".tar": "tar",
    ".tar.gz": "compressed tar",
    ".tgz": "compressed tar",
    ".tar.bz2": "compressed tar",
    ".tar.xz": "compressed tar",
    ".tar.zst": "compressed tar",
    ".zip": "zip",
    ".csv": "csv",
    ".parquet": "parquet",
}
_WANTED = (
    "name a folder with one sub-folder of images per class, an archive of it "
    "(.tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst, .zip) or a table (.csv, .parquet)"
)
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "huggingface_hub",
}
_SCHEMES = {*_PACKAGES, "memory"}


def is_uri(data: str) -> bool:
    """Whether `data` is no path of this machine. file: URIs are paths: see local_path."""
    return "://" in data and scheme_of(data) not in ("file", "local")


def scheme_of(data: str) -> str:
    """Of a URI, in lower case."""
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
    """Whether it lies on a web server, which lists no folders."""
    return scheme_of(data) in ("http", "https")


def kind_by_name(data: str) -> Kind:
    """What a file is by the end of its name; "folder" where that says nothing."""
    name = (urlsplit(data).path if "://" in data and is_web(data) else plain_path(data)).lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "folder")


def kind_of(data: str) -> Kind:
    """What `data` is; a folder of this machine may have any name."""
    return "folder" if not is_uri(data) and local_path(data).is_dir() else kind_by_name(data)


def check_data_folder(data: str) -> None:
    """Look whether `data` can be read at all, which takes no time; what it holds is found out by the step.

    Raises:
        UserError: it is not there, may not be read, is of no kind that is read, or is a URI that can't be used here.
    """
    if is_uri(data):
        _check_uri(data)
        return
    path = local_path(data)
    if not path.exists():
        raise UserError(f"the data folder {path} does not exist; {_WANTED}. To try: enginery data digits digits")
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"no permission to read the data folder {path}; make it readable for you (chmod -R u+rX)")
        return
    if not path.is_file() or kind_by_name(str(path)) == "folder":
        raise UserError(f"the data {path} is a file, not a folder, and of no kind that is read; {_WANTED}")
    if not os.access(path, os.R_OK):
        raise UserError(f"no permission to read {path}; make it readable for you (chmod u+r)")


def _check_uri(uri: str) -> None:
    scheme = scheme_of(uri)
    if "::" in uri:
        raise UserError(f"the data URI of scheme {scheme} chains several with '::', which is not read; {_WANTED}")
    try:
        without_secrets(uri)
    except ValueError as error:
        raise UserError(f"{error} ({credentials_hint(uri)})") from None
    if scheme not in _SCHEMES:
        raise UserError(
            f"the data {uri} has the scheme {scheme}, which is not read; use a path, or a URI of file, s3, gs, http, "
            "https, az or hf"
        )
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        fix = f"pip install {package}" if package else str(error)
        raise UserError(f"reading {scheme}:// needs a package that is not installed: {fix}") from None
    if is_web(uri) and kind_by_name(uri) == "folder":
        raise UserError(f"a web server lists no folders, so {uri} can't be read as one; name an archive or a table")


def credentials_hint(uri: str) -> str:
    """Where the driver of a URI looks for credentials."""
    return {
        "s3fs": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS",
        "adlfs": "AZURE_STORAGE_CONNECTION_STRING",
        "aiohttp": "~/.netrc, or the file that NETRC names",
        "huggingface_hub": "HF_TOKEN",
    }.get(_PACKAGES.get(scheme_of(uri), ""), "as the fsspec driver of this scheme documents")


LINK_OUT = "a link out of the data folder"
_ATTEMPTS_S = (0.5, 2.0)  # waits before a remote file is tried again
_CHUNK_BYTES = 1 << 24
_SPARED_BYTES = 1 << 30  # of a disk that is written to
_MAX_LISTED = 10_000  # folders, each of which is a request or more
_NUM_LISTERS = 8
_Result = TypeVar("_Result")


class Place(Protocol):
    """A folder. Paths are relative to it, with forward slashes."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def read(self, path: str) -> bytes:
        """A whole file. Raises OSError or Unreadable."""

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """A part of a file. Raises OSError or Unreadable."""

    def open(self, path: str) -> BinaryIO:
        """A file to seek and read in. Raises OSError or Unreadable."""

    def sizes(self, paths: Collection[str]) -> Mapping[str, int]:
        """Bytes of those of these files whose size is told without asking for each. Raises OSError."""


@dataclass(frozen=True)
class LocalPlace:
    """A folder of this machine. Nothing that a link leads out of it is read."""

    root: str  # without links
    name: str

    def resolved(self, path: str) -> str:
        """The regular file behind `path`."""
        full = os.path.realpath(os.path.join(self.root, path))
        if not is_below(full, self.root):
            raise Unreadable(LINK_OUT)
        if not stat.S_ISREG(os.stat(full).st_mode):  # a pipe would let the step wait for ever
            raise Unreadable("not a regular file")
        return full

    def read(self, path: str) -> bytes:
        """As Place."""
        return Path(self.resolved(path)).read_bytes()

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """As Place."""
        with self.open(path) as file:
            file.seek(start)
            return _whole(file.read(num_bytes), num_bytes)

    def open(self, path: str) -> BinaryIO:
        """As Place."""
        return Path(self.resolved(path)).open("rb")

    def size_bytes(self, path: str) -> int:
        """Of the file behind a link; one that is not there is rejected when it is read."""
        try:
            return os.stat(os.path.join(self.root, path)).st_size
        except OSError:
            return 0

    def sizes(self, paths: Collection[str]) -> Mapping[str, int]:
        """As Place."""
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

    def read(self, path: str) -> bytes:
        """As Place."""
        return self._read(path, lambda driver, full: driver.cat_file(full))

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """As Place."""
        if not num_bytes:
            return b""
        end = start + num_bytes
        return _whole(self._read(path, lambda driver, full: driver.cat_file(full, start=start, end=end)), num_bytes)

    def open(self, path: str) -> BinaryIO:
        """As Place."""
        return self._read(path, lambda driver, full: driver.open(full, "rb"))

    def download(self, path: str, target: Path) -> None:
        """Copy a file to this machine."""
        from components.preprocess.sources.web import DOWNLOAD

        # Of a web server as a stream: it need not send parts, nor say how much comes.
        options = {"block_size": 0, "size": 1, **DOWNLOAD} if is_web(self.name) else {}

        def copy(driver: Any, full: str) -> None:
            with driver.open(full, "rb", **options) as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    keep_room(target.parent, self.name)
                    file.write(chunk)

        self._read(path, copy)

    def has_ranges(self, path: str) -> bool:
        """Whether the server sends parts of a file. Simple web servers send the whole of it."""
        if not is_web(self.name):
            return True

        def ask(driver: Any, full: str) -> bool:
            # As a stream, of which nothing is fetched but the answer's head.
            with driver.open(full, "rb", block_size=0, size=1, headers={"Range": "bytes=0-0"}) as file:
                return bool(file.r.status == 206)

        return self._read(path, ask)

    def sizes(self, paths: Collection[str]) -> Mapping[str, int]:
        """As Place: by listing the folders of the files. A folder that may not be listed tells nothing."""
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
            except (FileNotFoundError, PermissionError, IsADirectoryError, EngineryError):
                raise
            except Exception as error:  # drivers raise anything
                if isinstance(error.__cause__, AddressRefused):  # aiohttp's has it in its words
                    raise error.__cause__ from None
                if wait_s is None or _is_refusal(error):
                    raise _as_os_error(error) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class FileStorage:
    """Samples that are files of their own."""

    place: Place

    def read(self, sample: Sample) -> bytes:
        """As Storage."""
        return self.place.read(sample.path)


def locate(data: str) -> Place:
    """The folder that a path or a URI names."""
    if is_uri(data):
        return RemotePlace(data if data.endswith("://") else data.rstrip("/"))
    path = local_path(data)
    return LocalPlace(os.path.realpath(path), str(path))


def locate_file(data: str) -> tuple[Place, str]:
    """The folder of the file that a path or a URI names, and the file's name."""
    if not is_uri(data):
        path = local_path(data)
        return LocalPlace(os.path.realpath(path.parent), str(path.parent)), path.name
    folder, _, file = (data.partition("?")[0] if is_web(data) else data).rpartition("/")
    folder += "/" * folder.endswith(":/")
    if is_web(data):
        file = unquote(urlsplit(data).path).rpartition("/")[2]
    return RemotePlace(folder, file, data if is_web(data) else ""), file


def is_below(path: str, root: str) -> bool:
    """Whether `path` lies in `root`; both without links."""
    return path.startswith(root.rstrip("/") + "/")


@contextmanager
def told_plainly(name: str) -> Iterator[None]:
    """Turn what goes wrong while a source is listed into one sentence with the fix.

    Raises:
        UserError: a file or server can't be read.
    """
    try:
        yield
    except UserError:
        raise
    except Unreadable as error:
        raise UserError(f"can't read {name}: {error}; put the file itself in its place") from None
    except AddressRefused as error:
        raise UserError(f"can't read {name}: {error.strerror}") from None
    except FileNotFoundError:
        raise UserError(f"there is nothing at {name}; check the spelling, and that this account sees it") from None
    except Exception as error:
        if not is_uri(name):
            if isinstance(error, OSError):
                raise UserError(f"can't read {name}: {error.strerror or error}; make it readable for you") from None
            raise
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if _is_refusal(error):
            raise UserError(
                f"no permission to read {name} ({text}); give credentials in the environment: {credentials_hint(name)}"
            ) from error
        raise UserError(f"can't read {name}: {text}; check the address and the network, then try again") from error


def _web_options(uri: str) -> dict[str, Any]:
    """For fsspec's driver of web servers."""
    if not is_web(uri):
        return {}
    from components.preprocess.sources.web import open_session

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
            "and name the folder"
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether asking again is pointless for want of credentials."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", getattr(error, "code", None))
    return isinstance(error, PermissionError) or "NoCredentialsError" in names or status in (401, 403, "401", "403")


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, OSError):
        return error
    text = " ".join(str(error).split())[:300]
    kind = PermissionError if _is_refusal(error) else OSError
    return kind(f"{type(error).__name__}: {text}")


def _whole(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:
        raise OSError(f"{len(data)} of {num_bytes} bytes came; the archive is cut off or was changed meanwhile")
    return data
