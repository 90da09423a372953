"""The report's section on speed in words and tables. report.html and model_card.md both take it from here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from components.common.contracts.records import BenchmarkRow, Precision
from components.common.runtimes import runs_plans
from components.validate.report_text import TIMES, megabytes, number
from components.validate.schema import Report
from components.validate.speed import budget_text

_Column = tuple[str, Callable[[BenchmarkRow], str]]  # its heading with the unit, and the text of a cell

_SURE_OF_POWER_S = 0.4  # a shorter measurement may hold too few steps of NVML's energy counter


@dataclass(frozen=True, kw_only=True)
class SpeedLine:
    """One line of a table."""

    precision: Precision
    is_new_way: bool  # another batch size, number of streams or handling of copies than the line before
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SpeedTable:
    """Numbers by precision. A column of which nothing is known is left out."""

    columns: tuple[str, ...]
    lines: tuple[SpeedLine, ...]


def budget_sentence(report: Report) -> str:
    """The result of the latency budget; empty where none was given."""
    budget = report.benchmark.latency_budget
    return "" if budget is None else f"Latency budget: {budget_text(budget, report.accuracy.unit)}."


def speed_sentences(report: Report) -> list[str]:
    """Meaning of the numbers, a sentence or two each."""
    rows, unit = report.benchmark.rows, report.accuracy.unit
    on_gpu = any(runs_plans(row.runtime) for row in rows)
    latency = "the copy of one batch to the GPU, its computation and the copy back, by CUDA events"
    sentences = [
        f"Latency is {latency if on_gpu else 'the time of the call that runs one batch'}; throughput is the {unit} of "
        f"whole batches over wall time. Both are taken after a warm-up{', as trtexec defines them' if on_gpu else ''}."
    ]
    if (turns := max(row.num_repeats for row in rows)) > 1:
        sentences.append(
            f"The precisions were measured in {turns} turns, one after the other in each. {unit}/s is the median of "
            "the turns; over FP32 is the median of the ratios within a turn, with its one-sided 95 % bounds."
        )
    if any(row.power_w is not None for row in rows):
        sentences.append("W is the mean power of the GPU's whole board, from NVML's energy counter.")
    elif on_gpu:
        longest_s = max(row.num_iterations / row.num_repeats * row.batch_size / row.images_per_s for row in rows)
        too_short = longest_s < _SURE_OF_POWER_S and any(row.sm_clock_mhz is not None for row in rows)
        reason = "the measurements are too short" if too_short else "NVML's energy counter can't be read here"
        sentences.append(f"Power is not known: {reason}.")
    return sentences


def doubt_sentence(report: Report) -> str:
    """The reason why speed-ups are unsure, and what to do; empty where none is."""
    ratios = [ratio for row in report.benchmark.rows for ratio in row.over.values()]
    doubts = [ratio.doubt for ratio in ratios if ratio.doubt]
    return f"{len(doubts)} of {len(ratios)} speed-ups are unsure: {doubts[-1]}." if doubts else ""


def has_streams(report: Report) -> bool:
    """True if several batches at the same time were measured."""
    return any(row.num_streams > 1 for row in report.benchmark.rows)


def main_table(report: Report) -> SpeedTable:
    """Every precision and batch size, with the copies, one batch at a time."""
    columns = (_BATCH, _images_per_s(report), _TOKENS, *_RATIOS, *_LATENCIES, *_POWER)
    return _table(report, report.benchmark.plain_rows, columns)


def further_table(report: Report) -> SpeedTable | None:
    """Several streams, and without the copies; None where neither was measured."""
    rows = tuple(row for row in report.benchmark.rows if not row.is_plain)
    if not rows:
        return None
    columns = (*_ways(rows), _images_per_s(report), *_RATIOS, *_LATENCIES, *_POWER)
    return _table(report, rows, columns)


def _images_per_s(report: Report) -> _Column:
    sure = report.benchmark.sure_images_per_s
    return "images/s", lambda row: "unsure" if (value := sure(row)) is None else number(value, 0)


def further_title(report: Report) -> str:
    """Title of the further table."""
    rows = report.benchmark.rows
    titles = ["several batches at the same time"] if has_streams(report) else []
    titles += [] if all(row.with_transfers for row in rows) else ["without the copies to and from the GPU"]
    title = ", and ".join(titles)
    return f"{title[:1].upper()}{title[1:]}:"


def detail_table(report: Report) -> SpeedTable:
    """All that was measured: spread of the throughput, every percentile, memory, clock and temperature."""
    rows = report.benchmark.rows
    return _table(report, rows, (*_ways(rows), *_SPREAD, *_PERCENTILES, *_HARDWARE))


def memory_sentence(report: Report) -> str:
    """Meaning of MB in the detailed table; empty where it has none."""
    if not any(row.memory_bytes for row in report.benchmark.rows):
        return ""
    return "MB is GPU memory: what was in use after the engine, its contexts and buffers were allocated, minus before."


def _ways(rows: Sequence[BenchmarkRow]) -> tuple[_Column, ...]:
    """The columns by which rows differ, besides the precision."""
    streams = any(row.num_streams > 1 for row in rows)
    copies = not all(row.with_transfers for row in rows)
    return (_BATCH, *([_STREAMS] if streams else []), *([_COPIES] if copies else []))


def _table(report: Report, rows: Sequence[BenchmarkRow], columns: Sequence[_Column]) -> SpeedTable:
    cells = [[show(row) for _, show in columns] for row in rows]
    known = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    changes = [False, *(before.way != row.way for before, row in pairwise(rows))]
    return SpeedTable(
        columns=tuple(columns[index][0].replace("images", report.accuracy.unit) for index in known),
        lines=tuple(
            SpeedLine(precision=row.precision, is_new_way=change, cells=tuple(line[index] for index in known))
            for row, change, line in zip(rows, changes, cells, strict=True)
        ),
    )


def _over(reference: Precision) -> _Column:
    """The median speed-up and its bounds."""

    def show(row: BenchmarkRow) -> str:
        if (ratio := row.over.get(reference)) is None:
            return ""
        bounds = f"({number(ratio.low)} to {number(ratio.high)})"
        return "unsure" if ratio.doubt else f"{number(ratio.median)} {TIMES} {bounds}"

    return f"over {reference.upper()}", show


_RATIOS = (_over("fp32"), _over("fp16"))


def _ms(value: float | None) -> str:
    return "" if value is None else number(value, 2 if value >= 10 else 3)


def _known(value: float | None, digits: int) -> str:
    return "" if value is None else number(value, digits)


_BATCH: _Column = ("batch", lambda row: str(row.batch_size))
_TOKENS: _Column = ("tokens/s", lambda row: "" if row.busy else _known(row.tokens_per_s, 0))
_STREAMS: _Column = ("streams", lambda row: str(row.num_streams))
_COPIES: _Column = ("copies", lambda row: "yes" if row.with_transfers else "no")
_LATENCIES: tuple[_Column, ...] = (
    ("p50 ms", lambda row: "unsure" if row.busy else _ms(row.p50_ms)),
    ("p99 ms", lambda row: "unsure" if row.busy else _ms(row.p99_ms)),
)
_POWER: tuple[_Column, ...] = (
    ("W", lambda row: _known(row.power_w, 0)),
    ("images/s/W", lambda row: _known(row.images_per_s_per_w, 1)),
)
_SPREAD: tuple[_Column, ...] = (
    ("lowest images/s", lambda row: _known(row.lowest_images_per_s, 0)),
    ("highest images/s", lambda row: _known(row.highest_images_per_s, 0)),
    ("others' CPU %", lambda row: _known(row.others_pct, 1)),
    ("steal %", lambda row: _known(row.steal_pct, 1)),
)
_PERCENTILES: tuple[_Column, ...] = (
    ("mean ms", lambda row: _ms(row.mean_ms)),
    ("p50 ms", lambda row: _ms(row.p50_ms)),
    ("p90 ms", lambda row: _ms(row.p90_ms)),
    ("p95 ms", lambda row: _ms(row.p95_ms)),
    ("p99 ms", lambda row: _ms(row.p99_ms)),
)
_HARDWARE: tuple[_Column, ...] = (
    ("MB", lambda row: "" if row.memory_bytes is None else megabytes(row.memory_bytes)),
    ("SM clock MHz", lambda row: "" if row.sm_clock_mhz is None else f"{row.sm_clock_mhz:,}"),
    ("\N{DEGREE SIGN}C", lambda row: "" if row.temperature_c is None else str(row.temperature_c)),
)
