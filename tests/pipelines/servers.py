"""Real servers for tests: MLflow's own on SQLite or PostgreSQL, PostgreSQL itself, and doors in front of them."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from tests.waiting import wait_until


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """True if a server at a URL does what it is asked."""
    with suppress(requests.RequestException):
        return requests.get(url, timeout=2).ok
    return False


@contextmanager
def started(command: list[str], url: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, once it answers at a URL."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        wait_until(lambda: process.poll() is not None or answers(url))
        yield process
    finally:
        stop(process)


@contextmanager
def server(folder: Path, port: int, store: str = "", workers: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """MLflow's own, on a SQLite file in `folder` or on another store."""
    options = ["--backend-store-uri", store or f"sqlite:///{folder / 'server.db'}"]
    options += ["--artifacts-destination", str(folder / "files"), "--workers", str(workers)]
    # A door may hold an answer back for longer than the 5 s after which uvicorn closes an idle connection.
    options += ["--uvicorn-opts", "--timeout-keep-alive 60"]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), *options]
    log = (folder / "server.log").open("ab")
    with started(command, f"http://127.0.0.1:{port}/health", cwd=folder, stderr=log) as process:
        yield process


def stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _postgresql(name: str) -> str:
    """One of PostgreSQL's programs, which Debian keeps off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    assert found, f"{name} is not there: apt-get install postgresql (this test does not skip)"
    return found


@contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL server of its own. Yields the URI of an empty database."""
    folder, port = Path(tempfile.mkdtemp(prefix="enginery-pg-")), free_port()
    identity: dict[str, str] = {}
    if os.getuid() == 0:  # as which PostgreSQL refuses to run
        shutil.chown(folder, pwd.getpwnam("postgres").pw_uid)
        identity = {"user": "postgres"}
    initdb = [_postgresql("initdb"), "-D", str(folder / "data"), "-U", "tester", "--auth=trust", "--no-sync"]
    subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **identity)
    settings = ["-c", "listen_addresses=127.0.0.1", "-p", str(port), "-k", str(folder), "-c", "fsync=off"]
    process = subprocess.Popen(
        [_postgresql("postgres"), "-D", str(folder / "data"), *settings],
        cwd=folder,
        stderr=(folder / "log").open("wb"),
        **identity,
    )
    try:
        ready = [_postgresql("pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
        wait_until(lambda: not subprocess.run(ready, check=False).returncode)
        yield f"postgresql://tester@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)  # without waiting for clients
        process.wait(30)
        shutil.rmtree(folder)


@contextmanager
def door(port: int, on_request: Callable[[int], None], on_answer: Callable[[], None]) -> Iterator[int]:
    """A port that passes everything on to another one.

    Args:
        port: the other one.
        on_request: called with the number of each piece that a client sends, before it is passed on.
        on_answer: called before each piece of an answer is passed on.
    """
    counted, lock = [0], threading.Lock()

    def count() -> None:
        with lock:
            counted[0] += 1
            on_request(counted[0])

    def carry(source: socket.socket, sink: socket.socket, before: Callable[[], None]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                before()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                try:
                    outer = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    inner.close()
                    continue
                threading.Thread(target=carry, args=(inner, outer, count), daemon=True).start()
                threading.Thread(target=carry, args=(outer, inner, on_answer), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
