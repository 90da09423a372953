"""Where the data lies and what kind it is, told from its name."""

import os
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from fsspec.registry import get_filesystem_class

from components.common.errors import UserError
from components.common.shown import without_secrets

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
