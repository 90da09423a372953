"""Line coverage of the steps that a verdict rests on, by the quick tests, at several commits.

    python -m benchmarks.coverage --machine cpu-2core --commit 53afae2 --commit HEAD

Needs pytest-cov beside the packages of this environment, in which the tests of each commit run. What tests start in
processes of their own is not counted. Old tests may fail with new packages: the result has pytest's summary.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.results import Results, result_options
from benchmarks.tests import ROOT

STEPS = ("export", "gate", "promote")


@click.command()
@result_options
@click.option("--commit", "commits", multiple=True, default=("HEAD",), show_default=True, help="The last one counts.")
def main(commits: tuple[str, ...], results: Results) -> None:
    runs = [_measure(commit) for commit in commits]
    notes = "Lines of components/<step> that ran in the processes of pytest, in percent; the measures: the last commit."
    measures = {f"coverage_{step}_pct": runs[-1][f"{step}_pct"] for step in STEPS}
    results.write("coverage", measures=measures, runs=runs, notes=notes)


def _measure(commit: str) -> dict[str, Any]:
    full = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    with TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        subprocess.run(["git", "checkout", "-q", full], cwd=clone, check=True)
        path = os.pathsep.join([str(clone), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "logical", "--dist", "loadfile"]
        command += ["-m", "not slow and not postgresql", *(f"--cov=components/{step}" for step in STEPS)]
        command += [f"--cov-report=json:{folder}/coverage.json", "--cov-report="]
        done = subprocess.run(command, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr)
        files = json.loads(Path(folder, "coverage.json").read_text())["files"]
    share = {}
    for step in STEPS:
        own = [entry["summary"] for name, entry in files.items() if f"components/{step}/" in name]
        share[f"{step}_pct"] = 100 * sum(e["covered_lines"] for e in own) / sum(e["num_statements"] for e in own)
    outcome = [line.strip(" =") for line in done.stdout.splitlines() if re.search(r"\d passed.* in [\d.]+s", line)][-1]
    print(share, outcome)
    return {"commit": full, **{key: round(value, 2) for key, value in share.items()}, "outcome": outcome}


if __name__ == "__main__":
    main()
