"""The charts of odd runs: one epoch, many, one batch size, none."""

import re
from collections.abc import Callable

from components.common.artifacts import (
    BenchmarkReport,
    BenchmarkRow,
    EpochRecord,
)
from components.validate.charts import loss_chart, speed_chart, top1_chart

History = Callable[[int], tuple[EpochRecord, ...]]


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_curves_have_whole_epochs_on_their_axis(make_history: History) -> None:
    for num_epochs in (1, 2, 3, 16, 90):
        for chart in (loss_chart, top1_chart):
            svg = chart(make_history(num_epochs))
            ticks = texts(svg[: svg.index(">epoch<")])
            assert "1" in ticks or num_epochs > 3
            assert all(tick.isdigit() and int(tick) <= num_epochs for tick in ticks[:-1]), (num_epochs, ticks)


def test_a_single_epoch_shows_its_values(make_history: History) -> None:
    loss, top1 = loss_chart(make_history(1)), top1_chart(make_history(1))
    assert {"2.307", "2.197"} <= set(texts(loss))
    assert "81.51" in texts(top1)
    assert "2.307" not in texts(loss_chart(make_history(2)))


def test_speed_is_drawn_between_round_numbers(speeds: tuple[BenchmarkRow, ...]) -> None:
    shown = texts(speed_chart(BenchmarkReport(bundle_digest="b", rows=speeds)))
    assert {"0.2", "50", "20,000", "FP32", "FP16", "INT8"} <= set(shown)
    assert shown.count("128") == 3
    single = texts(speed_chart(BenchmarkReport(bundle_digest="b", rows=speeds[:1])))
    assert {"2", "5"} <= set(single)  # 2.85 ms lies between
    assert speed_chart(BenchmarkReport(bundle_digest="b", rows=())) == ""
