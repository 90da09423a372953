"""What to do after a verdict that is no pass, from what was seen: the report's list of next steps."""

from components.common.records import AccuracyRow, ClassLoss
from components.common.verdict import deciding_images, drops_allowed, reaches_top1
from components.validate.formats import count, number, signed
from components.validate.schema import Report

_DROPS = ("top1_drop_points", "relative_top1_pct")
_SPEEDS = ("speedup", "speedup_fp16")
_FEW_CLASSES = 3  # that lose so much that the rest does not matter


def next_steps(report: Report) -> list[str]:
    """What to do, what helps most first; nothing after a pass."""
    verdict = report.verdict
    precision, fp32, own = (
        verdict.precision.upper(),
        report.accuracy.row("fp32"),
        report.accuracy.row(verdict.precision),
    )
    open_checks = {check.name: check for check in verdict.checks if check.verdict != "pass"}
    if fp32.top1_pct is None or own.top1_pct is None:
        missing = own if own.top1_pct is None else fp32
        if "saturate" in missing.note:
            return ["Export again: it writes a file with 7-bit weights for CPUs without VNNI, such as this one."]
        return [f"Validate on a machine that runs {missing.precision.upper()}, or judge another one (gate.precision)."]
    steps = []
    if "above_chance" in open_checks:
        steps.append(
            "Train again, and check that the model's classes are those of the data, in the same order: top-1 is hardly "
            "above that of always answering the most frequent class."
        )
    if "top1_pct" in open_checks and not reaches_top1(verdict.thresholds, fp32):
        steps.append(f"Train for longer or on more images: FP32 itself reaches {number(fp32.top1_pct)} %.")
    if any(name in open_checks for name in _DROPS):
        steps += _after_a_drop(report, own)
    elif class_check := open_checks.get("class_drop_points"):
        if class_check.verdict == "fail":
            steps += [_look_at(own.worse_classes[:_FEW_CLASSES])]
        elif own.largest_loss is not None:
            steps.append(
                f"Validate on more images of {own.largest_loss.name}, which has {own.largest_loss.num_images}: "
                "its loss may be chance."
            )
    if "validation_images" in open_checks:
        steps.append(f"Validate on at least {count(verdict.thresholds.min_validation_images)} images.")
    speeds = [open_checks[name] for name in _SPEEDS if name in open_checks]
    if any(check.verdict == "fail" for check in speeds):
        other = verdict.recommendation.precision if verdict.recommendation else "fp16"
        steps.append(
            f"Ship {other.upper()} (gate.precision={other}): {precision} is not fast enough here."
            if other == "fp16"
            else f"Ship FP32 on this machine: {precision} is not fast enough here."
        )
    elif speeds:
        steps.append("Measure the speed again on an idle machine, and for longer (validate.benchmark_seconds).")
    if "p99_ms" in open_checks:
        steps.append(
            "Serve smaller batches (gate.p99_batch_size): validate.latency_budget names the fastest way within a limit."
        )
    if "size_mb" in open_checks:
        steps.append("Take a smaller architecture (--architecture), or allow a larger file (gate.max_size_mb).")
    return steps


def _after_a_drop(report: Report, own: AccuracyRow) -> list[str]:
    """More images where the drop seen is allowed and only the proof is missing; else what makes the drop smaller."""
    thresholds, compared = report.verdict.thresholds, own.comparison
    if compared is None:
        return ["Validate again: this report has no interval of the drop."]
    allowed = min(drops_allowed(thresholds, report.accuracy.row("fp32").top1_pct or 0.0))
    needed = deciding_images(thresholds, report.accuracy, own)
    if -compared.delta_top1_points > allowed or needed is None:
        return _against_a_loss(report, own)
    return [
        f"Validate on about {count(needed)} images instead of {count(compared.num_images)} "
        "(preprocess.val_fraction, or a larger validation folder): they decide, if the share of lost and gained images "
        "stays as it is.",
        "Or allow a larger drop (gate.max_top1_drop_points), or take the measured drop without a proof "
        "(gate.confident=false).",
    ]


def _against_a_loss(report: Report, own: AccuracyRow) -> list[str]:
    """Remedies for a precision that loses too much, by where and how it does."""
    steps = []
    num_lost = own.comparison.num_lost if own.comparison else 0
    few = own.worse_classes[:_FEW_CLASSES]
    if few and 2 * sum(entry.num_lost for entry in few) >= num_lost:
        steps.append(_look_at(few))
    if own.precision == "int8":
        steps.append(_about_calibration(report))
    fp16 = next((row for row in report.accuracy.rows if row.precision == "fp16"), None)
    if own.precision == "int8" and fp16 is not None and fp16.delta_top1_points is not None:
        steps.append(f"Or ship FP16 (gate.precision=fp16): {signed(fp16.delta_top1_points)} points against FP32.")
    return steps


def _look_at(losses: tuple[ClassLoss, ...]) -> str:
    named = ", ".join(f"{entry.name} ({entry.num_lost} of {entry.num_images} images)" for entry in losses)
    return (
        f"Look at the images below of what loses most: {named}. More such training images, or calibrating with more "
        "(export.num_calibration_images), help where they are rare."
    )


def _about_calibration(report: Report) -> str:
    """The setting of export that has not been tried yet."""
    config, entry, chosen = report.provenance.configs["export"], report.calibration.selection, report.calibration.chosen
    if config.get("fallback") is False:
        return "Let export keep the costliest layers in float: export.fallback=true."
    if config.get("calibration_method", "auto") != "auto":
        return f"Let export compare calibrations (export.calibration_method=auto): {report.calibration.method} was set."
    if entry is None:
        return "Export with more training images, so that calibrations and layers in float can be compared on some."
    if entry.out_of_time:
        return "Give the search for calibration and layers in float more time: export.search_seconds."
    if chosen is None or not chosen.within_budget:
        return "INT8 of this architecture loses too much, with every calibration and fallback tried: train another one."
    return (
        f"Choose on more images (export.num_selection_images): there INT8 was within the budget, at "
        f"{signed(chosen.delta_top1_points)} points."
    )
