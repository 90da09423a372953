"""Small HTTP servers for what a test says."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(kw_only=True)
class Served:
    """State of a server of `serving`. A test gives it `answers`, or derives its own with a method `answer`."""

    endpoint: str = ""
    wanted_token: str | None = None
    wanted_cookie: str | None = None
    tokens: set[str | None] = field(default_factory=set)
    cookies: set[str | None] = field(default_factory=set)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path, body
    answers: Callable[..., tuple[Any, ...]] = lambda *_: (200, {})  # of method, path and body

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        return self.answers(method, path, body)


class QuietHandler(BaseHTTPRequestHandler):
    """Answers in one piece, and logs nothing."""

    def reply(self, status: int, data: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(
    handler: Any, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """A server with this class of handlers, for as long as the body runs. Port 0 is any."""
    server = ThreadingHTTPServer((host, port), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def address_of(handler: Any) -> Iterator[str]:
    """The address of a server with this class of handlers."""
    with listening(handler) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serving(state: Any, with_query: bool = False, port: int = 0) -> Iterator[Any]:
    """An HTTP server for `state`, which answers requests (method, path, body) and gets its address. Port 0 is any."""

    class Handler(QuietHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            try:
                body = json.loads(raw) if length else None
            except ValueError:  # not JSON alone
                body = raw
            path = self.path if with_query else self.path.split("?")[0]
            token, cookie = self.headers.get("authorization"), self.headers.get("Cookie")
            state.tokens.add(token)
            state.cookies.add(cookie)
            state.requests.append((self.command, path, body))
            if state.wanted_token is not None and token != f"Bearer {state.wanted_token}":
                self.reply(401, b'{"message": "who are you?"}', JSON)
            elif state.wanted_cookie is not None and cookie != state.wanted_cookie:
                self.reply(302, b"", {"Location": "/dex/auth"})
            else:
                headers: dict[str, str] = {}
                try:
                    status, told, *more = state.answer(self.command, path, body)
                    headers = more[0] if more else headers
                except Exception as error:  # an assertion on the request, too: the client tells it
                    status, told = 400, {"message": f"the test's server: {type(error).__name__}: {error}"}
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.reply(status, data, {**headers, **JSON})

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any

    with listening(Handler, port=port) as server:
        state.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield state
