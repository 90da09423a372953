"""Gather what a report says, image by image and class by class, and write it as HTML, Markdown and JSON."""

import difflib
import html
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup, escape
from PIL import Image
from pydantic import BaseModel

from components.common.contracts.digests import short
from components.common.contracts.environment import environment, own_version, utc_now
from components.common.contracts.errors import EngineryError, shown
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, write_atomically
from components.common.contracts.records import (
    PRECISIONS,
    AccuracyReport,
    BenchmarkReport,
    ClassLoss,
    EngineLayer,
    Precision,
)
from components.common.contracts.statistics import SIGNIFICANCE, holm
from components.common.contracts.verdict import judge
from components.common.data.evaluation import ClassPredictions, class_name
from components.common.data.image_files import read_images, read_listing, rgb, thumbnail
from components.common.data.pages import data_uri, templates
from components.common.tasks.predictions import Predictions
from components.validate import report_text, speed_text
from components.validate.charts import (
    confusion_picture,
    corruption_chart,
    layers_chart,
    lengths_chart,
    placement_chart,
    recall_chart,
    speed_chart,
    training_chart,
    trials_chart,
)
from components.validate.config import ValidateConfig
from components.validate.schema import (
    Calibration,
    ClassChange,
    Code,
    ConfusedPair,
    Confusion,
    Data,
    Disagreement,
    Model,
    PredictionChange,
    Provenance,
    Report,
    SplitSummary,
)


def class_changes(classes: tuple[str, ...], fp32: Predictions, own: Predictions) -> tuple[ClassChange, ...]:
    """Accuracy on each class that has images, the worst change first.

    p-values are corrected for as many tests as there are classes on which the two differ. McNemar's test takes the
    images that regressed and improved as given, and without any there is nothing to test: such a class has p = 1.
    """
    found = own.by_class(fp32, len(classes))
    tested = np.flatnonzero(~np.isnan(found.p_values)).tolist()
    corrected = dict(zip(tested, holm(found.p_values[tested].tolist()), strict=True))
    changes = [
        ClassChange(
            name=name,
            num_images=int(found.num_images[index]),
            fp32_pct=float(found.fp32_pct[index]),
            own_pct=float(found.own_pct[index]),
            delta_points=float(found.own_pct[index] - found.fp32_pct[index]),
            num_regressed=int(found.num_regressed[index]),
            num_improved=int(found.num_improved[index]),
            p_corrected=corrected.get(index, 1.0),
            significant=corrected.get(index, 1.0) < SIGNIFICANCE,
        )
        for index, name in enumerate(classes)
        if found.num_images[index]
    ]
    return tuple(sorted(changes, key=lambda entry: entry.delta_points))


def class_losses(changes: tuple[ClassChange, ...]) -> tuple[tuple[ClassLoss, ...], ClassLoss | None]:
    """The classes that are significantly worse than with FP32, and the one that loses most; None if none does."""
    losses = {
        ClassLoss(**entry.model_dump(include=set(ClassLoss.model_fields))): entry.significant
        for entry in changes
        if entry.delta_points < 0
    }
    return tuple(loss for loss, is_sure in losses.items() if is_sure), next(iter(losses), None)


COMMIT_VARIABLE = "ENGINERY_COMMIT"  # set in container images, which hold no git checkout
_PLACES = ("data", "class_names_file", "pretrained", "cache")  # fields that may name a folder or file of a machine
_OF_OWN_MODELS = ("architecture", "image_size", "resize_ratio", "interpolation", "mean", "std")  # of export's settings
_ROOT = Path(__file__).resolve().parents[2]


def gather_provenance(
    config: ValidateConfig, bundle: Artifact[BundleManifest], data: Artifact[DatasetManifest]
) -> Provenance:
    """All that leads from the report back to images, code and machines."""
    model, training = bundle.manifest, bundle.manifest.training
    digests = {
        "dataset": data.digest,
        **{f"{name} split": split.digest for name, split in data.manifest.splits.items()},
        "model": model.inputs["model"],
        "bundle": bundle.digest,
        **{name: model.files[name].digest for name in sorted(model.files)},
    }
    configs = {"preprocess": data.manifest.config, "export": model.config, "validate": config.model_dump(mode="json")}
    machines = {"preprocess": data.manifest.environment, "export": model.environment, "validate": environment()}
    if training is not None:
        configs["train"], machines["train"] = training.config, training.environment
        configs["export"] = {name: value for name, value in model.config.items() if name not in _OF_OWN_MODELS}
    elif model.transform is not None:
        configs["export"] = {**model.config, "image_size": model.transform.crop_size}  # ONNX files have their own
    order = [step for step in ("preprocess", "train", "export", "validate") if step in configs]
    return Provenance(
        code=code_version(),
        digests=digests,
        configs={step: _without_folders(configs[step]) for step in order},
        environments={step: machines[step] for step in order},
    )


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as it may leave the machine: of a path no more than its last part. URIs stay, which hold no secrets."""
    return {
        key: Path(value).name if key in _PLACES and value and "://" not in value else value
        for key, value in config.items()
    }


def code_version() -> Code:
    """Version of the package, and the commit from the environment or from the checkout that this file is in."""
    version = own_version()
    if commit := os.environ.get(COMMIT_VARIABLE):
        return Code(version=version, commit=commit, modified=False)
    if not (_ROOT / ".git").exists():  # installed elsewhere, perhaps inside somebody else's repository
        return Code(version=version, commit="", modified=False)
    commit = _git("rev-parse", "HEAD")
    return Code(version=version, commit=commit, modified=bool(commit and _git("status", "--porcelain", "-uno")))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a file system that hangs: the commit is not known
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_MAX_SIDE = 160  # pixels
_MAX_WIDE_SIDE = 640  # of several pictures side by side
_SMALL_SIDE = 64  # images up to this size stay exact


def read_thumbnails(
    data: Artifact[DatasetManifest],
    indices: Iterable[int],
    drawn: Callable[[Image.Image, int], Image.Image] = lambda image, _: image,
) -> dict[int, str]:
    """Data URIs of validation images by their position in val.jsonl, or of what is drawn of an image and its place."""
    wanted = {str(entry["key"]): index for index, entry in read_listing(data.file("val.jsonl"), set(indices)).items()}
    shards = [data.file(shard) for shard in data.manifest.splits["val"].shards]

    def shown(file: bytes, index: int) -> bytes:
        image = rgb(file)
        picture = drawn(image, index)
        side = _MAX_SIDE if picture is image else _MAX_WIDE_SIDE
        return thumbnail(picture, max_side=side, exact_side=_SMALL_SIDE)

    return {wanted[key]: data_uri(shown(file, wanted[key])) for key, file in read_images(shards, wanted)}


MAX_DISAGREEMENTS = 24
MAX_PAIRS = 20
MAX_MATRIX_CLASSES = 200  # more could neither be read nor drawn


def gather_report(
    config: ValidateConfig,
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    predictions: Mapping[str, Any],
    accuracy: AccuracyReport,
    benchmark: BenchmarkReport,
    sentences: Sequence[str] = (),
) -> Report:
    """All that the report says.

    Args:
        config: of the step.
        bundle: what was measured.
        data: what it was measured on.
        predictions: by precision, those that were measured: Predictions of images, or TextPredictions.
        accuracy: see AccuracyReport.
        benchmark: see BenchmarkReport.
        sentences: that were translated, where it is of text.
    """
    judged, classes = config.gate.precision, bundle.manifest.classes
    fp32, own = predictions.get("fp32"), predictions.get(judged)
    compared = (fp32, own) if fp32 is not None and own is not None else None
    by_class = {name: one for name, one in predictions.items() if isinstance(one, ClassPredictions)}
    others = {name: by_class[name] for name in PRECISIONS if name in by_class and name != judged}
    known = {"fp32", judged} <= by_class.keys()
    return Report(
        created=utc_now(),
        model=Model(layers=_layers(bundle, judged), **_shared(Model, bundle.manifest)),
        verdict=judge(config.gate, accuracy, benchmark),
        accuracy=accuracy,
        benchmark=benchmark,
        change=change(*compared) if compared else None,
        disagreements=_disagreements(data, *compared, sentences) if compared else (),
        confusion=_confusion(classes, by_class["fp32"], by_class[judged], others) if known else None,
        class_changes=class_changes(classes, *compared) if compared and classes else (),
        calibration=Calibration(**bundle.manifest.calibration.model_dump(), **_shared(Calibration, bundle.manifest)),
        placement=bundle.manifest.placement,
        training=bundle.manifest.training,
        data=_data(data.manifest),
        provenance=gather_provenance(config, bundle, data),
    )


def _shared(kind: type[BaseModel], record: BaseModel) -> dict[str, Any]:
    """The fields that a part of the report has in common with a manifest."""
    return {name: getattr(record, name) for name in kind.model_fields if name in type(record).model_fields}


def _layers(bundle: Artifact[BundleManifest], precision: str) -> tuple[EngineLayer, ...]:
    for engine in bundle.manifest.engines:
        if engine.precision == precision and engine.layers is not None:
            rows = json.loads(bundle.file(engine.layers.file).read_bytes())
            return tuple(EngineLayer.model_validate(row) for row in rows)
    return ()


def change(fp32: Predictions, own: Predictions) -> PredictionChange:
    """Regressed, improved and differing images, and how certain the difference in score is."""
    return PredictionChange(**own.comparison(fp32).model_dump(), num_differing=own.num_differing(fp32))


def _disagreements(
    data: Artifact[DatasetManifest], fp32: Predictions, own: Predictions, sentences: Sequence[str]
) -> tuple[Disagreement, ...]:
    classes = data.manifest.classes
    different = own.differing(fp32, MAX_DISAGREEMENTS).tolist()
    # in the order of the evaluation loader
    listing = {} if sentences else read_listing(data.file("val.jsonl"), set(different))
    if isinstance(own, ClassPredictions) and any(listing[index]["label"] != own.labels[index] for index in different):
        message = f"val.jsonl of {data.path} is not in the order of its shards; run preprocess again"
        raise EngineryError(message, code="unordered-listing")
    return tuple(
        Disagreement(
            index=index,
            path=listing[index]["path"].encode(errors="backslashreplace").decode() if listing else "",
            source=sentences[index] if sentences else "",
            label=fp32.described(index, classes)[0],
            fp32=fp32.described(index, classes)[1],
            own=own.described(index, classes)[1],
        )
        for index in different
    )


def _pair_counts(predictions: ClassPredictions, num_classes: int) -> Counter[tuple[int, int]]:
    """Images by (label, prediction), which is -1 for none. No matrix: with 20,000 classes it would not fit."""
    num_answers = num_classes + 1
    codes = predictions.labels.astype(np.int64) * num_answers + predictions.top[:, 0] + 1  # [N]
    values, counts = np.unique(codes, return_counts=True)
    pairs = [(code // num_answers, code % num_answers - 1) for code in values.tolist()]
    return Counter(dict(zip(pairs, counts.tolist(), strict=True)))


def _confusion(
    classes: tuple[str, ...],
    fp32: ClassPredictions,
    own: ClassPredictions,
    others: Mapping[Precision, ClassPredictions],
) -> Confusion:
    counts, counts_fp32 = (_pair_counts(entry, len(classes)) for entry in (own, fp32))
    per_label = np.bincount(own.labels, minlength=len(classes)).tolist()
    wrong = sorted((pair for pair in counts if pair[0] != pair[1]), key=lambda pair: (-counts[pair], pair))
    small = len(classes) <= MAX_MATRIX_CLASSES
    found = {name: _matrix(_pair_counts(entry, len(classes)), len(classes)) for name, entry in others.items() if small}
    return Confusion(
        matrix=_matrix(counts, len(classes)) if small else None,
        others=found,
        pairs=tuple(
            ConfusedPair(
                label=classes[label],
                predicted=class_name(classes, predicted),
                num_images=counts[label, predicted],
                num_images_fp32=counts_fp32[label, predicted],
                share_pct=100 * counts[label, predicted] / per_label[label],
            )
            for label, predicted in wrong[:MAX_PAIRS]
        ),
    )


def _matrix(counts: Counter[tuple[int, int]], num_classes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(counts[row, column] for column in range(num_classes)) for row in range(num_classes))


def _data(data: DatasetManifest) -> Data:
    splits = (
        SplitSummary(
            name=name,
            num_images=split.num_images,
            digest=split.digest,
            fewest=min(split.class_counts, default=None),
            most=max(split.class_counts, default=None),
        )
        for name, split in sorted(data.splits.items())
    )
    return Data(
        num_classes=len(data.classes),
        splits=tuple(splits),
        statistics=data.statistics,
        num_rejected=data.num_rejected,
        near_duplicates=data.near_duplicates,
    )


REPORT_FILES = ("report.html", "report.json", "model_card.md")
_MAX_CLASS_ROWS = 20
_MAX_LAYERS = 20  # of the ranking, in its chart
_MAX_NUMBERED = 50  # classes whose confusion matrix is a table; above, a picture
_MAX_NUMBERED_IN_CARD = 20
_MAX_COMPARED = 2000  # characters of a translation
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write_report(report: Report, thumbnails: Mapping[int, str], output: Path) -> None:
    """Write the three files.

    Args:
        report: what they say.
        thumbnails: data URI of each disagreement's image, by its index.
        output: directory of the Report artifact.
    """
    values = {
        "report": report,
        "say": report_text,
        "speed": speed_text,
        "next_steps": report_text.next_steps(report),
        "max_class_rows": _MAX_CLASS_ROWS,
        "max_layers": _MAX_LAYERS,
        "max_numbered": _MAX_NUMBERED,
        "max_numbered_in_card": _MAX_NUMBERED_IN_CARD,
    }
    charts = {name: Markup(svg) for name, svg in _charts(report).items()}  # noqa: S704  # drawn here, text escaped
    found = templates(Path(__file__).with_name("templates"), filters=_FILTERS)
    page = found.get_template("report.html.j2").render(**values, charts=charts, thumbnails=thumbnails)
    card = found.get_template("model_card.md.j2").render(**values)
    write_atomically(output / "report.html", page.encode())
    write_atomically(output / "model_card.md", card.encode())
    write_atomically(output / "report.json", report.model_dump_json(indent=1).encode())


def _charts(report: Report) -> dict[str, str]:
    history = report.training.history if report.training else ()
    classes, precision = report.model.classes, report.verdict.precision
    matrix, others = (report.confusion.matrix, report.confusion.others) if report.confusion else (None, {})
    matrices = {precision: matrix, **others} if matrix is not None and len(matrix) > _MAX_NUMBERED else {}
    calibration = report.calibration
    selection = calibration.selection
    ranking = selection.ranking if selection else ()
    return {
        "speed": speed_chart(report.benchmark, report.accuracy.unit),
        "lengths": lengths_chart(report.benchmark),
        "corruptions": corruption_chart(
            report.accuracy, precision, report.verdict.thresholds.max_corrupted_drop_points
        ),
        "recall": recall_chart(report.accuracy),
        "training": training_chart(history, report_text.training_score(report)) if history else "",
        "trials": trials_chart(selection, calibration.chosen, report.accuracy.score_name)
        if selection and selection.trials
        else "",
        "placement": placement_chart(report.placement) if report.placement else "",
        "layers": layers_chart(ranking, calibration.excluded, _MAX_LAYERS) if ranking else "",
        **{f"confusion {name}": confusion_picture(entry, classes, name) for name, entry in matrices.items()},
    }


def _markdown(value: Any) -> Markup:
    """Text that Markdown shows as it is, also in a table's cell."""
    line = _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return Markup(html.escape(line, quote=False))  # noqa: S704  # Markdown shows entities as what they stand for


def _markdown_code(value: str) -> Markup:
    """An indented block, which no content can end; Markdown shows it as it is, entities too."""
    return Markup("\n".join(f"    {line}" for line in value.splitlines()))  # noqa: S704


def _marked(text: str, other: str) -> Markup:
    """Text with marks about the words that another text has not, in this order."""
    words, others = (re.findall(r"\s+|\S+", shown(one)[:_MAX_COMPARED]) for one in (text, other))
    mark = Markup("<mark>{}</mark>")
    return Markup("").join(
        escape("".join(words[start:end])) if kind == "equal" else mark.format("".join(words[start:end]))
        for kind, start, end, _, _ in difflib.SequenceMatcher(None, words, others, autojunk=False).get_opcodes()
        if start < end
    )


_FILTERS: dict[str, Callable[..., str]] = {
    "number": report_text.number,
    "signed": report_text.signed,
    "probability": report_text.probability,
    "count": "{:,}".format,
    "megabytes": report_text.megabytes,
    "short": short,
    "shown": shown,
    "marked": _marked,
    "yaml": lambda value: yaml.safe_dump(value, sort_keys=True, allow_unicode=True).strip(),
    "markdown": _markdown,
    "markdown_code": _markdown_code,
}
