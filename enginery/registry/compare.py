"""Runs side by side: what was measured, what differed, and whether the numbers may be compared at all."""

import json
from collections.abc import Mapping, Sequence

from pydantic import Field

from components.common.contracts.digests import short
from components.common.contracts.records import PRECISIONS, Record
from components.common.contracts.settings import flatten
from enginery.local.summary import PrecisionRow, RunSummary

NOTHING = "not set"


class ComparedRun(Record):
    """One of the runs. `label` is what tables and differences call it."""

    label: str = Field(description="A, B, C, ... in the order in which the runs were named.")
    run_id: str
    status: str
    registered: str
    unit: str = Field(description="Validation data and speed are counted in these: images or sentences.")
    rows: dict[str, PrecisionRow] = Field(description="What was measured, by precision; empty if it did not get there.")


class RunComparison(Record):
    """Output of `enginery compare --json`."""

    schema_version: int = 1
    runs: tuple[ComparedRun, ...]
    arguments: dict[str, dict[str, str]] = Field(description="Arguments that differ: name -> label -> value.")
    data: dict[str, dict[str, str]] = Field(description="Digests that differ, shortened.")
    versions: dict[str, dict[str, str]] = Field(description="Library versions and hardware that differ.")
    warnings: tuple[str, ...] = Field(description="Why numbers of these runs may not be compared.")

    @property
    def precisions(self) -> list[str]:
        """The precisions that any run measured, FP32 first."""
        rows = [row for run in self.runs for row in run.rows.values() if row.score_pct is not None]
        return [name for name in PRECISIONS if any(row.precision == name for row in rows)]


def joined_units(runs: Sequence[ComparedRun]) -> str:
    """Units of the runs that measured something, such as "images" or "images or sentences"."""
    return " or ".join(dict.fromkeys(run.unit for run in runs if run.rows))


def compare(summaries: Sequence[RunSummary]) -> RunComparison:
    """Put runs side by side. The first one is A."""
    labels = [label(position) for position in range(len(summaries))]
    digests = [
        {"dataset": one.dataset_digest, "validation split": one.split_digest, "bundle": one.bundle_digest}
        for one in summaries
    ]
    runs = tuple(
        ComparedRun(
            label=name,
            run_id=summary.run_id,
            status=summary.status,
            registered=summary.registered,
            unit=summary.unit,
            rows={row.precision: row for row in summary.rows},
        )
        for name, summary in zip(labels, summaries, strict=True)
    )
    mixed = len({summary.registered == summary.run_id for summary in summaries}) > 1
    arguments = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in flatten(each).items()}
        for each in ({"pipeline": summary.pipeline, **summary.arguments} for summary in summaries)
    ]
    return RunComparison(
        runs=runs,
        arguments={} if mixed else _differences(labels, arguments),
        data=_differences(labels, [{key: short(value) for key, value in entry.items()} for entry in digests]),
        versions=_differences(labels, [_versions(summary) for summary in summaries]),
        warnings=(*_warnings(runs, [entry["validation split"] for entry in digests]), *([MIXED] if mixed else [])),
    )


# Of a version and a run, every argument would differ.
MIXED = "arguments are not compared: a version has the settings of its steps, a run the options of its pipeline"


def label(position: int) -> str:
    """A to Z, then R27, R28, ..."""
    return chr(ord("A") + position) if position < 26 else f"R{position + 1}"


def _differences(labels: Sequence[str], entries: Sequence[Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Keys on which the runs do not agree; a run that has no value counts as one with another."""
    keys = dict.fromkeys(key for entry in entries for key in entry)
    values = {key: [entry.get(key, "") for entry in entries] for key in keys}
    return {key: dict(zip(labels, found, strict=True)) for key, found in values.items() if len(set(found)) > 1}


def _versions(summary: RunSummary) -> dict[str, str]:
    here = summary.environment
    gpus = ", ".join(gpu.name for gpu in here.gpus) or "none"
    drivers = ", ".join(sorted({gpu.driver for gpu in here.gpus}))
    machine = {"python": here.python, "platform": here.platform, "cpu": here.cpu, "cores": str(here.num_cores)}
    return {**here.versions, **machine, "gpus": gpus, "driver": drivers}


def _warnings(runs: Sequence[ComparedRun], splits: Sequence[str]) -> list[str]:
    unit = joined_units(runs)
    warnings = [f"{run.label} ended as {run.status} before anything was measured" for run in runs if not run.rows]
    groups: dict[str, list[str]] = {}
    for run, split in zip(runs, splits, strict=True):
        if run.rows:
            groups.setdefault(split, []).append(run.label)
    if len(groups) > 1:
        text = " and ".join("/".join(names) for names in groups.values())
        warnings.append(f"the validation {unit} differ between {text}: their scores can't be compared")
    for precision in PRECISIONS:
        rows = [run.rows[precision] for run in runs if precision in run.rows]
        devices = {row.device for row in rows if row.device}
        if len(devices) > 1:
            text = f"speed was measured on different devices ({'; '.join(sorted(devices))})"
            warnings.append(f"{text}: p50 and {unit}/s can't be compared")
            break
        batches = {row.throughput_batch_size for row in rows if row.throughput_batch_size}
        if len(batches) > 1:
            text = ", ".join(str(size) for size in sorted(batches))
            warnings.append(f"{unit}/s was measured at different batch sizes ({text})")
            break
    return warnings
