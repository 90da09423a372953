"""Compare results with earlier ones of the same machine: which rates fell by more than is allowed.

    python -m benchmarks.regression --before benchmarks/results/h200 --after /tmp/results/h200

Ends with 1 on a regression, and with 2 where there is nothing to compare.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

_RATE = "images_per_s"
_NOT_A_RATE = "images_per_s_per_w"  # follows the clock that the power limit leaves


@dataclass(frozen=True, kw_only=True)
class MeasureChange:
    """One measure of one result file, then and now."""

    name: str
    measure: str
    before: float
    after: float

    @property
    def fall_pct(self) -> float:
        """The loss since then, in per cent of then; negative where it is higher."""
        return 100.0 * (self.before - self.after) / self.before


def changes(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[MeasureChange]:
    """The rates that both results have."""
    for measure, value in before.items():
        if _RATE in measure and _NOT_A_RATE not in measure and value > 0 and measure in after:
            yield MeasureChange(name=name, measure=measure, before=value, after=after[measure])


@click.command()
@click.option("--before", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--after", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--allowed-pct", default=5.0, help="The largest fall of a rate that is no regression.")
def main(before: Path, after: Path, allowed_pct: float) -> None:
    """Print each rate then and now."""
    found: list[MeasureChange] = []
    for file in sorted(after.glob("*.json")):
        if (earlier := before / file.name).is_file():
            then, now = (json.loads(path.read_bytes())["measures"] for path in (earlier, file))
            found += changes(file.stem, then, now)
    if not found:
        click.echo(f"no rate is in both {before} and {after}: measure under the names of the earlier results", err=True)
        sys.exit(2)
    for change in found:
        mark = "REGRESSION" if change.fall_pct > allowed_pct else ""
        line = (
            f"{change.name} {change.measure}: {change.before:,.1f} -> {change.after:,.1f} ({-change.fall_pct:+.1f} %)"
        )
        click.echo(f"{line} {mark}".rstrip())
    sys.exit(any(change.fall_pct > allowed_pct for change in found))


if __name__ == "__main__":
    main()
