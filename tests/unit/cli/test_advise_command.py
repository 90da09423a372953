"""`enginery advise`: what it says follows from the count, the data sheets and the fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import helper

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.runtimes.architectures import build_model
from components.common.runtimes.counting import count_model, count_onnx
from enginery.advise import answers
from enginery.advise.answers import PRICES, read_prices
from enginery.advise.roofline import SpeedPrediction, Work, devices, load_coefficients, predict
from enginery.cli.advise import advise
from enginery.formats import range_text
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses
from tests.unit.shapes import Chain

_ASKED = ("resnet18", "--image-size", "64")


def _rows(*arguments: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(advise, [*arguments, "--json"], catch_exceptions=False)
    return {row["gpu"]: row for row in json.loads(result.stdout)["gpus"]}


def test_serving() -> None:
    rows = _rows(*_ASKED, "--qps", "1000000", "--p99", "7ms")
    assert set(rows) == set(devices())
    for row in rows.values():
        assert row["low"] < row["images_per_s"] < row["high"]
        assert row["images_per_s"] <= max(filter(None, row["images_per_s_by_precision"].values()))
        assert row["p99_ms_range"][0] < row["p99_ms"] <= 7
        assert row["p99_ms"] < row["p99_ms_range"][1]
        assert (row["num_gpus"][1] - 1) * 0.9 * row["low"] < 1_000_000 <= row["num_gpus"][1] * 0.9 * row["low"]
        assert row["num_gpus"][0] * 0.9 * row["high"] >= 1_000_000
        assert (row["sharing"], row["why"] in ("the load takes all of it", "a CPU has none")) == ("neither", True)
    assert rows["H200"]["p99_ms_range"][1] <= 7
    assert rows["H200"]["num_gpus"][1] < rows["P4"]["num_gpus"][0]
    assert rows["Xeon-8380"]["images_per_s_by_precision"].keys() == {"fp32", "int8"}


def test_a_load_decides_batch_and_max_q() -> None:
    """A small load takes the smallest batch, and the device that it leaves the least of unused."""
    small, large = _rows(*_ASKED, "--qps", "50"), _rows(*_ASKED, "--qps", "5000000")
    assert small["H200"]["batch"] == 1 < large["H200"]["batch"]
    assert small["H200"]["p99_ms"] < large["H200"]["p99_ms"]
    for rows, qps in ((small, 50), (large, 5_000_000)):
        for name, row in rows.items():
            power_w = row["num_gpus"][1] * devices()[name].power_w
            assert row["images_per_s_per_w"] == pytest.approx(qps / power_w)
            assert row["kwh_per_million_at_most"] == pytest.approx(1e6 / qps * power_w / 3.6e6)
        in_time = [row for row in rows.values() if row["p99_ms_range"][1] <= 7]
        best = max(in_time, key=lambda row: float(row["images_per_s_per_w"]))
        assert [row["gpu"] for row in rows.values() if row["max_q"]] == [best["gpu"]]


def test_the_tail_of_the_queue_is_that_of_a_simulation() -> None:
    """Poisson arrivals at one server that takes a millisecond for each: 99 % wait no longer than is said.

    The closer a load is to the engine's speed the later it answers, and at nine tenths the latest.
    """
    prediction = SpeedPrediction(images_per_s=1000.0, batch_s=0.001, busy_share=1.0, limit="arithmetic")
    engine = answers._Engine(precision="fp16", batch=1, streams=1, prediction=prediction, log_error=0.0)
    done, times, arrivals = 0.0, [], np.cumsum(np.random.default_rng(0).exponential(1 / 800, 200_000))
    for arrival in arrivals:
        done = max(done, arrival) + 0.001
        times.append(done - arrival)
    assert engine.p99_s(800.0) == pytest.approx(float(np.quantile(times, 0.99)), rel=0.15)
    assert [engine.p99_s(qps) for qps in (1.0, 500.0)] == pytest.approx([0.002, 0.0043], rel=0.01)
    assert engine.p99_s(800.0) < engine.p99_s(890.0) < engine.p99_s(None)


def test_a_short_latency_takes_small_batches_or_none() -> None:
    assert _rows(*_ASKED, "--p99", "2ms")["H100"]["batch"] < _rows(*_ASKED, "--p99", "0.1s")["H100"]["batch"]
    refused = _rows(*_ASKED, "--p99", "0.01ms")["H200"]
    assert refused["images_per_s"] is None
    soonest, low, high = (float(each) for each in re.findall(r"\d[\d.]*", refused["limit"]))
    assert refused["limit"].startswith("latency")
    assert 0.01 < low < soonest < high


def test_a_small_load_is_answered_sooner_and_that_is_said() -> None:
    texts = {
        load: CliRunner().invoke(advise, ["resnet50", "--p99", "5ms", *load], catch_exceptions=False).stdout
        for load in ((), ("--qps", "100"))
    }
    assert ["latency" in texts[load].split("T4")[1].split("A10")[0] for load in texts] == [True, False]
    assert ["less load" in text for text in texts.values()] == [True, False]


def test_the_speed_of_each_precision_is_that_within_the_latency() -> None:
    """FP32, which is too late at the slow end of the range only, besides INT8, which is not."""
    speeds = _rows("resnet50", "--qps", "500")["H200"]["images_per_s_by_precision"]
    assert 0 < speeds["fp32"] < speeds["fp16"] < speeds["int8"]


def test_a_small_load_leaves_room() -> None:
    rows = _rows(*_ASKED, "--qps", "100")
    assert rows["H100"]["sharing"] == "MIG"
    assert rows["H100"]["why"].startswith("a part of 1 of 7 carries the load")
    assert rows["T4"]["sharing"] == "MPS"
    assert rows["Xeon-8380"]["sharing"] == "neither"


def test_a_part_that_answers_too_late_is_not_advised() -> None:
    """A load that a seventh of the GPU carries, asked for sooner than a seventh answers."""
    whole = _rows("resnet50", "--qps", "10")["A100-80"]
    part = devices()["A100-80"].part(1)
    assert (part.int8_tops, part.num_sms) == (78, 13.5)
    soon = f"{whole['p99_ms_range'][1] * 1.01:.6f}ms"
    asked = _rows("resnet50", "--qps", "10", "--p99", soon)["A100-80"]
    assert not asked["why"].startswith("a part of 1 of 7")


def test_what_does_not_fit_is_memory_and_not_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    small = devices() | {"T4": replace(devices()["T4"], memory_gb=1.01)}
    monkeypatch.setattr(answers, "devices", lambda: small)
    row = _rows("vgg19", "--p99", "10s")["T4"]
    assert row["images_per_s"] is None
    assert row["limit"].startswith("memory: one image takes 1.")


def test_decoding_limits() -> None:
    free, capped = (_rows(*_ASKED, "--p99", "1s", "--decode-rate", rate) for rate in ("none", "500"))
    assert "decode_per_s" not in free["T4"]
    assert (capped["T4"]["images_per_s"], capped["T4"]["limit"]) == (500, "decoder")
    shared = _rows(*_ASKED, "--p99", "1s", "--decode-rate", "500", "--qps", "45000")["H200"]
    alone = _rows(*_ASKED, "--p99", "1s", "--qps", "450")["H200"]
    assert shared["num_gpus"] == [100, 100]
    assert capped["H200"]["p99_ms"] == shared["p99_ms"] == alone["p99_ms"]  # of 450 images/s on each
    assert capped["H200"]["why"] == shared["why"] == alone["why"]
    hardware = _rows(*_ASKED, "--p99", "1s", "--decode-rate", "gpu")
    assert hardware["H200"]["images_per_s"] == devices()["H200"].jpeg_per_s
    assert (hardware["L4"]["decode_per_s"], hardware["L4"]["limit"]) == ("unknown", free["L4"]["limit"])
    for rate in ("0", "1e-300", "nan", "fast"):
        with refuses("invalid-numbers", "--decode-rate"):
            _rows(*_ASKED, "--decode-rate", rate)


def test_training_fits_and_meets_the_deadline() -> None:
    rows = _rows(*_ASKED, "--workload", "train", "--images", "1000000", "--deadline", "6min", "--batch", "60000")
    assert rows["H200"]["fits"]
    assert rows["P4"]["batch"] == rows["P4"]["largest_batch"] < 60000
    assert rows["P4"]["memory_gb"] <= devices()["P4"].memory_gb
    for row in rows.values():
        least, most = row["num_gpus"]
        assert least <= row["hours_on_one"] / 0.1 + 1
        assert most * 0.1 * 0.9847 >= row["hours_on_one_range"][1] or most == 1
        gpu_hours = row["hours_on_one_range"][1] / (1 if most == 1 else 0.9847)  # several lose some of their speed
        assert row["kwh_at_most"] == pytest.approx(gpu_hours * devices()[row["gpu"]].power_w / 1000)
        if "cost" in row:
            assert row["cost_range"][1] == pytest.approx(gpu_hours * read_prices(PRICES)[row["gpu"]])
    assert rows["P4"]["limit"].startswith("memory")
    assert (rows["H200"]["precision"], rows["EPYC-7763"]["precision"]) == ("fp16", "fp32")


def test_an_optimizer_of_more_numbers_takes_more_memory() -> None:
    sgd, adamw = (_rows(*_ASKED, "--workload", "train", "--optimizer", name)["H200"] for name in ("sgd", "adamw"))
    assert adamw["memory_gb"] - sgd["memory_gb"] == pytest.approx(4 * 11_689_512 / 1e9)  # of ResNet-18's weights


def test_max_q_keeps_to_the_budget(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("device,usd_per_hour\nH200,4\nT4,0.5\n")
    free = _rows(*_ASKED, "--prices", str(prices))
    cheap = _rows(*_ASKED, "--prices", str(prices), "--budget", "1")
    in_time = [row for row in free.values() if row["p99_ms_range"][1] <= 7]
    assert len(in_time) < len(free)
    best = max(in_time, key=lambda row: float(row["images_per_s_per_w"]))
    assert [name for name, row in free.items() if row["max_q"]] == [best["gpu"]]
    assert [name for name, row in cheap.items() if row["max_q"]] == ["T4"]
    assert cheap["T4"]["cost_per_million"] == pytest.approx(0.5 / 3600 / cheap["T4"]["images_per_s"] * 1e6)
    assert "cost_per_million" not in cheap["L4"]
    poor = CliRunner().invoke(advise, [*_ASKED, "--prices", str(prices), "--budget", "0.1"], catch_exceptions=False)
    assert "No device keeps to a budget of 0.1" in poor.output


@pytest.mark.parametrize("workload", ["serve", "train"])
def test_the_page_shows_every_gpu_and_both_charts(tmp_path: Path, workload: str) -> None:
    file = tmp_path / "page.html"
    load = ("--images", "100000000") if workload == "train" else ("--qps", "10")
    rows = _rows(*_ASKED, "--workload", workload, *load, "--html", str(file))
    text = file.read_text()
    assert text.count("<svg") == 2
    roofline = text.split("<svg")[2]
    assert "FLOPs per byte" in roofline
    assert "convolution" in roofline
    for name, row in rows.items():
        assert f"<th>{name}</th>" in text
        assert (f">{name}</text>" in text.split("<svg")[1]) == ("cost" in row or "cost_per_million" in row)
        if workload == "serve":
            assert row.get("why", "") in text
            for speed in filter(None, row["images_per_s_by_precision"].values()):
                assert f">{speed:,.0f}</td>" in text or not row["images_per_s"]
    assert "https://" in text.split("Data sheets")[1]
    printed = CliRunner().invoke(advise, [*_ASKED, "--workload", workload, *load], catch_exceptions=False).stdout
    assert not re.search(r"\de\+\d", text + printed)
    assert range_text([99.7, 1e6], ".2g") == "100 to 1,000,000"


def test_a_page_without_an_answer_says_so(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    _rows(*_ASKED, "--p99", "0.01ms", "--image-size", "4096", "--html", str(file))
    assert not re.search(r"\de\+\d", file.read_text())
    assert "No device of the table answers in time" in file.read_text()
    assert "<svg" not in file.read_text()
    _rows("resnet50", "--image-size", "2048", "--qps", "0.5", "--p99", "10s", "--html", str(file))
    assert not re.search(r"\de\+\d", file.read_text())
    assert "too late" not in file.read_text()  # a precision that a CPU does not have is not late


def test_a_file_without_products_has_no_roofline(tmp_path: Path) -> None:
    for sides, name in ((("height", "width"), "unknown"), ((64, 64), "model")):
        node = helper.make_node("Relu", ["images"], ["logits"])
        onnx.save(onnx_model([node], {"images": [1, 3, *sides]}, {}), tmp_path / f"{name}.onnx")
    _rows(str(tmp_path / "model.onnx"), "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert (text.count("<svg"), re.findall(r"\de\+\d", text)) == (1, [])  # the cost
    with refuses("shapes-unknown"):
        _rows(str(tmp_path / "unknown.onnx"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"device,usd_per_hour\nH300,1\n",
        b"device,usd_per_hour\nH200,nan\n",
        b"device,usd_per_hour\nH200,free\n",
        b"device,usd_per_hour\nH200,3\nH200,4\n",
        b"\xff\xfe",
        b"a" * 70_000,
    ],
)
def test_prices_are_checked(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prices.csv"
    file.write_bytes(content)
    with refuses("invalid-prices", "--prices"):
        read_prices(file)


def test_a_missing_price_list_is_said_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="csv: No such file"):
        read_prices(tmp_path / "prices.csv")


def test_prices_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_bytes(b"\xef\xbb\xbfdevice,usd_per_hour\r\nH200,3\r\n")
    assert read_prices(file) == {"H200": 3.0}


def test_shipped_prices_name_date_and_source() -> None:
    assert set(read_prices(PRICES)) <= set(devices())
    for line in PRICES.read_text().splitlines()[1:]:
        assert "https://" in line.split(",", 3)[3]
        assert line.split(",")[2].startswith("2026-")


def test_times_are_read() -> None:
    assert _rows(*_ASKED, "--p99", "7") == _rows(*_ASKED, "--p99", "0.007s")  # of the option's unit
    for text in ("0ms", "-7ms", "7 weeks", "1e9s", "ms"):
        with refuses("invalid-numbers", "--p99"):
            _rows(*_ASKED, "--p99", text)


@pytest.mark.parametrize("name", ["none/page.html", "."])
def test_a_page_needs_a_folder_and_is_none(tmp_path: Path, name: str) -> None:
    with refuses("no-folder", "--html"):
        _rows(*_ASKED, "--html", str(tmp_path / name))


def test_a_narrow_terminal_keeps_the_numbers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        arguments = [*_ASKED, "--qps", "100000"]
        texts[width] = CliRunner().invoke(advise, arguments, catch_exceptions=False).stdout
    row = _rows(*arguments)["B200"]
    lines = {width: next(line for line in text.splitlines() if "B200" in line) for width, text in texts.items()}
    assert f" {row['images_per_s']:,.0f} " in lines[80]
    assert max(map(len, texts[80].split("Left out")[0].splitlines())) <= 80
    assert "img/s/W" in texts[80].split("Left out")[1]
    assert f" {row['images_per_s_per_w']:.3g} " in lines[200]
    assert "Left out" not in texts[200]


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ("--workload train --qps 5", "--qps"),
        ("--workload train --images 9 --p99 7ms", "--p99"),
        ("--deadline 8h", "--deadline"),
        ("--batch 8", "--batch"),
        ("--workload train --deadline 8h", "--deadline"),
        ("--workload train --epochs 3", "--epochs"),
        ("--workload train --budget 100", "--budget"),
        ("--config settings.yaml", "--config"),
        ("--how-much-data images --html page.html", "--html"),
        ("--how-much-data images --num-classes 3", "--num-classes"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options: str, setting: str) -> None:
    with refuses("option-unused", setting):
        _rows("resnet18", *options.split())


def test_a_folder_called_as_a_network_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18").mkdir()
    (tmp_path / "other").mkdir()
    result = CliRunner().invoke(advise, [*_ASKED, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["counted"] == "the network resnet18 at 64x64 px with 1,000 classes"
    with refuses("unknown-architecture", "MODEL", says="folder without manifest.json"):
        _rows("other")


def test_a_bundle_says_its_size_and_classes(detection_chain: Chain) -> None:
    bundle, classes = str(detection_chain.bundle), load(detection_chain.bundle, BundleManifest).manifest.classes
    named = ("detection/fcos_small", "--image-size", "64", "--num-classes", str(len(classes)))
    memory = [_rows(*model, "--workload", "train")["H200"]["memory_gb"] for model in ((bundle,), named, named[:3])]
    assert memory[0] == memory[1] < memory[2]
    assert _rows(bundle)["H200"]["images_per_s"] > 0
    for option in ("--image-size", "--num-classes"):
        with refuses("fixed-by-file", option):
            _rows(bundle, option, "64")


def test_networks_of_text_are_refused() -> None:
    with refuses("other-task", "MODEL"):
        _rows("translation/lstm_small")


def test_an_onnx_file_is_served_and_not_trained(tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    node, weights = helper.make_node("Conv", ["images", "weight"], ["logits"]), np.zeros((64, 3, 3, 3), np.float32)
    shapes = {"images": ["batch", 3, 96, 96]}, {"logits": ["batch", 64, 94, 94]}
    file = tmp_path / "[" / "model].onnx"  # which is no markup
    onnx.save(onnx_model([node], *shapes, {"weight": weights}), file)
    assert "model].onnx at 96x96 px" in CliRunner().invoke(advise, [str(file)], catch_exceptions=False).stdout
    # Images of 96 px: no more of them than the link carries.
    assert 0 < _rows(str(file), "--p99", "1s")["P4"]["images_per_s"] <= 15.75e9 * 0.874 / (12 * 96**2) * 1.001
    for arguments, code in ((("--workload", "train"), "not-trainable"), (("--image-size", "64"), "fixed-by-file")):
        with refuses(code):
            _rows(str(file), *arguments)


def test_batches_precisions_and_streams_cost_what_they_should() -> None:
    work, (kinds, _) = Work(count_model("resnet18", 224)), load_coefficients()
    device, fitted = devices()["H200"], kinds["gpu"]
    few, many = (predict(work, device, "fp16", batch, fitted["fp16"]) for batch in (1, 128))
    assert few.limit == "launches"
    assert few.batch_s < many.batch_s
    assert few.images_per_s < many.images_per_s
    assert predict(work, device, "fp32", 128, fitted["fp32"]).images_per_s < many.images_per_s
    four = predict(work, device, "fp16", 1, fitted["fp16"], streams=4)
    assert few.images_per_s < four.images_per_s < 4 * few.images_per_s
    assert four.busy_share > few.busy_share
    assert four.batch_s > few.batch_s


def test_kernels_are_told_apart() -> None:
    """Winograd takes 3x3 convolutions of stride 1, of which ResNet-18 has 13; BatchNorm and ReLU are no kernels."""
    work = Work(count_model("resnet18", 224))
    assert int(work.winograd.sum()) == 13
    assert len(work.flops) == 20 + 1 + 2  # convolutions, the linear layer, two kinds of pooling
    groups = Work(count_model("mobilenet_v2", 224))
    assert int((groups.kind == 3).sum()) == 17  # depthwise
    # The first convolution adds 3x3x3 products for 32 channels: Tensor Cores take 64 of both, FP32 32 and 8.
    assert groups.padding[0] == pytest.approx(64 / 27 * 2)
    assert groups.fp32_padding[0] == pytest.approx(32 / 27)


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        ("mobilenet_v2", 64),  # depthwise convolutions with folded BatchNorm have a bias; they stay depthwise
        ("efficientnet_b0", 64),  # SiLU is Sigmoid and Mul there
        ("segmentation/fpn_small", 64),
        ("detection/fcos_small", 64),
    ],
)
def test_an_exported_file_is_the_same_work(tmp_path: Path, architecture: str, size: int) -> None:
    model = build_model(architecture, 10).eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.zeros(1, 3, size, size),), str(file), dynamo=False, opset_version=17)
    counted, exported = Work(count_model(architecture, size, 10)), Work(count_onnx(file))
    products = counted.flops > 0
    assert exported.flops[exported.flops > 0].tolist() == counted.flops[products].tolist()
    assert exported.kind[exported.flops > 0].tolist() == counted.kind[products].tolist()
    assert exported.only_int8.sum() == counted.only_int8.sum()
    assert exported.values.sum() == pytest.approx(counted.values.sum(), rel=0.1)
    assert exported.image_bytes == counted.image_bytes == 12 * size**2
    assert counted.live_values <= exported.live_values <= 2 * counted.live_values  # Sigmoid and Mul keep their input
    (device, fitted) = devices()["H200"], load_coefficients()[0]["gpu"]
    speeds = [
        predict(work, device, precision, 32, fitted[precision]).images_per_s
        for precision in ("fp16", "int8")
        for work in (counted, exported)
    ]
    assert speeds[1::2] == pytest.approx(speeds[::2], rel=0.1)
