"""The nightly comparison: a fall beyond what is allowed fails, noise and other measures don't."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.regression import main

BEFORE = {"train_images_per_s": 1000.0, "images_per_s_per_w_b1": 10.0, "p50_ms": 1.0}


def compare(tmp_path: Path, after: dict[str, float], name: str = "train.json") -> tuple[int, str]:
    for folder, file, measures in (("before", "train.json", BEFORE), ("after", name, after)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps({"measures": measures}))
    done = CliRunner().invoke(main, ["--before", str(tmp_path / "before"), "--after", str(tmp_path / "after")])
    return done.exit_code, done.output


@pytest.mark.parametrize(("rate", "code"), [(1100.0, 0), (950.0, 0), (949.0, 1)])
def test_a_fall_of_more_than_5_per_cent_fails(tmp_path: Path, rate: float, code: int) -> None:
    found, output = compare(tmp_path, {**BEFORE, "train_images_per_s": rate})
    assert found == code
    assert ("REGRESSION" in output) == bool(code)


def test_power_and_latency_are_not_compared(tmp_path: Path) -> None:
    assert compare(tmp_path, {**BEFORE, "images_per_s_per_w_b1": 1.0, "p50_ms": 9.0})[0] == 0


def test_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    code, output = compare(tmp_path, BEFORE, "engines.json")
    assert code == 2
    assert "no rate is in both" in output
