"""A server's counts of its requests beside the validation of the model that it serves, and a page about them."""

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import matplotlib
import numpy as np
from markupsafe import Markup
from pydantic import Field

from components.common.contracts.environment import utc_now
from components.common.contracts.errors import EngineryError, UserError, shortened
from components.common.contracts.manifests import MANIFEST, RepositoryManifest, check_task, file_problem, load
from components.common.contracts.records import FileEntry, Precision, Record
from components.common.data.baseline import (
    MAX_IMAGES,
    MIN_IMAGES,
    STATISTICS,
    Baseline,
    Comparison,
    StatisticHistogram,
    StatisticName,
    baseline_file,
    example_name,
    read_baseline,
)
from components.common.data.pages import data_uri, templates
from components.common.data.web import open_session
from components.validate.charts import SERIES, STYLE, as_svg, new_axes
from enginery.formats import number
from enginery.release.fetch import read_identity
from enginery.serving.sources import find_source

# The number at the end is a time, which a Prometheus adds that hands metrics on.
_SERIES = re.compile(r'enginery_drift_images_total\{(?P<labels>(?:\w+="[^"\n]*",?)+)\} (?P<value>\S+)(?: -?\d+)?')
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MAX_METRICS_BYTES = 16 << 20
_MAX_EXAMPLE_BYTES = 1 << 20
_NUM_EXAMPLES = 3  # of a statistic
_OTHER_TASK = "drift is of a classifier's answers, so name one"


@dataclass(frozen=True, kw_only=True)
class ServedBaseline:
    """The baseline of a served model, and where it is from."""

    name: str
    digest: str  # of the file
    baseline: Baseline
    classes: tuple[str, ...]


class BinShare(Record):
    """Images of one bin."""

    bin: str = Field(description="The class or classes, or the range of values.")
    baseline_pct: float
    served_pct: float


class StatisticDrift(Record):
    """One statistic of the requests beside validation's."""

    statistic: StatisticName
    meaning: str
    drifted: bool = Field(description="Whether a distance is above its threshold.")
    psi: float = Field(description="Population stability index.")
    psi_threshold: float = Field(description="What chance rarely exceeds: see `thresholds`.")
    js: float = Field(description="Jensen-Shannon divergence in bits, 0 to 1.")
    js_threshold: float
    bins: tuple[BinShare, ...]

    @property
    def most_changed(self) -> BinShare:
        """The bin whose share changed most."""
        return max(self.bins, key=lambda each: abs(each.served_pct - each.baseline_pct))


class Drift(Record):
    """The comparison of a server's requests with a model's validation."""

    model: str
    precision: Precision
    baseline_digest: str
    num_validation_images: int
    num_images: int = Field(description="That the server counted.")
    date: str = Field(description="In UTC: YYYY-MM-DDThh:mm:ssZ.")
    statistics: tuple[StatisticDrift, ...] = Field(description="Those that drifted first.")

    @property
    def drifted(self) -> tuple[StatisticName, ...]:
        """Names of the statistics that drifted."""
        return tuple(each.statistic for each in self.statistics if each.drifted)


def find_baseline(text: str, precision: Precision | None) -> ServedBaseline:
    """The baseline that belongs to what is served.

    Args:
        text: a registered version, or the folder of a release or of a model repository.
        precision: None for what the verdict says to ship, or what the repository holds.

    Raises:
        UserError: it is nothing that is served, or has no baseline.
        EngineryError: files are gone or were changed.
    """
    folder = Path(text).expanduser()
    if (folder / MANIFEST).is_file() and read_identity(folder).kind == "repository":
        repository = load(folder, RepositoryManifest).manifest
        if precision not in (None, repository.precision):
            message = f"{folder} holds {repository.precision.upper()} alone; drop --precision"
            raise UserError(message, code="no-such-precision", setting="--precision")
        check_task(f"the repository {folder}", repository.task, "classification", _OTHER_TASK)
        return _opened(folder, repository.files, repository.name, repository.precision, repository.classes)
    with find_source(text, precision) as source:
        label = f"{source.name} version {source.version}" if source.version else source.name
        check_task(f"the model {label}", source.bundle.manifest.task, "classification", _OTHER_TASK)
        path, files = (source.report.path, source.report.manifest.files) if source.report else (folder, {})
        return _opened(path, files, label, source.precision, source.bundle.manifest.classes)


def _opened(
    folder: Path, files: Mapping[str, FileEntry], name: str, precision: Precision, classes: tuple[str, ...]
) -> ServedBaseline:
    file = baseline_file(precision)
    if file not in files:
        raise UserError(
            f"{name} has no baseline of {precision.upper()}: it was not validated, or by an enginery before 0.2. "
            "Validate and promote it again, and serve that version",
            code="no-baseline",
        )
    entry = files[file]
    if problem := file_problem(folder, file, entry.size_bytes, entry.digest):
        raise EngineryError(f"{problem}. Put the original back", code="damaged-artifact")
    return ServedBaseline(name=name, digest=entry.digest, baseline=read_baseline(folder / file), classes=classes)


# --- what the server counted


def read_metrics(place: str, timeout_s: float) -> str:
    """The text of a server's metrics.

    Args:
        place: where they are: a URL, or a file.
        timeout_s: of a URL.

    Raises:
        UserError: there is no such file.
        EngineryError: the server does not answer, or says far more than metrics.
    """
    try:
        if is_url := "://" in place:
            data = asyncio.run(_download(place, timeout_s))
        else:
            with Path(place).open("rb") as file:
                data = file.read(_MAX_METRICS_BYTES + 1)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = shortened(getattr(error, "strerror", None) or str(error) or "it took longer than --timeout")
        if is_url:
            raise EngineryError(
                f"{place} does not answer with metrics ({reason}); start the server, or name the address of its "
                "metrics, such as http://localhost:8002/metrics",
                code="server-unreachable",
                setting="--metrics",
            ) from None
        raise UserError(
            f"can't read {place}: {reason}; name a file with a server's metrics, or their address, such as "
            "http://localhost:8002/metrics",
            code="no-file",
            setting="--metrics",
        ) from None
    if len(data) > _MAX_METRICS_BYTES:
        message = f"{place} holds more than {_MAX_METRICS_BYTES:,} bytes, so it is no server's metrics; name another"
        raise EngineryError(message, code="invalid-metrics", setting="--metrics")
    return data.decode("utf-8", "replace")


async def _download(url: str, timeout_s: float) -> bytes:
    session = await open_session(named=url, loop=asyncio.get_running_loop())
    async with session, session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
        answer.raise_for_status()
        data = bytearray()
        async for chunk in answer.content.iter_chunked(1 << 16):
            data += chunk
            if len(data) > _MAX_METRICS_BYTES:
                break
        return bytes(data)


_Counts = dict[StatisticName, np.ndarray]


def counts_of(metrics: str, place: str, served: ServedBaseline) -> _Counts:
    """Images by bin of each statistic, [bins] int64, as a server counted them by this baseline.

    Args:
        metrics: the text.
        place: where it is from, for errors.
        served: the baseline.

    Raises:
        UserError: the server serves something else, or counts nothing.
        EngineryError: the numbers are none of ours.
    """
    counts, others, num_found = served.baseline.no_counts(), set(), 0
    for line in metrics.splitlines():
        found = _SERIES.fullmatch(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found["labels"]))
        if labels.get("baseline") != served.digest:
            names = ("model", "version", "precision", "baseline")
            others.add(" ".join(filter(None, (labels.get(name, "")[:80] for name in names))))
            continue
        try:
            index, value = int(labels["bin"]), float(found["value"])
            if index < 0 or not 0 <= value <= MAX_IMAGES:
                raise ValueError
            counts[labels["statistic"]][index] += round(value)
        except (KeyError, IndexError, ValueError):
            message = f"{place} holds numbers that no server of enginery writes: {line[:200]!r}; read the metrics again"
            raise EngineryError(message, code="invalid-metrics", setting="--metrics") from None
        num_found += 1
    if num_found:
        return counts
    if others:
        raise UserError(
            f"the server at {place} serves something else than {served.name} in {served.baseline.precision.upper()} "
            f"(baseline {served.digest}): it counts by {shortened('; '.join(sorted(others)))}. Name what it "
            "serves, or its --precision",
            code="other-baseline",
        )
    raise UserError(
        f"{place} counts no images by a baseline. Name a model server's metrics, such as "
        "http://localhost:8002/metrics; if it serves a version without a baseline, serve a validated one",
        code="no-drift-metrics",
        setting="--metrics",
    )


def compare(served: ServedBaseline, now: Sequence[_Counts], before: Sequence[_Counts] = ()) -> Drift:
    """Compare what servers counted with the baseline.

    Args:
        served: the baseline.
        now: counts of each server.
        before: earlier ones of the same servers, which are left out; empty for all since they started.

    Raises:
        UserError: there are too few images, or earlier counts are larger.
    """
    baseline = served.baseline
    counts = {
        name: sum((each[name] for each in now), none) - sum((each[name] for each in before), none)
        for name, none in baseline.no_counts().items()
    }
    if any((each < 0).any() for each in counts.values()):
        raise UserError(
            "the servers counted less than before: one was started again, or --since is not the earlier one. "
            "Compare without --since",
            code="counts-fell",
            setting="--since",
        )
    # Read while they are handed on, statistics differ by a few images: fewer mean higher thresholds.
    num_images = min(int(each.sum()) for each in counts.values())
    if num_images < MIN_IMAGES:
        raise UserError(
            f"not enough evidence: {num_images:,} images were counted, and {MIN_IMAGES:,} are needed. Wait for "
            f"{MIN_IMAGES - num_images:,} more",
            code="too-few-images",
        )
    statistics = [
        StatisticDrift(
            **dataclasses.asdict(found),
            meaning=STATISTICS[own.name].meaning,
            drifted=found.drifted,
            bins=_bins(own, counts[own.name], served.classes),
        )
        for own, found in zip(baseline.statistics, Comparison(baseline, num_images).compare(counts), strict=True)
    ]
    return Drift(
        model=served.name,
        precision=baseline.precision,
        baseline_digest=served.digest,
        num_validation_images=baseline.num_images,
        num_images=num_images,
        date=utc_now(),
        statistics=tuple(sorted(statistics, key=lambda each: not each.drifted)),
    )


def _bins(histogram: StatisticHistogram, counts: np.ndarray, classes: tuple[str, ...]) -> tuple[BinShare, ...]:
    baseline_pct, served_pct = (100 * each / each.sum() for each in (np.array(histogram.counts), counts))
    return tuple(
        BinShare(bin=histogram.label(index, classes), baseline_pct=own, served_pct=served)
        for index, (own, served) in enumerate(zip(baseline_pct.tolist(), served_pct.tolist(), strict=True))
    )


# --- the page


def page(drift: Drift, examples: Path | None = None) -> str:
    """One HTML file, complete in itself.

    Args:
        drift: what it says.
        examples: the folder in which the server keeps images; None for none.
    """
    shown = [(each, Markup(_chart(each)), _examples(each, examples)) for each in drift.statistics]  # noqa: S704  # drawn here, text escaped
    found = templates(Path(__file__).with_name("templates"), filters={"number": number})
    return found.get_template("drift.html.j2").render(drift=drift, statistics=shown, has_examples=examples is not None)


def _chart(statistic: StatisticDrift) -> str:
    """Shares of validation and of the requests by bin, as SVG."""
    bins = statistic.bins
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"drift {statistic.statistic}"}):
        figure, axes = new_axes("share of the images in %", "")
        figure.set_figheight(1 + 0.28 * len(bins))
        places = np.arange(len(bins))
        validation, requests = zip(*((each.baseline_pct, each.served_pct) for each in bins), strict=True)
        axes.barh(places - 0.2, validation, 0.4, color=SERIES["fp32"], label="validation")
        axes.barh(places + 0.2, requests, 0.4, color=SERIES["int8"], label="requests")
        axes.set_yticks(places, [shortened(each.bin, 40) for each in bins])
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def _examples(statistic: StatisticDrift, folder: Path | None) -> list[tuple[str, str]]:
    """Bin and data URI of an image of each of the bins that grew most; of what drifted alone."""
    found: list[tuple[str, str]] = []
    if folder is None or not statistic.drifted:
        return found
    grown = sorted(enumerate(statistic.bins), key=lambda each: each[1].baseline_pct - each[1].served_pct)
    for index, each in grown[:_NUM_EXAMPLES]:
        file = folder / example_name(statistic.statistic, index)
        if each.served_pct > each.baseline_pct and file.is_file() and file.stat().st_size <= _MAX_EXAMPLE_BYTES:
            data = file.read_bytes()
            if data.startswith(b"\xff\xd8"):
                found.append((each.bin, data_uri(data)))
    return found
