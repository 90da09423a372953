"""`enginery ui`: MLflow's own UI on this machine's runs."""

import os
import sys

import click

from components.common.registry.store import without_credentials
from enginery.local.state import StateDirectory
from enginery.serving.server import address_of, check_port


@click.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="TCP port on this machine."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def ui(port: int, host: str) -> None:
    """Open the MLflow UI on this machine's runs."""
    uri = StateDirectory.current().tracking_uri
    shown = without_credentials(uri)
    if uri.startswith(("http://", "https://")):
        click.echo(f"MLFLOW_TRACKING_URI names a server; its UI is at {shown}")
        return
    check_port(address_of(host), port, "--port")
    # The UI opens on traces of language models unless the address says what this is.
    click.echo(f"http://{host}:{port}/#/experiments?workflowType=machine_learning shows {shown}; Ctrl-C ends it")
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri  # a command line would show a database's password to all users
    command = [sys.executable, "-m", "mlflow", "ui", "--host", host, "--port", str(port)]
    os.execv(sys.executable, command)
