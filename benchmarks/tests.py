"""How long the test suites take: `make test`, `make test-all`, and `.ci/run` in a fresh clone.

    python -m benchmarks.tests --machine cpu-2core
    python -m benchmarks.tests --machine cpu-2core --target test

Installing is not in the times of Make's targets: run them once before. It is in that of `.ci/run`, whose output goes
to standard error meanwhile. A suite that fails is not written.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.results import Results, current_commit, result_options

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT = Path(__file__).resolve().parents[1]
MEASURES = {"test": "test_seconds", "test-all": "test_all_seconds", "ci": "ci_seconds"}


@click.command()
@result_options
@click.option(
    "--target", "targets", multiple=True, type=click.Choice(list(MEASURES)), help="One of them.  [default: all]"
)
def main(targets: tuple[str, ...], results: Results) -> None:
    runs = [_run(target) for target in targets or MEASURES]
    runs += [run for run in results.earlier("tests")["runs"] if run["target"] not in {run["target"] for run in runs}]
    results.write(
        "tests",
        measures={MEASURES[run["target"]]: run["seconds"] for run in runs},
        runs=runs,
        notes="Wall time: of a Make target after installation, of .ci/run with it. Each run names its commit.",
    )


def _run(target: str) -> dict[str, Any]:
    with TemporaryDirectory() as clone:
        command, folder, env = ["make", target], ROOT, dict(os.environ)
        if target == "ci":
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            command, folder = ["bash", ".ci/run"], Path(clone)
            env |= {"PATH": PATH, "PYTHONPATH": "", "ENGINERY_HOME": ""}
        started, lines = time.monotonic(), []
        with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                lines.append(line)
                print(line, end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    if process.returncode:
        sys.exit(f"{target} failed")
    summaries = [line.strip(" =\n") for line in lines if re.search(r"\d passed.* in [\d.]+s", line)]
    outcome = summaries[0 if target == "ci" else -1]
    print(f"{target}: {seconds:.0f} s; {outcome}")
    return {"target": target, "commit": current_commit(), "seconds": round(seconds, 1), "outcome": outcome}


if __name__ == "__main__":
    main()
