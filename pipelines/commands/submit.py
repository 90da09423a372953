"""`enginery submit`: a pipeline file on a Kubeflow Pipelines server."""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import kfp_server_api  # type: ignore[import-untyped]
import urllib3
from kfp import compiler

from components.common.errors import EXIT_FAILURE, EngineryError, UserError
from pipelines.commands.run import FILE_FIRST, pipeline_command
from pipelines.parameters import PipelineFile, load_pipeline

TOKEN_VARIABLE = "KFP_TOKEN"  # noqa: S105  # the name of a variable, no token
_TIMEOUT_S = 10.0
_ENDED = {"SUCCEEDED": 0, "SKIPPED": 0, "FAILED": EXIT_FAILURE, "CANCELED": EXIT_FAILURE}
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.5, 15.0
_MAX_LOST_POLLS = 20  # in a row, before the server counts as gone


@click.command(context_settings=FILE_FIRST, add_help_option=False, options_metavar="")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py --endpoint URL [OPTIONS]")
@click.pass_context
def submit(ctx: click.Context, file: Path) -> None:
    """Submit a pipeline file to a Kubeflow Pipelines server.

    The options are the pipeline's own, and some more: `enginery submit FILE.py --help` lists them. Paths among them
    are the cluster's. A bearer token is taken from the environment variable KFP_TOKEN.
    """
    if str(file) in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
    command_for(file).main(args=ctx.args, prog_name=f"enginery submit {file}", standalone_mode=True)


def command_for(path: Path) -> click.Command:
    """The command line of one pipeline file on a cluster.

    Raises:
        UserError: the file is no pipeline.
    """
    file = load_pipeline(path)

    def execute(arguments: dict[str, Any], wait: bool, **where: Any) -> None:
        sys.exit(_submit(file, arguments, wait=wait, **where))

    options = [
        click.Option(
            ["--endpoint"],
            required=True,
            envvar="KF_PIPELINES_ENDPOINT",
            show_envvar=True,
            metavar="URL",
            help="Where Kubeflow Pipelines answers, such as http://localhost:8080 behind a port-forward.",
        ),
        click.Option(["--experiment"], metavar="NAME", help="KFP experiment.  [default: the pipeline's name]"),
        click.Option(["--run-name"], metavar="NAME", help="Name of the run.  [default: the pipeline's, and the time]"),
        click.Option(["--namespace"], metavar="NAME", help="Your namespace, where KFP serves several users."),
        click.Option(["--wait"], is_flag=True, help="Follow the run to its end; exit code 1 if it fails."),
    ]
    return pipeline_command(file, execute, options, local=False)


def _submit(
    file: PipelineFile,
    arguments: dict[str, Any],
    *,
    endpoint: str,
    experiment: str | None,
    run_name: str | None,
    namespace: str | None,
    wait: bool,
) -> int:
    endpoint = _checked_endpoint(endpoint)
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, f"{file.name}.yaml")
        compiler.Compiler().compile(file.pipeline, str(package))
        _check_server(endpoint, token)
        with _explained(endpoint), _quiet():
            from kfp.client import Client

            client = Client(host=endpoint, existing_token=token or None)
            result = client.create_run_from_pipeline_package(
                str(package),
                arguments=arguments,
                run_name=run_name or f"{file.name} {datetime.now():%Y-%m-%d %H:%M:%S}",
                experiment_name=experiment or file.name,
                namespace=namespace,
            )
    click.echo(f"run         {result.run_id}")
    click.echo(f"look at it  {endpoint}/#/runs/details/{result.run_id}")
    return _follow(client, result.run_id, endpoint) if wait else 0


def _checked_endpoint(endpoint: str) -> str:
    """The base URL, from what people copy out of a browser."""
    url = endpoint.split("#")[0].rstrip("/")
    if not url.startswith(("http://", "https://")) or url.count("/") < 2 or not url.split("/")[2]:
        raise UserError(f"--endpoint must be a URL such as http://localhost:8080 or https://kfp.example.org/pipeline, "
                        f"got {endpoint!r}")  # fmt: skip
    return url


def _check_server(endpoint: str, token: str) -> None:
    """Ask for the server's health once. KFP's own client would retry for half a minute, logging tracebacks."""
    config = kfp_server_api.Configuration(host=endpoint)
    config.retries = urllib3.Retry(1, backoff_factor=0.5, redirect=False)
    if token:
        config.api_key["authorization"] = token
        config.api_key_prefix["authorization"] = "Bearer"
    api = kfp_server_api.HealthzServiceApi(kfp_server_api.ApiClient(config))
    with _explained(endpoint):
        response = api.healthz_service_get_healthz(_preload_content=False, _request_timeout=_TIMEOUT_S)
        try:
            answer = json.loads(response.data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UserError(
                f"{endpoint} answers, but not as Kubeflow Pipelines does (a login page?). Give the URL that serves "
                f"KFP's API (.../apis/v2beta1), and a token in {TOKEN_VARIABLE} if it asks for one"
            )


@contextlib.contextmanager
def _explained(endpoint: str) -> Iterator[None]:
    """Turn what the client raises into one message."""
    try:
        yield
    except kfp_server_api.ApiException as error:
        if error.status in (301, 302, 303, 307, 308, 401, 403):
            given = "the token in it was refused" if os.environ.get(TOKEN_VARIABLE) else "it is not set"
            raise UserError(
                f"{endpoint} refuses this request ({error.status} {error.reason}). A bearer token is taken from "
                f"{TOKEN_VARIABLE}; {given}. Where several users share KFP, --namespace must be yours"
            ) from None
        if error.status == 404:
            raise UserError(f"{endpoint} serves no KFP API (404 {error.reason}). Give the URL above /apis") from None
        raise EngineryError(f"{endpoint} answers {error.status} {error.reason}: {_message_of(error)}") from None
    except (urllib3.exceptions.HTTPError, TimeoutError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"can't reach Kubeflow Pipelines at {endpoint}: {str(reason).split(': ', 1)[-1]}. Check the URL; for a "
            "cluster's own service: kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80, then "
            "--endpoint http://localhost:8080"
        ) from None


def _message_of(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(str(error.body).split())[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """KFP's client prints links and warns of what does not concern us."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _follow(client: Any, run_id: str, endpoint: str) -> int:
    """Poll until the run ends. Returns the exit code. Ctrl-C stops the watching, not the run."""
    # KFP's wait_for_run_completion never ends for a cancelled run and gives up at the first lost connection.
    seen, pause_s, lost = "", _SHORTEST_POLL_S, 0
    while True:
        try:
            run = client.get_run(run_id)
            lost = 0
        except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError):
            lost += 1
            if lost >= _MAX_LOST_POLLS:
                with _explained(endpoint):
                    raise
        else:
            state = str(run.state or "PENDING").upper()
            if state != seen:
                click.echo(f"state       {state.lower()}")
                seen = state
            if state in _ENDED:
                if run.error is not None and run.error.message:
                    click.echo(f"reason      {run.error.message}")
                return _ENDED[state]
        try:
            time.sleep(pause_s)
        except SystemExit:  # which pipelines.cli makes of Ctrl-C
            click.echo(f"\nno longer waiting; run {run_id} goes on")
            return 130
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
