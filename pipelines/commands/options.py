"""What several commands ask of their options' values."""

import math

import click

from components.common.errors import UserError


def finite(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Keeps out what no range of click's does: infinity, and what is no number.

    Raises:
        UserError: it is one of these.
    """
    if value is not None and not math.isfinite(value):
        raise UserError(f"{parameter.opts[0]} {value}: write a number, such as 2.5")
    return value
