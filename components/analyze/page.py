"""The analysis for people: one HTML file with a timeline and thumbnails by stream."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.analyze.results import StreamResult
from components.common.contracts.records import StreamRecord
from components.common.data.pages import data_uri, templates

_MAX_COLOURS = 10  # classes with a colour of their own, the most frequent ones
_MAX_SHOWN = 100  # streams with a timeline; summary.json has all


def clock(seconds: float) -> str:
    """Return text such as "1:02:03.4" or "2:03.4"."""
    tenths = round(10 * seconds)
    minutes, tenths = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    rest = f"{tenths // 10:02}.{tenths % 10}"
    return f"{hours}:{minutes:02}:{rest}" if hours else f"{minutes}:{rest}"


def page(
    summary: dict[str, Any], records: Sequence[StreamRecord], results: Sequence[StreamResult], classes: Sequence[str]
) -> str:
    """Return the page, complete in itself.

    Args:
        summary: as summary.json.
        records: of the streams.
        results: likewise, in the same order.
        classes: names, by number.
    """
    totals = sum((result.counts for result in results), Counter[int]())
    frequent = sorted((label for label in totals if label >= 0), key=lambda label: -totals[label])[:_MAX_COLOURS]
    colour = {label: f"c{index}" for index, label in enumerate(frequent)}

    def name(label: int) -> str:
        return classes[label] if label >= 0 else "no class"

    streams = [
        {
            "record": record,
            "segments": [
                {
                    "start": begin,
                    "length": end - begin,
                    "style": colour.get(label, "other" if label >= 0 else "none"),
                    "title": f"{clock(begin)} to {clock(end)}: {name(label)}",
                }
                for label, begin, end in result.timeline.segments()
                if label is not None
            ],
            "end_s": record.seconds,
            "thumbnails": [
                {
                    "source": data_uri(each.jpeg),
                    "time": clock(each.time_s),
                    "label": name(each.label),
                    "pct": 100 * each.probability,
                }
                for each in result.thumbnails.kept
            ],
            "events": result.shown_events,
        }
        for record, result in list(zip(records, results, strict=True))[:_MAX_SHOWN]
    ]
    found = templates(Path(__file__).with_name("templates"), filters={"clock": clock})
    return found.get_template("analysis.html.j2").render(
        summary=summary,
        streams=streams,
        num_hidden=len(records) - len(streams),
        legend=[(colour[label], classes[label], 100 * totals[label] / totals.total()) for label in frequent],
        has_others=any(label >= 0 and label not in colour for label in totals),
    )
