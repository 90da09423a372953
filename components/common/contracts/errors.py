"""Errors a user can cause or must act on, and how text of foreign origin is shown."""

import re
from urllib.parse import parse_qsl, urlsplit

from components.common.registry.store import FEW_SLASHES, split_scheme, without_credentials

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_GATE_FAILED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_INTERRUPTED = 130  # as shells say it of Ctrl-C


class EngineryError(Exception):
    """A failure with a message meant for the user.

    Attributes:
        exit_code: The process ends with it.
        code: Stable name of the kind of failure, such as "archive-too-large"; programs and tests compare it.
        setting: The setting at fault, as the user writes it; empty where none is.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str = "", *, code: str = "", setting: str = "") -> None:
        super().__init__(shown(message))
        self.code = code
        self.setting = setting


class UserError(EngineryError):
    """The user's input or environment is at fault, and the message says how to fix it."""

    exit_code = EXIT_USER_ERROR


class GateFailed(EngineryError):
    """The model did not pass its gate. The report is already written when this is raised."""

    exit_code = EXIT_GATE_FAILED


class AddressRefused(PermissionError):
    """A web server leads to an address of an inner network; strerror says which, and what to do."""


class RuntimeUnavailable(EngineryError):
    """An inference runtime (TensorRT, OpenVINO, ...) is not usable here. The message says what to install."""


class Preempted(KeyboardInterrupt):
    """SIGTERM came, what was done so far is saved, and the same command resumes from there.

    A KeyboardInterrupt, because nothing failed: whoever handles that one (MLflow's status, the run) is right here, too.
    """

    exit_code = EXIT_PREEMPTED


_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
# Addresses of a text, up to the next one's scheme. A quote ends one, unless an @ behind it makes it part of a password.
# Without a scheme, or with too few slashes behind it, only those with a user are looked for: others are paths.
_ADDRESS = re.compile(
    rf"{_SCHEME}(?:(?:(?!{_SCHEME})\S)*@)?(?:(?!{_SCHEME})[^\s'\"<>])*|(?<![\w.:/])//[^\s'\"<>/@]+@[^\s'\"<>]*"
    rf"|{FEW_SLASHES}[^\s'\"<>/@]{{1,500}}@[^\s'\"<>]*"
)
_PATH_SECRET = re.compile(r";([^;/?#=]*)=([^;/?#]*)")  # a parameter behind a ; of a path, such as ;token=...
# Terminals obey the first two; the rest puts text into another order, takes no room, or is no UTF-8. Joiners of letters
# (U+200C, U+200D) stay: languages and emoji need them.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
_SECRET_NAME = re.compile(r"key|token|sig|secret|pass|pwd|auth|cred|session|policy", re.IGNORECASE)
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")  # behind the name of an artifact in an OCI registry
_MAX_PLAIN = 15  # characters of a query's value, such as 1 or main; longer ones may be anything
_CONTAINERS = ("abfs", "abfss", "az", "adl")  # what stands before the @ is no user
_LOGINS = ("sftp", "ssh")  # a name alone stands before the @, or a token
_MIN_PORT = 1000  # of a service that is not the web; smaller numbers before a slash may be of a password


def shown(text: str) -> str:
    r"""The text with control characters as \x1b and so on, and without what addresses in it hold of secrets.

    Lines stay lines. A text that was treated stays as it is.
    """
    return visible(_ADDRESS.sub(lambda found: _hidden(found[0]), text))


def visible(text: str) -> str:
    r"""The text with control characters as \x1b and so on. Lines stay lines."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _hidden(address: str) -> str:
    """An address without its secrets, if it has any."""
    if not _is_secret(address):
        return address
    bare, mark, fragment = without_credentials(address).partition("#")
    bare = _PATH_SECRET.sub(r";\1=***", bare)
    return f"{bare}{mark}{'***' if '=' in fragment else fragment}"  # others are places of a page


def shortened(text: object, max_chars: int = 300) -> str:
    """A library's text in one line, cut behind a word where it is longer."""
    line = " ".join(str(text).split())
    cut = line[:max_chars].rpartition(" ")[0].rstrip(",;:.") or line[:max_chars]
    return line if len(line) <= max_chars else f"{cut} ..."


def holds_secret(text: str) -> bool:
    """True if an address that a text is, or that is in it, has a user or password, or may have a token or signature."""
    return _is_secret(text) or any(_is_secret(found[0]) for found in _ADDRESS.finditer(text))


def _is_secret(uri: str) -> bool:
    scheme, rest = split_scheme(uri)
    if rest is None:
        return False
    if not scheme:
        return "@" in rest.partition("/")[0]
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        port = parts.port  # raises for most passwords with a slash
    except ValueError:
        return "@" in rest
    if parts.password is not None or (parts.username is not None and _may_be_token(scheme.lower(), parts.username)):
        return True
    if port is not None and _may_be_password(parts.hostname or "", port, rest):
        return True
    is_web = scheme.lower() in ("http", "https")
    if any(
        bool(_SECRET_NAME.search(name)) + (len(value) > _MAX_PLAIN) > (not is_web)
        for name, value in _PATH_SECRET.findall(parts.path)
    ):
        return True
    pairs = parse_qsl(f"{parts.query}&{parts.fragment}".replace(";", "&"), keep_blank_values=True)
    return any(_SECRET_NAME.search(name) or max(len(name), len(value)) > _MAX_PLAIN for name, value in pairs)


def _may_be_token(scheme: str, user: str) -> bool:
    """True for what stands before an @, unless it is a container, or a login of short parts or of letters."""
    if scheme in _CONTAINERS:
        return False
    is_name = (len(part) <= _MAX_PLAIN or (part.isalpha() and part.islower()) for part in re.split("[._-]", user))
    return scheme not in _LOGINS or not all(is_name)


def _may_be_password(host: str, port: int, rest: str) -> bool:
    """True if what seems to be host, port and a path with an @ may be a user, a password with a slash, and a host."""
    before, _, after = _DIGEST.sub("", rest).rpartition("@")
    if not before or before.endswith("/") or host == "localhost" or ":" in host or host.replace(".", "").isdigit():
        return False
    if port >= _MIN_PORT or port in (80, 443):  # an @ in a path is no user
        return False
    return "." not in host or "/" in after


def without_secrets(value: str) -> str:
    """The value itself, if it holds no secret: settings are written into manifests, MLflow and KFP.

    Raises:
        ValueError: it does.
    """
    if holds_secret(value):
        hidden = shown(value)
        if _is_secret(hidden):
            hidden = without_credentials(hidden)
        raise ValueError(
            f"the address {re.split('[?#]', hidden)[0]} holds a user, a password or a signature, "
            "which would be written into manifests, MLflow and KFP. Leave it out: credentials come from the "
            "environment, from ~/.netrc (or the file that NETRC names) or from a Kubernetes Secret; what has only a "
            "signed link must be fetched before"
        )
    return value
