"""report.html, model_card.md and report.json say the same, whatever there is to say; and what they advise."""

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
from components.common.contracts.records import (
    AccuracyRow,
    ClassLoss,
    GateCheck,
    LayerCost,
    PairedComparison,
    Recommendation,
)
from components.common.contracts.statistics import drop_upper
from components.common.contracts.verdict import CHECKS, Thresholds
from components.validate.report import write_report
from components.validate.report_text import (
    calibration_facts,
    limitations,
    megabytes,
    next_steps,
    number,
    probability,
    provenance_facts,
    ranking_sentences,
    selection_facts,
    selection_sentences,
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
    """Contents of a page by heading: rows of tables, pairs of fact lists, items, paragraphs and code."""

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
    r"|model\.(classes|shapes\.(output_name|opt_batch))|model\.engines\.\d+\.(precision|weights)"
    r"|placement\.trials\.\d+\.(precision|excluded|turns_images_per_s|within_budget|chosen)"
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


def test_small_files_have_a_size() -> None:
    assert [megabytes(value) for value in (49_999, 50_000, 94_000_000)] == ["0.0500", "0.1", "94.0"]


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


# What to do next, by what was seen

LOSS = ClassLoss(name="cat", num_images=40, num_lost=30, num_gained=1, delta_points=-72.5, p_corrected=1e-5)


def judged(
    report: Report,
    check: str,
    verdict: str = "fail",
    *,
    lost: int = 40,
    gained: int = 2,
    export: dict[str, Any] | None = None,
    chosen: bool = True,
    advice: Recommendation | None = None,
    fp16: bool = False,
    measured: float | None = 1.0,
    speeds: bool = True,
    **own: Any,
) -> list[str]:
    """The steps after one check of INT8, of 1,000 images, that does not pass."""
    fp32, half, int8 = report.accuracy.rows
    other = half if fp16 else AccuracyRow(precision="fp16", runtime="n/a", note="needs TensorRT")
    change = {"comparison": PairedComparison.of(1000, lost, gained), "worse_classes": (), "largest_loss": None, **own}
    rows = (fp32, other, int8.model_copy(update=change))
    entry = GateCheck(name=check, measured=measured, threshold=0.5, verdict=verdict, explanation="")  # type: ignore[arg-type]
    found = {"checks": (entry,), "recommendation": advice, "thresholds": Thresholds(min_top1_pct=99.0)}
    selection = report.calibration.selection
    assert selection is not None
    selection = selection.model_copy(update={"out_of_time": False})
    accuracy = report.accuracy.model_copy(update={"rows": rows})
    benchmark = report.benchmark if speeds else report.benchmark.model_copy(update={"rows": ()})
    verdict = report.verdict.model_copy(update=found)
    changed_report = report.model_copy(update={"accuracy": accuracy, "benchmark": benchmark, "verdict": verdict})
    calibration = {"selection": selection, **({} if chosen else {"method": "entropy"})}
    return next_steps(exported_with(changed(changed_report, **calibration), **(export or {})))


def changed(report: Report, **calibration: Any) -> Report:
    return report.model_copy(update={"calibration": report.calibration.model_copy(update=calibration)})


def exported_with(report: Report, **config: Any) -> Report:
    configs = {**report.provenance.configs, "export": config}
    return report.model_copy(update={"provenance": report.provenance.model_copy(update={"configs": configs})})


FEW = {"verdict": "not enough evidence", "lost": 4, "gained": 3}  # 0.1 points, which are allowed
FP16 = Recommendation(precision="fp16", reason="INT8 is slow")
FP32 = Recommendation(precision="fp32", reason="INT8 is slow")
REMEDIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("top1_drop_points", FEW, "preprocess.val_fraction", "gate.confident=false"),
    ("relative_top1_pct", FEW, "preprocess.val_fraction", "gate.confident=false"),
    ("top1_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", "export.num_selection_images"),
    ("top1_drop_points", {}, "export.num_selection_images", ""),
    ("top1_drop_points", {"fp16": True}, "export.num_selection_images", "gate.precision=fp16"),
    ("top1_drop_points", {"export": {"fallback": False}}, "export.fallback=true", ""),
    ("top1_drop_points", {"export": {"calibration_method": "max"}}, "export.calibration_method=auto", ""),
    ("top1_drop_points", {"chosen": False}, "another one", ""),
    ("top1_drop_points", {"top1_pct": None, "note": "sums saturate on AVX2"}, "7-bit", ""),
    ("top1_drop_points", {"top1_pct": None, "note": "it needs a GPU"}, "a machine that runs INT8", ""),
    ("top1_drop_points", {"comparison": None}, "Validate again", ""),
    ("class_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", ""),
    ("class_drop_points", {"verdict": "not enough evidence", "largest_loss": LOSS}, "more images of cat", ""),
    ("above_chance", {}, "Train again", ""),
    ("top1_pct", {}, "Train for longer", ""),
    ("validation_images", {"verdict": "not enough evidence"}, "at least 100 images", ""),
    ("speedup", {"advice": FP16}, "gate.precision=fp16", ""),
    ("speedup_fp16", {"advice": FP32}, "Ship FP32", ""),
    ("speedup", {"verdict": "not enough evidence"}, "validate.benchmark_seconds", ""),
    ("p99_ms", {}, "validate.latency_budget", ""),
    ("p99_ms", {"verdict": "not enough evidence"}, "idle machine", ""),
    ("p99_ms", {"verdict": "not enough evidence", "measured": None}, "validate.benchmark_batch_sizes", ""),
    ("speedup_fp16", {"verdict": "not enough evidence", "speeds": False}, "gate.min_speedup_fp16=0", ""),
    ("size_mb", {}, "--architecture", ""),
]


@pytest.mark.parametrize(("check", "seen", "first", "also"), REMEDIES)
def test_each_cause_has_its_remedy(
    check: str, seen: dict[str, Any], first: str, also: str, reports: dict[str, Report]
) -> None:
    steps = judged(reports["ten classes"], check, **seen)
    assert first in steps[0]
    assert also in " ".join(steps[1:])
    assert len(steps) == 1 + bool(also)


def test_every_check_of_the_gate_has_a_remedy(reports: dict[str, Report]) -> None:
    assert {row[0] for row in REMEDIES} == set(CHECKS)
    passed = reports["ten classes"].verdict.model_copy(update={"passed": True, "checks": ()})
    assert next_steps(reports["ten classes"].model_copy(update={"verdict": passed})) == []


def test_the_number_of_images_decides(reports: dict[str, Report]) -> None:
    """As many times the images with as many times the lost and gained ones are enough, and half of them are not."""
    (step, _) = judged(reports["ten classes"], "top1_drop_points", **FEW)
    needed = int(step.split("about ")[1].split(" ")[0].replace(",", ""))
    times = needed / 1000
    assert drop_upper(needed, 4 * times, 3 * times) <= 0.5 < drop_upper(needed / 2, 2 * times, 1.5 * times)


# How INT8 was chosen


def calibration_part(report: Report, output: Path) -> tuple[str, str]:
    """The part on calibration, of page and card."""
    page, card = write(report, output)
    return (
        page[page.index("<h2>Calibration") : page.index("<h2>Training")],
        card[card.index("## Calibration") : card.index("## Training")],
    )


def test_the_chosen_trial_is_marked_once(reports: dict[str, Report], tmp_path: Path) -> None:
    page, card = calibration_part(reports["ten classes"], tmp_path)
    assert page.count("(chosen)") == card.count("(chosen)") == 1
    (row,) = re.findall(r'<tr class="chosen">(.*?)</tr>', page)
    cells = ["percentile (chosen)", "8-bit weights, signed activations", "2", "2,053", "84.42"]
    assert re.findall(r"<td[^>]*>([^<]*)", row)[:5] == cells
    assert f"| {' | '.join(cells)} |" in card
    assert page.count("<svg") == 2
    assert "<dt>kept in float</dt><dd>/conv1/Conv, /fc/Gemm</dd>" in page
    assert "- kept in float: /conv1/Conv, /fc/Gemm" in card


def test_the_choice_is_told_in_words(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    compared, chosen, _ = selection_sentences(report)
    assert compared.startswith("2 calibrations measured with every layer in INT8, then 1 set of layers")
    for part in ("percentile with 2 layers in float", "98.28 %", "+0.38 points", "within the budget"):
        assert part in chosen
    outside = selection_sentences(changed(report, method="max", excluded=()))[1]
    assert "\u22121.62 points" in outside
    assert "outside the budget" in outside
    assert len(selection_sentences(changed(report, method="entropy"))) == 2  # as no such trial was measured


def test_of_many_layers_the_costliest_are_shown(reports: dict[str, Report], tmp_path: Path) -> None:
    names = [f"/layer{index}/Conv" for index in range(1, 43)]
    ranking = tuple(LayerCost(name=name, operator="Conv", cost_nats=0.1 / len(name)) for name in names)
    selection = reports["ten classes"].calibration.selection
    assert selection is not None
    excluded = (names[0], names[30], names[40])
    entry = selection.model_copy(update={"ranking": ranking})
    page, card = calibration_part(changed(reports["ten classes"], selection=entry, excluded=excluded), tmp_path)
    for text in (page, card):
        assert "The 20 costliest of 42 layers that were measured alone in INT8" in html.unescape(text)
        assert "2 layers kept in float cost less than those shown." in text
        assert names[40] in text
    assert ">layer20 Conv</text>" in page
    assert ">layer21 Conv</text>" not in page


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_selection_images": 0, "fallback": True}, ": export.num_selection_images is 0."),
        (
            {"num_selection_images": 2000, "fallback": False, "calibration_method": "mse"},
            ": the method was given (export.calibration_method), and export.fallback is off.",
        ),
        (
            {"num_selection_images": 2000, "fallback": False, "calibration_method": "auto"},
            ": 14,387 training images are too few to calibrate with some and compare on others.",
        ),
        ({}, "."),
    ],
)
def test_where_nothing_was_compared_it_says_why(
    config: dict[str, Any], why: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    page, card = calibration_part(exported_with(reports["own model"], **config), tmp_path)
    assert f"<p>No calibrations were compared{why}</p>" in page
    assert f"No calibrations were compared{why}" in card.replace("\\", "")
    for text in (page, card):
        assert not re.search("<svg|<figure|Candidates|Costliest|chosen\\)", text)


def test_without_a_ranking_there_is_no_chart_of_it(reports: dict[str, Report], tmp_path: Path) -> None:
    selection = reports["ten classes"].calibration.selection
    assert selection is not None
    entry = selection.model_copy(update={"ranking": (), "num_ranking_images": 0})
    unranked = changed(reports["ten classes"], selection=entry)
    page, _ = calibration_part(unranked, tmp_path)
    assert "<p>Layers were not ranked: the budget holds with all of them in INT8.</p>" in page
    assert page.count("<svg") == 1
    off = ranking_sentences(exported_with(unranked, num_ranking_images=0), 20)
    assert off == ["Layers were not ranked: export.num_ranking_images is 0."]


@pytest.mark.parametrize(
    ("num_built", "said"), [(0, "There are no TensorRT"), (1, "Some TensorRT engines are missing")]
)
def test_all_or_some_engines_are_missing(reports: dict[str, Report], tmp_path: Path, num_built: int, said: str) -> None:
    report = reports["ten classes"]
    missing = {"engines": report.model.engines[:num_built], "layers": (), "engines_missing": "no memory left"}
    report = report.model_copy(update={"model": report.model.model_copy(update=missing)})
    assert any(point.startswith(said) and point.endswith(": no memory left.") for point in limitations(report))
    for text in write(report, tmp_path):
        assert said in text
        assert text.count("no memory left") >= 2
