"""Other tasks than classification on built-in data, from images or sentences to a verdict on INT8, on a CPU.

    python -m benchmarks.tasks --machine cpu-2core

Wall time counts from the start of `enginery run` to its end; writing the dataset and installing are not in it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.results import Results, result_options
from enginery import load_report, load_summary
from enginery.datasets.phrases import write_phrases
from enginery.datasets.shapes import write_shapes

_CONFIGS = {"detection": "shapes", "segmentation": "shapes_masks", "translation": "phrases"}


@click.command()
@result_options
@click.option("--only", type=click.Choice(list(_CONFIGS)), multiple=True, help="Tasks to run; all without it.")
@click.option("--seed", default=0, show_default=True, help="Of the data and of the training.")
def main(only: tuple[str, ...], seed: int, results: Results) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shapes(Path(folder) / "shapes", seed=seed)
        write_phrases(Path(folder) / "phrases", seed=seed)
        runs = {task: _run(task, Path(folder), seed) for task in only or _CONFIGS}
    notes = "Wall time of `enginery run`. Scores are mAP@[.5:.95], mIoU and BLEU on validation data."
    for task, run in runs.items():
        measures = {f"{task}_{name}": value for name, value in run.items() if isinstance(value, float)}
        click.echo(f"{task}: {measures}")
        results.write(f"tasks_{task}" + (f"_seed_{seed}" if seed else ""), measures=measures, runs=[run], notes=notes)


def _run(task: str, folder: Path, seed: int) -> dict[str, Any]:
    summary = folder / f"{task}.json"
    data = folder / ("phrases" if task == "translation" else "shapes")
    command = [sys.executable, "-m", "enginery.cli.main", "run", task, "--config", _CONFIGS[task], "--data", str(data)]
    command += ["--seed", str(seed), "--summary", str(summary)]
    started = time.monotonic()
    done = subprocess.run(command, env={**os.environ, "ENGINERY_HOME": str(folder / f"{task}-home")}, check=False)
    seconds = time.monotonic() - started
    if not summary.exists():
        raise SystemExit(f"{task} ended with {done.returncode} and without a summary")
    record = load_summary(summary)
    report = load_report(next((folder / f"{task}-home" / "runs").rglob("report.json")).parent)
    fp32, int8 = report.accuracy.row("fp32"), report.accuracy.row("int8")
    found: dict[str, Any] = {
        "exit_code": done.returncode,
        "seconds_wall": seconds,
        "fp32_score_pct": fp32.score_pct,
        "int8_score_pct": int8.score_pct,
        "fp32_score50_pct": fp32.score50_pct,
        "train_seconds": next((step.seconds_work for step in record.steps if step.name == "train"), None),
        "drop_upper_points": int8.comparison.drop_upper_points if int8.comparison else None,
        "verdict": report.verdict.passed,
        "steps": [step.model_dump(mode="json") for step in record.steps],
    }
    return found


if __name__ == "__main__":
    main()
