"""What a check is, and how one runs: whatever it raises becomes a line of the report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "warning", "missing", "absent"]


@dataclass(frozen=True)
class Finding:
    """What a check found. `fix` is empty only where nothing needs one: "ok", or "absent" with what it depends on."""

    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Planned:
    """A check that has not run yet."""

    group: str
    name: str
    look: Callable[[], Finding]
    required: bool = False  # every run needs it


class Check(BaseModel):
    """One line of the report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str
    name: str
    status: Status
    found: str
    fix: str = Field(description="What to do; empty when nothing needs doing here.")
    required: bool = Field(description="Whether every run needs it: then missing means that nothing runs.")


def ok(found: str) -> Finding:
    """All is well."""
    return Finding("ok", found)


def warning(found: str, fix: str) -> Finding:
    """It works, worse than it could."""
    return Finding("warning", found, fix)


def missing(found: str, fix: str) -> Finding:
    """It does not work here."""
    return Finding("missing", found, fix)


def absent(found: str, fix: str = "") -> Finding:
    """Not here, and nothing that this machine is asked to do needs it. `fix` says how to have it all the same."""
    return Finding("absent", found, fix)


def run_check(planned: Planned) -> Check:
    """Look, and never raise: a check that breaks says nothing about the machine, and must not hide the others."""
    try:
        finding = planned.look()
    except Exception as error:  # the boundary between checks
        reason = " ".join(str(error).split())
        text = f"could not check: {type(error).__name__}: {reason}"
        finding = warning(text, "see what it says; if it is enginery's mistake, report it with this text")
    return Check(
        group=planned.group,
        name=planned.name,
        status=finding.status,
        found=finding.found,
        fix=finding.fix,
        required=planned.required,
    )
