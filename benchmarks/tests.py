"""How long the test suites take: `make test` and `make test-all`.

    python -m benchmarks.tests --machine cpu-2core
    python -m benchmarks.tests --machine cpu-2core --target test

Installing is not in it: run the target once before. A suite that fails is not written.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.results import RESULTS, current_commit, write_result

ROOT = Path(__file__).resolve().parents[1]
MEASURES = {"test": "test_seconds", "test-all": "test_all_seconds"}


@click.command()
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option(
    "--target", "targets", multiple=True, type=click.Choice(list(MEASURES)), help="One of them.  [default: both]"
)
def main(machine: str, targets: tuple[str, ...]) -> None:
    file = RESULTS / machine / "tests.json"
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    runs = [_run(target) for target in targets or MEASURES]
    runs += [run for run in before if run["target"] not in {run["target"] for run in runs}]
    write_result(
        machine,
        "tests",
        measures={MEASURES[run["target"]]: run["seconds"] for run in runs},
        runs=runs,
        notes="Wall time of the Make target, after installation. Each run names its commit.",
    )


def _run(target: str) -> dict[str, Any]:
    started = time.monotonic()
    done = subprocess.run(["make", target], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - started
    outcome = done.stdout.rstrip().rpartition("\n")[2].strip(" =")
    print(f"make {target}: {seconds:.0f} s; {outcome}")
    if done.returncode:
        sys.exit(f"{done.stdout}\nmake {target} failed")
    return {"target": target, "commit": current_commit(), "seconds": round(seconds, 1), "outcome": outcome}


if __name__ == "__main__":
    main()
