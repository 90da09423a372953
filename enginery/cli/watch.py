"""`enginery watch`: follow a run on a Kubeflow Pipelines server."""

import sys
from pathlib import Path

import click

from enginery.cli.submit import KFP_NAMESPACE, log_options
from enginery.cluster.server import Server, login_options
from enginery.cluster.watch import Following, PodLogs


def _watch(
    run_id: str,
    endpoint: str,
    token_file: Path | None,
    cookie_file: Path | None,
    ca_file: Path | None,
    namespace: str | None,
    logs: bool,
) -> None:
    server = Server.find(endpoint, token_file, cookie_file, ca_file)
    of_pods = PodLogs(namespace or KFP_NAMESPACE, run_id) if logs else None
    sys.exit(Following(server, server.client(), run_id, of_pods, namespace or "").to_the_end())


watch = click.Command(
    "watch",
    params=[
        click.Argument(["run_id"], metavar="RUN"),
        *login_options(),
        click.Option(["--namespace"], metavar="NAME", help="Namespace of its pods.  [default: kubeflow]"),
        *log_options(),
    ],
    callback=_watch,
    help="Follow a run that `enginery submit` started, to its end; the exit code is as with --wait. Ctrl-C stops the "
    "watching, not the run.",
)
