"""`enginery serve`: a promoted model behind Triton on this machine, or as a model repository."""

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import MANIFEST, Artifact, RepositoryManifest, load_manifest
from components.common.contracts.records import PRECISIONS, Precision
from components.common.contracts.settings import resolve
from enginery.cli.options import PATH, given, signing_key
from enginery.formats import echo
from enginery.local.state import RunDirectory, StateDirectory, is_held
from enginery.pins import plan_needs, plan_server

if TYPE_CHECKING:
    from enginery.serving.server import Server

_SOURCE = "NAME@ALIAS|NAME/VERSION|DIR"


class _ServeGroup(click.Group):
    """`enginery serve MODEL` starts a server; `enginery serve export MODEL DIR` is the other verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ServeGroup, subcommand_metavar=f"[{_SOURCE} | export ...] [OPTIONS]")
def serve() -> None:
    """Serve a promoted model by Triton, on this machine without a GPU, or export its model repository.

    `enginery serve classifier@champion` starts the server; `enginery serve start --help` lists its options.
    `enginery serve export classifier@champion DIR` writes what NVIDIA's Triton image serves, on a GPU or a CPU.
    """


_precision = click.option(
    "--precision", type=click.Choice(PRECISIONS), help="What to serve.  [default: what the verdict says to ship]"
)
_name = click.option("--name", default="", help="Of the model in Triton.  [default: the registered model's]")
_top_k = click.option("--top-k", default=5, show_default=True, help="How many classes to name for each image.")
_port = click.IntRange(1, 65535)
_max_wait = click.option(
    "--max-wait",
    "max_wait_s",
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait in a queue before a 503.",
)
_shadow_share = click.option(
    "--shadow-share",
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="Of the images, 0 to 1: what `enginery shadow` may see while it runs.",
)
_keep_examples = "Keep a small copy of one image per bin of `enginery drift`, for its page"


@serve.command()
@click.argument("model", metavar=_SOURCE)
@click.argument("directory", type=PATH, metavar="DIR")
@_precision
@_name
@_top_k
@_max_wait
@click.option(
    "--keep-examples",
    is_flag=True,
    help=f"{_keep_examples}: in the server's folder $ENGINERY_EXAMPLES, if that is set.",
)
@_shadow_share
@signing_key
def export(model: str, directory: Path, precision: Precision | None, key: Path | None, **settings: Any) -> None:
    """Write a model repository for Triton into the new folder DIR.

    The model is a registered version, or the folder of a release or of a bundle. Plans are written where they were
    measured; the same repository is served on a CPU by `tritonserver --model-config-name=cpu`.
    """
    from components.common.registry.trust import check_signer
    from enginery.new_folders import translate_errors
    from enginery.serving.repository import RepositoryConfig, gpu_server_options, write_repository
    from enginery.serving.sources import find_source

    config = resolve(RepositoryConfig, "serve", settings)
    if key is not None:
        check_signer(key)
    with translate_errors(directory), find_source(model, precision) as source:
        repository = write_repository(source, directory, config, key)
        unmeasured = len(source.bundle.manifest.engines) and not source.measured_engines
    click.echo(f"wrote {directory}")
    _show(repository)
    if engines := repository.manifest.engines:
        echo(f"  image    {'; '.join(filter(None, plan_server(engines)))}")
    if options := gpu_server_options(repository.manifest):
        click.echo(f"  on GPUs  tritonserver needs {' '.join(options)}: the plan carries code that it runs")
    if unmeasured:
        click.echo("  its TensorRT plans are left out: no report says what they are worth")


@serve.command()
@click.argument("model", metavar=f"{_SOURCE}")
@_precision
@_name
@_top_k
@_max_wait
@_shadow_share
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all.")
@click.option("--http-port", default=8000, type=_port, show_default=True, help="For HTTP.")
@click.option("--grpc-port", default=8001, type=_port, show_default=True, help="For gRPC.")
@click.option("--metrics-port", default=8002, type=_port, show_default=True, help="For Prometheus.")
@click.option("--examples", type=PATH, metavar="DIR", help=f"{_keep_examples}, in DIR.  [default: no image is kept]")
@click.option(
    "--allow-loading",
    is_flag=True,
    help="Let clients with the key load models, as `enginery loadtest --compare-batching` does; see docs/loadtest.md.",
)
def start(
    model: str,
    precision: Precision | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    examples: Path | None,
    allow_loading: bool,
    **settings: Any,
) -> None:
    """Serve a model on this machine's CPU until Ctrl-C, by a real Triton.

    The model is a registered version, or the folder of a release, of a bundle, or of what `enginery serve export`
    wrote. Triton itself is installed once, beside this Python's packages (ENGINERY_TRITON names another folder).
    """
    from components.common.runtimes.selection import not_measured_here
    from enginery.serving.installation import install_triton
    from enginery.serving.loading import loading_key
    from enginery.serving.server import Ports, Server, address_of

    ports = Ports(host=address_of(host), http=http_port, grpc=grpc_port, metrics=metrics_port)
    key = loading_key(ports.host) if allow_loading else ""
    ports.check()
    triton = install_triton(click.echo)
    config = {**settings, "keep_examples": examples is not None}
    if examples is not None:
        _make_private(examples)
    with _repository(model, precision, config) as repository:
        server = Server.start(triton, repository.path, ports, loading_key=key, examples=examples)
        with _stopped_by_signals(server):
            server.wait_until_ready()
            server.echo = lambda line: echo(line, err=True)
            echo(f"ready: Triton serves {repository.manifest.name} on this machine's CPU; Ctrl-C ends it")
            _show(repository)
            if note := not_measured_here(repository.manifest.precision, repository.manifest.measured_on):
                echo(f"warning: {note}", err=True)
            for protocol, url in ports.urls().items():
                click.echo(f"  {protocol:9}{url}")
            status = server.serve(lambda line: echo(line, err=True))
    if status:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise EngineryError(f"the server ended by itself ({how}): {server.reason()}", code="server-ended")


@serve.command()
def install() -> None:
    """Install Triton's server now, which `enginery serve` else does when it first starts."""
    from enginery.serving.installation import install_triton

    click.echo(f"Triton's server is in {install_triton(click.echo).folder}")


@contextmanager
def _repository(
    model: str, precision: Precision | None, config: dict[str, Any]
) -> Iterator[Artifact[RepositoryManifest]]:
    """Yield an exported repository as it is, or one that is written for as long as the server runs."""
    from components.serve.repository_check import open_repository
    from enginery.release.fetch import fetch, read_identity
    from enginery.serving.repository import RepositoryConfig, write_repository
    from enginery.serving.sources import find_source

    folder = Path(model).expanduser()
    is_exported = (folder / MANIFEST).is_file() and read_identity(folder).kind == "repository"
    if (
        is_exported
        and config["keep_examples"]
        and not load_manifest(folder / MANIFEST, RepositoryManifest).manifest.config.get("keep_examples")
    ):
        raise UserError(
            f"{folder} was exported for a server that keeps no images; drop --examples, or export again with "
            "--keep-examples",
            code="already-exported",
            setting="--examples",
        )
    if is_exported and (chosen := given("precision", "name", "top_k", "max_wait_s", "shadow_share")):
        raise UserError(
            f"{folder} is served as it was exported, so {' and '.join(chosen)} can't be chosen any more; drop the "
            "option, or export again with it",
            code="already-exported",
        )
    parent = StateDirectory.current().path / "serve"
    parent.mkdir(exist_ok=True)
    _remove_left(parent)
    with TemporaryDirectory(dir=parent) as temporary:
        RunDirectory.hold(Path(temporary))
        if is_exported:  # a copy: what was checked can't be swapped any more
            fetch(str(folder), Path(temporary) / "models", read_identity(folder).digest)
            yield open_repository(Path(temporary) / "models")
            return
        with find_source(model, precision) as source:
            repository = write_repository(
                source, Path(temporary) / "models", resolve(RepositoryConfig, "serve", config)
            )
        yield repository


def _make_private(folder: Path) -> None:
    """Make the folder of example images, which only its owner reads."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        message = f"can't keep images in {folder}: {error.strerror}; name a folder that you may write with --examples"
        raise UserError(message, code="no-output", setting="--examples") from None


def _remove_left(parent: Path) -> None:
    """Remove what killed servers left; one that just begins has a minute to hold its folder."""
    for folder in parent.glob("*/"):
        if time.time() - folder.stat().st_mtime > 60 and not is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stopped_by_signals(server: "Server") -> Iterator[None]:
    """Ctrl-C and SIGTERM let requests in progress finish; a second one does not wait for them."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if not server.stopping:
            click.echo("stopping: requests in progress are finished; once more ends it at once", err=True)
        server.ask_to_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except EngineryError:
        if not server.stopping:
            raise
    finally:
        if server.process.poll() is None:
            server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.stopping:
        sys.exit(0)


def _show(repository: Artifact[RepositoryManifest]) -> None:
    manifest = repository.manifest
    label = f"{manifest.name} version {manifest.version}" if manifest.version else manifest.name
    echo(f"  model    {label}, {manifest.precision.upper()}, bundle {manifest.inputs['bundle']}")
    plans = plan_needs(manifest.engines)
    echo(f"  runs on  {plans + '; ' if plans else ''}CPUs (OpenVINO)")
    for where, batching in manifest.batching.items():
        echo(f"  on {where:6}{batching.reason}; waits {batching.queue_delay_us / 1e3:,.2f} ms for others")
