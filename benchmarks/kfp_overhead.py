"""Time that Kubeflow Pipelines takes between two steps, by the pods of finished runs whose steps follow each other.

    date -u +%FT%T; enginery submit ...
    python -m benchmarks.kfp_overhead --machine cpu-2core --run ID --submitted 2026-11-28T20:00:00 \\
        --store s3://kfp/resnet50 --local-run .enginery/runs/ID --notes "KFP 2.17.0"

From the end of a step's container, whose uploads are done, to the start of the next one's. Needs a KUBECONFIG that may
read pods; Kubernetes keeps whole seconds. Beside it what the same took by `enginery run`.
"""

import json
import statistics
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import fsspec

from benchmarks.results import Results, result_options
from enginery.cluster.server import KFP_NAMESPACE
from enginery.cluster.watch import RUN_LABEL, core_api, step_of


@click.command()
@result_options
@click.option("--run", "run_ids", required=True, multiple=True, help="Id of a finished run.")
@click.option(
    "--submitted",
    multiple=True,
    required=True,
    type=click.DateTime(["%Y-%m-%dT%H:%M:%S"]),
    help="When `enginery submit` was begun, UTC, for each run.",
)
@click.option(
    "--store", required=True, help="Where KFP keeps what runs of the pipeline write, such as s3://kfp/resnet50."
)
@click.option("--local-run", type=click.Path(path_type=Path), required=True, help="Folder of the same run by itself.")
@click.option("--namespace", default=KFP_NAMESPACE, show_default=True, help="Where its pods are.")
@click.option("--name", default="kfp_overhead", show_default=True, help="Name of the result.")
@click.option("--notes", required=True, help="Versions, and what else the machine did.")
def main(
    run_ids: tuple[str, ...],
    submitted: tuple[datetime, ...],
    store: str,
    local_run: Path,
    namespace: str,
    name: str,
    notes: str,
    results: Results,
) -> None:
    files, folder = fsspec.url_to_fs(store)
    runs = [
        {**_run(run_id, namespace, begun), "uploaded_mb": files.du(f"{folder}/{run_id}") / 1e6}
        for run_id, begun in zip(run_ids, submitted, strict=True)
    ]
    local = json.loads((local_run / "summary.json").read_text(encoding="utf-8"))
    local_steps = [step["seconds_total"] for step in local["steps"]]
    gaps = [gap for run in runs for gap in run["seconds_between_steps"]]
    measures = {
        "kfp_seconds_per_step": statistics.median(gaps),
        "kfp_seconds_per_step_worst": max(gaps),
        "submit_seconds": statistics.median(run["seconds_to_first_pod"] for run in runs),
        "first_step_seconds": statistics.median(run["seconds_to_first_step"] for run in runs),
        "uploaded_mb": statistics.median(run["uploaded_mb"] for run in runs),
        "local_seconds_per_step": (local["seconds_total"] - sum(local_steps)) / len(local_steps),
    }
    click.echo(measures)
    results.write(name, measures=measures, runs=runs, notes=notes)


def _run(run_id: str, namespace: str, submitted: datetime) -> dict[str, Any]:
    """Times of one run. Its first pod is the driver of the whole, made when KFP has the run."""
    begun = submitted.replace(tzinfo=UTC)
    pods = core_api().list_namespaced_pod(namespace, label_selector=f"{RUN_LABEL}={run_id}").items
    steps = []
    for pod in pods:
        (state,) = (status.state.terminated for status in pod.status.container_statuses if status.name == "main")
        if step := step_of(pod, None):
            steps.append((state.started_at, state.finished_at, step))
    steps.sort()
    created = min(pod.metadata.creation_timestamp for pod in pods)
    return {
        "steps": [step for _, _, step in steps],
        "seconds_of_steps": [(end - start).total_seconds() for start, end, _ in steps],
        "seconds_between_steps": [(after[0] - before[1]).total_seconds() for before, after in pairwise(steps)],
        "seconds_to_first_pod": (created - begun).total_seconds(),
        "seconds_to_first_step": (steps[0][0] - begun).total_seconds(),
    }


if __name__ == "__main__":
    main()
