"""A Kubeflow Pipelines server and the Kubernetes API around it: how to get in, and what the server's refusals mean."""

import contextlib
import io
import json
import os
import shlex
import ssl
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import kfp_server_api  # type: ignore[import-untyped]
import urllib3

from components.common.contracts.errors import EngineryError, UserError

KFP_NAMESPACE = "kubeflow"  # where runs are if KFP serves one user
TOKEN_VARIABLE = "KFP_TOKEN"  # noqa: S105  # the name of a variable, no token
COOKIE_VARIABLE = "KFP_COOKIE"
# Where a pod finds the token that Kubernetes makes for KFP and renews; KFP's client knows the same two names.
_POD_TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105
_POD_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
# Whole seconds: the generated clients of KFP and of Kubernetes ignore any other limit, and would wait for ever.
_HEALTH_S, _ANSWER_S = 10, 30


@dataclass(frozen=True, kw_only=True)
class Login:
    """The user's login. Tokens and cookies come from the environment or from files: no list of processes shows them."""

    source: str  # what it is and where it comes from, for messages; "" for nobody
    token: Callable[[], str] | None = None  # asked before every request, as it may be renewed
    cookie: str = ""

    @classmethod
    def find(cls, token_file: Path | None, cookie_file: Path | None) -> "Login":
        """The first of: a file that was named, KFP_TOKEN, KFP_COOKIE, the token of the pod that this runs in.

        Raises:
            UserError: two files, or one that can't be read.
        """
        if token_file and cookie_file:
            message = "--token-file and --cookie-file can't be had together: a server asks for one of them"
            raise UserError(message, code="two-logins", setting="--cookie-file")
        if token_file:
            _read(token_file, "--token-file")
            return cls(source=f"the token in {token_file}", token=lambda: _read(token_file, "--token-file"))
        if cookie_file:
            return cls(source=f"the cookie in {cookie_file}", cookie=_read(cookie_file, "--cookie-file"))
        if token := os.environ.get(TOKEN_VARIABLE, "").strip():
            _check_line(token, TOKEN_VARIABLE, TOKEN_VARIABLE)
            return cls(source=f"the token in {TOKEN_VARIABLE}", token=lambda: token)
        if cookie := os.environ.get(COOKIE_VARIABLE, "").strip():
            _check_line(cookie, COOKIE_VARIABLE, COOKIE_VARIABLE)
            return cls(source=f"the cookie in {COOKIE_VARIABLE}", cookie=cookie)
        of_pod = Path(os.environ.get(_POD_TOKEN_VARIABLE) or _POD_TOKEN)
        if of_pod.is_file():
            return cls(source=f"this pod's token ({of_pod})", token=lambda: _read(of_pod, _POD_TOKEN_VARIABLE))
        return cls(source="")

    def refresh_api_key_hook(self, config: Any) -> None:
        """Renew the token; KFP's client calls this before a request."""
        if self.token is not None:
            config.api_key["authorization"] = self.token()


def _read(file: Path, source: str) -> str:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        message = f"{source} {file} can't be read: {reason}; name a file that holds nothing else"
        raise UserError(message, code="login-file-unreadable", setting=source) from None
    _check_line(text, f"{source} {file}", source)
    return text


def _check_line(text: str, where: str, setting: str) -> None:
    """A header of HTTP takes no more than this."""
    if not text or not text.isascii() or not text.isprintable():
        message = f"{where} must hold one line of ASCII characters, and nothing else"
        raise UserError(message, code="login-not-one-line", setting=setting)


@dataclass(frozen=True, kw_only=True)
class KfpServer:
    """One KFP server, as one user sees it."""

    endpoint: str  # without a slash at its end
    login: Login
    ca_file: Path | None = None
    options: str = ""  # by which a command gets in again, as a shell takes them

    def __post_init__(self) -> None:
        """Refuse certificates that can't be read, which would look like a server that can't be reached."""
        try:
            ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            text = f"--ca-file {self.ca_file}: {error.strerror or error}. Name a file with certificates in PEM"
            raise UserError(text, code="ca-file-unreadable", setting="--ca-file") from None

    @classmethod
    def find(cls, endpoint: str, token_file: Path | None, cookie_file: Path | None, ca_file: Path | None) -> Self:
        """Make one from the values of the options of the same names.

        Raises:
            UserError: no URL, or a file that can't be read.
        """
        url = checked_endpoint(endpoint)
        files = {"--token-file": token_file, "--cookie-file": cookie_file, "--ca-file": ca_file}
        words = ["--endpoint", url, *(word for name, file in files.items() if file for word in (name, str(file)))]
        return cls(endpoint=url, login=Login.find(token_file, cookie_file), ca_file=ca_file, options=shlex.join(words))

    def client(self) -> Any:
        """KFP's client, once the server has said that it is well.

        Raises:
            UserError: it can't be reached, refuses, or is something else.
        """
        self._check()
        with self.translate_errors(), quiet():
            from kfp.client import Client

            client = Client(
                host=self.endpoint,
                credentials=self.login if self.login.token else None,
                cookies=self.login.cookie or None,
                ssl_ca_cert=str(self.ca_file) if self.ca_file else None,
            )
        rest = client._run_api.api_client.rest_client  # of all its APIs; its methods set no limit
        ask = rest.request
        rest.request = lambda *given, **named: ask(*given, **{**named, "_request_timeout": _ANSWER_S})
        return client

    def link(self, run_id: str) -> str:
        """A run's page."""
        return f"{self.endpoint}/#/runs/details/{run_id}"

    def _check(self) -> None:
        """Ask for the server's health once. KFP's own client would retry for half a minute, logging tracebacks."""
        config = kfp_server_api.Configuration(host=self.endpoint)
        config.retries = urllib3.Retry(1, backoff_factor=0.5, redirect=False)
        if self.ca_file:
            config.ssl_ca_cert = str(self.ca_file)
        if self.login.token:
            config.api_key_prefix["authorization"] = "Bearer"
            config.api_key["authorization"] = self.login.token()
        api = kfp_server_api.HealthzServiceApi(kfp_server_api.ApiClient(config, cookie=self.login.cookie or None))
        with self.translate_errors():
            try:
                response = api.healthz_service_get_healthz(_preload_content=False, _request_timeout=_HEALTH_S)
            except kfp_server_api.ApiException as error:
                if error.status != 404:
                    raise
                text = f"{self.endpoint} serves no KFP API (404 {error.reason}). Give the URL above /apis"
                raise UserError(text, code="no-kfp-api", setting="--endpoint") from None
            try:
                answer = json.loads(response.data)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise self._no_api()

    def field(self, answer: Any, name: str) -> str:
        """A field that an answer of KFP's must have.

        Raises:
            UserError: it has none, as what KFP's client makes of a page has none.
        """
        if value := getattr(answer, name, None):
            return str(value)
        raise self._no_api()

    def _no_api(self) -> UserError:
        return UserError(
            f"{self.endpoint} answers, but not as Kubeflow Pipelines does (a login page?). Give the URL that "
            f"serves KFP's API (.../apis/v2beta1), and a token in {TOKEN_VARIABLE} or a cookie in "
            f"{COOKIE_VARIABLE} if it asks for one",
            code="no-kfp-api",
            setting="--endpoint",
        )

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turn what the client raises into one message."""
        try:
            yield
        except kfp_server_api.ApiException as error:
            if error.status in (301, 302, 303, 307, 308, 401, 403):
                sent = f"{self.login.source} was refused" if self.login.source else "nothing was sent"
                raise UserError(
                    f"{self.endpoint} refuses this request ({error.status} {error.reason}): {sent}. A bearer token is "
                    f"taken from {TOKEN_VARIABLE} or --token-file, a login page's cookie from {COOKIE_VARIABLE} or "
                    "--cookie-file. Where several users share KFP, --namespace must be yours",
                    code="kfp-refuses",
                ) from None
            if error.status == 404:
                what = _message_of(error) or "it does not say what"
                raise UserError(
                    f"{self.endpoint} does not have this (404 {error.reason}): {what}. Check the id, and that it is of "
                    "this server",
                    code="kfp-not-found",
                ) from None
            raise EngineryError(
                f"{self.endpoint} answers {error.status} {error.reason}: {_message_of(error) or 'it does not say why'}",
                code="kfp-error",
            ) from None
        except (urllib3.exceptions.HTTPError, TimeoutError) as error:
            reason = getattr(error, "reason", None) or error
            text = str(reason).split(": ", 1)[-1]
            fix = "Check the URL; for a cluster's own service: kubectl port-forward -n kubeflow svc/ml-pipeline-ui "
            fix += "8080:80, then --endpoint http://localhost:8080"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                fix = "Name the certificates that sign it with --ca-file"
            message = f"can't reach Kubeflow Pipelines at {self.endpoint}: {text}. {fix}"
            raise EngineryError(message, code="kfp-unreachable", setting="--endpoint") from None


def checked_endpoint(endpoint: str) -> str:
    """The base URL, from what people copy out of a browser.

    Raises:
        UserError: it is none, or has a password in it.
    """
    url = endpoint.split("#")[0].rstrip("/")
    if not url.startswith(("http://", "https://")) or url.count("/") < 2 or not url.split("/")[2]:
        raise UserError(
            "--endpoint must be a URL such as http://localhost:8080 or https://kfp.example.org/pipeline, "
            f"got {endpoint!r}",
            code="endpoint-not-url",
            setting="--endpoint",
        )
    if "@" in url.split("/")[2]:
        raise UserError(
            "--endpoint has a user or a password in it, which lists of processes and logs show; leave it out, and give "
            f"a token in {TOKEN_VARIABLE} or a cookie in {COOKIE_VARIABLE}",
            code="endpoint-holds-secret",
            setting="--endpoint",
        )
    return url


def _message_of(error: Any) -> str:
    """KFP's text of an error: JSON with `message` by its API, other JSON or a page by what stands before it."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        answer = json.loads(body)
        return " ".join(str(answer["message"]).split())
    except (ValueError, KeyError, TypeError):
        return "" if "<html" in body.lower() else " ".join(body.split())[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """KFP's client prints links and warns of what does not concern us."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
