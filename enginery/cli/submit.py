"""`enginery submit`: a pipeline file on a Kubeflow Pipelines server."""

import json
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from kfp import compiler

from components.common.contracts.errors import UserError
from enginery.cli.compile import load_for_cluster
from enginery.cli.options import PATH, login_options, logs_option, settings_options
from enginery.cli.run import FILE_FIRST, pipeline_command
from enginery.cluster.server import KfpServer, quiet
from enginery.cluster.settings import ClusterSettings, settings_rows
from enginery.cluster.watch import follow
from enginery.formats import echo, seconds_in
from enginery.local.parameters import PipelineFile, load_pipeline


@click.command(context_settings=FILE_FIRST, options_metavar="")
@click.argument("file", type=PATH, metavar="PIPELINE --endpoint URL [OPTIONS]")
@click.pass_context
def submit(ctx: click.Context, file: Path) -> None:
    """Submit a pipeline, by its name or file, to a Kubeflow Pipelines server.

    The options are the pipeline's own, and some more: `enginery submit PIPELINE --help` lists them, and `enginery
    submit --settings-help` the keys of the settings file. Paths among them are the cluster's. A bearer token is taken
    from the environment variable KFP_TOKEN, a login page's cookie from KFP_COOKIE.
    """
    if str(file) == "--settings-help":
        formatter = click.HelpFormatter(width=100)
        with formatter.section("Keys of the settings file (an example: pipelines/configs/cluster.yaml)"):
            formatter.write_dl(
                [(key, f"{text}  [default: {default}]" if default else text) for key, default, text in settings_rows()],
                col_max=34,
            )
        click.echo(formatter.getvalue().rstrip())
        return
    command_for(file).main(args=ctx.args, prog_name=f"enginery submit {file}", standalone_mode=True)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A pipeline's arguments, and how it is to run."""

    arguments: dict[str, Any]
    settings: ClusterSettings
    experiment: str
    run_name: str
    namespace: str
    cron: str  # of a recurring run, in KFP's six fields; "" for none
    every_s: int  # 0 for none
    once: bool  # a run of this name counts as this one


def command_for(path: Path) -> click.Command:
    """The command line of one pipeline file on a cluster.

    Raises:
        UserError: the file is no pipeline.
    """
    file = load_pipeline(path)

    def execute(
        arguments: dict[str, Any],
        settings: Path | None,
        num_nodes: int | None,
        wait: bool,
        logs: bool,
        cron: str | None,
        every: str | None,
        **values: Any,
    ) -> None:
        server = KfpServer.find(*(values.pop(name) for name in ("endpoint", "token_file", "cookie_file", "ca_file")))
        placed, of_cluster = file, ClusterSettings()
        if settings is not None or num_nodes is not None:
            placed, of_cluster = load_for_cluster(path, settings, num_nodes)
        if cron and every:
            raise UserError("--cron and --every can't be had together", code="two-schedules", setting="--every")
        if values["once"] and not values["run_name"]:
            text = "--once looks for a run of this name; give it one with --run-name"
            raise UserError(text, code="once-without-name", setting="--run-name")
        if wait and (cron or every):
            text = "--wait follows one run, and --cron and --every make many; leave --wait out"
            raise UserError(text, code="schedule-with-wait", setting="--wait")
        name = file.name if cron or every else f"{file.name} {datetime.now():%Y-%m-%d %H:%M:%S}"
        request = Request(
            arguments=arguments,
            settings=of_cluster,
            experiment=values["experiment"] or file.name,
            run_name=values["run_name"] or name,
            namespace=values["namespace"] or of_cluster.namespace,
            cron=_cron(cron) if cron else "",
            every_s=_every_s(every) if every else 0,
            once=values["once"],
        )
        sys.exit(_submit(placed, request, server, wait=wait, logs=logs))

    options = [
        *login_options(),
        *settings_options(),
        click.Option(["--experiment"], metavar="NAME", help="KFP experiment.  [default: the pipeline's name]"),
        click.Option(["--run-name"], metavar="NAME", help="Name of the run.  [default: the pipeline's, and the time]"),
        click.Option(
            ["--once"],
            is_flag=True,
            help="Submit nothing if a run of this --run-name is there and did not fail; --wait follows that one.",
        ),
        click.Option(["--namespace"], metavar="NAME", help="Your namespace, where KFP serves several users."),
        click.Option(
            ["--wait"],
            is_flag=True,
            help="Follow the run to its end; exit code 3 if its gate said no, 1 if it failed otherwise.",
        ),
        logs_option(),
        click.Option(["--cron"], metavar="TIMES", help="Run again and again: minute, hour, day, month, weekday."),
        click.Option(["--every"], metavar="TIME", help="Run again and again, such as every 6h or 1d."),
    ]
    return pipeline_command(file, execute, options, local=False)


def _cron(text: str) -> str:
    """KFP counts seconds, too; crontab's five fields begin with minutes."""
    fields = text.split()
    if len(fields) not in (5, 6) or not all(re.fullmatch(r"[0-9A-Za-z*/,?-]+", field) for field in fields):
        raise UserError(
            f"--cron takes five fields (minute, hour, day, month, weekday), such as '0 3 * * 1' for Mondays at 3, or "
            f"six with seconds before them; got {text!r}",
            code="bad-schedule",
            setting="--cron",
        )
    return " ".join(fields if len(fields) == 6 else ["0", *fields])


def _every_s(text: str) -> int:
    seconds = seconds_in(text)
    if not seconds or seconds % 1:
        message = f"--every takes a number and s, m, h or d, such as 6h; got {text!r}"
        raise UserError(message, code="bad-schedule", setting="--every")
    return int(seconds)


def _submit(file: PipelineFile, request: Request, server: KfpServer, *, wait: bool, logs: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, f"{file.name}.yaml")
        compiler.Compiler().compile(file.pipeline, str(package))
        client = server.client()
        with server.translate_errors(), quiet():
            if request.cron or request.every_s:
                lines = _recurring(client, package, request, server)
                run_id = ""
            else:
                run_id = _earlier(client, request) if request.once else ""
                lines = [f"run         {run_id}, which was there before"] if run_id else []
                run_id = run_id or _once(client, package, request, server)
                lines = [*(lines or [f"run         {run_id}"]), f"look at it  {server.link(run_id)}"]
    for line in lines:
        echo(line)
    if not wait:
        return 0
    return follow(server, client, run_id, namespace=request.namespace, logs=logs)


def _earlier(client: Any, request: Request) -> str:
    """Id of the newest run of this name that has not failed; empty if there is none."""
    by_name = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": request.run_name}]}
    options = {"sort_by": "created_at desc", "filter": json.dumps(by_name), "namespace": request.namespace or None}
    runs = client.list_runs(page_size=100, **options).runs or []
    return next((str(run.run_id) for run in runs if run.state not in ("FAILED", "CANCELED")), "")


def _once(client: Any, package: Path, request: Request, server: KfpServer) -> str:
    result = client.create_run_from_pipeline_package(
        str(package),
        arguments=request.arguments,
        run_name=request.run_name,
        experiment_name=request.experiment,
        namespace=request.namespace or None,
        pipeline_root=request.settings.pipeline_root or None,
        service_account=request.settings.service_account or None,
    )
    return server.field(result, "run_id")


def _recurring(client: Any, package: Path, request: Request, server: KfpServer) -> list[str]:
    """Have KFP start the pipeline again and again. Returns the lines to print.

    Raises:
        UserError: there is one of this name already, and two would do everything twice.
    """
    experiment = client.create_experiment(request.experiment, namespace=request.namespace or None)
    kfp = f"kfp --endpoint {shlex.quote(server.endpoint)} recurring-run"
    token = ""
    while True:
        page = client.list_recurring_runs(page_token=token, page_size=100, experiment_id=experiment.experiment_id)
        for run in page.recurring_runs or []:
            if run.display_name == request.run_name:
                raise UserError(
                    f"the experiment {request.experiment} has a recurring run {request.run_name!r} already: "
                    f"{run.recurring_run_id}. Remove it ({kfp} delete {run.recurring_run_id}), or give this one "
                    "another --run-name",
                    code="recurring-run-exists",
                    setting="--run-name",
                )
        if not (token := page.next_page_token):
            break
    made = client.create_recurring_run(
        experiment.experiment_id,
        request.run_name,
        interval_second=request.every_s or None,
        cron_expression=request.cron or None,
        max_concurrency=1,  # two at a time would fight over the GPUs and the champion
        no_catchup=True,
        params=request.arguments,
        pipeline_package_path=str(package),
        pipeline_root=request.settings.pipeline_root or None,
        service_account=request.settings.service_account or None,
    )
    run_id = server.field(made, "recurring_run_id")
    return [
        f"recurring   {run_id}",
        f"look at it  {server.endpoint}/#/recurringrun/details/{run_id}",
        f"list        {kfp} list",
        f"stop        {kfp} disable {run_id}",
    ]
