"""report.html, model_card.md and report.json say the same, whatever there is to say."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.contracts.digests import short
from components.common.contracts.records import ClassLoss, Recommendation
from components.common.contracts.verdict import Thresholds
from components.validate.report import write_report
from components.validate.report_text import (
    calibration_facts,
    limitations,
    number,
    probability,
    provenance_facts,
    selection_facts,
    signed,
)
from components.validate.schema import Report

NAMES = (
    "ten classes",
    "fifty classes",
    "a hundred classes",
    "a thousand classes",
    "one epoch",
    "no disagreement",
    "no GPU",
    "own model",
    "no speed",
)


@dataclass(frozen=True, kw_only=True)
class Written:
    report: Report
    page: str
    card: str
    values: dict[str, Any]  # of report.json


def write(report: Report, output: Path) -> tuple[str, str]:
    output.mkdir(exist_ok=True)
    write_report(report, {}, output)
    page, card = ((output / name).read_text(encoding="utf-8") for name in ("report.html", "model_card.md"))
    return page, card


class Page(HTMLParser):
    """What a page says by heading: rows of tables, pairs of fact lists, items, paragraphs and code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.heading = ""
        self.found: dict[str, list[tuple[str, ...]]] = {}
        self.paragraphs: list[str] = []
        self._cells: list[str] = []
        self._text: list[str] = []
        self._figure = self._wide = 0
        self.narrow_tables = 0
        self.feed(page[page.index("<body>") :])

    def _add(self, *cells: str) -> None:
        self.found.setdefault(self.heading, []).append(cells)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = [] if tag not in ("span", "code", "strong") else self._text
        if tag in ("tr", "dl", "figure"):
            self._cells = []
        self._figure += tag == "figure"
        if tag == "table" and dict(attrs).get("class") != "checks" and not self._wide:
            self.narrow_tables += 1
        if tag == "div":
            self._wide = 1 if dict(attrs).get("class") == "wide" else 0

    def handle_endtag(self, tag: str) -> None:
        text = " ".join("".join(self._text).split())
        if tag in ("h1", "h2", "h3", "h4"):
            self.heading = text
        elif tag in ("td", "th", "dt") or (tag == "dd" and self._figure) or tag == "small":
            self._cells.append(text)
        elif tag == "tr":
            self._add(*self._cells)
        elif tag == "dd":
            self._add(self._cells.pop(), text)
        elif tag == "figure" and self._cells:
            _, label, _, fp32, _, own, path = self._cells
            self._add(label, fp32, own, path)
            self._cells = []
        elif tag == "li":
            self._add(text)
        elif tag == "pre":
            self._add("".join(self._text))
        elif tag == "p":
            self.paragraphs.append(text)
        self._figure -= tag == "figure"

    def handle_data(self, data: str) -> None:
        self._text.append(data)


def plain(markdown: str) -> str:
    """Markdown without its escapes and marks."""
    return html.unescape(re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)[`*]", "", markdown))).strip()


def card_says(card: str) -> dict[str, list[tuple[str, ...]]]:
    heading, found, code = "", {}, []  # type: ignore[var-annotated]
    for line in [*card.splitlines(), "# "]:
        if code and line and not line.startswith("    "):
            found.setdefault(heading, []).append(("\n".join(code),))
            code = []
        if line.startswith("    "):
            code.append(line[4:])
        elif line.startswith("#"):
            heading = plain(line.lstrip("# "))
        elif line.startswith("|") and not re.fullmatch(r"[|:-]+", line):
            cells = [plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(heading, []).append(tuple(cells))
        elif line.startswith("- "):
            text, fact = plain(line[2:]), re.match(r"- ([^:*.]+): (.+)", line)
            is_sentence = fact is None or heading in ("Limitations", "What to do next")
            found.setdefault(heading, []).append((text,) if is_sentence else (plain(fact[1]), plain(fact[2])))
    return found


@pytest.fixture(scope="module", params=NAMES)
def written(
    request: pytest.FixtureRequest, reports: dict[str, Report], tmp_path_factory: pytest.TempPathFactory
) -> Written:
    report, output = reports[request.param], tmp_path_factory.mktemp("forms")
    page, card = write(report, output)
    return Written(report=report, page=page, card=card, values=json.loads((output / "report.json").read_bytes()))


def test_the_card_says_what_the_page_says(written: Written) -> None:
    page, card = written.page, written.card
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    shown, told = Page(page), card_says(card)
    told = {heading.removeprefix("timm/some_net: "): rows for heading, rows in told.items()}
    gallery = "Where INT8 and FP32 disagree"
    if gallery in told:
        assert told[gallery].pop(0) == ("label", "FP32", "INT8", "image")
    if len(written.report.model.classes) == 50:  # the card leaves a large matrix to report.json
        shown.found.pop("What INT8 confuses")
        assert "The matrix of 50 classes is in report.json" in card
    assert list(told) == list(shown.found)
    for heading, rows in shown.found.items():
        assert sorted(told[heading]) == sorted(rows), heading
    if written.report.training is not None:
        (config,) = told["train"]
        assert yaml.safe_load(config[0]) == written.report.provenance.configs["train"]
    text = plain(card)
    for paragraph in shown.paragraphs:
        assert paragraph in text or paragraph.startswith("Images by label (rows) and prediction"), paragraph
    assert shown.narrow_tables == 0, "a table that can't scroll is cut on a phone"


# Shown in other words: the verdict's thresholds and measured values in the explanation of each check.
NOT_SHOWN = re.compile(
    r"verdict\.(passed|precision|thresholds|checks\.\d+\.(name|measured|threshold))|schema_version|created"
    r"|benchmark\.(bundle_digest|rows\.\d+\.(num_iterations|runtime|turns_images_per_s\.\d+))|accuracy\.(bundle_digest|rows\.\d+\.file)"
    r"|model\.(classes|shapes\.(output_name|opt_batch))|model\.engines\.\d+\.precision"
    r"|disagreements\.\d+\.index|confusion\.(matrix|others)|class_changes\.(2\d|[3-9]\d|\d{3})|calibration\.(seconds|cached)"
    r"|class_changes\.\d+\.(p_corrected|significant)"
    r"|mcnemar|drop_lower|calibration\.selection\.(ranking|out_of_time|trials\.\d+\.(excluded|within_budget))|training\.environment|code\.modified"
)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from leaves(entry, f"{path}.{key}" if path else str(key))
    elif value not in (None, "", "n/a"):
        yield path, value


def forms(value: Any) -> set[str]:
    """How a value of report.json may be written for a person."""
    if isinstance(value, str):
        return {" ".join(value.split()), value.upper(), *([short(value)] if value.startswith("sha256:") else [])}
    numbers = {number(value, digits) for digits in range(5)} if isinstance(value, float) else {f"{value:,}"}
    return numbers | {signed(value), f"{value:g}", f"{value / 1e6:,.1f}", f"{value / 1e9:,.0f} GB", f"{value:.2e}"}


def test_page_and_card_show_every_value_of_the_json(written: Written) -> None:
    page, card = written.page, plain(written.card)
    body = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :])).split())
    shown = [(path, value) for path, value in leaves(written.values) if not NOT_SHOWN.search(path)]
    assert len(shown) > 150
    for path, value in shown:
        assert any(form in body for form in forms(value)), f"{path} = {value} is not in report.html"
        assert any(form in card for form in forms(value)), f"{path} = {value} is not in model_card.md"


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("ten classes", '<table class="heat'),
        ("fifty classes", '<table class="heat'),
        ("a hundred classes", "<image "),
        ("a thousand classes", ""),
    ],
)
def test_every_precision_has_a_matrix(name: str, start: str, reports: dict[str, Report], tmp_path: Path) -> None:
    """As a table, or as a picture of many classes; FP32's and FP16's are shown folded."""
    page, _ = write(reports[name], tmp_path)
    for other in ('<table class="heat', "<image "):
        assert page.count(other) == (3 if other == start else 0)
    assert ("data:image/png;base64" in page) == (start == "<image ")
    assert re.findall("<summary>The same of (.+)</summary>", page) == (["FP32", "FP16"] if start else [])
    confusion, rows = reports[name].confusion, reports[name].accuracy
    assert confusion is not None
    assert (confusion.matrix is not None) == bool(start)
    for other, matrix in confusion.others.items():
        row = rows.row(other)
        right = sum(matrix[index][index] for index in range(len(matrix)))
        assert right == round(row.num_images * row.top1_pct / 100)
        assert sum(map(sum, matrix)) == row.num_images
    assert ("A matrix of 1,000 classes could not be read" in page) == (not start)


def test_key_figures_are_the_judged_precision(reports: dict[str, Report], tmp_path: Path) -> None:
    report = reports["ten classes"]
    page, _ = write(report, tmp_path)
    row = report.accuracy.row("int8")
    figures = re.findall(r"<li><strong>([^<]+)</strong> ([^<]+)</li>", page)
    assert figures[0][0] == f"{row.top1_pct:.2f} %"
    assert figures[1][0] == f"{signed(row.delta_top1_points)} points"
    ratio = report.benchmark.speedup("int8", "fp32", 128)
    assert ratio is not None
    assert ratio.low < ratio.median < ratio.high
    assert "batch 128" in figures[2][1]
    assert all(f"{value:.2f}" in " ".join(figures[2]) for value in (ratio.low, ratio.median, ratio.high))
    assert figures[3] == ("26.5 MB", "file size; FP32 108.8 MB")


def test_speed_shows_what_is_known(reports: dict[str, Report], tmp_path: Path) -> None:
    page, card = write(reports["ten classes"], tmp_path)
    main = "| precision | batch | images/s | over FP32 | over FP16 | p50 ms | p99 ms | W | images/s/W |"
    further = main.replace("| batch |", "| batch | streams | copies |")
    assert card.index(main) < card.index(further)
    assert "\nSeveral batches at the same time, and without the copies to and from the GPU:\n" in card
    # Alone, on 2 streams and on 4: in the table of all values, in the main one and in the further one.
    assert card.count("| FP16 | 8 | ") == 6
    sentence = "Latency budget: within 6.73 ms: FP16, batch 64, 23,573 images/s (p99 3.83 ms); INT8 left out"
    assert sentence in page
    assert sentence in card
    assert "the copy of one batch to the GPU, its computation and the copy back" in page
    for text in (page, card):  # elsewhere MB is a file's size
        assert text.count("MB is GPU memory") == 1
        assert text.index("All values") < text.index("MB is GPU memory")
    without = {"power_w": None, "images_per_s_per_w": None}
    for clock, seconds, reason in ((1980, 0.3, "are too short"), (1980, 1.5, "can't be read"), (None, 0.3, "be read")):
        benchmark = reports["ten classes"].benchmark
        rows = []
        for row in benchmark.rows:
            batches = round(seconds * row.num_repeats * row.images_per_s / row.batch_size)
            rows.append(row.model_copy(update=without | {"sm_clock_mhz": clock, "num_iterations": batches}))
        changed = {"benchmark": benchmark.model_copy(update={"rows": tuple(rows)})}
        _, card = write(reports["ten classes"].model_copy(update=changed), tmp_path)
        assert re.search(f"Power is not known: .*{reason}", card)
    page, card = write(reports["no GPU"], tmp_path)  # a report of a CPU, as version 0.1 wrote them
    assert "| precision | batch | images/s | over FP32 | p50 ms | p99 ms |\n" in card
    assert "| precision | batch | p50 ms | p90 ms | p99 ms |\n" in card
    assert "Latency is the time of the call that runs one batch" in page
    for word in ("streams", "copies", "Latency budget", "images/s/W", "NVML", "GPU memory"):
        assert word not in card, word


def test_calibration_samples_and_machines_are_told_in_full(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    facts = dict(calibration_facts(report))
    assert facts["method"] == "percentile, 99.97 % of the values"
    assert (
        facts["samples"]
        == f"257 of the 14,387 images of the train split ({report.data.splits[0].digest[7:19]}), chosen with seed 2"
    )
    assert facts["kept in float"] == "/conv1/Conv, /fc/Gemm"
    assert dict(calibration_facts(reports["own model"]))["time"] == "none: the result was in the cache"
    assert selection_facts(reports["own model"]) == []
    assert dict(selection_facts(report))["time"] == "61.2 s; the time limit ended the search"
    machines = dict(provenance_facts(report))
    gpus = "2 \N{MULTIPLICATION SIGN} NVIDIA H200 (151 GB), driver 580.159.04"
    assert machines["train"] == f"Some CPU, 17 cores; {gpus}; Python 3.12.1, Linux-6.8"
    assert "no GPU" in dict(provenance_facts(reports["no GPU"]))["validate"]


def test_a_recommendation_stands_before_the_tables(reports: dict[str, Report], tmp_path: Path) -> None:
    report = reports["ten classes"]
    advice = Recommendation(precision="fp16", reason="INT8 is accurate enough, but not fast enough: it is <slow>")
    verdict = report.verdict.model_copy(update={"recommendation": advice})
    page, card = write(report.model_copy(update={"verdict": verdict}), tmp_path)
    sentence = f"Recommended: FP16, since {advice.reason}."
    assert sentence in Page(page).paragraphs
    assert sentence in plain(card)
    assert page.index("Recommended: FP16") < page.index("</header>")
    assert "Recommended" not in write(report, tmp_path)[0]


def test_classes_that_are_surely_worse_are_named(reports: dict[str, Report], tmp_path: Path) -> None:
    """In words for each precision, and in the table of the judged one."""
    report = reports["ten classes"]
    loss = ClassLoss(name="a|b_*c*", num_images=40, num_lost=13, num_gained=1, delta_points=-30.0, p_corrected=0.000732)
    other = loss.model_copy(update={"name": "class 4", "p_corrected": 0.0183})
    rows = (
        *report.accuracy.rows[:2],
        report.accuracy.rows[2].model_copy(update={"worse_classes": (loss, other), "largest_loss": loss}),
    )
    changed = report.model_copy(update={"accuracy": report.accuracy.model_copy(update={"rows": rows})})
    page, card = write(changed, tmp_path)
    sentence = (
        "INT8 is significantly worse than FP32 on 2 classes: a|b_*c*, \N{MINUS SIGN}30.00 points (13 lost and 1 gained "
        "of 40 images, p = 7.32e-04); class 4, \N{MINUS SIGN}30.00 points (13 lost and 1 gained of 40 images, "
        "p = 0.0183)."
    )
    assert sentence in Page(page).paragraphs
    assert sentence in plain(card)
    losing = [entry for entry in report.class_changes if entry.delta_points < 0]
    for row, entry in zip(Page(page).found["Change by class"][1:], losing, strict=True):
        assert row[0] == entry.name
        shown = (str(entry.num_lost), str(entry.num_gained), probability(entry.p_corrected))
        assert row[5:] == (*shown, "yes" if entry.significant else "no")


def test_limitations_name_classes_that_lose_more_than_chance(reports: dict[str, Report]) -> None:
    """And where none does, the one that loses most."""
    report = reports["ten classes"]
    change = report.class_changes[0].model_copy(
        update={"name": "a", "num_images": 40, "num_lost": 3, "num_gained": 1, "delta_points": -5.0}
    )
    changes = {
        name: change.model_copy(update={"name": name, "significant": name in "bc"}) for name in ("a", "b", "c", "d")
    }
    for names, told in (("ad", "a"), ("abcd", "bc")):
        entries = tuple(changes[name] for name in names)
        said = [line for line in limitations(report.model_copy(update={"class_changes": entries})) if "loses" in line]
        chance = ", which may be chance" if told == "a" else ""
        lost = f"loses 5.00 points (3 lost and 1 gained of 40 images){chance}."
        assert said == [f"The class {name} {lost}" for name in told]


def test_the_interval_told_is_the_one_that_the_gate_judges(reports: dict[str, Report], tmp_path: Path) -> None:
    report = reports["no disagreement"]
    page, card = write(report, tmp_path)
    bound = number(report.change.drop_upper_points)
    assert f"at most {bound}" in page[: page.index("</header>")]
    assert f"at most {bound}" in plain(card)
    assert [row[3] for row in Page(page).found["Accuracy"] if row[0] == "INT8"] == [bound]


@pytest.mark.parametrize(("confident", "said"), [(True, "INT8 passed"), (False, "INT8 passed, not proved")])
def test_a_pass_without_proof_says_so(reports: dict[str, Report], tmp_path: Path, confident: bool, said: str) -> None:
    report = reports["ten classes"]
    verdict = report.verdict.model_copy(update={"passed": True, "thresholds": Thresholds(confident=confident)})
    page, card = write(report.model_copy(update={"verdict": verdict}), tmp_path)
    assert f"<h1>{said}</h1>" in page
    assert f": {said}\n" in card
