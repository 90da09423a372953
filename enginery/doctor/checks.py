"""Checks, their findings and the report of them all. Whatever a check raises becomes a line of the report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from components.common.contracts.records import Record

Status = Literal["ok", "warning", "missing", "absent"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `fix` is empty only where nothing needs one: "ok", or "absent" with what it depends on."""

    status: Status
    found: str
    fix: str = ""


def ok(found: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", found)


def warning(found: str, fix: str) -> Finding:
    """Return that it works, worse than it could."""
    return Finding("warning", found, fix)


def missing(found: str, fix: str) -> Finding:
    """Return that it does not work here."""
    return Finding("missing", found, fix)


def absent(found: str, fix: str = "") -> Finding:
    """Return that it is not here, and nothing here needs it. `fix` says how to have it all the same."""
    return Finding("absent", found, fix)


class Check(Record):
    """One line of the report."""

    group: str
    name: str
    status: Status
    found: str
    fix: str = Field(description="What to do; empty when nothing needs doing here.")
    required: bool = Field(description="True if every run needs it: then missing means that nothing runs.")


class Diagnosis(Record):
    """The report, as `enginery doctor --json` prints it."""

    schema_version: int = 1
    checks: tuple[Check, ...]
    conclusion: str = Field(description="What this machine can run.")
    exit_code: int = Field(description="0, or 1 when something that every run needs is missing.")


@dataclass(frozen=True)
class Planned:
    """A check that has not run yet."""

    group: str
    name: str
    find: Callable[[], Finding]
    required: bool = False  # every run needs it

    def run(self) -> Check:
        """Run the check. A check that breaks says nothing about the machine, and must not hide the others."""
        try:
            finding = self.find()
        except Exception as error:  # the boundary between checks
            text = f"could not check: {type(error).__name__}: {' '.join(str(error).split())}"
            finding = warning(text, "see what it says; if it is enginery's mistake, report it with this text")
        return Check(group=self.group, name=self.name, required=self.required, **vars(finding))
