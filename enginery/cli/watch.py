"""`enginery watch`: follow a run on a Kubeflow Pipelines server."""

import sys
from pathlib import Path

import click

from enginery.cli.options import login_options, logs_option
from enginery.cluster.server import KfpServer
from enginery.cluster.watch import follow


@click.command(params=[click.Argument(["run_id"], metavar="RUN"), *login_options(), logs_option()])
@click.option("--namespace", default="", metavar="NAME", help="Namespace of its pods.  [default: kubeflow]")
def watch(
    run_id: str,
    endpoint: str,
    token_file: Path | None,
    cookie_file: Path | None,
    ca_file: Path | None,
    logs: bool,
    namespace: str,
) -> None:
    """Follow a run that `enginery submit` started, to its end; the exit code is as with --wait.

    Ctrl-C stops the watching, not the run.
    """
    server = KfpServer.find(endpoint, token_file, cookie_file, ca_file)
    sys.exit(follow(server, server.client(), run_id, namespace=namespace, logs=logs))
