"""Reports of every kind, of invented but coherent numbers: made at once, where a chain would take minutes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from components.common.contracts.environment import Environment, Gpu
from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    BlockRecord,
    CorruptedRow,
    DatasetStatistics,
    EngineLayer,
    EngineLayers,
    EpochRecord,
    GateCheck,
    LatencyBudget,
    LayerCost,
    LengthRow,
    OperatingPoint,
    PairedComparison,
    PlacementEntry,
    PlacementTrial,
    SelectionEntry,
    TrainingRecord,
    Trial,
)
from components.common.contracts.transforms import ShapeSpec, TextSpec, TransformSpec
from components.common.contracts.verdict import Thresholds, Verdict
from components.common.data.evaluation import ClassPredictions
from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.scores import signatures
from components.validate import report as gathering
from components.validate.report import class_changes, class_losses
from components.validate.schema import (
    Calibration,
    Code,
    Data,
    Disagreement,
    Model,
    Provenance,
    Report,
    SplitSummary,
)
from components.validate.speed import speedup
from tests.unit import measurements
from tests.unit.measurements import engine_entry, updated

NAMES = ("a|b_*c*", '<b>"x"&', "`code` [link](x)", *(f"class {index}" for index in range(3, 1000)))
IMAGES_PER_CLASS = 40


def digest(seed: int) -> str:
    return "sha256:" + np.random.default_rng(seed).bytes(32).hex()


def history(num_epochs: int) -> tuple[EpochRecord, ...]:
    return tuple(
        EpochRecord(
            train_loss=2.3071 / epoch,
            train_images_per_s=4321.0 + epoch,
            val_loss=None if epoch == 2 else 2.1973 / epoch,
            val_score_pct=81.37 + epoch / 7,
        )
        for epoch in range(1, num_epochs + 1)
    )


def machine(seed: int) -> Environment:
    gpu = Gpu(name="NVIDIA H200", memory_bytes=150_754_820_096, driver="580.159.04")
    versions = {"torch": f"2.11.{seed}", "tensorrt": f"8.6.{seed}", "numpy": "2.5.2"}
    return Environment(
        python=f"3.12.{seed}", platform="Linux-6.8", cpu="Some CPU", num_cores=17, gpus=(gpu, gpu), versions=versions
    )


def accuracy_row(
    precision: str, fp32: ClassPredictions, own: ClassPredictions, classes: tuple[str, ...]
) -> AccuracyRow:
    worse, largest = class_losses(class_changes(classes, fp32, own))
    return measurements.accuracy_row(
        precision,
        own.score_pct,
        device="NVIDIA H200",
        file=f"{precision}.plan",
        size_bytes={"fp32": 108_849_268, "fp16": 48_625_236, "int8": 26_505_316}[precision],
        num_images=own.num_images,
        top5_pct=99.4937,
        delta_points=own.score_pct - fp32.score_pct,
        agreement_pct=own.agreement_pct(fp32),
        ece_pct={"fp32": 2.4671, "fp16": 2.4783, "int8": 3.1237}[precision],
        comparison=own.comparison(fp32) if precision != "fp32" else None,
        worse_classes=worse,
        largest_loss=largest,
    )


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED_MS = {"fp32": 2.6478, "fp16": 0.5073, "int8": 0.3517}  # what a batch takes besides its images
MS_PER_IMAGE = {"fp32": 0.19077, "fp16": 0.035047, "int8": 0.026647}
LATENCY_BUDGET_MS = 6.73
TURNS = (0.9713, 1.0, 0.9932, 1.0179, 1.0071)  # of the median
PERCENTILES = {"mean": 1.0191, "p50": 1.0, "p90": 1.0712, "p95": 1.1573, "p99": 1.3917}  # over the median


def benchmark_row(
    precision: str, batch_size: int, *, num_streams: int = 1, with_transfers: bool = True
) -> BenchmarkRow:
    alone_ms = FIXED_MS[precision] + MS_PER_IMAGE[precision] * batch_size
    p50_ms = alone_ms * num_streams**0.83 * (1 if with_transfers else 0.7317)
    images_per_s = 1013 * batch_size * num_streams / p50_ms
    power_w = 317.3 + 1.37 * batch_size + 2.9 * num_streams
    return measurements.benchmark_row(
        precision,
        images_per_s,
        batch_size,
        num_streams=num_streams,
        with_transfers=with_transfers,
        num_repeats=len(TURNS),
        turns_images_per_s=tuple(share * images_per_s for share in (TURNS if precision == "fp32" else TURNS[::-1])),
        lowest_images_per_s=min(TURNS) * images_per_s,
        highest_images_per_s=max(TURNS) * images_per_s,
        **{f"{name}_ms": factor * p50_ms for name, factor in PERCENTILES.items()},
        num_iterations=777,
        power_w=power_w,
        images_per_s_per_w=images_per_s / power_w,
        memory_bytes=513_000_000 + 1_370_000 * batch_size * num_streams,
        sm_clock_mhz=1753 + batch_size,
        temperature_c=41 + num_streams,
    )


def benchmark_rows() -> tuple[BenchmarkRow, ...]:
    """As a GPU has them: batches, then without the copies, then several streams."""
    ways: list[dict[str, Any]] = [{"batch_size": size} for size in BATCHES]
    ways += [{"batch_size": size, "with_transfers": False} for size in (1, 128)]
    ways += [{"batch_size": size, "num_streams": number} for number in (2, 4) for size in (1, 8)]
    return tuple(row for way in ways for row in with_speedups([benchmark_row(name, **way) for name in FIXED_MS]))


def with_speedups(rows: list[BenchmarkRow]) -> list[BenchmarkRow]:
    """Of the precisions of one way, the widest first."""
    return [
        row.model_copy(update={"over": {wider.precision: speedup(row, wider) for wider in rows[:index]}})
        for index, row in enumerate(rows)
    ]


def cpu_rows() -> tuple[BenchmarkRow, ...]:
    """As a CPU has them."""
    gone = dict.fromkeys(("power_w", "images_per_s_per_w", "memory_bytes", "sm_clock_mhz", "temperature_c"))
    return tuple(
        row.model_copy(update={"runtime": "openvino", "over": dict([*row.over.items()][:1]), **gone})
        for row in benchmark_rows()
        if row.is_plain and row.batch_size in (1, 16) and row.precision != "fp16"
    )


def latency_budget() -> LatencyBudget:
    row = benchmark_row("fp16", 64)
    chosen = OperatingPoint(**row.model_dump(include=set(OperatingPoint.model_fields)))
    return LatencyBudget(budget_ms=LATENCY_BUDGET_MS, chosen=chosen, left_out=("int8",))


KEPT_IN_FLOAT = ("/conv1/Conv", "/fc/Gemm")
BLOCK_FIELDS = ("name", "kind", "num_layers", "num_int8_layers", "float_ms", "int8_ms", "chosen_ms")
BLOCKS = (
    ("/layer1/layer1.0", "convolution", 3, 3, 0.417, 0.2791, 0.2813),
    ("/layer2/layer2.0", "depthwise", 4, 0, 0.3371, 0.5573, 0.3391),
)


def placement() -> PlacementEntry:
    """A search in which a mixed engine won."""
    rows = (
        ("FP16", "fp16", 0, 18_143.0, None),
        ("INT8", "int8", 1, 19_217.0, -0.42),
        ("mixed 1", "int8", 3, 23_911.0, -0.13),
    )
    return PlacementEntry(
        runtime="tensorrt",
        device="NVIDIA H200",
        batch_size=129,
        blocks=tuple(BlockRecord(**dict(zip(BLOCK_FIELDS, row, strict=True))) for row in BLOCKS),
        trials=tuple(
            PlacementTrial(
                name=name,
                precision=precision,
                excluded=KEPT_IN_FLOAT[:1] * num_excluded,
                images_per_s=rate,
                latency_ms=129e3 / rate,
                turns_images_per_s=(rate,),
                build_seconds=41.7 + num_excluded,
                delta_points=delta,
                agreement_pct=None if delta is None else 99.2 + delta,
                within_budget=None if delta is None else delta > -0.3,
                chosen=name == "mixed 1",
            )
            for name, precision, num_excluded, rate, delta in rows
        ),
        seconds=23.7,
    )


def selection() -> SelectionEntry:
    tried = (("max", ()), ("percentile", ()), ("percentile", KEPT_IN_FLOAT))
    first = {"score_pct": 82.417, "delta_points": -1.618, "low_points": -2.719, "high_points": -0.577}
    first["agreement_pct"] = 96.283
    trials = (
        Trial(
            method=method,
            excluded=excluded,
            within_budget=index > 1,
            **{name: value + index for name, value in first.items()},
        )
        for index, (method, excluded) in enumerate(tried)
    )
    names = (KEPT_IN_FLOAT[0], "/layer1/layer1.0/conv1/Conv", *(f"/layer{n}/Conv" for n in range(2, 7)))
    costs = zip((*names, KEPT_IN_FLOAT[1]), range(1, 9), strict=True)
    return SelectionEntry(
        runtime="torch",
        num_images=2053,
        fp32_score_pct=84.035,
        max_drop_points=0.73,
        min_relative_score_pct=98.6,
        trials=tuple(trials),
        ranking=tuple(LayerCost(name=name, operator="Conv", cost_nats=0.0173 / n) for name, n in costs),
        num_ranking_images=259,
        out_of_time=True,
        seconds=61.23,
    )


def degraded(report: Report) -> Report:
    """With what 400 degraded images cost each precision: one kind surely, one by chance."""
    seen = {("noise", 0.38): (217, 33, 4), ("blur", 6.0): (313, 7, 2), ("jpeg", 40.0): (351, 0, 1)}
    rows = []
    for row in report.accuracy.rows:
        pairs = [PairedComparison.of(400, *changed) if row.comparison else None for _, *changed in seen.values()]
        p_values = [pair.mcnemar_p * len(pairs) if pair else None for pair in pairs]
        kinds = tuple(
            CorruptedRow(
                kind=kind,
                strength=strength,
                score_pct=right / 4 + (pair.delta_points if pair else 0.0),
                comparison=pair,
                p_corrected=p_value and min(1.0, p_value),
            )
            for ((kind, strength), (right, *_)), pair, p_value in zip(seen.items(), pairs, p_values, strict=True)
        )
        rows.append(row.model_copy(update={"corrupted": kinds}))
    return updated(report, "accuracy", rows=tuple(rows))


def make_report(num_classes: int, *, num_epochs: int = 3) -> Report:
    """A report with everything in it, of invented but coherent numbers."""
    random = np.random.default_rng(num_classes)
    classes = NAMES[:num_classes]
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), IMAGES_PER_CLASS)

    def disturbed(top: np.ndarray, share: float) -> ClassPredictions:
        wrong = random.random(len(top)) < share
        return ClassPredictions(
            top=np.where(wrong, (top + 1) % num_classes, top)[:, None].astype(np.int32), labels=labels
        )

    fp32 = disturbed(labels, 0.13)
    fp16, int8 = disturbed(fp32.top[:, 0], 0.01), disturbed(fp32.top[:, 0], 0.07)
    different = np.flatnonzero(fp32.top[:, 0] != int8.top[:, 0])[:24].tolist()
    checks = (
        GateCheck(name="drop_points", measured=1.0, threshold=0.5, verdict="fail", explanation="top-1 drop 1.00"),
        GateCheck(name="speedup", measured=None, threshold=2.0, verdict="not enough evidence", explanation="no speed"),
    )
    steps = ("preprocess", "train", "export", "validate")
    return Report(
        created="2026-01-02T03:04:05Z",
        model=Model(
            architecture="timm/some_net",
            classes=classes,
            transform=TransformSpec(resize_size=257, crop_size=223, interpolation="bicubic"),
            shapes=ShapeSpec(height=223, width=223, max_batch=129),
            engines=(
                engine_entry(
                    source_onnx="int8_fp16.onnx",
                    tensorrt_version="10.9.8",
                    driver_version="580.159.04",
                    flags=("STRONGLY_TYPED", "AMPERE_PLUS"),
                    optimization_level=4,
                    mantissa_bits=7,
                    build_seconds=19.37,
                    weights="qdq",
                    failed_forms=("weights in INT8, level 4: assertion failed",),
                    layers=EngineLayers(
                        file="int8.layers.json",
                        num_layers=61,
                        num_reformats=2,
                        convolutions={"INT8": 51, "FP16": 2},
                        exceptions={KEPT_IN_FLOAT[0]: "FP16", "/layer1/layer1.0/conv1/Conv": "FP16"},
                    ),
                ),
            ),
            engines_missing="",
            layers=(
                EngineLayer(name="images_QuantizeLinear", kind="Reformat", precision="", nodes=()),
                EngineLayer(name="a", kind="CaskConvolution", precision="INT8", nodes=("/conv1/Conv", "/relu/Relu")),
            ),
        ),
        verdict=Verdict(passed=False, precision="int8", thresholds=Thresholds(), checks=checks, note="few images"),
        accuracy=AccuracyReport(
            dataset_digest=digest(1),
            split_digest=digest(2),
            bundle_digest=digest(3),
            most_frequent_pct=10.0,
            rows=(
                accuracy_row("fp32", fp32, fp32, classes),
                accuracy_row("fp16", fp32, fp16, classes),
                accuracy_row("int8", fp32, int8, classes),
            ),
        ),
        benchmark=BenchmarkReport(bundle_digest=digest(3), rows=benchmark_rows(), latency_budget=latency_budget()),
        change=gathering.change(fp32, int8),
        disagreements=tuple(
            Disagreement(
                index=index,
                path=f"folder|x/{index:05d}.jpg",
                label=classes[labels[index]],
                fp32=classes[fp32.top[index, 0]],
                own=classes[int8.top[index, 0]],
            )
            for index in different
        ),
        confusion=gathering._confusion(classes, fp32, int8, {"fp32": fp32, "fp16": fp16}),
        class_changes=class_changes(classes, fp32, int8),
        calibration=Calibration(
            method="percentile",
            num_images=257,
            split="train",
            seconds=1.71,
            digest=digest(4),
            excluded=KEPT_IN_FLOAT,
            selection=selection(),
            num_quantized_layers=51,
            num_quantizable_layers=53,
        ),
        placement=placement(),
        training=TrainingRecord(
            history=history(num_epochs),
            config={"epochs": num_epochs, "learning_rate": 0.4173},
            metrics={"train_loss": 0.7691, "val_score_pct": 81.799, "train_images_per_s": 4324.0, "val_loss": 0.7324},
            environment=machine(1),
        ),
        data=Data(
            num_classes=num_classes,
            splits=(
                SplitSummary(name="train", num_images=14_387, digest=digest(5), fewest=139, most=147),
                SplitSummary(name="val", num_images=len(labels), digest=digest(2), fewest=40, most=40),
            ),
            statistics=DatasetStatistics(
                mean=(0.3091, 0.3192, 0.3293),
                std=(0.2481, 0.2582, 0.2683),
                min_side=181,
                median_side=377,
                max_side=4033,
            ),
            num_rejected=1207,
        ),
        provenance=Provenance(
            code=Code(version="0.1.7", commit="0123456789abcdef" * 2 + "01234567", modified=True),
            digests={
                "dataset": digest(1),
                "train split": digest(5),
                "val split": digest(2),
                "int8_fp16.onnx": digest(6),
            },
            configs={
                step: {"seed": seed, "data": "/some/data|x", "calibration_percentile": 99.97}
                for seed, step in enumerate(steps)
            },
            environments={step: machine(seed) for seed, step in enumerate(steps)},
        ),
    )


def agreeing(report: Report) -> Report:
    return updated(report, "change", num_differing=0).model_copy(update={"disagreements": ()})


def without_a_gpu(report: Report) -> Report:
    rows = list(report.accuracy.rows)
    rows[1] = AccuracyRow(precision="fp16", runtime="n/a", note="needs TensorRT on a GPU")
    machines = {step: entry.model_copy(update={"gpus": ()}) for step, entry in report.provenance.environments.items()}
    report = updated(report, "accuracy", rows=tuple(rows))
    report = updated(report, "model", engines=(), layers=(), engines_missing="no CUDA_GPU is usable")
    report = updated(report, "provenance", environments=machines)
    return report.model_copy(update={"benchmark": BenchmarkReport(bundle_digest=digest(3), rows=cpu_rows())})


def own_model(report: Report) -> Report:
    report = updated(report, "calibration", selection=None, excluded=(), cached=True)
    return report.model_copy(update={"training": None})


HOSTILE = '<script>alert("x")</script> & |`code`| \u202egnp.exe\x1b[31m [link](javascript:x)'


def translated(report: Report) -> Report:
    """The same model as one of sentences, some of which are hostile."""
    sentences = (HOSTILE, "am 3. Mai", "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd")
    references = (HOSTILE, "on the 3rd of May", "hello world")
    fp32, fp16 = (TextPredictions.of_texts(own, references, "en") for own in (references, references))
    int8 = TextPredictions.of_texts((f"{HOSTILE} <b>too</b>", "on the 3rd of March", ""), references, "en")
    rows = tuple(
        row.model_copy(
            update={
                "score_pct": own.score_pct,
                "score_low_pct": own.score_low_pct,
                "chrf_pct": own.measures()["chrf_pct"],
                "delta_points": own.score_pct - fp32.score_pct,
                "agreement_pct": own.agreement_pct(fp32),
                "comparison": own.comparison(fp32) if own is not fp32 else None,
                "worse_classes": (),
                "largest_loss": None,
                "top5_pct": None,
                "ece_pct": None,
            }
        )
        for row, own in zip(report.accuracy.rows, (fp32, fp16, int8), strict=True)
    )
    text = TextSpec(source_language="de", target_language="en", num_tokens=8017, max_tokens=253)
    report = updated(report, "accuracy", task="translation", rows=rows, signatures=signatures("en"))
    report = updated(report, "model", classes=(), transform=None, shapes=None, text=text)
    splits = tuple(split.model_copy(update={"fewest": None, "most": None}) for split in report.data.splits)
    report = updated(report, "data", num_classes=0, statistics=None, splits=splits)
    lengths = tuple(
        LengthRow(
            precision=name, min_tokens=4 * n, max_tokens=4 * n + 3, num_sentences=31, p50_ms=17.31 * n, p99_ms=19.7
        )
        for name in ("fp32", "int8")
        for n in (1, 2, 3)
    )
    speeds = tuple(
        row.model_copy(update={"tokens_per_s": 13.7 * row.images_per_s})
        for row in report.benchmark.rows
        if row.is_plain
    )
    report = updated(report, "benchmark", lengths=lengths, rows=speeds)
    return report.model_copy(
        update={
            "change": gathering.change(fp32, int8),
            "disagreements": tuple(
                Disagreement(
                    index=index,
                    path="",
                    source=sentences[index],
                    label=references[index],
                    fp32=fp32.hypotheses[index],
                    own=int8.hypotheses[index],
                )
                for index in int8.differing(fp32, 24)
            ),
            "confusion": None,
            "class_changes": (),
        }
    )


REPORTS = {
    "ten classes": make_report(10),
    "fifty classes": make_report(50),
    "a hundred classes": make_report(100),
    "a thousand classes": make_report(1000),
    "one epoch": make_report(10, num_epochs=1),
    "no disagreement": agreeing(make_report(10)),
    "no GPU": without_a_gpu(make_report(10)),
    "own model": own_model(make_report(10)),
    "degraded images": degraded(make_report(10)),
    "translation": translated(make_report(10)),
    "no speed": make_report(10).model_copy(update={"benchmark": BenchmarkReport(bundle_digest="b", rows=())}),
}


@pytest.fixture(scope="session")
def reports() -> dict[str, Report]:
    return REPORTS


@pytest.fixture(scope="session")
def make_history() -> Callable[[int], tuple[EpochRecord, ...]]:
    """Training curves of so many epochs."""
    return history


@pytest.fixture(scope="session")
def speeds() -> tuple[BenchmarkRow, ...]:
    return benchmark_rows()
