"""A running Triton: started on a model repository, watched, ended."""

import ctypes
import errno
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import psutil

import components
from components.common.contracts.errors import EngineryError, UserError
from components.serve.repository_check import CPU, EXAMPLES_VARIABLE
from components.serve.shadow import SHADOW_VARIABLE
from enginery.local.state import StateDirectory
from enginery.serving.installation import Triton
from enginery.serving.loading import HEADER

DRAIN_S = 30  # time for requests in progress when the server is told to stop
_POLL_S = 0.1
_MAX_STARTS = 3
# Ends after which it is started again. Triton divides by zero where a request asks for the `classification` of text.
_CRASHES = (-signal.SIGABRT, -signal.SIGFPE, -signal.SIGSEGV)
_MODELS_END_S = 2.0  # for the Python models, once Triton is gone
_SHARED = "enginery_"  # how the Python backend's files in /dev/shm begin; then comes the number of our process
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A failed model's reason in Triton's log: an exception of its Python, without the frames, or words of Triton.
_REASON = re.compile(r"""failed to load '[^']+' version \d+: [\w ]+: (.*?)(?:\\n\\nAt:|"$|$)""")
# Other lines that say why it ended, the last two of the C++ runtime, and those that are in every log without a GPU.
_ERRORS = ("E", "error", "terminate called", "  what():", "[libprotobuf ERROR")
_HARMLESS = re.compile("CudaDriverHelper|unable to create stream")
_CONSEQUENCE = "failed to load all models"  # the last line, which does not say why
_PLACE = re.compile(r"^(E\d+ \S+ +\d+ \S+|\[libprotobuf ERROR \S+)\] ")  # in Triton's code, at a line's beginning
# Of each thread, reserved and not used. Triton 2.51 puts the body of an HTTP request on the stack where it is said to
# be a form, which is what curl says of any --data; with the usual 8 MiB a body of 7 ended the server.
_STACK_BYTES = 1 << 30
_CLOSED = "logging,trace,shared-memory"  # parts of Triton's interface; containers/serve/start closes the same
METRICS_VARIABLE = "ENGINERY_METRICS_URL"  # as components/serve/admission_control.py reads it
_LIBC = ctypes.CDLL(None)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine


def shadow_socket() -> Path:
    """Return the socket at which `enginery shadow` listens for samples of this account's servers."""
    return Path(os.environ.get(SHADOW_VARIABLE) or StateDirectory.current().path / "shadow.sock").absolute()


def address_of(host: str) -> str:
    """The address that a name of this machine stands for, IPv4 before IPv6: Triton listens on addresses only.

    Raises:
        UserError: it stands for none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        reason = "" if found else "it is empty"
    except (OSError, UnicodeError) as error:
        found, reason = [], (isinstance(error, OSError) and error.strerror) or "it is no name"
    if reason:
        raise UserError(
            f"can't listen on --host {host!r}: {reason}; give an address of this machine, such as 127.0.0.1, or "
            "0.0.0.0 for all of them",
            code="cannot-listen",
            setting="host",
        )
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def check_port(host: str, port: int, option: str) -> None:
    """Say before any work that a port can't be had.

    Raises:
        UserError: it is taken, or the host is none of this machine's addresses.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fix = f"End what uses the port, or choose another with {option}"
            if error.errno == errno.EADDRNOTAVAIL:
                fix = "Give an address of this machine with --host; 0.0.0.0 is all of them"
            raise UserError(f"can't listen on {host}:{port}: {error.strerror}. {fix}", code="cannot-listen") from None


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Address and ports of the server."""

    host: str = "127.0.0.1"  # an address
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def check(self) -> None:
        """Raise a UserError where the ports are equal, or one can't be had."""
        given = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}
        if len(set(given.values())) < len(given):
            message = f"the ports for HTTP, gRPC and metrics must differ, got {', '.join(map(str, given.values()))}"
            raise UserError(message, code="equal-ports")
        for name, port in given.items():
            check_port(self.host, port, f"--{name}-port")

    def urls(self) -> dict[str, str]:
        """Return the addresses by protocol, for a person."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {
            "HTTP": f"http://{host}:{self.http}",
            "gRPC": f"{host}:{self.grpc}",
            "metrics": f"http://{host}:{self.metrics}/metrics",
        }

    def addresses(self) -> list[str]:
        """Triton's options; its two libraries write IPv6 each in its own way."""
        plain, bracketed = (f"ipv6:{self.host}", f"[{self.host}]") if ":" in self.host else (self.host, self.host)
        return [f"--http-address={plain}", f"--grpc-address={bracketed}", f"--metrics-address={plain}"]

    @property
    def own_metrics(self) -> str:
        """The metrics' address for the server's own models."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104  # not to bind to
        return Ports(host=host, metrics=self.metrics).urls()["metrics"]


@dataclass(kw_only=True)
class Server:
    """A process of Triton's. Ends with the process that made it."""

    ports: Ports
    process: subprocess.Popen[str]
    launch: Callable[[], subprocess.Popen[str]]
    log: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    echo: Callable[[str], None] | None = None  # for lines of the log, once the server is ready
    stopping: bool = False  # it was asked to end, and is not started again

    @classmethod
    def start(
        cls, triton: Triton, repository: Path, ports: Ports, *, loading_key: str = "", examples: Path | None = None
    ) -> "Server":
        """Start it on a repository that was checked, without a GPU. Returns at once: see `wait_until_ready`.

        Args:
            triton: what is started.
            repository: its folder.
            ports: where it listens.
            loading_key: lets clients that send it load models, as a load test does; without one nobody may.
            examples: folder in which a repository that lets images be kept has them; None for no images.
        """
        _remove_leftovers()
        command = [
            str(triton.binary),
            f"--model-repository={repository.absolute()}",
            f"--backend-directory={triton.backends}",
            f"--model-config-name={CPU}",
            "--disable-auto-complete-config",
            *ports.addresses(),
            f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-port={ports.metrics}",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            f"--exit-timeout-secs={DRAIN_S}",
            f"--backend-config=python,shm-region-prefix-name={_SHARED}{os.getpid()}_",
            "--log-info=false",
            *_closed_to_clients(loading_key),
            *(("--model-control-mode=explicit", "--load-model=*") if loading_key else ()),
        ]
        launch = partial(
            subprocess.Popen,
            command,
            env={
                **triton.environment(Path(components.__file__).absolute().parents[1]),
                METRICS_VARIABLE: ports.own_metrics,
                SHADOW_VARIABLE: str(shadow_socket()),
                EXAMPLES_VARIABLE: str(examples.absolute()) if examples is not None else "",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C in a terminal is ours to hand on
            preexec_fn=_prepare,
        )
        server = cls(ports=ports, process=launch(), launch=launch)
        server._follow_log()
        return server

    def _follow_log(self) -> None:
        threading.Thread(target=self._read, args=(self.process.stdout,), name="triton-log", daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.log.append(line.rstrip("\n"))
            if self.echo is not None:
                self.echo(line.rstrip("\n"))

    def wait_until_ready(self) -> None:
        """Return when the server takes requests.

        Triton gives its Python processes 5 seconds to answer, and aborts where a busy machine needs longer: it is
        started again then.

        Raises:
            EngineryError: it ended before.
        """
        for left in reversed(range(_MAX_STARTS)):
            if self._becomes_ready():
                return
            time.sleep(_POLL_S)  # the log's last lines
            if self.process.returncode not in _CRASHES or self.stopping or not left:
                raise EngineryError(f"the server did not start: {self.reason()}", code="server-not-started")
            self._tidy()
            self._start_again()

    def serve(self, say: Callable[[str], None]) -> int:
        """Until it ends by itself or is stopped; where it crashes it is started again, and `say` gets a line.

        Returns:
            Its exit status, negative for a signal.

        Raises:
            EngineryError: it did not start again.
        """
        while (status := self.wait()) in _CRASHES and not self.stopping:
            time.sleep(_POLL_S)  # the log's last lines
            say(f"the server crashed (signal {-status}: {self.reason()}) and is started again")
            self._start_again()
            self.wait_until_ready()
            say("ready again")
        return status

    def _start_again(self) -> None:
        self.log.clear()
        self.process = self.launch()
        if self.stopping:  # since the last one ended, which was told so instead
            self.process.terminate()
        self._follow_log()

    def _becomes_ready(self) -> bool:
        """True when it takes requests, False when it ended."""
        url = f"{self.ports.urls()['HTTP']}/v2/health/ready"
        while self.process.poll() is None:
            try:
                with _DIRECT.open(url, timeout=2):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        return False

    def reason(self) -> str:
        """Return the reason why it ended, from its log."""
        lines = [line for line in self.log if not _HARMLESS.search(line)]
        for line in lines:
            if found := _REASON.search(line):
                message = re.sub(r"^(EngineryError|UserError|RuntimeError|RuntimeUnavailable): ", "", found[1])
                return " ".join(message.replace("\\n", " ").replace('\\"', '"').split())
        errors = [line for line in lines if line.startswith(_ERRORS)]
        if len(errors) > 1 and _CONSEQUENCE in errors[-1]:
            return "; ".join(_PLACE.sub("", line).strip('"') for line in errors[:2])
        return (errors or lines or [f"it ended with {self.process.returncode}"])[-1]

    def ask_to_stop(self) -> None:
        """Have it finish the requests in progress and end; asked again it ends at once."""
        if self.stopping:
            self.process.kill()
        self.stopping = True
        self.process.terminate()

    def stop(self) -> None:
        """Let it finish the requests in progress, then end it."""
        self.process.terminate()
        try:
            self.process.wait(DRAIN_S + 5)
            self._tidy()
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Until it ends by itself. Returns its exit status, negative for a signal."""
        status = self.process.wait()
        self._tidy()
        return status

    def _tidy(self) -> None:
        """End what is left of its group: its Python models.

        They see that it is gone, but one that was just telling it something waits for the answer for ever.
        """
        deadline = time.monotonic() + _MODELS_END_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(_POLL_S)
            os.killpg(self.process.pid, signal.SIGKILL)
        _remove_leftovers()


def _closed_to_clients(loading_key: str) -> list[str]:
    """Options with which nobody who can ask for predictions changes what is logged, traced, shared or loaded."""
    closed = [f"{_CLOSED}:enginery={secrets.token_hex(16)}"]  # that nobody is told
    if loading_key:  # else Triton loads nothing, and its index of models is open
        closed.append(f"model-repository:{HEADER}={loading_key}")
    return [f"--{option}={entry}" for option in ("http-restricted-api", "grpc-restricted-protocol") for entry in closed]


def _remove_leftovers() -> None:
    """Remove processes and shared memory of servers whose `enginery serve` was killed."""
    for process in psutil.process_iter(["cmdline"]):
        regions = [word for word in process.info["cmdline"] or () if word.startswith(_SHARED)]
        if regions and "python_backend_stub" in process.info["cmdline"][0] and not _lives(_owner(regions[0])):
            with suppress(psutil.Error):
                process.kill()
    for file in Path("/dev/shm").glob(f"{_SHARED}*"):
        owner = _owner(file.name)
        if owner == str(os.getpid()) or not _lives(owner):
            file.unlink(missing_ok=True)


def _owner(region: str) -> str:
    """Number of the process whose server has a region of shared memory."""
    return region.removeprefix(_SHARED).partition("_")[0]


def _lives(pid: str) -> bool:
    return Path("/proc", pid).exists()


def _prepare() -> None:
    """Prepare the new process, before it becomes Triton."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
