"""`enginery doctor`: what this machine or a cluster can do."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load
from enginery.cli.options import PATH, login_options, settings_options
from enginery.doctor.checks import Check, Diagnosis
from enginery.doctor.machine import diagnose
from enginery.formats import echo_json, new_console

_MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "missing": "[red]missing[/]",
    "absent": "[dim]not here[/]",
}


_PREFIX = "With --cluster: "


@click.command(params=[*settings_options(_PREFIX), *login_options(_PREFIX, required=False)])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--bundle", type=PATH, metavar="DIR", help="Say what its plans and INT8 files need, too.")
@click.option("--cluster", is_flag=True, help="Check the cluster of KUBECONFIG instead of this machine.")
@click.option("--namespace", metavar="NAME", help=f"{_PREFIX}Namespace of runs, instead of the settings'.")
def doctor(as_json: bool, bundle: Path | None, cluster: bool, **of_cluster: Any) -> None:
    """Say what this machine can do, and how to fix what is missing; or, with --cluster, a cluster.

    The exit code is 1 when something that every run needs is missing.
    """
    given = [name for name, value in of_cluster.items() if value is not None and name != "endpoint"]
    if given and not cluster:
        option = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{option} goes with --cluster; add it", code="needs-cluster", setting=option)
    if bundle and cluster:
        raise UserError("--bundle goes without --cluster; drop one", code="needs-machine", setting="--bundle")
    opened = load(bundle, BundleManifest).manifest if bundle else None
    check = _of_cluster(**of_cluster) if cluster else partial(diagnose, opened)
    if as_json:
        diagnosis = check()
        echo_json(diagnosis)
    else:
        with new_console(stderr=True).status("checking; about 10 seconds"):
            diagnosis = check()
        _show(diagnosis)
    sys.exit(diagnosis.exit_code)


def _of_cluster(
    settings: Path | None,
    num_nodes: int | None,
    endpoint: str | None,
    token_file: Path | None,
    cookie_file: Path | None,
    ca_file: Path | None,
    namespace: str | None,
) -> Callable[[], Diagnosis]:
    """The checks of a cluster; mistakes in the settings are reported before they run."""
    from enginery.cluster.server import Login, checked_endpoint
    from enginery.cluster.settings import load_settings
    from enginery.doctor.access import ClusterAccess
    from enginery.doctor.cluster import diagnose_cluster

    placed = load_settings(settings, num_nodes=num_nodes)
    if namespace:
        placed = placed.model_copy(update={"namespace": namespace})
    url = checked_endpoint(endpoint) if endpoint else ""
    access = ClusterAccess(placed, url, Login.find(token_file, cookie_file), ca_file)
    return lambda: diagnose_cluster(access)


def _show(diagnosis: Diagnosis) -> None:
    console = new_console()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in dict.fromkeys(check.group for check in diagnosis.checks):
        table.add_row(f"[bold]{group}[/]")
        checks = [check for check in diagnosis.checks if check.group == group]
        # A check that depends on something that is not here says nothing by itself.
        dependent = [check for check in checks if check.status == "absent" and not check.fix]
        for check in checks:
            if check not in dependent:
                table.add_row(_MARKS[check.status], check.name, _text_of(check))
        if dependent:
            table.add_row("", "not checked", f"{', '.join(check.name for check in dependent)}: {dependent[0].found}")
        table.add_row()
    console.print(table)
    console.print(f"[bold]{escape(diagnosis.conclusion)}[/]", soft_wrap=False)
    worse = [check.name for check in diagnosis.checks if check.status in ("missing", "warning")]
    if worse and not diagnosis.exit_code:
        console.print(f"Could be better, with the fix above: {', '.join(worse)}.", soft_wrap=False)


def _text_of(check: Check) -> str:
    found = escape(check.found)
    if not check.fix:
        return found
    return f"{found}\n[cyan]{'fix: ' if check.status != 'absent' else ''}{escape(check.fix)}[/]"
