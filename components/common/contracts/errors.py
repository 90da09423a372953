"""Errors a user can cause or must act on, and how text of foreign origin is shown."""

import re
from urllib.parse import parse_qsl, urlsplit

from components.common.registry.store import without_credentials

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


class RuntimeUnavailable(EngineryError):
    """An inference runtime (TensorRT, OpenVINO, ...) is not usable here. The message says what to install."""


class Preempted(KeyboardInterrupt):
    """SIGTERM came, what was done so far is saved, and the same command resumes from there.

    A KeyboardInterrupt, because nothing failed: whoever handles that one (MLflow's status, the run) is right here, too.
    """

    exit_code = EXIT_PREEMPTED


_ADDRESS = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
# Terminals obey the first two; the rest puts text into another order, or is no UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET_NAME = re.compile(r"key|token|sig|secret|pass|pwd|auth|cred|session|policy", re.IGNORECASE)
_MAX_PLAIN = 15  # characters of a query's value, such as 1 or main; longer ones may be anything
_NAMED_USERS = ("abfs", "abfss", "az", "adl", "sftp", "ssh")  # what stands before the @ is no secret


def shown(text: str) -> str:
    r"""The text with control characters as \x1b and so on, and without what addresses in it hold of secrets.

    Lines stay lines. A text that was treated stays as it is.
    """
    text = _ADDRESS.sub(lambda found: without_credentials(found[0]) if holds_secret(found[0]) else found[0], text)
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def holds_secret(uri: str) -> bool:
    """True if a URI has a user or password, or a query or fragment that may be a token or a signature."""
    scheme, mark, rest = uri.partition("://")
    if not mark or rest.startswith("/"):
        return False
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  # raises for a password with a slash
    except ValueError:
        return "@" in rest
    if parts.password is not None or (parts.username is not None and scheme.lower() not in _NAMED_USERS):
        return True
    pairs = parse_qsl(f"{parts.query}&{parts.fragment}", keep_blank_values=True)
    return any(_SECRET_NAME.search(name) or max(len(name), len(value)) > _MAX_PLAIN for name, value in pairs)


def without_secrets(value: str) -> str:
    """The value itself, if it holds no secret: settings are written into manifests, MLflow and KFP.

    Raises:
        ValueError: it does.
    """
    if holds_secret(value):
        raise ValueError(
            f"the address {without_credentials(value).partition('?')[0]} holds a user, a password or a signature, "
            "which would be written into manifests, MLflow and KFP. Leave it out: credentials come from the "
            "environment, from ~/.netrc (or the file that NETRC names) or from a Kubernetes Secret; what has only a "
            "signed link must be fetched before"
        )
    return value
