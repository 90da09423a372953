"""The measurements that `enginery advise` is fitted on and those that judge it are apart."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import advise


def test_the_fit_sees_nothing_that_is_held_out() -> None:
    held_out = json.loads((Path(advise.__file__).parent / "advise_heldout.json").read_text())
    fitted = advise.fit_rows()
    assert len(fitted) > 80
    assert {row.workload for row in fitted} == {"serve", "train"}
    assert not {row.device for row in fitted} & set(held_out["devices"])
    assert not {row.network for row in fitted} & set(held_out["networks"])
    assert not {row.batch for row in fitted} & set(held_out["batch_sizes"])
    assert not any(row.published for row in fitted)
    assert not set(fitted) & set(advise.held_out_rows())


def test_every_kind_of_held_out_row_has_some() -> None:
    reasons = [advise.why_held_out(row) for row in advise.held_out_rows()]
    assert min(reasons.count(reason) for reason in ("device", "network", "batch")) >= 10
    assert {row.device for row in advise.held_out_rows()} >= {"A100", "H100", "P4", "V100"}


def test_rows_are_what_was_measured() -> None:
    speeds = {(row.source, row.precision, row.network, row.batch): row.images_per_s for row in advise.measured_rows()}
    assert speeds["h200/engines_resnet50.json", "int8", "resnet50", 128] == 62467.2588
    assert round(speeds["h200/networks.json", "fp16", "convnext_tiny", 1]) == 1271
    assert round(speeds["h200/tasks_detection.json", "int8", "detection/retinanet_resnet50_fpn", 32]) == 3725
    assert speeds["h200/train_resnet50_8_queues.json", "bf16", "resnet50", 1024] == 7114.3
    row = advise.fit_rows()[0]
    assert advise.why_held_out(replace(row, device="T4")) == "device"
    assert advise.why_held_out(replace(row, published=True)) == "device"


def test_ranges_hold_for_new_networks() -> None:
    """Simulated: errors are a network's own and each row's; some networks have many rows."""
    chance = np.random.default_rng(0)

    def errors(num_rows: int) -> list[float]:
        return [float(each) for each in chance.normal(0, 0.2) + chance.normal(0, 0.1, num_rows)]

    held = []
    for _ in range(300):
        networks = {str(number): errors(4 if number % 4 else 12) for number in range(12)}
        left_out = [advise._LeftOut(name, error, [0.3]) for name, rows in networks.items() for error in rows]
        width, wider = advise._widths(left_out)
        assert wider == pytest.approx(np.hypot(width, 0.3))
        held.append(np.mean(np.abs(errors(6)) <= width))
    assert 0.9 < np.mean(held) < 0.97
    assert advise._widths([advise._LeftOut(name, 0.1 * error, [0.0]) for error, name in enumerate("abc")])[0] == 0.2
