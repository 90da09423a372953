"""The quickstart's chain: ResNet-50 on digits, from the image folder to the registered INT8 model, by step.

    python -m benchmarks.quickstart --machine cpu-2core --repeat 3 --limit AVX2 --limit AVX512_CORE

Wall time counts from the start of `enginery run` to its end; writing the dataset and installing are not in it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.results import Results, result_options
from components.common.contracts.instruction_sets import VARIABLE, instruction_set
from enginery import load_summary

ROOT = Path(__file__).resolve().parents[1]


@click.command()
@result_options
@click.option("--repeat", default=1, show_default=True, help="Runs; seeds 0, 1, 2, ...")
@click.option("--limit", multiple=True, help="Instruction sets that oneDNN is limited to; the CPU's own without it.")
def main(repeat: int, limit: tuple[str, ...], results: Results) -> None:
    runs = [_run(seed, own) for own in limit or ("",) for seed in range(repeat)]
    top1 = [run["rows"][0]["score_pct"] for run in runs]
    measures = {
        "quickstart_seconds": statistics.median(run["seconds_wall"] for run in runs),
        "quickstart_seconds_worst": max(run["seconds_wall"] for run in runs),
        "quickstart_overhead_seconds": statistics.median(run["seconds_overhead"] for run in runs),
        "quickstart_overhead_seconds_worst_step": max(
            step["seconds_overhead"] for run in runs for step in run["steps"]
        ),
        "quickstart_top1_pct": statistics.median(top1),
        "quickstart_top1_pct_worst": min(top1),
        "int8_delta_points": statistics.median(run["rows"][2]["delta_points"] for run in runs),
    }
    for index, step in enumerate(runs[0]["steps"]):
        measures[f"{step['name']}_seconds"] = statistics.median(run["steps"][index]["seconds_total"] for run in runs)
    notes = (
        "Overhead: wall time of the steps that is neither work nor imports nor MLflow. "
        f"Medians over {len(runs)} {'run' if len(runs) == 1 else 'runs'}."
    )
    results.write("quickstart", measures=measures, runs=runs, notes=notes)


def _run(seed: int, own: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data, summary_file = Path(folder, "digits"), Path(folder, "summary.json")
        enginery = [sys.executable, "-m", "enginery.cli.main"]
        subprocess.run([*enginery, "data", "digits", str(data)], check=True, cwd=ROOT)
        command = [*enginery, "run", "pipelines/resnet50.py", "--config", "pipelines/configs/digits.yaml"]
        command += ["--data", str(data), "--seed", str(seed), "--summary", str(summary_file)]
        environment = {**os.environ, "ENGINERY_HOME": str(Path(folder, "home")), **({VARIABLE: own} if own else {})}
        started = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        seconds_wall = time.perf_counter() - started
        summary = load_summary(summary_file)
    steps = [{**step.model_dump(mode="json"), "seconds_overhead": step.seconds_overhead} for step in summary.steps]
    return {
        "seed": seed,
        "instruction_set": own or instruction_set(),
        "seconds_wall": seconds_wall,
        "seconds_overhead": sum(step["seconds_overhead"] for step in steps),
        "steps": steps,
        "rows": [row.model_dump(mode="json") for row in summary.rows],
        "checks": [check.model_dump(mode="json") for check in summary.checks],
    }


if __name__ == "__main__":
    main()
