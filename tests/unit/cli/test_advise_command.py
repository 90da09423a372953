"""`enginery advise`: what it says follows from the count, the data sheets and the fit."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper

from components.common.contracts.errors import UserError
from components.common.runtimes.architectures import build_model
from components.common.runtimes.counting import count_model, count_onnx
from enginery.advise.answers import PRICES, read_prices
from enginery.advise.roofline import Work, devices, load_coefficients, predict
from enginery.cli.advise import advise

_ASKED = ("resnet18", "--image-size", "64")


def _rows(*arguments: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(advise, [*arguments, "--json"], catch_exceptions=False)
    return {row["gpu"]: row for row in json.loads(result.stdout)["gpus"]}


def test_serving() -> None:
    rows = _rows(*_ASKED, "--qps", "1000000", "--p99", "7ms")
    assert set(rows) == set(devices())
    for row in rows.values():
        assert row["low"] < row["images_per_s"] < row["high"]
        assert row["images_per_s"] == max(row["images_per_s_by_precision"].values())
        assert row["p99_ms"] <= 7
        assert row["num_gpus"][0] * row["high"] >= 1_000_000
        assert (row["num_gpus"][1] - 1) * row["low"] < 1_000_000 <= row["num_gpus"][1] * row["low"]
        assert row["sharing"] == "neither"
    assert rows["H200"]["num_gpus"][1] < rows["P4"]["num_gpus"][0]


def test_a_short_latency_takes_small_batches_or_none() -> None:
    assert _rows(*_ASKED, "--p99", "1ms")["T4"]["batch"] < _rows(*_ASKED, "--p99", "0.1s")["T4"]["batch"]
    refused = _rows(*_ASKED, "--p99", "0.01ms")["H200"]
    assert refused["images_per_s"] is None
    assert "latency" in refused["limit"]


def test_a_small_load_leaves_room() -> None:
    rows = _rows(*_ASKED, "--qps", "100")
    assert rows["H100"]["sharing"] == "MIG"
    assert rows["H100"]["why"].startswith("1 of 7 parts")
    assert rows["T4"]["sharing"] == "MPS"


def test_training_fits_and_meets_the_deadline() -> None:
    rows = _rows(*_ASKED, "--workload", "train", "--images", "1000000", "--deadline", "6min", "--batch", "60000")
    assert rows["H200"]["fits"]
    assert rows["P4"]["batch"] == rows["P4"]["largest_batch"] < 60000
    assert rows["P4"]["memory_gb"] <= devices()["P4"].memory_gb
    for row in rows.values():
        least, most = row["num_gpus"]
        assert least <= row["hours_on_one"] / 0.1 + 1
        assert most * 0.1 * 0.9847 >= row["hours_on_one_range"][1] or most == 1


def test_max_q_keeps_to_the_budget(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("device,usd_per_hour\nH200,4\nT4,0.5\n")
    free = _rows(*_ASKED, "--prices", str(prices))
    cheap = _rows(*_ASKED, "--prices", str(prices), "--budget", "1")
    best = max(free.values(), key=lambda row: float(row["images_per_s_per_w"]))
    assert [name for name, row in free.items() if row["max_q"]] == [best["gpu"]]
    assert [name for name, row in cheap.items() if row["max_q"]] == ["T4"]
    assert cheap["T4"]["cost_per_million"] == pytest.approx(0.5 / 3600 / cheap["T4"]["images_per_s"] * 1e6)
    assert "cost_per_million" not in cheap["L4"]


@pytest.mark.parametrize("workload", ["serve", "train"])
def test_the_page_shows_every_gpu_and_both_charts(tmp_path: Path, workload: str) -> None:
    file = tmp_path / "page.html"
    rows = _rows(*_ASKED, "--workload", workload, "--images", "1000", "--qps", "10", "--html", str(file))
    text = file.read_text()
    assert text.count("<svg") == 2
    roofline = text.split("<svg")[2]
    assert "FLOPs per byte" in roofline
    assert "convolution" in roofline
    for name, row in rows.items():
        assert f"<th>{name}</th>" in text
        assert (f">{name}</text>" in text.split("<svg")[1]) == ("cost" in row or "cost_per_million" in row)
    assert "https://" in text.split("Data sheets")[1]


def test_a_page_without_an_answer_says_so(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    _rows(*_ASKED, "--p99", "0.01ms", "--html", str(file))
    assert "No GPU of the table answers in time" in file.read_text()
    assert "<svg" not in file.read_text()


@pytest.mark.parametrize(
    "content", [b"", b"device,usd_per_hour\nH300,1\n", b"device,usd_per_hour\nH200,nan\n", b"\xff\xfe", b"a" * 70_000]
)
def test_prices_are_checked(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prices.csv"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_prices(file)
    assert (error.value.code, error.value.setting) == ("invalid-prices", "--prices")


def test_shipped_prices_name_date_and_source() -> None:
    assert set(read_prices(PRICES)) <= set(devices())
    for line in PRICES.read_text().splitlines()[1:]:
        assert "https://" in line.split(",", 3)[3]
        assert line.split(",")[2].startswith("2026-")


@pytest.mark.parametrize("text", ["7", "0ms", "-7ms", "7 weeks", "1e9s", "ms"])
def test_times_are_read(text: str) -> None:
    if text == "7":  # of the option's unit
        assert _rows(*_ASKED, "--p99", text) == _rows(*_ASKED, "--p99", "0.007s")
        return
    with pytest.raises(UserError) as error:
        _rows(*_ASKED, "--p99", text)
    assert (error.value.code, error.value.setting) == ("invalid-numbers", "--p99")


def test_an_onnx_file_is_served_and_not_trained(tmp_path: Path) -> None:
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 96, 96])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 64, 94, 94])
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [64, 3, 3, 3], [0.0] * 1728)
    node = helper.make_node("Conv", ["images", "weight"], ["logits"])
    graph = helper.make_graph([node], "graph", [images], [logits], [weight])
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), file)
    # Images of 96 px: no more of them than the link carries.
    assert 0 < _rows(str(file), "--p99", "1s")["P4"]["images_per_s"] <= 15.75e9 * 0.874 / (12 * 96**2) * 1.001
    with pytest.raises(UserError) as error:
        _rows(str(file), "--workload", "train")
    assert error.value.code == "not-trainable"


def test_batches_precisions_and_streams_cost_what_they_should() -> None:
    work, (fitted, _) = Work(count_model("resnet18", 224), 224), load_coefficients()
    device = devices()["H200"]
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
    work = Work(count_model("resnet18", 224), 224)
    assert int(work.winograd.sum()) == 13
    assert len(work.flops) == 20 + 1 + 2  # convolutions, the linear layer, two kinds of pooling
    groups = Work(count_model("mobilenet_v2", 224), 224)
    assert int((groups.kind == 3).sum()) == 17  # depthwise


def test_an_exported_file_is_the_same_work(tmp_path: Path) -> None:
    """Depthwise convolutions with folded BatchNorm have a bias; they stay depthwise."""
    model = build_model("mobilenet_v2", 1000).eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.zeros(1, 3, 64, 64),), str(file), dynamo=False, opset_version=17)
    counted, exported = Work(count_model("mobilenet_v2", 64), 64), Work(count_onnx(file), 64)
    assert exported.kind.tolist() == counted.kind.tolist()
    assert exported.flops.tolist() == counted.flops.tolist()
