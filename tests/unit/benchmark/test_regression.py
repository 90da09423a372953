"""The nightly comparison: a fall beyond what is allowed fails, noise and other measures don't."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.regression import main

BEFORE = {"train_images_per_s": 1000.0, "images_per_s_per_w_b1": 10.0, "p50_ms": 1.0}


def compare(tmp_path: Path, after: dict[str, float], name: str) -> tuple[int, str]:
    for folder, file, measures in (("before", "train.json", BEFORE), ("after", name, after)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps({"measures": measures}))
    done = CliRunner().invoke(main, ["--before", str(tmp_path / "before"), "--after", str(tmp_path / "after")])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("changed", "name", "code", "said"),
    [
        ({"train_images_per_s": 1100.0}, "train.json", 0, ""),
        ({"train_images_per_s": 950.0}, "train.json", 0, ""),
        ({"train_images_per_s": 949.0}, "train.json", 1, "REGRESSION"),  # by more than 5 per cent
        ({"images_per_s_per_w_b1": 1.0, "p50_ms": 9.0}, "train.json", 0, ""),  # are not compared
        ({}, "engines.json", 2, "no rate is in both"),
    ],
)
def test_what_is_a_regression(tmp_path: Path, changed: dict[str, float], name: str, code: int, said: str) -> None:
    found, output = compare(tmp_path, {**BEFORE, **changed}, name)
    assert found == code
    assert said in output
    assert ("REGRESSION" in output) == (code == 1)
