"""Options of several commands, and what they ask of their values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.decorators import FC

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import write_atomically
from components.common.process.disk import out_of_space
from enginery.formats import seconds_in


def finite(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Keeps out what no range of click's does: infinity, and what is no number.

    Raises:
        UserError: it is one of these.
    """
    if value is not None and not math.isfinite(value):
        option = parameter.opts[0]
        raise UserError(f"{option} {value}: write a number, such as 2.5", code="invalid-numbers", setting=option)
    return value


def given(*parameters: str) -> list[str]:
    """Those options of the running command that somebody wrote."""
    ctx = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    written = [name for name in parameters if ctx.get_parameter_source(name) is not default]
    return [option.opts[0] for option in ctx.command.params if option.name in written]


def comma_list(
    kind: Callable[[str], Any],
    is_allowed: Callable[[Any], bool],
    wanted: str,
    *,
    automatic: str | None = None,
    code: str = "invalid-numbers",
) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback for an option of several values with commas between: each once, numbers in order.

    Args:
        kind: makes a value of its text, or raises ValueError.
        is_allowed: True for a value that may be given.
        wanted: what to write, for people.
        automatic: a word that stands for None, as an option that is not given does.
        code: of the error.
    """

    def read(ctx: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text == automatic or text is None:
            return None
        try:
            values = list(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
        except ValueError:
            values = []
        if not values or not all(map(is_allowed, values)):
            option = parameter.opts[0]
            raise UserError(f"{option} {text}: write {wanted}", code=code, setting=option)
        return tuple(values if kind is str else sorted(values))

    return read


def duration(unit: str) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """A callback for an option that is a time such as 7ms, 90s, 1.5h or 2d; a number alone is of `unit`."""

    def read(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        seconds = seconds_in(text, unit)
        if not seconds:
            option = parameter.opts[0]
            message = f"{option} {text}: write a time above 0 with one of ms, s, min, h and d, such as 7ms or 8h"
            raise UserError(message, code="invalid-numbers", setting=option)
        return seconds

    return read


PATH = click.Path(path_type=Path)


def write_output(file: Path, data: bytes, option: str) -> None:
    """Write the file that an option names.

    Raises:
        UserError: it can't be written.
        EngineryError: its disk is full.
    """
    try:
        write_atomically(file, data)
    except OSError as error:
        message = f"can't write {file}: {error.strerror}; name another with {option}"
        refused = UserError(message, code="no-output", setting=option)
        raise out_of_space(error, file.absolute().parent) or refused from None


def login_options(prefix: str = "", *, required: bool = True) -> list[click.Parameter]:
    """Options of every command that talks to KFP; their values make a `Server`."""
    files = {
        "--token-file": "Bearer token.  [default: $KFP_TOKEN; in a pod, its own]",
        "--cookie-file": "Cookie of a login page (OIDC), as NAME=VALUE.  [default: $KFP_COOKIE]",
        "--ca-file": "Certificates that sign the server's.",
    }
    endpoint = click.Option(
        ["--endpoint"],
        required=required,
        envvar="KF_PIPELINES_ENDPOINT",
        show_envvar=True,
        metavar="URL",
        help=f"{prefix}Where Kubeflow Pipelines answers, such as http://localhost:8080 behind a port-forward.",
    )
    rest = [click.Option([name], type=PATH, metavar="FILE", help=prefix + text) for name, text in files.items()]
    return [endpoint, *rest]


def settings_options(prefix: str = "") -> list[click.Parameter]:
    """Options of every command that reads the settings of a cluster."""
    return [
        click.Option(
            ["--settings"],
            type=PATH,
            metavar="FILE.yaml",
            help=f"{prefix}Images, GPUs, volumes and secrets of the cluster (enginery submit --settings-help).",
        ),
        click.Option(
            ["--num-nodes"],
            type=click.IntRange(min=1),
            metavar="N",
            help=f"{prefix}Nodes to train on, instead of the settings' number.",
        ),
    ]


def logs_option() -> click.Parameter:
    """The option of the commands that follow a run."""
    return click.Option(
        ["--logs/--no-logs"],
        default=True,
        help="While following, show what the steps print, by a KUBECONFIG.  [default: logs]",
    )


signing_key = click.option(
    "--key",
    type=PATH,
    metavar="FILE",
    help="Private key to sign with, or a Sigstore's trust configuration.  [default: unsigned]",
)
server_url = click.option(
    "--url",
    default="http://localhost:8000",
    show_default=True,
    help="Of the server: http://HOST:8000 or grpc://HOST:8001.",
)
server_model = click.option("--model", metavar="NAME", help="Of the server's models.  [default: its only one]")


def timeout(default: float) -> Callable[[FC], FC]:
    """`--timeout`, for commands that ask a server."""
    return click.option(
        "--timeout",
        default=default,
        type=click.FloatRange(0.001),
        callback=finite,
        show_default=True,
        help="Seconds for an answer.",
    )
