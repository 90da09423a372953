"""Runs side by side: which run is meant, what differs, and when numbers may not be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.environment import environment
from components.common.contracts.errors import UserError
from enginery.local.runs import find_summary
from enginery.local.summary import RunSummary, SummaryBuilder
from enginery.registry.compare import compare
from tests.unit.measurements import accuracy_report, accuracy_row, benchmark_report
from tests.unit.registered import enginery, refuses
from tests.unit.runs import precision_row, run_summary, write_run

FIRST, SECOND, OTHER = "digits-20260101-120000-aaaa", "digits-20260102-120000-bbbb", "own-20260103-120000-cccc"
UNFINISHED = "digits-20260601-120000-dddd"


MEASURED: dict[str, Any] = {
    "arguments": {"epochs": 2, "seed": 0, "train": {"augmentation": {"min_area": 0.7}}},
    "rows": [precision_row("fp32", 90.0), precision_row("int8", 89.5)],
    "split_digest": "sha256:" + "5" * 64,
}


def summary(run_id: str, directory: Path, **values: Any) -> RunSummary:
    return run_summary(directory / run_id, **{**MEASURED, **values})


def write(home: Path, run_id: str, **values: Any) -> Path:
    return write_run(home / "runs" / run_id, **{**MEASURED, **values})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    write(tmp_path, FIRST)
    write(tmp_path, SECOND, arguments={"epochs": 5, "seed": 0, "train": {}})
    write(tmp_path, OTHER, split_digest="sha256:" + "6" * 64)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "run_id"), [(FIRST, FIRST), ("digits-20260102", SECOND), ("own", OTHER), ("latest", OTHER)]
)
def test_a_run_by_id_prefix_latest_or_path(home: Path, text: str, run_id: str) -> None:
    (home / "runs" / UNFINISHED).mkdir()
    assert find_summary(text, home / "runs").run_id == run_id
    for path in (home / "runs" / run_id, home / "runs" / run_id / "summary.json"):
        assert find_summary(str(path), home / "elsewhere").run_id == run_id
    # Runs are named with the pipeline first, so one can be the start of another's only by a person's choice.
    write(home, f"{run_id}-20260101-120000-bbbb")
    assert find_summary(run_id, home / "runs").run_id == run_id


@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        ("digits", None, f"begin with 'digits': {UNFINISHED}, {SECOND}, {FIRST}; type more"),
        ("nothing", None, f"no run 'nothing' in .*; the newest are {UNFINISHED}, {OTHER}, {SECOND}"),
        ("digits-20260601", None, "has no summary.json: it is still going, or it was killed"),
        ("digits-20260601", '{"schema_version": 9}', "not a summary that this version of enginery reads: schema_versi"),
        ("digits-20260601", "{half", "not a summary"),
        ("/none.json", None, "No such file"),
    ],
)
def test_what_is_no_run(home: Path, text: str, content: str | None, said: str) -> None:
    folder = home / "runs" / UNFINISHED
    folder.mkdir()
    if content is not None:
        (folder / "summary.json").write_text(content)
    with pytest.raises(UserError, match=said):
        find_summary(text, home / "runs")
    with pytest.raises(UserError, match=r"there are no runs in|No such file"):
        find_summary(text, home / "elsewhere")


def test_only_what_differs_is_shown_and_other_validation_images_are_warned_of(home: Path) -> None:
    result = compare([find_summary(name, home / "runs") for name in (FIRST, SECOND)])
    assert result.arguments == {"epochs": {"A": "2", "B": "5"}, "train.augmentation.min_area": {"A": "0.7", "B": ""}}
    assert (result.data, result.versions, result.warnings) == ({}, {}, ())
    assert result.runs[1].rows["int8"].score_pct == 89.5
    result = compare([find_summary(name, home / "runs") for name in (FIRST, SECOND, OTHER)])
    assert result.data == {"validation split": {"A": "5" * 12, "B": "5" * 12, "C": "6" * 12}}
    assert result.warnings == ("the validation images differ between A/B and C: their scores can't be compared",)


def test_other_devices_versions_and_failed_runs(tmp_path: Path) -> None:
    here = environment()
    there = here.model_copy(update={"versions": {**here.versions, "torch": "1.0"}})
    faster = [precision_row("fp32", 90.0, device="NVIDIA H100"), precision_row("int8", 89.0, device="NVIDIA H100")]
    second = summary(SECOND, tmp_path, rows=faster, environment=there)
    failed = summary(OTHER, tmp_path, rows=[], status="failed", environment=here)
    result = compare([summary(FIRST, tmp_path), second, failed])
    assert set(result.versions) == {"torch"}
    assert result.warnings[0] == "C ended as failed before anything was measured"
    assert result.warnings[1].startswith("speed was measured on different devices (CPU, 2 cores; NVIDIA H100)")


def test_summary_builder_keeps_the_digests_of_the_report(tmp_path: Path) -> None:
    builder = SummaryBuilder(0.0)
    fields = run_summary(tmp_path).model_dump(exclude_unset=True)
    assert builder.summary(**fields).split_digest == ""
    accuracy = accuracy_report(accuracy_row("fp32", 90.0))
    builder.handle(
        {"event": "results", "accuracy": accuracy.model_dump(), "benchmark": benchmark_report().model_dump()}
    )
    made = builder.summary(**fields)
    assert (made.dataset_digest, made.split_digest, made.bundle_digest) == ("d", "s", "sha256:b")


def test_command_compare(home: Path) -> None:
    shown = enginery("compare", "digits-20260101", "latest", columns=80).stdout
    assert "89.50" in shown
    assert "warning: the validation images differ between A and B" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "images/s" in shown
    for run, split in ((FIRST, "5"), (OTHER, "6")):
        write(home, run, unit="sentences", split_digest=split)
    shown = " ".join(enginery("compare", FIRST, OTHER).stdout.split())
    assert "sentences/s" in shown
    assert "the validation sentences differ between A and B" in shown
    printed = json.loads(enginery("compare", FIRST, SECOND, "--json").stdout)
    assert printed["arguments"]["epochs"] == {"A": "2", "B": "5"}
    for arguments, code in (((FIRST,), "too-few-runs"), ((FIRST, FIRST), "same-run-twice")):
        with refuses(code):
            enginery("compare", *arguments)


def test_foreign_words_are_shown_as_they_are(home: Path) -> None:
    path = write(home, FIRST, registered="[/b]", unit="[/c]", arguments={"[/d]": "\x9b2J"}) / "summary.json"
    path.write_text(path.read_text().replace(FIRST, "[/a]"))
    shown = enginery("compare", path, SECOND).stdout
    assert [word in shown for word in ("[/a]", "[/b]", "[/c] or images/s", "[/d]", r"\x9b2J")] == [True] * 5
    assert enginery("compare", path, SECOND, "--json").stdout.isascii()


def test_a_speed_that_is_unsure_was_measured_all_the_same(home: Path) -> None:
    busy = {"p50_ms": None, "images_per_s": None, "latency_doubt": "others took 87 % of the cores' time"}
    fp16 = precision_row("fp16", 90.0).model_copy(update={"score_pct": None, "p50_ms": None, "images_per_s": None})
    rows = [precision_row("fp32", 90.0, **busy), fp16]
    write(home, FIRST, rows=rows)
    write(home, SECOND, rows=rows)
    shown = enginery("compare", FIRST, SECOND).stdout
    assert (shown.count("unsure"), shown.count("n/a")) == (4, 0)
    write(home, FIRST, rows=[rows[0], precision_row("fp16", 90.0)])
    shown = enginery("compare", FIRST, SECOND).stdout
    assert (shown.count("FP16"), shown.count("n/a")) == (1, 3)
    assert "the same in all: arguments, data, library versions and hardware" in shown


def test_command_runs(home: Path) -> None:
    (home / "runs" / UNFINISHED).mkdir()
    shown = enginery("runs", columns=80).stdout
    lines = [line.split() for line in shown.splitlines() if "-2026" in line]
    assert [line[0] for line in lines] == [UNFINISHED, OTHER, SECOND, FIRST]
    assert lines[0][1] == "killed"
    assert lines[1][1:5] == ["done", "89.50", "-0.50", "pass"]
    assert max(len(line) for line in shown.splitlines()) <= 80
    printed = json.loads(enginery("runs", "--json").stdout)
    assert printed[1]["int8_score_pct"] == 89.5
    assert printed[0]["int8_score_pct"] is None
