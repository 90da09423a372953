"""The analysis for people: one HTML file with a timeline and thumbnails by stream."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.analyze.answers import FrameAnswers
from components.analyze.results import NONE, StreamResult
from components.common.contracts.records import StreamRecord
from components.common.data.pages import data_uri, templates

_MAX_COLOURS = 10  # classes with a colour of their own, the most frequent ones
_OTHER = "#9aa3ae"
_MAX_SHOWN = 100  # streams with a timeline, those with a problem first; summary.json has all


def clock(seconds: float) -> str:
    """Return text such as "1:02:03.4" or "2:03.4"."""
    tenths = round(10 * seconds)
    minutes, tenths = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    rest = f"{tenths // 10:02}.{tenths % 10}"
    return f"{hours}:{minutes:02}:{rest}" if hours else f"{minutes}:{rest}"


def page(
    summary: dict[str, Any], records: Sequence[StreamRecord], results: Sequence[StreamResult], answers: FrameAnswers
) -> str:
    """Return the page, complete in itself.

    Args:
        summary: as summary.json.
        records: of the streams.
        results: likewise, in the same order.
        answers: with the classes.
    """
    shown = sorted(zip(records, results, strict=True), key=lambda each: not each[0].problem)[:_MAX_SHOWN]
    totals = sum((result.counts for result in results), Counter[str]())
    frequent = [name for name, _ in totals.most_common() if name != NONE][:_MAX_COLOURS]
    has_others = len({*totals} - {NONE}) > len(frequent)
    num_labelled = sum(result.num_labelled for result in results)
    colours = {name: answers.colour(name, rank) for rank, name in enumerate(frequent)}
    # Classes that exclude each other share a row.
    row = {name: 0 if answers.shows_one else index for index, name in enumerate(frequent)}
    streams = [
        {
            "record": record,
            "segments": [
                {
                    "start": begin,
                    "length": end - begin,
                    "row": row.get(name, 0 if answers.shows_one else len(frequent)),
                    "colour": colours.get(name, _OTHER),
                    "title": f"{clock(begin)} to {clock(end)}: {name}",
                }
                for name, begin, end in result.timeline.segments()
                if name != NONE
            ],
            "end_s": record.seconds,
            "thumbnails": [
                {"source": data_uri(each.jpeg), "time": clock(each.time_s), "caption": each.caption}
                for each in result.thumbnails.kept
            ],
            "events": result.shown_events,
            "video": result.video,
        }
        for record, result in shown
    ]
    legend = [(colours[name], name, 100 * totals[name] / num_labelled) for name in frequent]
    found = templates(Path(__file__).with_name("templates"), filters={"clock": clock})
    return found.get_template("analysis.html.j2").render(
        summary=summary,
        streams=streams,
        num_hidden=len(records) - len(streams),
        legend=legend,
        other_colour=_OTHER if has_others else "",
        rows=[] if answers.shows_one else [*frequent, *["other classes"] * has_others],
    )
