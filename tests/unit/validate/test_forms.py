"""report.html, model_card.md and report.json say the same, whatever there is to say; and what they advise."""

import difflib
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
from components.common.contracts.errors import shown
from components.common.contracts.records import (
    AccuracyRow,
    ClassLoss,
    GateCheck,
    LayerCost,
    NearDuplicates,
    PairedComparison,
    Recommendation,
    Speedup,
)
from components.common.contracts.statistics import drop_upper
from components.common.contracts.verdict import CHECKS, Thresholds
from components.validate.report import write_report
from components.validate.report_text import (
    megabytes,
    next_steps,
    number,
    placement_sentences,
    selection_facts,
    signed,
)
from components.validate.schema import Report
from tests.unit.measurements import updated

from .conftest import REPORTS

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True, kw_only=True)
class Written:
    report: Report
    page: str
    card: str
    values: dict[str, Any]  # of report.json


def write(report: Report, output: Path, *, drawn: bool = False) -> tuple[str, str]:
    """Page and card; unless `drawn`, charts are made and not drawn, which takes longer than all else."""
    output.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr("components.validate.charts.as_svg", lambda _: "<svg></svg>")
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
        self._text = [] if tag not in ("span", "code", "strong", "mark") else self._text
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
    heading, found, code = "", {}, []
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


@pytest.fixture(scope="module", params=REPORTS)
def written(request, reports: dict[str, Report], tmp_path_factory: pytest.TempPathFactory) -> Written:
    report, output = reports[request.param], tmp_path_factory.mktemp("forms")
    page, card = write(report, output, drawn=request.param == "ten classes")
    return Written(report=report, page=page, card=card, values=json.loads((output / "report.json").read_bytes()))


def check_same(report: Report, page: str, card: str) -> None:
    """Check that page and card say the same."""
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    in_page, in_card = Page(page), card_says(card)
    in_card = {heading.removeprefix("timm/some_net: "): rows for heading, rows in in_card.items()}
    gallery = "Where INT8 and FP32 disagree"
    if gallery in in_card and report.accuracy.unit == "images":
        assert in_card[gallery].pop(0) == ("label", "FP32", "INT8", "image")
    if len(report.model.classes) == 50:  # the card leaves a large matrix to report.json
        in_page.found.pop("What INT8 confuses")
        assert "The matrix of 50 classes is in report.json" in card
    assert list(in_card) == list(in_page.found)
    for heading, rows in in_page.found.items():
        assert sorted(in_card[heading]) == sorted(rows), heading
    if report.training is not None:
        (config,) = in_card["train"]
        assert yaml.safe_load(config[0]) == report.provenance.configs["train"]
    text = plain(card)
    for paragraph in in_page.paragraphs:
        assert paragraph in text or paragraph.startswith("Images by label (rows) and prediction"), paragraph
    assert in_page.narrow_tables == 0, "a table that can't scroll is cut on a phone"


def test_the_card_says_what_the_page_says(written: Written) -> None:
    check_same(written.report, written.page, written.card)


# Shown in other words: the verdict's thresholds and measured values in the explanation of each check.
NOT_SHOWN = re.compile(
    r"verdict\.(passed|precision|thresholds|checks\.\d+\.(name|measured|threshold))|schema_version|created"
    r"|benchmark\.(bundle_digest|rows\.\d+\.(num_iterations|runtime|turns_images_per_s\.\d+))|accuracy\.(bundle_digest|rows\.\d+\.file)"
    r"|model\.(classes|shapes\.(output_name|opt_batch))|model\.engines\.\d+\.(precision|weights)"
    r"|placement\.trials\.\d+\.(precision|excluded|turns_images_per_s|within_budget|chosen)"
    r"|disagreements\.\d+\.index|confusion\.(matrix|others)|class_changes\.(2\d|[3-9]\d|\d{3})|calibration\.(seconds|cached)"
    r"|class_changes\.\d+\.(p_corrected|significant)|score_low_pct|std_points"
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
    """The ways to write a value of report.json for a person."""
    if isinstance(value, str):
        return {" ".join(shown(value).split()), value.upper(), *([short(value)] if value.startswith("sha256:") else [])}
    numbers = {number(value, digits) for digits in range(5)} if isinstance(value, float) else {f"{value:,}"}
    return numbers | {signed(value), f"{value:g}", f"{value / 1e6:,.1f}", f"{value / 1e9:,.0f} GB", f"{value:.2e}"}


def test_page_and_card_show_every_value_of_the_json(written: Written) -> None:
    page, card = written.page, plain(written.card)
    body = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :])).split())
    wanted = [(path, value) for path, value in leaves(written.values) if not NOT_SHOWN.search(path)]
    assert len(wanted) > 150
    for path, value in wanted:
        assert any(form in body for form in forms(value)), f"{path} = {value} is not in report.html"
        assert any(form in card for form in forms(value)), f"{path} = {value} is not in model_card.md"


def test_sentences_can_do_nothing_to_the_page_or_its_reader(reports: dict[str, Report], tmp_path: Path) -> None:
    page, card = write(reports["translation"], tmp_path)
    for text in (page, card):
        assert "<script" not in text
        assert "\u202e" not in text
        assert "\x1b" not in text
    said = re.sub(r"<[^>]+>", "", page[page.index("<body>") :]).lower()
    assert set(re.findall(r".{4}\bimages\b", said)) == {"few images"}  # the verdict's note
    assert not re.search(r"(?<!\\)\]\(javascript", card)
    assert "<mark> &lt;b&gt;too&lt;/b&gt;</mark>" in page
    assert re.search(r"<mark>hello world</mark></td><td[^>]*></td></tr>", page)  # an empty translation


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
    page, _ = write(reports[name], tmp_path, drawn=start == "<image ")
    for other in ('<table class="heat', "<image "):
        assert page.count(other) == (3 if other == start else 0)
    assert ("data:image/png;base64" in page) == (start == "<image ")
    assert re.findall("<summary>The same of (.+)</summary>", page) == (["FP32", "FP16"] if start else [])
    confusion, rows = reports[name].confusion, reports[name].accuracy
    assert (confusion.matrix is not None) == bool(start)
    for other, matrix in confusion.others.items():
        row = rows.row(other)
        right = sum(matrix[index][index] for index in range(len(matrix)))
        assert right == round(row.num_images * row.score_pct / 100)
        assert sum(map(sum, matrix)) == row.num_images
    assert ("A matrix of 1,000 classes could not be read" in page) == (not start)


def test_small_files_have_a_size() -> None:
    assert [megabytes(value) for value in (49_999, 50_000, 94_000_000)] == ["0.0500", "0.1", "94.0"]


# What to do next, by what was seen

LOSS = ClassLoss(name="cat", num_images=40, num_regressed=30, num_improved=1, delta_points=-72.5, p_corrected=1e-5)


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
    entry = GateCheck(name=check, measured=measured, threshold=0.5, verdict=verdict, explanation="")
    found = {"checks": (entry,), "recommendation": advice, "thresholds": Thresholds(min_score_pct=99.0)}
    calibration = {} if chosen else {"method": "entropy"}
    calibration["selection"] = report.calibration.selection.model_copy(update={"out_of_time": False})
    report = updated(report, "accuracy", rows=rows)
    report = report if speeds else updated(report, "benchmark", rows=())
    report = updated(updated(report, "verdict", **found), "calibration", **calibration)
    return next_steps(exported_with(report, **(export or {})))


def exported_with(report: Report, **config: Any) -> Report:
    return updated(report, "provenance", configs={**report.provenance.configs, "export": config})


FEW = {"verdict": "not enough evidence", "lost": 4, "gained": 3}  # 0.1 points, which are allowed
FP16 = Recommendation(precision="fp16", reason="INT8 is slow")
FP32 = Recommendation(precision="fp32", reason="INT8 is slow")
REMEDIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("drop_points", FEW, "preprocess.val_fraction", "gate.max_drop_points), or take"),
    ("relative_score_pct", FEW, "preprocess.val_fraction", "gate.min_relative_score_pct), or take"),
    ("drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", "export.num_selection_images"),
    ("drop_points", {}, "export.num_selection_images", ""),
    ("drop_points", {"fp16": True}, "export.num_selection_images", "gate.precision=fp16"),
    ("drop_points", {"export": {"num_selection_images": 10_000}}, "export.search_seconds", ""),
    ("drop_points", {"export": {"fallback": False}}, "export.fallback=true", ""),
    ("drop_points", {"export": {"calibration_method": "max"}}, "export.calibration_method=auto", ""),
    ("drop_points", {"chosen": False}, "another one", ""),
    ("drop_points", {"score_pct": None, "note": "sums saturate on AVX2"}, "7-bit", ""),
    ("drop_points", {"score_pct": None, "note": "it needs a GPU"}, "a machine that runs INT8", ""),
    ("drop_points", {"comparison": None}, "Validate again", ""),
    ("class_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", ""),
    ("class_drop_points", {"verdict": "not enough evidence", "largest_loss": LOSS}, "more images of cat", ""),
    ("corrupted_drop_points", {}, "training images", ""),
    ("corrupted_drop_points", {"verdict": "not enough evidence", "measured": 0.4}, "more images", ""),
    ("corrupted_drop_points", {"measured": None}, "validate.corruptions=true", ""),
    ("above_chance", {}, "Train again", ""),
    ("score_pct", {}, "Train for longer", ""),
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


def test_a_proof_that_two_checks_miss_is_one_remedy(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    fp32, fp16, int8 = report.accuracy.rows
    rows = (fp32, fp16, int8.model_copy(update={"comparison": PairedComparison.of(1000, 4, 3)}))
    checks = [
        GateCheck(name=name, measured=1.0, threshold=0.5, verdict="not enough evidence", explanation="")
        for name in ("drop_points", "relative_score_pct")
    ]
    steps = next_steps(updated(updated(report, "accuracy", rows=rows), "verdict", checks=tuple(checks)))
    assert len(steps) == 2
    assert "(gate.max_drop_points, gate.min_relative_score_pct)" in steps[1]


def test_after_an_fp32_score_of_nothing_calibration_is_no_remedy(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    rows = tuple(row.model_copy(update={"score_pct": 0.0}) for row in report.accuracy.rows)
    unlearned = updated(report, "accuracy", rows=rows)
    entry = GateCheck(
        name="relative_score_pct", measured=None, threshold=99.0, verdict="not enough evidence", explanation=""
    )
    for asks, number_of in ((True, 0), (False, 1)):
        thresholds = Thresholds(require_above_chance=asks)
        steps = next_steps(updated(unlearned, "verdict", checks=(entry,), thresholds=thresholds))
        assert [step.startswith("Train again") for step in steps] == [True] * number_of


def test_every_check_of_the_gate_has_a_remedy(reports: dict[str, Report]) -> None:
    assert {row[0] for row in REMEDIES} == set(CHECKS)
    assert next_steps(updated(reports["ten classes"], "verdict", passed=True, checks=())) == []


def test_a_mixture_that_was_faster_and_not_chosen_is_not_called_slower(reports: dict[str, Report]) -> None:
    report = next(iter(reports.values()))
    assert report.placement is not None
    trials = tuple(trial.model_copy(update={"chosen": trial.name == "INT8"}) for trial in report.placement.trials)
    placement = report.placement.model_copy(update={"trials": trials})
    said = " ".join(placement_sentences(report.model_copy(update={"placement": placement})))
    assert "holds the budget and is clearly faster" in said


def test_the_number_of_images_decides(reports: dict[str, Report]) -> None:
    """As many times the images with as many times the lost and gained ones are enough, and half of them are not."""
    (step, _) = judged(reports["ten classes"], "drop_points", **FEW)
    needed = int(step.split("about ")[1].split(" ")[0].replace(",", ""))
    times = needed / 1000
    assert drop_upper(needed, 4 * times, 3 * times) <= 0.5 < drop_upper(needed / 2, 2 * times, 1.5 * times)


# What differs between reports, in golden files


@pytest.mark.parametrize(
    ("clock_mhz", "seconds", "reason"),
    [(1980, 0.3, "are too short"), (1980, 1.5, "can't be read"), (None, 0.3, "be read")],
)
def test_unknown_power(
    reports: dict[str, Report], tmp_path: Path, clock_mhz: int | None, seconds: float, reason: str
) -> None:
    gone = {"power_w": None, "images_per_s_per_w": None, "sm_clock_mhz": clock_mhz}
    rows = []
    for row in reports["ten classes"].benchmark.rows:
        batches = round(seconds * row.num_repeats * row.images_per_s / row.batch_size)
        rows.append(row.model_copy(update={**gone, "num_iterations": batches}))
    _, card = write(updated(reports["ten classes"], "benchmark", rows=tuple(rows)), tmp_path)
    assert re.search(f"Power is not known: .*{reason}", card)


def test_an_unsure_speed_is_that_of_the_precision_not_of_fp32(reports: dict[str, Report], tmp_path: Path) -> None:
    report = reports["ten classes"]
    found = Speedup(median=2.0, low=1.9, high=2.1, doubt="other processes took 31 % of the cores' time: validate again")
    rows = tuple(
        row.model_copy(update={"others_pct": 31.0, "over": dict.fromkeys(row.over, found)})
        for row in report.benchmark.rows
    )
    _, card = write(updated(report, "benchmark", rows=rows), tmp_path)
    assert "- **unsure** speed over FP32 at batch 128: other processes took 31 % of the cores' time\n" in card
    assert "| others' CPU % |" in card


def near_duplicates(report: Report, num_left_out: int) -> Report:
    found = NearDuplicates(num_across=7, num_left_out=num_left_out, num_train=0, num_val=0, num_plain=0)
    return updated(report, "data", near_duplicates=found)


def class_changes(report: Report, names: str, significant: str) -> Report:
    """Classes that lose 5 points each."""
    lost = {"num_images": 40, "num_regressed": 3, "num_improved": 1, "delta_points": -5.0}
    entries = (
        report.class_changes[0].model_copy(update={**lost, "name": name, "significant": name in significant})
        for name in names
    )
    return report.model_copy(update={"class_changes": tuple(entries)})


def worse_classes(report: Report) -> Report:
    loss = ClassLoss(
        name="a|b_*c*", num_images=40, num_regressed=13, num_improved=1, delta_points=-30.0, p_corrected=0.000732
    )
    *others, int8 = report.accuracy.rows
    losses = (loss, loss.model_copy(update={"name": "class 4", "p_corrected": 0.0183}))
    return updated(
        report, "accuracy", rows=(*others, int8.model_copy(update={"worse_classes": losses, "largest_loss": loss}))
    )


def no_class_loses(report: Report) -> Report:
    rows = (row.model_copy(update={"worse_classes": (), "largest_loss": None}) for row in report.accuracy.rows)
    return updated(report, "accuracy", rows=tuple(rows))


def variants(reports: dict[str, Report]) -> dict[str, tuple[str, Report]]:
    """Reports that differ in one thing from another one, which is named first."""
    report, own = reports["ten classes"], reports["own model"]
    selection = report.calibration.selection
    names = [f"/layer{index}/Conv" for index in range(1, 43)]
    many = tuple(LayerCost(name=name, operator="Conv", cost_nats=0.1 / len(name)) for name in names)
    advice = Recommendation(precision="fp16", reason="INT8 is accurate enough, but not fast enough: it is <slow>")
    needless = selection.model_copy(update={"ranking": (), "num_ranking_images": 0, "out_of_time": False})
    unranked = updated(report, "calibration", selection=needless)
    given = {"num_selection_images": 2000, "fallback": False}
    missing = {"layers": (), "engines_missing": "no memory left"}
    found = {
        **{name: reports[name] for name in ("one epoch", "no disagreement", "no GPU", "own model", "degraded images")},
        "another precision is recommended": updated(report, "verdict", recommendation=advice),
        "passed": updated(report, "verdict", passed=True),
        "passed, not proved": updated(report, "verdict", passed=True, thresholds=Thresholds(confident=False)),
        "two classes are worse": worse_classes(report),
        "no class loses": no_class_loses(report),
        "one class loses, by chance": class_changes(report, "ad", ""),
        "two of four classes lose more than chance": class_changes(report, "abcd", "bc"),
        "outside the budget": updated(report, "calibration", method="max", excluded=()),
        "a method that was not tried": updated(report, "calibration", method="entropy"),
        "many layers": updated(
            report,
            "calibration",
            selection=selection.model_copy(update={"ranking": many}),
            excluded=(names[0], names[30], names[40]),
        ),
        "not ranked: there was no need": unranked,
        "not ranked: switched off": exported_with(unranked, num_ranking_images=0),
        "near-duplicates left out": near_duplicates(report, 7),
        "near-duplicates kept": near_duplicates(report, 0),
        "no engine": updated(report, "model", engines=(), **missing),
        "some engines": updated(report, "model", engines=report.model.engines[:1], **missing),
    }
    uncompared = {
        "nothing compared: switched off": exported_with(own, num_selection_images=0, fallback=True),
        "nothing compared: on too few": exported_with(own, num_selection_images=64, fallback=True),
        "nothing compared: the method was given": exported_with(own, **given, calibration_method="mse"),
        "nothing compared: too few images": exported_with(own, **given, calibration_method="auto"),
    }
    return {
        **{name: ("ten classes", other) for name, other in found.items()},
        **{name: ("own model", other) for name, other in uncompared.items()},
    }


def test_golden(reports: dict[str, Report], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The card of ten classes, and how those of other reports differ from it; each page says what its card says."""

    def card_lines(report: Report) -> list[str]:
        page, card = write(report, tmp_path)
        check_same(report, page, card)
        return [f"{page.count('<svg')} charts, {page.count('<img ')} images", *card.splitlines()]

    assert selection_facts(reports["own model"]) == []  # there was no search
    bases = {name: card_lines(reports[name]) for name in ("ten classes", "own model")}
    others = []
    for name, (base, report) in variants(reports).items():
        others += [f"# {name}", *list(difflib.unified_diff(bases[base], card_lines(report), n=0, lineterm=""))[2:], ""]
    for file, lines in (("ten_classes.md", bases["ten classes"]), ("others.diff", others)):
        text = "\n".join(line for line in lines if not line.startswith("@@")) + "\n"
        if request.config.getoption("--update-golden"):
            (GOLDEN / file).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / file).read_text(encoding="utf-8"), "run `make golden` and read the diff"
