"""What several commands ask of their options' values."""

import math
from collections.abc import Callable

import click
from click.decorators import FC

from components.common.contracts.errors import UserError


def finite(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Keeps out what no range of click's does: infinity, and what is no number.

    Raises:
        UserError: it is one of these.
    """
    if value is not None and not math.isfinite(value):
        raise UserError(f"{parameter.opts[0]} {value}: write a number, such as 2.5", code="invalid-numbers")
    return value


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
