"""Text of report.html and model_card.md, which say the same, and the next steps after a verdict that is no pass."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from components.common.contracts.digests import short
from components.common.contracts.environment import Environment
from components.common.contracts.records import (
    CALIBRATION_METHODS,
    FP16_MANTISSA_BITS,
    MIN_SELECTION_IMAGES,
    AccuracyRow,
    ClassLoss,
    CorruptedRow,
    EngineEntry,
    GateCheck,
    NearDuplicates,
    ProfileRecord,
)
from components.common.contracts.statistics import SIGNIFICANCE
from components.common.contracts.verdict import CHECKS, deciding_images, drops_allowed, largest_batch, reaches_score
from components.common.tasks import TASKS
from components.validate.schema import Report

TIMES = "\N{MULTIPLICATION SIGN}"
_MINUS = "\N{MINUS SIGN}"
_NONE = "\N{EN DASH}"


def number(value: float | None, digits: int = 2) -> str:
    """A number with separators for thousands; a dash for what was not measured."""
    return _NONE if value is None else f"{value:z,.{digits}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """A number with its sign; zero has none."""
    if value is None:
        return _NONE
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return f"{_MINUS if value < 0 else '+'}{text}"


def probability(value: float) -> str:
    """A p-value."""
    return f"{value:.4f}" if value >= 0.001 else f"{value:.2e}"


def megabytes(value: int) -> str:
    """Bytes in units of 1,000,000, with more decimals where one would show nothing."""
    return f"{value / 1e6:,.{1 if value >= 50_000 else 4}f}"


_FEW_CLASSES = 3  # that lose so much that the rest does not matter


def next_steps(report: Report) -> list[str]:
    """Remedies, the one that helps most first; nothing after a pass."""
    accuracy, judged = report.accuracy, report.verdict.precision
    for row in (accuracy.row(judged), accuracy.row("fp32")):
        if row.score_pct is None and "saturate" in row.note:
            return ["Export again: it writes a file with 7-bit weights for CPUs without VNNI, such as this one."]
        if row.score_pct is None:
            return [f"Validate on a machine that runs {row.precision.upper()}, or judge another one (gate.precision)."]
    open_checks = {check.name: check for check in report.verdict.checks if check.verdict != "pass"}
    steps = [remedy(report, open_checks[name]) for name, remedy in _REMEDIES.items() if name in open_checks]
    return list(dict.fromkeys(step for each in steps for step in each))


def _has_open(report: Report, kind: str, verdict: str = "") -> bool:
    """True if a check of a kind has this verdict, or any that is no pass."""
    found = {check.verdict for check in report.verdict.checks if CHECKS[check.name].kind == kind}
    return verdict in found if verdict else bool(found - {"pass"})


def _train_for_longer(report: Report, _: GateCheck) -> list[str]:
    fp32 = report.accuracy.row("fp32")
    if reaches_score(report.verdict.thresholds, fp32):
        return []
    return [f"Train for longer or on more {report.accuracy.unit}: FP32 itself reaches {number(fp32.score_pct)} %."]


def _after_chance(report: Report, check: GateCheck) -> list[str]:
    if not TASKS[report.accuracy.task].classifies:
        return [f"Train for longer, and see in the data card whether the labels are sound: {check.explanation}."]
    return [
        "Train again, and check that the model's classes are those of the data, in the same order: "
        f"{report.accuracy.score_name} is hardly above that of always answering the most frequent class."
    ]


def _after_a_drop(report: Report, check: GateCheck) -> list[str]:
    """More images where the drop seen is allowed and only the proof is missing; else what makes the drop smaller."""
    thresholds, own = report.verdict.thresholds, report.accuracy.row(report.verdict.precision)
    compared, unit = own.comparison, report.accuracy.unit
    if compared is None:
        return ["Validate again: this report has no interval of the drop."]
    fp32_pct = report.accuracy.row("fp32").score_pct
    if not fp32_pct:  # who asks for more than chance says the same
        return [] if thresholds.require_above_chance else _after_chance(report, check)
    allowed = min(drops_allowed(thresholds, fp32_pct))
    needed = deciding_images(thresholds, report.accuracy, own)
    if -compared.delta_points > allowed or needed is None:
        # Remedies for a precision that loses too much, by where and how it does
        steps = []
        num_regressed = own.comparison.num_regressed if own.comparison else 0
        few = own.worse_classes[:_FEW_CLASSES]
        if few and 2 * sum(entry.num_regressed for entry in few) >= num_regressed:
            steps.append(_look_at(few))
        if own.precision == "int8":
            steps.append(_about_calibration(report))
        fp16 = next((row for row in report.accuracy.rows if row.precision == "fp16"), None)
        if own.precision == "int8" and fp16 is not None and fp16.delta_points is not None:
            steps.append(f"Or ship FP16 (gate.precision=fp16): {signed(fp16.delta_points)} points against FP32.")
        return steps
    open_names = [one.name for one in report.verdict.checks if one.verdict != "pass"]
    unproved = [f"gate.{CHECKS[name].setting}" for name in open_names if _REMEDIES[name] is _after_a_drop]
    return [
        f"Validate on about {needed:,} {unit} instead of {compared.num_images:,} "
        f"(preprocess.val_fraction, or a larger validation set): they decide, if the share of {unit} that differ "
        "stays as it is.",
        f"Or allow a larger drop ({', '.join(unproved)}), or take the measured drop without a proof "
        "(gate.confident=false).",
    ]


def _after_a_class_drop(report: Report, check: GateCheck) -> list[str]:
    own = report.accuracy.row(report.verdict.precision)
    if _has_open(report, "drop"):  # whose remedies are those of its classes, too
        return []
    if check.verdict == "fail":
        return [_look_at(own.worse_classes[:_FEW_CLASSES])]
    if own.largest_loss is None:
        return []
    name, num_images = own.largest_loss.name, own.largest_loss.num_images
    return [f"Validate on more images of {name}, which has {num_images}: its loss may be chance."]


def _after_a_low_speed(report: Report, check: GateCheck) -> list[str]:
    precision, reference = report.verdict.precision, CHECKS[check.name].reference
    if report.benchmark.speedup(precision, reference, largest_batch(report.benchmark)) is None:
        names = f"{precision.upper()} and {reference.upper()}"
        return [
            f"Measure the speed of {names} on a machine that runs both, or set gate.{CHECKS[check.name].setting}=0."
        ]
    if not _has_open(report, "speedup", "fail"):
        return ["Measure the speed again on an idle machine, and for longer (validate.benchmark_seconds)."]
    advice, slow = report.verdict.recommendation, f"{report.verdict.precision.upper()} is not fast enough here."
    if advice is not None and advice.precision != "fp16":
        return [f"Ship FP32 on this machine: {slow}"]
    return [f"Ship FP16 (gate.precision=fp16): {slow}"]


def _after_a_long_latency(report: Report, check: GateCheck) -> list[str]:
    batch_size = report.verdict.thresholds.p99_batch_size
    if check.measured is None:
        return [f"Measure batch {batch_size} (validate.benchmark_batch_sizes), or judge another (gate.p99_batch_size)."]
    if check.verdict != "fail":
        return ["Measure the latency again on an idle machine."]
    return [
        "Serve smaller batches (gate.p99_batch_size): validate.latency_budget names the fastest way within a limit."
    ]


def _after_a_corrupted_drop(_: Report, check: GateCheck) -> list[str]:
    if check.measured is None:
        return ["Measure degraded images, too: validate.corruptions=true."]
    if check.verdict != "fail" and check.measured <= check.threshold:
        return ["Validate on more images, or allow a larger drop on degraded ones (gate.max_corrupted_drop_points)."]
    return [
        "Add images like the degraded ones below to the training images, with which INT8 is calibrated, or allow a "
        "larger drop on them (gate.max_corrupted_drop_points)."
    ]


def _look_at(losses: tuple[ClassLoss, ...]) -> str:
    named = ", ".join(f"{entry.name} ({entry.num_regressed} of {entry.num_images} images)" for entry in losses)
    return (
        f"Look at the images below of what loses most: {named}. More such training images, or calibrating with more "
        "(export.num_calibration_images), help where they are rare."
    )


def _too_few_to_compare(report: Report) -> int | None:
    """The setting that says on how many images to compare, where it is what leaves nothing to compare."""
    asked: int | None = report.provenance.configs["export"].get("num_selection_images")
    return asked if asked is not None and asked < MIN_SELECTION_IMAGES else None


def _about_calibration(report: Report) -> str:
    """The setting of export that has not been tried yet."""
    config, entry, chosen = report.provenance.configs["export"], report.calibration.selection, report.calibration.chosen
    if config.get("fallback") is False:
        return "Let export keep the costliest layers in float: export.fallback=true."
    if config.get("calibration_method", "auto") != "auto":
        return f"Let export compare calibrations (export.calibration_method=auto): {report.calibration.method} was set."
    if entry is None:
        unit = report.accuracy.unit
        if (too_few := _too_few_to_compare(report)) is not None:
            return (
                f"Let export compare calibrations and layers in float on {MIN_SELECTION_IMAGES} or more training "
                f"{unit} (export.num_selection_images): {too_few} was set."
            )
        return f"Export with more training {unit}, so that calibrations and layers in float can be compared on some."
    if entry.out_of_time:
        return "Give the search for calibration and layers in float more time: export.search_seconds."
    if chosen is None or not chosen.within_budget:
        return "INT8 of this architecture loses too much, with every calibration and fallback tried: train another one."
    found = f"there INT8 was within the budget, at {signed(chosen.delta_points)} points."
    if entry.num_images < config.get("num_selection_images", 0):
        return f"Export with more training {report.accuracy.unit}, or more time (export.search_seconds): {found}"
    return f"Choose on more {report.accuracy.unit} (export.num_selection_images): {found}"


_REMEDIES: dict[str, Callable[[Report, GateCheck], list[str]]] = {
    "above_chance": _after_chance,
    "score_pct": _train_for_longer,
    "drop_points": _after_a_drop,
    "relative_score_pct": _after_a_drop,
    "class_drop_points": _after_a_class_drop,
    "corrupted_drop_points": _after_a_corrupted_drop,
    "validation_images": lambda report, _: [
        f"Validate on at least {report.verdict.thresholds.min_validation_images:,} {report.accuracy.unit}."
    ],
    "speedup": _after_a_low_speed,
    "speedup_fp16": _after_a_low_speed,
    "p99_ms": _after_a_long_latency,
    "size_mb": lambda *_: ["Take a smaller architecture (--architecture), or allow a larger file (gate.max_size_mb)."],
}
"""Remedies by check that does not pass, the one that helps most first."""

Facts = list[tuple[str, str]]  # what, and its value with its unit

_MAX_NAMES = 10
_MAX_LOSING_CLASSES = 5
_RECIPE = (
    "epochs",
    "global_batch_size",
    "learning_rate",
    "weight_decay",
    "label_smoothing",
    "precision",
    "seed",
    "publish",
)


def state(report: Report) -> Literal["pass", "doubt", "fail"]:
    """The verdict's state: "doubt" where nothing fails and the evidence is too little."""
    if report.verdict.passed:
        return "pass"
    return "fail" if any(check.verdict == "fail" for check in report.verdict.checks) else "doubt"


def outcome(report: Report) -> str:
    """The verdict in a few words, with the precision that it is on."""
    precision = report.verdict.precision.upper()
    if not report.verdict.passed:
        return f"{precision} did not pass" if state(report) == "fail" else f"{precision}: not enough evidence to pass"
    return f"{precision} passed" if report.verdict.thresholds.confident else f"{precision} passed, not proved"


def key_figures(report: Report) -> Facts:
    """Cost and gain of the judged precision in a few numbers; nothing where it was not measured."""
    precision = report.verdict.precision
    fp32, own = report.accuracy.row("fp32"), report.accuracy.row(precision)
    if own.score_pct is None or fp32.score_pct is None:
        return []
    bound = (
        f"; the drop is at most {number(report.change.drop_upper_points)}, with 95 % confidence"
        if report.change
        else ""
    )
    figures = [
        (f"{number(own.score_pct)} %", f"{report.accuracy.score_name}; FP32 {number(fp32.score_pct)} %"),
        (f"{signed(own.delta_points)} points", f"{report.accuracy.score_name} against FP32{bound}"),
    ]
    largest = largest_batch(report.benchmark)
    if ratio := report.benchmark.speedup(precision, "fp32", largest):
        batch = f"FP32 at batch {largest}"
        if ratio.doubt:
            figures.append(("unsure", f"speed over {batch}: {ratio.doubt.partition(':')[0]}"))
        else:
            bounds = f"{number(ratio.low)} to {number(ratio.high)}"
            figures.append((f"{number(ratio.median)} {TIMES}", f"speed of {batch}; {bounds}"))
    figures.append((f"{megabytes(own.size_bytes)} MB", f"file size; FP32 {megabytes(fp32.size_bytes)} MB"))
    return figures


def change_sentences(report: Report) -> list[str]:
    """The recommendation where it is not the judged precision, the difference from FP32's predictions, and the note."""
    change, advice, sentences = report.change, report.verdict.recommendation, []
    own, of = report.verdict.precision, f"of {change.num_images:,} {report.accuracy.unit}" if change else ""
    if advice is not None and advice.precision != own:
        sentences.append(f"Recommended: {advice.precision.upper()}, since {advice.reason}.")
    if change is not None:
        sentences.append(
            f"O{of[1:]} FP32 alone is right on {change.num_regressed:,} (regressed) and "
            f"{own.upper()} alone on {change.num_improved:,} (improved)."
            if change.std_points is None
            else f"O{of[1:]} {own.upper()} is worse than FP32 on {change.num_regressed:,} (regressed) and "
            f"better on {change.num_improved:,} (improved)."
        )
    if report.verdict.note:
        sentences.append(f"Note: {report.verdict.note}.")
    return sentences


def accuracy_sentences(report: Report) -> list[str]:
    """Notes on the rows, the precisions that were not measured, and where the others were."""
    rows = [row for row in report.accuracy.rows if row.score_pct is not None]
    devices = sorted({row.device for row in rows if row.device})
    num_images = max((row.num_images for row in rows), default=0)
    where = f", on {' and '.join(devices)}" if devices else ""
    known = report.verdict.note  # which says it already
    notes = [f"{row.precision.upper()}: {row.note}." for row in rows if row.note and row.note not in known]
    missing = [row for row in report.accuracy.rows if row.score_pct is None]
    notes += [f"{row.precision.upper()} was not measured: {row.note}." for row in missing]
    near = []
    if report.accuracy.num_near_duplicates:
        without = [f"{row.precision.upper()} {number(row.distinct_score_pct)} %" for row in rows]
        near.append(
            f"{report.accuracy.num_near_duplicates:,} of these images are training images but for size, compression, "
            f"brightness, a mirror or a crop. Without them, {report.accuracy.score_name} is {', '.join(without)}."
        )
    return [
        *notes,
        f"All precisions saw the same {num_images:,} {report.accuracy.unit} of the validation split{where}. The drop "
        "is at most the upper end of its paired one-sided 95 % interval, which the gate judges.",
        *near,
        *(f"{name} is that of sacrebleu: {signature}." for name, signature in report.accuracy.signatures.items()),
        *([_ECE] if any(row.ece_pct is not None for row in rows) else [_BOOTSTRAP.format(unit=report.accuracy.unit)]),
    ]


_ECE = (
    "ECE is the expected calibration error over 15 bins of confidence: how far a model is surer, or less sure, than it "
    "is right."
)
_BOOTSTRAP = (
    "Intervals are of the paired bootstrap over {unit}: both precisions are scored on the same {unit}, drawn again and "
    "again. The drop at most includes one more, which loses FP32's whole score. Regressed and improved are the {unit} "
    "on which a precision is worse and better than FP32."
)


def class_sentences(report: Report) -> list[str]:
    """Sentences on the classes that each precision recognizes surely less often than FP32, or on the largest loss."""
    compared = [row for row in report.accuracy.rows if row.comparison is not None and report.model.classes]
    sentences = [_classes(row) for row in compared]
    sentences += _unseen_classes(report) if sentences else []
    meaning = (
        f"p is {_test(report)}, corrected for the number of classes (Holm); below {SIGNIFICANCE:g} it is significant."
    )
    return [*sentences, meaning] if any(row.worse_classes or row.largest_loss for row in compared) else sentences


def _test(report: Report) -> str:
    return "McNemar's" if report.change is None or report.change.std_points is None else "Student's"


def _classes(row: AccuracyRow) -> str:
    name, worse = row.precision.upper(), [_loss(entry) for entry in row.worse_classes]
    if worse:
        return f"{name} is significantly worse than FP32 on {_of(len(worse), 'class', 'es')}: {_some(worse, '; ')}."
    if row.largest_loss is None:
        return f"{name} is worse than FP32 on no class."
    return (
        f"{name} is significantly worse than FP32 on no class. The largest loss is that of {_loss(row.largest_loss)}."
    )


def _unseen_classes(report: Report) -> list[str]:
    seen = {entry.name for entry in report.class_changes}
    unseen = [name for name in report.model.classes if name not in seen]
    if not unseen or not seen:
        return []
    return [f"Nothing is known about {_of(len(unseen), 'class', 'es')} without validation images: {_some(unseen)}."]


def _some(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return f"{separator.join(names[:_MAX_NAMES])}{more}"


def _of(number_of: int, noun: str, plural: str = "s") -> str:
    return f"{number_of:,} {noun}{'' if number_of == 1 else plural}"


def _loss(entry: ClassLoss) -> str:
    return f"{entry.name}, {signed(entry.delta_points)} points ({_lost(entry)}, p = {probability(entry.p_corrected)})"


def _lost(entry: ClassLoss) -> str:
    return f"{entry.num_regressed:,} regressed and {entry.num_improved:,} improved of {entry.num_images:,} images"


def corruption_sentences(report: Report) -> list[str]:
    """Kinds of degraded images on which each precision surely loses, and how they were made; nothing elsewhere."""
    rows = [row for row in report.accuracy.rows if row.comparison is not None and row.corrupted]
    sentences = []
    for row in rows:
        worse = [one.name for one in row.corrupted if _is_worse(one)]
        number_of = f"{len(worse) or 'none'} of {len(row.corrupted)} kinds of degraded images"
        named = f": {', '.join(worse)}" if worse else ""
        sentences.append(f"{row.precision.upper()} is significantly worse than FP32 on {number_of}{named}.")
    how = (
        "Each validation image was degraded at the model's input size, before normalization, after Hendrycks and "
        "Dietterich (2019): noise of this standard deviation, where white is 1; blur of this width, in pixels of an "
        "image of 224; JPEG of this quality; brightness raised by this; contrast times this. Intervals are one-sided "
        f"95 % ends of each kind, and p is {_test(report)}, corrected for the number of kinds (Holm); below "
        f"{SIGNIFICANCE:g} it is significant."
    )
    return [*sentences, how] if sentences else []


def corrupted_pairs(report: Report, row: AccuracyRow) -> list[tuple[CorruptedRow, CorruptedRow]]:
    """FP32 and a precision on each kind of degraded images."""
    return list(zip(report.accuracy.row("fp32").corrupted, row.corrupted, strict=True))


def _is_worse(row: CorruptedRow) -> bool:
    """True if a precision surely loses accuracy by a corruption that FP32 keeps."""
    pair = row.comparison
    return pair is not None and pair.num_regressed > pair.num_improved and (row.p_corrected or 0.0) < SIGNIFICANCE


def intended_use(report: Report) -> list[str]:
    """The model's purpose and its input."""
    model = report.model
    shapes, transform = model.shapes, model.transform
    if model.text is not None:
        languages = {"source": model.text.source_language, "target": model.text.target_language}
        longest = f"The input is text in Unicode's form NFC, of at most {model.text.max_tokens:,} tokens with its end, "
        return [
            TASKS[report.accuracy.task].purpose.format(**languages),
            f"{longest}of the {model.text.num_tokens:,} of its vocabulary ({model.text.vocabulary}).",
        ]
    assert shapes is not None
    assert transform is not None
    return [
        TASKS[report.accuracy.task].purpose.format(number=f"{len(model.classes):,}", names=_some(model.classes)),
        f"The input, named {shapes.input_name}, is [batch, {shapes.channels}, {shapes.height}, {shapes.width}] float32 "
        f"of {shapes.min_batch} to {shapes.max_batch} images: RGB, the shorter side resized to "
        f"{transform.resize_size} px ({transform.interpolation}), its central square of {transform.crop_size} px, "
        f"divided by 255, minus {_channels(transform.mean, 4)}, divided by {_channels(transform.std, 4)}.",
    ]


def limitations(report: Report) -> list[str]:
    """Cases in which the numbers do not hold, or hold less."""
    own, points = report.verdict.precision.upper(), []
    if report.verdict.note:
        points.append(f"{report.verdict.note[:1].upper()}{report.verdict.note[1:]}.")
    if report.change and report.change.num_differing:
        differing = f"{report.change.num_differing:,} of {report.change.num_images:,} {report.accuracy.unit}"
        verb = "translates" if report.accuracy.unit == "sentences" else "predicts"
        what = "another class" if TASKS[report.accuracy.task].classifies else "otherwise"
        points.append(f"{own} {verb} {what} than FP32 on {differing}.")
    losing = [entry for entry in report.class_changes if entry.delta_points < 0]  # the largest loss first
    surely = [entry for entry in losing if entry.significant]
    for entry in (surely or losing[:1])[:_MAX_LOSING_CLASSES]:
        chance = "" if entry.significant else ", which may be chance"
        points.append(f"The class {entry.name} loses {number(-entry.delta_points)} points ({_lost(entry)}){chance}.")
    if report.model.engines_missing:
        points.append(f"{missing_engines(report)}: {report.model.engines_missing}.")
    others = "others but degraded ones" if corruption_sentences(report) else "others"
    unit = report.accuracy.unit
    return [*points, f"Accuracy holds for {unit} like those of the validation split. Nothing was measured on {others}."]


def missing_engines(report: Report) -> str:
    """The start of a sentence: all engines are missing, or those after the first that could not be built."""
    return "Some TensorRT engines are missing" if report.model.engines else "There are no TensorRT engines"


def engine_layers(engine: EngineEntry) -> str:
    """Count the convolutions that run in the engine's own precision, and its layers that only change formats.

    Convolutions in another precision are counted by it.
    """
    layers = engine.layers
    if layers is None:
        return "not inspected"
    total, own = sum(layers.convolutions.values()), engine.precision.upper()
    parts = [f"{layers.convolutions.get(own, 0)} of {total} convolutions in {own}"]
    parts += [f"{times} in {name}" for name, times in layers.convolutions.items() if name != own]
    reformats = "1 reformat layer" if layers.num_reformats == 1 else f"{layers.num_reformats} reformat layers"
    return ", ".join([*parts, f"{reformats} of {layers.num_layers}"])


def built_as(engine: EngineEntry) -> str:
    """Flags and options that the engine was built with."""
    level = [] if engine.optimization_level is None else [f"level {engine.optimization_level}"]
    kept = engine.mantissa_bits
    bits = [] if kept is None else [f"weights of {kept} of {FP16_MANTISSA_BITS} mantissa bits"]
    weights = ["weights in float behind QuantizeLinear"] if engine.weights == "qdq" else []
    failed = [f"not built as: {form}" for form in engine.failed_forms]
    return ", ".join([*engine.flags, *level, *bits, *weights, *failed])


def placement_sentences(report: Report) -> list[str]:
    """Sentences on how the blocks in INT8 were chosen; none where they were not chosen by time."""
    placement = report.placement
    if placement is None:
        return []
    reference, everywhere, chosen = placement.trials[0], placement.trials[1], placement.chosen
    blocks = sum(bool(block.num_int8_layers) for block in placement.blocks)
    share = placement.int8_time_pct
    sentences = [
        f"Which blocks run in INT8 was chosen by their time on {placement.device}, batch {placement.batch_size}, by "
        f"{placement.runtime}, in {number(placement.seconds, 1)} s without builds: {blocks} of "
        f"{_of(len(placement.blocks), 'block')}"
        + (f", which take {number(share, 1)} % of the time." if share is not None else ".")
    ]
    if chosen is everywhere:
        sentences.append("No mixture that was tried holds the budget and is clearly faster than INT8 everywhere.")
    over = [(reference, reference.name), (everywhere, "INT8 everywhere")]
    ratios = [f"{chosen.images_per_s / other.images_per_s:.2f}x {name}" for other, name in over if other is not chosen]
    sentences.append(f"Throughput of the chosen candidate, in turns: {' and '.join(ratios)}.")
    return sentences


def layer_exceptions(report: Report) -> Facts:
    """Convolutions that the judged engine runs in another precision than its own: the node, and what it runs in."""
    reasons = dict.fromkeys(report.placement.chosen.excluded if report.placement else (), "kept out of INT8 for speed")
    reasons |= dict.fromkeys(report.calibration.excluded, "kept out of INT8 for accuracy")
    found: Facts = []
    for engine in report.model.engines:
        if engine.precision == report.verdict.precision and engine.layers is not None:
            for name, precision in engine.layers.exceptions.items():
                reason = reasons.get(name) if engine.precision == "int8" else None
                found.append((name, f"{precision}, {reason or 'chosen by TensorRT'}"))
    return found


def calibration_facts(report: Report) -> Facts:
    """Method and samples behind the INT8 scales, and which layers are in INT8."""
    entry, config = report.calibration, report.provenance.configs["export"]
    split = next((split for split in report.data.splits if split.name == entry.split), None)
    method, samples = entry.method, f"{entry.num_images:,}"
    known = CALIBRATION_METHODS.get(method)
    if known and known.has_percentile and "calibration_percentile" in config:
        method += f", {config['calibration_percentile']:g} % of the values"
    if split is not None:
        samples += (
            f" of the {split.num_images:,} {report.accuracy.unit} of the {split.name} split ({short(split.digest)})"
        )
    if "seed" in config:
        samples += f", chosen with seed {config['seed']}"
    facts = [
        ("method", method),
        ("samples", samples),
        ("time", "none: the result was in the cache" if entry.cached else f"{number(entry.seconds, 1)} s"),
        ("INT8 layers", f"{entry.num_quantized_layers:,} of {entry.num_quantizable_layers:,}"),
    ]
    if entry.excluded:
        facts.append(("kept in float", ", ".join(entry.excluded)))
    return facts + ([("digest", entry.digest)] if entry.digest else [])


def selection_facts(report: Report) -> Facts:
    """The search for calibration and INT8 layers; nothing where they were given."""
    entry = report.calibration.selection
    if entry is None:
        return []
    score, share = report.accuracy.score_name, entry.min_relative_score_pct
    budget = f"{entry.max_drop_points:g} points of {score}, at least {share:g} % of FP32's"
    end = "; the time limit ended the search" if entry.out_of_time else ""
    return [
        ("measured on", f"{entry.num_images:,} training {report.accuracy.unit} that nothing was calibrated with"),
        ("by", entry.runtime),
        ("FP32 there", f"{number(entry.fp32_score_pct)} %"),
        ("budget", budget),
        ("time", f"{number(entry.seconds, 1)} s{end}"),
    ]


def selection_sentences(report: Report) -> list[str]:
    """The comparison and its choice, or why nothing was compared."""
    entry, chosen = report.calibration.selection, report.calibration.chosen
    if entry is None:
        return [_why_nothing_was_compared(report)]
    methods = sum(not trial.excluded for trial in entry.trials)
    fallbacks = len(entry.trials) - methods
    tried = f"{_of(methods, 'calibration')} measured with every layer in INT8"
    tried += f", then {_of(fallbacks, 'set')} of layers kept in float" if fallbacks else ""
    if any((trial.num_images or entry.num_images) < entry.num_images for trial in entry.trials):
        tried += f"; those without a chance not on all {report.accuracy.unit}"
    sentences = [f"{tried}."]
    if chosen is not None:
        layers = f" with {_of(len(chosen.excluded), 'layer')} in float" if chosen.excluded else ""
        what, things = TASKS[report.accuracy.task].agreement
        sentences.append(
            f"Chosen: {chosen.method}{layers}, the same {what} as FP32 on "
            f"{number(chosen.agreement_pct)} % of the {things}; {signed(chosen.delta_points)} "
            f"points of {report.accuracy.score_name} against FP32, one-sided 95 % bounds {signed(chosen.low_points)} "
            f"and {signed(chosen.high_points)}; "
            f"{'within' if chosen.within_budget else 'outside'} the budget."
        )
    sentences.append(
        f"These are training {report.accuracy.unit}, which the model has learned, so its score and losses differ from "
        f"those on the validation {report.accuracy.unit}, which alone count for the verdict."
    )
    return sentences


def ranking_sentences(report: Report, max_layers: int) -> list[str]:
    """The ranking, of which so many layers are shown, or why there is none."""
    calibration = report.calibration
    entry = calibration.selection
    if entry is None:
        return []
    if not entry.ranking:
        off = report.provenance.configs["export"].get("num_ranking_images") == 0
        why = "export.num_ranking_images is 0" if off else "the budget holds with all of them in INT8"
        return [f"Layers were not ranked: {why}."]
    shown = [layer.name for layer in entry.ranking[:max_layers]]
    which = "All" if len(shown) == len(entry.ranking) else f"The {len(shown)} costliest of"
    sentences = [
        f"{which} {_of(len(entry.ranking), 'layer')} that were measured alone in INT8: divergence from FP32's "
        f"predictions, over {entry.num_ranking_images:,} calibration {report.accuracy.unit}."
    ]
    if any(name not in calibration.excluded for name in shown) and calibration.excluded:
        sentences.append("Costly layers that the budget did not need in float went back into INT8.")
    if further := len(set(calibration.excluded) - set(shown)):
        sentences.append(f"{_of(further, 'layer')} kept in float cost less than those shown.")
    return [*sentences, "The whole ranking is in report.json."]


def _why_nothing_was_compared(report: Report) -> str:
    config, nothing = report.provenance.configs["export"], "No calibrations were compared"
    if (too_few := _too_few_to_compare(report)) is not None:
        return f"{nothing}: export.num_selection_images is {too_few}, and at least {MIN_SELECTION_IMAGES} are needed."
    if config.get("fallback") is False and config.get("calibration_method") != "auto":
        return f"{nothing}: the method was given (export.calibration_method), and export.fallback is off."
    images = next((split.num_images for split in report.data.splits if split.name == "train"), None)
    if images is not None and config.get("num_selection_images"):
        unit = report.accuracy.unit
        return f"{nothing}: {images:,} training {unit} are too few to calibrate with some and compare on others."
    return f"{nothing}."


def training_score(report: Report) -> str:
    """The name of what training validates by."""
    return "next tokens" if report.accuracy.unit == "sentences" else report.accuracy.score_name


def training_facts(report: Report) -> Facts:
    """The recipe, and what the epoch measured whose weights are the result."""
    training = report.training
    if training is None:
        return []
    facts = [(key.replace("_", " "), str(training.config[key])) for key in _RECIPE if key in training.config]
    facts += [_metric(key, value, report.accuracy.unit) for key, value in training.metrics.items()]
    return facts + _profile_facts(training.profile)


def _profile_facts(profile: ProfileRecord | None) -> Facts:
    """The costliest operations of the recorded steps."""
    if profile is None:
        return []
    families = ", ".join(f"{share:.0f} % {name}" for name, share in profile.families_pct.items() if share >= 0.5)
    costliest = ", ".join(f"{one.name[:60]} {one.share_pct:.0f} %" for one in profile.operations[:3])
    steps = _of(profile.num_steps, "recorded step")
    return [
        ("a step spends", f"{number(profile.ms_per_step, 1)} ms ({steps}): {families}"),
        ("costliest operations", costliest),
    ]


def _metric(key: str, value: float, unit: str) -> tuple[str, str]:
    known = {
        "train_loss": ("training loss", number(value, 3)),
        "train_images_per_s": ("training speed", f"{number(value, 0)} {unit}/s"),
        "val_loss": ("validation loss", number(value, 3)),
        "val_score_pct": ("validation score", f"{number(value)} %"),
        "elapsed_s": ("time of training and validation", f"{number(value, 1)} s"),
        "epochs_to_target": ("epochs to the target", number(value, 0)),
        "seconds_to_target": ("time to the target", f"{number(value, 1)} s"),
        "data_wait_pct": (f"waiting for {unit}", f"{number(value, 1)} % of the time"),
        "gpu_utilization_pct": ("GPU utilization", f"{number(value, 0)} %"),
        "gpu_memory_bytes": ("GPU memory in use", f"{number(value / 1e9, 1)} GB"),
        "gpu_power_w": ("power of the GPUs", f"{number(value, 0)} W"),
        "tflops_per_s": ("arithmetic", f"{number(value, 1 if value >= 10 else 3)} TFLOP/s"),
        "peak_pct": ("of the GPUs' peak", f"{number(value, 1)} %"),
    }
    return known.get(key, (key.replace("_", " "), number(value, 3)))


def data_facts(report: Report) -> Facts:
    """The images: source, number of classes, sizes, colours."""
    statistics, config = report.data.statistics, report.provenance.configs["preprocess"]
    source = [("source", str(config["data"]))] if "data" in config else []
    if statistics is None:
        return [*source, ("rejected pairs", f"{report.data.num_rejected:,}")]
    side = f"{statistics.min_side:,} px"
    if statistics.max_side != statistics.min_side:
        side = f"{statistics.min_side:,} to {statistics.max_side:,} px"
        side += f", median {statistics.median_side:,} px"
    return [
        *source,
        ("classes", f"{report.data.num_classes:,}"),
        ("shorter side", side),
        ("mean RGB", _channels(statistics.mean, 3)),
        ("std RGB", _channels(statistics.std, 3)),
        ("rejected files", f"{report.data.num_rejected:,}"),
        *_near_duplicate_facts(report.data.near_duplicates),
    ]


def _near_duplicate_facts(found: NearDuplicates | None) -> Facts:
    if found is None:
        return [("near-duplicates", "not looked for")]
    where = "left out of the validation split, counted as rejected" if found.num_left_out else "in the validation split"
    return [("near-duplicates", f"{found.num_across:,} of training images, {where}" if found.num_across else "none")]


def provenance_facts(report: Report) -> Facts:
    """Code and machines."""
    code = report.provenance.code
    version = f"enginery {code.version or 'unknown'}"
    if code.commit:
        version += f", commit {code.commit}" + (" with uncommitted changes" if code.modified else "")
    machines = [(step, _machine(entry)) for step, entry in report.provenance.environments.items()]
    return [("written", _when(report)), ("code", version), *machines]


def headline(report: Report) -> str:
    """Model, classes and size or languages, and time of the measurement."""
    shapes, text, kind = report.model.shapes, report.model.text, f"{report.accuracy.task}, {report.model.architecture}"
    if text is not None:
        return f"{kind}, {text.languages}, measured {_when(report)}"
    size = f"{shapes.height} {TIMES} {shapes.width} px" if shapes is not None else ""
    return f"{kind}, {_of(len(report.model.classes), 'class', 'es')}, {size}, measured {_when(report)}"


def libraries(report: Report) -> list[tuple[str, list[str]]]:
    """Every library with its version in each step, empty where a step has none."""
    machines = report.provenance.environments.values()
    names = sorted({name for machine in machines for name in machine.versions})
    return [(name, [machine.versions.get(name, "") for machine in machines]) for name in names]


def _machine(machine: Environment) -> str:
    gpus = Counter((gpu.name, gpu.memory_bytes, gpu.driver) for gpu in machine.gpus)
    parts = [
        f"{f'{number_of} {TIMES} ' if number_of > 1 else ''}{name} ({memory_bytes / 1e9:,.0f} GB), driver {driver}"
        for (name, memory_bytes, driver), number_of in gpus.items()
    ]
    graphics = "; ".join(parts) or "no GPU"
    return f"{machine.cpu}, {machine.num_cores} cores; {graphics}; Python {machine.python}, {machine.platform}"


def _when(report: Report) -> str:
    return report.created.replace("T", " ").replace("Z", " UTC")


def _channels(values: Sequence[float], digits: int) -> str:
    return ", ".join(number(value, digits) for value in values)
