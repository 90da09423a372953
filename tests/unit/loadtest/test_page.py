"""What people and programs get to read."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from components.common.contracts.environment import environment
from components.common.contracts.errors import UserError
from enginery.cli.commands import cli
from enginery.serving.loadtest.page import page
from enginery.serving.loadtest.page_text import caution_text, gain_text, knee_text, load_text
from enginery.serving.loadtest.results import Knee, Level, LoadTest, Series


def level(load: float, throughput: float, p99_ms: float, *, closed: bool = False, **changed: object) -> Level:
    made = Level(
        concurrency=int(load) if closed else None,
        request_rate=None if closed else load,
        images_per_request=1,
        duration_s=5,
        num_requests=int(5 * load),
        errors={},
        images_per_s=throughput,
        p50_ms=p99_ms / 2,
        p95_ms=0.9 * p99_ms,
        p99_ms=p99_ms,
        max_ms=2 * p99_ms,
        send_lag_p99_ms=0.5,
        batches={1: 30, 16: 4},
        queue_ms=1.25,
        compute_ms=3.5,
    )
    return made.model_copy(update=changed)


def series(name: str, factor: float) -> Series:
    rates = [level(100, 100, 12), level(400 * factor, 400 * factor, 48), level(1200, 500 * factor, 900)]
    last = rates[-1].model_copy(update={"errors": {"overloaded": 7, "timeout": 2}})
    return Series(
        name=name,
        batching={"preferred_batch_size": [16], "max_queue_delay_microseconds": 2000} if factor > 1 else None,
        closed=(level(1, 200, 6, closed=True), level(32, 500 * factor, 60, closed=True)),
        open=(*rates[:2], last),
        knee=Knee(request_rate=400 * factor, images_per_s=400 * factor, p99_ms=48, is_highest_tried=False),
    )


@pytest.fixture
def result() -> LoadTest:
    return LoadTest(
        date="2026-11-22T09:00:00+00:00",
        url="http://localhost:8000",
        model="<digits>",
        network="digits_model",
        sent="random tensors",
        latency_budget_ms=50,
        seconds_per_level=5,
        client_cores=(1,),
        max_batch_size=128,
        instance_group=[{"count": 1, "kind": "KIND_CPU"}],
        series=(series("dynamic batching", 2.0), series("without", 1.0)),
        environment=environment(),
    )


def test_the_page_says_what_was_measured_and_is_complete_in_itself(result: LoadTest) -> None:
    text = page(result)
    assert "&lt;digits&gt;" in text
    assert "<digits>" not in text
    assert "knee: 800 images/s within 50 ms at p99 (measured 48.0 ms)" in text
    assert "1,000 images/s at most, 500 without (2.00 times as much)" in text
    assert "7 overloaded, 2 timeout" in text
    assert text.count("<svg") == 3
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert "#0101" not in text  # colours that stand for the page's
    rows = re.findall(r"<tr[^>]*><th>(.*?)</th>", text)
    assert rows.count("1 client") == rows.count("1,200 requests/s") == 2
    assert len(re.findall(r'<tr class="chosen">', text)) == 2


def test_json_comes_back_as_it_was(result: LoadTest) -> None:
    assert LoadTest.model_validate_json(result.model_dump_json()) == result


def test_words_fit_what_there_is(result: LoadTest) -> None:
    only = result.model_copy(update={"series": result.series[:1]})
    assert gain_text(only) is None
    assert caution_text(result) is None
    late = level(900, 900, 20, send_lag_p99_ms=15.0)
    slow = result.series[0].model_copy(update={"open": (late,)})
    assert "from 900 requests/s on" in str(caution_text(result.model_copy(update={"series": (slow,)})))
    without = result.series[0].model_copy(update={"knee": None})
    assert "100 requests/s, the lowest rate tried, was too much for 50 ms" in knee_text(without, 50)
    assert knee_text(without.model_copy(update={"open": ()}), 50) == "no knee: no request rate was tried"
    assert page(result.model_copy(update={"series": (without.model_copy(update={"open": ()}),)}))
    nobody = without.open[0].model_copy(update={"request_rate": 0.5, "num_requests": 0, "p50_ms": None, "p99_ms": None})
    assert "no request was due" in knee_text(without.model_copy(update={"open": (nobody,)}), 50)
    assert load_text(nobody) == "0.5 requests/s"
    failed = result.model_copy(update={"failures": {"<model> refused it": 1200}})
    assert "1,200 times: &lt;model&gt; refused it" in page(failed)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--concurrency", "0"], "whole numbers of 1 to 4096"),
        (["--concurrency", "1,x"], "whole numbers of 1 to 4096"),
        (["--rates", "5,-1"], "numbers above 0"),
        (["--rates", "nan"], "numbers above 0"),
        (["--cores", "100000"], "numbers of cores"),
        (["--tensors", "--data", "."], "drop one of them"),
    ],
)
def test_options_that_can_not_be_are_refused(arguments: list[str], word: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["loadtest", *arguments, "--output", str(tmp_path / "new")])
    assert isinstance(done.exception, UserError)
    assert word in str(done.exception)
    assert not (tmp_path / "new").exists()
