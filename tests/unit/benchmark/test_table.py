"""The classic table: published rows, arithmetic, and the forms it is written in."""

import csv
import io
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure
from PIL import Image

from components.common.contracts.records import BenchmarkRow
from enginery import benchmark
from enginery.benchmark.measuring import Settings, _row
from enginery.benchmark.table import Row, as_csv, markdown, network_name, published_rows, write_picture
from enginery.cli.benchmark import _cost_notes

PUBLISHED = Path(benchmark.__file__).with_name("whitepaper.csv")
BATCHES = (1, 2, 4, 8, 64, 128)


def row(**changes: object) -> Row:
    fields = {
        "device": "NVIDIA X",
        "precision": "INT8",
        "network": "ResNet-50",
        "batch": 8,
        "images_per_s": 2000.0,
        "power_w": 500.0,
        "latency_ms": 4.0,
    }
    return Row(**(fields | changes))


def test_published_rows():
    rows = published_rows(["ResNet-50"], BATCHES)
    v100 = {entry.batch: entry for entry in rows if entry.device == "Tesla V100"}
    assert set(v100) == set(BATCHES)
    assert (v100[128].images_per_s, v100[128].power_w, v100[128].latency_ms) == (6024, 210.1, 21.25)
    assert {entry.device for entry in rows} >= {"Tesla P4", "Jetson TX1", "Jetson TX2 Max-P", "Jetson TX2 Max-Q"}
    assert {entry.network for entry in rows} == {"ResNet-50"}


def test_published_efficiency_is_what_the_paper_prints():
    with open("enginery/benchmark/whitepaper.csv", encoding="utf-8") as file:
        printed = [entry for entry in csv.DictReader(file) if entry["unit"] == "images"]
    assert len(printed) == 108
    names = {entry["network"] for entry in printed}
    rows = {(e.device, e.precision, e.network, e.batch): e for e in published_rows(sorted(names), BATCHES)}
    assert len(rows) == len(printed)
    for entry in printed:
        found = rows[entry["device"], entry["precision"], entry["network"], int(entry["batch"])]
        if entry["items_per_s_per_w"]:  # rounded there, and so is the power, so 8 % is what agreement can mean
            assert found.images_per_s_per_w == pytest.approx(float(entry["items_per_s_per_w"]), rel=0.08)


def test_only_the_batches_and_networks_asked_for():
    assert {entry.batch for entry in published_rows(["AlexNet"], [1, 128])} == {1, 128}
    assert published_rows(["mobilenet_v2"], BATCHES) == []
    assert [network_name(name) for name in ("vgg19", "mobilenet_v2")] == ["VGG-19", "mobilenet_v2"]


@pytest.mark.parametrize(
    ("power_w", "per_hour", "per_kwh", "cost"),
    # 1,000 images/s: 1,000 s, so 1000/3600 hours, and at 360 W 0.1 kWh. What nothing measures has no price: not 0.
    [
        (None, None, None, None),
        (None, None, 0.5, None),
        (None, 3.6, 0.5, 1.0),
        (360.0, None, 0.5, 0.05),
        (360.0, 3.6, 0.5, 1.05),
    ],
)
def test_cost(power_w, per_hour, per_kwh, cost):
    times = {"p50_ms": 1, "p90_ms": 1, "p99_ms": 1, "num_iterations": 9, "power_w": power_w}
    speed = BenchmarkRow(precision="int8", runtime="openvino", batch_size=8, images_per_s=1000, **times)
    assert _row("net", "CPU", speed, settings(per_hour, per_kwh)).cost == pytest.approx(cost)


def settings(price_per_hour: float | None, price_per_kwh: float | None) -> Settings:
    return Settings(
        batches=(8,),
        precisions=("int8",),
        image_size=64,
        seconds=1.0,
        optimization_level=3,
        timing_caches=None,
        price_per_hour=price_per_hour,
        price_per_kwh=price_per_kwh,
    )


@pytest.mark.parametrize(
    ("prices", "changes", "note"),
    [
        ((None, None), {}, None),
        ((3.6, 0.5), {"cost": 1.0}, "Cost per million images at 3.6 per hour and 0.5 per kWh."),
        ((3.6, 0.5), {"cost": 1.0, "power_w": None}, ", without electricity where power is not known."),
        ((None, 0.5), {"power_w": None}, "No cost per million images: nothing here measures power."),
    ],
)
def test_the_prices_stand_beside_the_costs(prices, changes, note):
    notes = _cost_notes(settings(*prices), [row(**changes)])
    assert notes == [] if note is None else notes[0].endswith(note)


def test_markdown():
    text = markdown([row(), row(precision="FP16", power_w=None)], published_rows(["ResNet-50"], [8]), "About this.")
    lines = text.splitlines()
    assert lines[0] == "About this."
    assert lines[2] == "| device | precision | network | batch | images/s | W | images/s/W | ms |"
    assert lines[4] == "| NVIDIA X | INT8 | ResNet-50 | 8 | 2,000 | 500.0 | 4.00 | 4.00 |"
    assert lines[5] == "| NVIDIA X | FP16 | ResNet-50 | 8 | 2,000 |  |  | 4.00 |"
    assert any(line.startswith("| Tesla V100 | FP16/FP32 mixed | ResNet-50 | 8 | 2,493 |") for line in lines)
    assert "whitepaper" in lines[-1]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    with_cost = markdown([row(cost=1.2345)], [], "")
    assert ("per million images" in with_cost, "Other devices" in with_cost) == (True, False)
    assert with_cost.rstrip().endswith("| 1.23 |")
    assert markdown([row(cost=1234.5)], [], "").rstrip().endswith("| 1,234 |")


def test_csv_keeps_all_digits():
    (entry,) = csv.DictReader(io.StringIO(as_csv([row(images_per_s=2000.123, cost=None)])))
    assert (entry["images_per_s"], entry["cost"]) == ("2000.123", "")
    assert float(entry["images_per_s_per_w"]) == pytest.approx(4.000246)


def test_picture(tmp_path):
    measured = [row(batch=batch, images_per_s=500.0 * batch, precision=p) for batch in (1, 8) for p in ("FP32", "INT8")]
    write_picture(measured, published_rows(["ResNet-50"], [1, 8]), tmp_path / "t.png")
    with Image.open(tmp_path / "t.png") as picture:
        assert picture.size[0] > 500
        assert len(set(picture.convert("RGB").getdata())) > 50


@pytest.mark.parametrize(
    ("rates", "labels"),
    [
        ((199, 400), ["200", "300", "400"]),
        ((19, 45_000), ["20", "50", "100", "200", "500", "1,000", "2,000", "5,000", "10,000", "20,000", "50,000"]),
        ((211, 238), ["210", "220", "230"]),
        ((0.6, 3), ["0.6", "0.7", "0.8", "0.9", "1", "2", "3"]),
    ],
)
def test_speeds_are_round_numbers_without_powers(rates: tuple[float, float], labels: list[str], tmp_path: Path) -> None:
    measured = [row(batch=batch, images_per_s=rate) for batch, rate in zip((1, 8), rates, strict=True)]
    with patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        write_picture(measured, [], tmp_path / "t.png")
    axes = saved.call_args.args[0].axes[0]
    low, high = axes.get_ylim()
    write = axes.yaxis.get_major_formatter()
    ticks = [write(value, 0) for value in axes.get_yticks() if low <= value <= high]
    assert (ticks, list(axes.get_yticks(minor=True))) == (labels, [])
