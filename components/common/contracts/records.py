"""Parts of manifests: records of measurements, engines, calibrations and data."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from components.common.contracts.environment import Environment
from components.common.contracts.statistics import (
    MAX_IMAGES_NEEDED,
    SIGNIFICANCE,
    drop_lower,
    drop_upper,
    images_needed,
    mcnemar,
)
from components.common.tasks import TASKS, TaskName

Precision = Literal["fp32", "fp16", "int8"]
# Below this, one image is a point of top-1 or more, and to compare calibrations would only measure chance.
MIN_SELECTION_IMAGES = 100
_MAX_BUSY_PCT = 10.0  # of the cores' time that others take while a speed is measured
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]  # without folders
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
FP16_MANTISSA_BITS = 10  # explicit ones of float16; bfloat16 has 7, float8 E4M3 has 3
# Flags of an EngineEntry that change how its plan is loaded; the others only tell how it was built.
STRIPPED = "STRIP_PLAN"  # has no weights
VERSION_COMPATIBLE = "VERSION_COMPATIBLE"  # carries TensorRT's lean runtime
HARDWARE_COMPATIBLE = "AMPERE_PLUS"


# Names of earlier versions, and what they have become.
RENAMED = {
    "max_top1_drop_points": "max_drop_points",
    "min_relative_top1_pct": "min_relative_score_pct",
    "min_top1_pct": "min_score_pct",
    "fp32_top1_pct": "fp32_score_pct",
    "champion_top1_pct": "champion_score_pct",
    "delta_top1_points": "delta_points",
    "num_gained": "num_improved",
    "num_lost": "num_regressed",
    "val_top1_pct": "val_score_pct",
    "top1_pct": "score_pct",
}
_RENAMED_CHECKS = {
    "top1_drop_points": "drop_points",
    "relative_top1_pct": "relative_score_pct",
    "top1_pct": "score_pct",
}


def with_new_names(value: Any, fields: Collection[str]) -> Any:
    """A mapping with the names that its fields have now; anything else as it is."""
    if not isinstance(value, dict) or not RENAMED.keys() & value:
        return value
    return {new if (new := RENAMED.get(name, name)) in fields else name: entry for name, entry in value.items()}


Metrics = Annotated[dict[str, float], BeforeValidator(lambda value: with_new_names(value, RENAMED.values()))]


class Record(BaseModel):
    """Part of a manifest, or a record beside them: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, value: Any) -> Any:
        return with_new_names(value, cls.model_fields)


class FileEntry(Record):
    """Size and digest of one file of an artifact."""

    size_bytes: int
    digest: str


class Split(Record):
    """One part of a dataset: its shards and how many images of each class they hold."""

    num_images: int = Field(ge=1)
    shards: tuple[FileName, ...] = Field(description="WebDataset tar files; each has a DALI index beside it (.idx).")
    class_counts: tuple[int, ...] = Field(
        description="Images per class, in the order of `classes`; objects, where images have several."
    )
    digest: str = Field(description="Digest of the listing: label and content digest of every image, in order.")


class DatasetStatistics(Record):
    """Seen while the training split was decoded."""

    mean: tuple[float, float, float] = Field(
        description="Per RGB channel, in units of 0..1, over the training split; of an image with 40,000 pixels or "
        "more, over those on a regular grid, at least 10,000."
    )
    std: tuple[float, float, float]
    min_side: int = Field(description="Shortest image side in pixels, over all splits.")
    median_side: int = Field(description="Median of the shorter side in pixels, over all splits.")
    max_side: int = Field(description="Longest of the shorter sides in pixels, over all splits.")
    max_width: int = Field(0, description="Widest image in pixels, over all splits; 0 where it was not recorded.")
    max_height: int = Field(0, description="Highest image in pixels, over all splits; 0 where it was not recorded.")


class NearDuplicates(Record):
    """Images that are the same but for size, compression, brightness, a mirror or a crop of up to 10 %."""

    num_across: int = Field(description="Validation images that have a near-duplicate in the training split.")
    num_left_out: int = Field(description="Those of them that were left out of the validation split: all or none.")
    num_train: int = Field(description="Training images that have a near-duplicate there.")
    num_val: int = Field(description="Validation images that have a near-duplicate there.")
    num_plain: int = Field(description="Different images with too little detail to be compared.")


class EpochRecord(Record):
    """Measurements of one epoch of training."""

    train_loss: float
    train_images_per_s: float
    val_loss: float | None = Field(None, description="Over the validation split; None if not finite or not measured.")
    val_score_pct: float | None = Field(None, description="None where the epoch was not validated.")
    elapsed_s: float | None = Field(
        None,
        description="Since the training began, validations included, without the time between two processes; None in "
        "manifests of earlier versions.",
    )
    data_wait_pct: float | None = Field(
        None, description="Share of the time of training that waited for images; None in manifests up to version 0.1."
    )
    gpu_utilization_pct: float | None = Field(
        None, description="Share of the time with a kernel running on the GPU, mean of all; None where NVML is silent."
    )
    gpu_memory_bytes: int | None = Field(None, description="In use at most, on the GPU with the most in use.")
    gpu_power_w: float | None = Field(None, description="Mean power of the GPUs' boards, sum of all.")
    tflops_per_s: float | None = Field(
        None, description="Convolutions and matrix products of forward and backward, sum of all processes."
    )
    peak_pct: float | None = Field(
        None, description="tflops_per_s over what the GPUs' data sheets say; None for GPUs not known."
    )


class ProfiledOperation(Record):
    """One kernel of a GPU, or one operator of torch on a CPU, with all its calls."""

    name: str
    calls_per_step: float
    share_pct: float = Field(description="Of the time of all of them.")


class ProfileRecord(Record):
    """Operations of some steps of training and their time, by torch.profiler."""

    num_steps: int
    ms_per_step: float = Field(description="Time of all kernels (on a GPU) or operators (on a CPU), by step.")
    families_pct: dict[str, float] = Field(description="Share of that time by what they do, the largest first.")
    operations: tuple[ProfiledOperation, ...] = Field(description="The costliest ones, the costliest first.")


class TrainingRecord(Record):
    """The training of a model, as its checkpoint tells it."""

    history: tuple[EpochRecord, ...]
    config: dict[str, Any] = Field(description="The resolved config of the train step.")
    metrics: Metrics = Field(description="What training measured at its end, by metric name.")
    environment: Environment
    profile: ProfileRecord | None = Field(None, description="None where no steps were recorded (train.profile_steps).")


class EngineLayer(Record):
    """One layer of an engine: the nodes of the ONNX file that TensorRT fused into it, and the precision it runs in."""

    name: str
    kind: str = Field(description="TensorRT's name for what it does, such as CaskConvolution or Reformat.")
    precision: str = Field(description='"INT8", "FP16", "TF32", "FP32", ... of its arithmetic; "" where it has none.')
    nodes: tuple[str, ...] = Field(description="Of the ONNX file.")


class EngineLayers(Record):
    """The graph's layers in an engine, as TensorRT's engine inspector lists them."""

    file: str = Field(description="JSON list of all layers, one EngineLayer each.")
    num_layers: int
    num_reformats: int = Field(description="Layers that only change the format or type of a tensor.")
    convolutions: dict[str, int] = Field(description="Number of the graph's convolutions by precision they run in.")
    exceptions: dict[str, str] = Field(
        description="Convolutions that run in another precision than the engine's own, and that precision, by node."
    )


class EngineEntry(Record):
    """One TensorRT plan of a bundle."""

    file: str
    precision: Precision
    source_onnx: str
    onnx_digest: str = Field("", description="Of the file that it was built from.")
    tensorrt_version: str
    gpu_name: str
    compute_capability: str = Field(pattern=r"^[0-9]+\.[0-9]+$")
    driver_version: str
    flags: tuple[str, ...] = Field(
        (), description="Flags of the build: STRONGLY_TYPED, FP16, INT8, TF32, and `export.engine_options`."
    )
    optimization_level: int | None = Field(None, description="0 builds fastest, 5 runs fastest.")
    mantissa_bits: int | None = Field(
        None,
        description="Explicit mantissa bits that the weights of its convolutions and matrix products were rounded to, "
        "of 10; None where all were kept.",
    )
    build_seconds: float
    weights: Literal["dq", "qdq"] = Field(
        "dq", description='Of INT8: "dq" stores 8 bits; "qdq" stores float and quantizes, which some networks need.'
    )
    failed_forms: tuple[str, ...] = Field((), description="Forms of the graph that TensorRT did not build, and why.")
    layers: EngineLayers | None = Field(None, description="What the engine inspector says; None where nothing asked.")

    @property
    def needs(self) -> str:
        """Return text such as "NVIDIA H200 (compute capability 9.0), TensorRT 11.2.1.2"."""
        gpu = f"{self.gpu_name} (compute capability {self.compute_capability})"
        if HARDWARE_COMPATIBLE in self.flags:
            gpu = "a GPU of compute capability 8.0 or newer"
        later = " or a later one of that major version" if VERSION_COMPATIBLE in self.flags else ""
        return f"{gpu}, TensorRT {self.tensorrt_version}{later}"

    def fits_tensorrt(self, version: str) -> bool:
        """True if this version of TensorRT may load the plan: the one that built it, to the build where both name it.

        A version-compatible plan also runs on later versions of the same major one.
        """
        there, here = _version_numbers(self.tensorrt_version), _version_numbers(version)
        is_later = VERSION_COMPATIBLE in self.flags and there[:1] == here[:1] and here > there
        return same_version(self.tensorrt_version, version) or is_later

    def mismatches(self, tensorrt: str, gpu: str, capability: tuple[int, int]) -> list[str]:
        """The differences of a machine to the one that built the plan, a phrase each; empty where the plan fits.

        A hardware-compatible plan runs on every GPU of compute capability 8.0 or newer.
        """
        differences = []
        if not self.fits_tensorrt(tensorrt):
            differences.append(f"TensorRT {self.tensorrt_version} there, {tensorrt} here")
        if HARDWARE_COMPATIBLE not in self.flags or capability < (8, 0):
            shown = "{}.{}".format(*capability)
            if gpu != self.gpu_name:
                differences.append(f"GPU {self.gpu_name} there, {gpu} here")
            if shown != self.compute_capability:
                differences.append(f"compute capability {self.compute_capability} there, {shown} here")
        return differences


def same_version(one: str, other: str) -> bool:
    """True if two versions of TensorRT agree in all parts that both name, as 8.6.0 and 8.6.0.12 do.

    What follows the numbers is left out, such as the CUDA of "11.2.1.2+cuda13.3".
    """
    pairs = list(zip(_version_numbers(one), _version_numbers(other), strict=False))
    return bool(pairs) and all(a == b for a, b in pairs)


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0].partition(".post")[0])]


class BlockRecord(Record):
    """A block of the network, and the time of its layers in a batch, conversions between precisions included."""

    name: str
    kind: str = Field(description='"convolution", "depthwise", "attention" or "product" (matrix products).')
    num_layers: int = Field(description="Convolutions and matrix products with weights.")
    num_int8_layers: int = Field(description="Of these, in INT8 in the candidate that was chosen.")
    float_ms: float = Field(description="In FP16, on CPUs in FP32.")
    int8_ms: float = Field(description="With every block in INT8.")
    chosen_ms: float


class PlacementTrial(Record):
    """One candidate of the search for the blocks in INT8."""

    name: str
    precision: Precision
    excluded: tuple[str, ...] = Field(description="Nodes of fp32.onnx in float, in graph order.")
    images_per_s: float = Field(description="Median of the turns.")
    latency_ms: float = Field(description="Of a batch, at that rate.")
    turns_images_per_s: tuple[float, ...]
    build_seconds: float = 0.0
    delta_points: float | None = Field(None, description="On the selection images; None where not measured.")
    agreement_pct: float | None = Field(None, description="Images on which FP32 predicts the same class, in per cent.")
    within_budget: bool | None = None
    chosen: bool = False


class PlacementEntry(Record):
    """The blocks in INT8, chosen by their measured times."""

    runtime: str
    device: str
    batch_size: int
    blocks: tuple[BlockRecord, ...] = Field(description="In graph order; empty where nothing was profiled.")
    trials: tuple[PlacementTrial, ...] = Field(description="The fastest without INT8 first, then INT8 everywhere.")
    seconds: float = Field(description="Without the time of builds.")

    @property
    def chosen(self) -> PlacementTrial:
        """The candidate that is served as INT8."""
        return next(trial for trial in self.trials if trial.chosen)

    @property
    def int8_time_pct(self) -> float | None:
        """Share of the chosen candidate's time in blocks with INT8 layers; None where nothing was profiled."""
        total = sum(block.chosen_ms for block in self.blocks)
        in_int8 = sum(block.chosen_ms for block in self.blocks if block.num_int8_layers)
        return 100 * (in_int8 / total) if total else None  # divided first, which is never above 1


class Int8Form(Record):
    """The form in which a file writes INT8."""

    weight_bits: Literal[7, 8] = Field(description="8: weights to +-127; 7: to +-63, which never saturate.")
    activations: Literal["signed", "unsigned"] = Field(
        description='"signed": -127..127; "unsigned": 0..255 for tensors that are never negative, such as after a ReLU.'
    )
    signed_weight_bits: Literal[7, 8] | None = Field(
        None, description="Of layers that read tensors which can be negative; None: those of all."
    )
    scores: Literal["float", "int8"] = Field(
        "float", description="Attention scores: the products of queries and keys, where a network has them."
    )
    runtime: Literal["tensorrt", "openvino"] = Field(
        "tensorrt",
        description='Whose errors are avoided; "openvino": concatenated tensors that can be negative have codes around '
        "128, every convolution has a bias, averages that float operators read are float, Reduce operators keep "
        "their axes, and a Clip stands before a Reshape of a matrix to more axes.",
    )

    @property
    def arithmetic(self) -> str:
        """Return text such as "7-bit weights, unsigned activations"."""
        fewer = f" ({self.signed_weight_bits}-bit beside signed activations)" if self.signed_weight_bits else ""
        scores = ", attention scores in INT8" if self.scores == "int8" else ""
        return f"{self.weight_bits}-bit weights{fewer}, {self.activations} activations{scores}"


class CpuModel(Int8Form):
    """An INT8 file for CPUs: the scales of int8.onnx, written for what CPUs multiply fast and without saturation."""

    file: str
    saturates_on: tuple[str, ...] = Field(
        description="Instruction sets, by oneDNN's names, on which sums of its products saturate; empty for none."
    )


class CpuTrial(Int8Form):
    """One way to write INT8 for CPUs, measured by OpenVINO's own logits against a simulation in floating point."""

    instruction_set: str = Field(description="What OpenVINO ran it with, by oneDNN's name.")
    logits_error: float = Field(description="RMS difference of OpenVINO's logits from FP32's, over the RMS of FP32's.")
    simulated_error: float = Field(description="The same of ONNX Runtime, which computes Q/DQ in floating point.")
    saturates: bool = Field(description="Whether OpenVINO's error is larger than rounding explains.")
    images_per_s: float | None = Field(None, description="None where accuracy alone decided.")


class Trial(Int8Form):
    """One candidate that was measured while INT8 was chosen: a calibration, and layers left in float."""

    method: str
    excluded: tuple[str, ...] = Field(description="Nodes of fp32.onnx kept out of INT8, the costliest first.")
    num_images: int | None = Field(
        None, description="The first of the selection images, or all: measured no longer than it had a chance."
    )
    score_pct: float = Field(description="On these images, which are training images.")
    chrf_pct: float | None = Field(None, description="Of translations, as in AccuracyRow: decides between equal BLEU.")
    delta_points: float = Field(description="Score minus that of FP32 on the same images, in percentage points.")
    low_points: float = Field(description="Lower end of the one-sided 95 % interval of that difference (Tango, 1998).")
    high_points: float = Field(description="Upper end, likewise.")
    agreement_pct: float = Field(description="Images on which FP32 predicts the same class, in per cent.")
    within_budget: bool
    weight_bits: Literal[7, 8] = 8  # of manifests up to version 0.1, which don't say
    activations: Literal["signed", "unsigned"] = "signed"


class LayerCost(Record):
    """Cost of one node of the graph when it alone runs in INT8."""

    name: str = Field(description="Node of fp32.onnx.")
    operator: str = Field(description="ONNX operator, such as Conv.")
    cost_nats: float = Field(description="Mean Kullback-Leibler divergence of the predicted classes from FP32's.")


class SelectionEntry(Record):
    """The choice of a calibration and of the layers in INT8 by measurement."""

    runtime: str = Field(
        description="What ran the candidates: openvino; or torch, of translators onnxruntime, which stand in for plans."
    )
    num_images: int = Field(description="Training images, none of them calibrated with, that candidates ran on.")
    fp32_score_pct: float
    max_drop_points: float = Field(description="The budget, in points of the score.")
    min_relative_score_pct: float = Field(description="The budget, as the least share of FP32's score, in per cent.")
    trials: tuple[Trial, ...] = Field(description="In the order in which they were measured.")
    ranking: tuple[LayerCost, ...] = Field(
        description="Nodes that were measured alone in INT8, the costliest first; groups of others cost less."
    )
    num_ranking_images: int = Field(description="Calibration images that the ranking rests on; 0 for no ranking.")
    out_of_time: bool = Field(description="Whether the time limit ended the search.")
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CalibrationMethod:
    """A way to read a tensor's INT8 range from its histogram."""

    text: str
    """Its effect, after the method's name."""
    has_percentile: bool = False
    """True if the range depends on calibration_percentile."""
    is_smoothing: bool = False
    """True if ranges of channels are balanced first, which changes weights: only in networks of images."""


# By name: `calibration.RANGES` of export has a function for each. Of equally good ones, the first is taken.
CALIBRATION_METHODS = {
    "max": CalibrationMethod(text="keeps the largest magnitude"),
    "percentile": CalibrationMethod(text="clips above calibration_percentile", has_percentile=True),
    "entropy": CalibrationMethod(text="loses the least information"),
    "mse": CalibrationMethod(text="has the least squared error of rounding and clipping"),
    "smoothquant": CalibrationMethod(
        text="is mse after ranges of channels went from activations into weights, behind LayerNormalizations",
        is_smoothing=True,
    ),
}


class CalibrationEntry(Record):
    """The origin of the INT8 scales."""

    method: str
    num_images: int
    split: str
    seconds: float = Field(description="To run the model over the images, or to read the cache.")
    digest: str = Field("", description="Of graph and weights, images, TransformSpec, method and its parameters.")
    ids: tuple[str, ...] = Field((), description="Keys of the images in the split's listing.")
    images_digest: str = Field("", description="Of the images' contents and of what the loader does to them.")
    cached: bool = Field(False, description="Whether the histograms came from the cache.")
    excluded: tuple[str, ...] = Field((), description="Nodes of fp32.onnx kept out of INT8, the costliest first.")
    selection: SelectionEntry | None = Field(None, description="None where nothing was compared.")
    cpu_trials: tuple[CpuTrial, ...] = Field((), description="Ways to write INT8 for CPUs; empty where a GPU chose.")


class PairedComparison(Record):
    """Images on which a precision regresses or improves against FP32, and how certain the difference in score is."""

    num_images: int
    num_regressed: int = Field(description="Images that FP32 gets right and the precision gets wrong, or less right.")
    num_improved: int = Field(description="Images that FP32 gets wrong, or less right, and the precision gets right.")
    delta_points: float = Field(description="Score of the precision minus that of FP32, in percentage points.")
    drop_lower_points: float = Field(
        description="Lower end of the one-sided 95 % interval of the drop: the difference with the sign changed."
    )
    drop_upper_points: float = Field(
        description="Upper end of the one-sided 95 % interval of the drop (Tango, 1998; bootstrap, Efron, 1979, "
        "with Gaffke, 2005): what the gate judges."
    )
    mcnemar_p: float = Field(
        description="Two-sided p-value of no difference: McNemar's on the images that regressed and improved."
    )
    mcnemar_test: Literal["exact binomial", "chi-square", "bootstrap"] = Field(
        description="How it was computed: exactly for fewer than 25 images that differ. By Student's t-test "
        "with std_points where a score is no share of images."
    )
    std_points: float | None = Field(
        None, description="Standard deviation of delta_points by the bootstrap; None for a share of images."
    )

    @classmethod
    def of(cls, num_images: int, num_regressed: int, num_improved: int) -> Self:
        """All that follows from the counts."""
        counts = num_images, num_regressed, num_improved
        p_value, test = mcnemar(num_regressed, num_improved)
        return cls(
            num_images=num_images,
            num_regressed=num_regressed,
            num_improved=num_improved,
            delta_points=100 * (num_improved - num_regressed) / max(num_images, 1),
            drop_lower_points=drop_lower(*counts),
            drop_upper_points=drop_upper(*counts),
            mcnemar_p=p_value,
            mcnemar_test=test,
        )

    def lower_points(self, num_tests: int) -> float:
        """Lower end of the drop's interval where so many are judged at once (Bonferroni)."""
        if self.std_points is None:
            return drop_lower(self.num_images, self.num_regressed, self.num_improved, num_tests=num_tests)
        return -self.delta_points - NormalDist().inv_cdf(1 - SIGNIFICANCE / num_tests) * self.std_points

    def images_needed(self, budget_points: float) -> int | None:
        """Images from which on the interval of the drop lies on one side of a budget; None for no such number."""
        if self.std_points is None:
            return images_needed(self.num_images, self.num_regressed, self.num_improved, budget_points)
        distance = budget_points + self.delta_points
        if not distance:
            return None
        # So many times the images leave 1 / times of the one part, squared, and 1 / times^2 of the other.
        seen = (NormalDist().inv_cdf(1 - SIGNIFICANCE) * self.std_points) ** 2
        unseen = self.unseen_points if distance > 0 else 0.0
        needed = self.num_images * (seen + math.hypot(seen, 2 * distance * unseen)) / (2 * distance**2)
        return math.ceil(needed) if needed <= MAX_IMAGES_NEEDED else None

    @property
    def unseen_points(self) -> float:
        """The part of the upper end, by squares, that is not the deviation seen: images such as none of these."""
        seen = NormalDist().inv_cdf(1 - SIGNIFICANCE) * (self.std_points or 0.0)
        return math.sqrt(max((self.drop_upper_points + self.delta_points) ** 2 - seen**2, 0.0))

    @property
    def counts_text(self) -> str:
        """The images that differ, in words."""
        of_all = f"of {self.num_images:,}"
        if self.std_points is None:
            return f"{self.num_regressed:,} regressed and {self.num_improved:,} improved {of_all}"
        return f"worse on {self.num_regressed:,} and better on {self.num_improved:,} {of_all}"


class ClassLoss(Record):
    """One class that a precision recognizes less often than FP32 does."""

    name: str
    num_images: int = Field(description="Validation images of the class.")
    num_regressed: int = Field(description="Of these, images that FP32 gets right and the precision gets wrong.")
    num_improved: int = Field(description="Of these, images that FP32 gets wrong and the precision gets right.")
    delta_points: float = Field(description="Accuracy on the class minus that of FP32, in percentage points.")
    p_corrected: float = Field(
        description="McNemar's p-value (boxes, masks: Student's), corrected for the number of classes (Holm, 1979)."
    )


class CorruptedRow(Record):
    """Accuracy on the validation images after each was degraded in one way."""

    kind: str = Field(description='"noise", "blur", "jpeg", "brightness" or "contrast".')
    strength: float = Field(
        description="Standard deviation of the noise, in units of 0..1; of the blur in pixels of an image of 224; "
        "quality of JPEG; shift of the brightness, in units of 0..1; factor of the contrast."
    )
    score_pct: float
    comparison: PairedComparison | None = Field(None, description="Against FP32 on the same images; None for FP32.")
    p_corrected: float | None = Field(
        None, description="McNemar's p-value, corrected for the number of corruptions (Holm, 1979); None for FP32."
    )

    @property
    def name(self) -> str:
        """Return text such as "noise 0.08"."""
        return f"{self.kind} {self.strength:g}"


class AccuracyRow(Record):
    """Accuracy of one precision on the validation split, by the runtime that would serve it."""

    precision: Precision
    runtime: str = Field(description='"tensorrt", "openvino", ...; "n/a" when nothing here runs this precision.')
    device: str = ""
    instruction_set: str = Field("", description="Of the CPU, by oneDNN's name; empty on a GPU and in older reports.")
    file: str = ""
    size_bytes: int = 0
    num_images: int = 0
    score_pct: float | None = None
    score_low_pct: float | None = Field(
        None, description="Lower end of the score's one-sided 95 % interval; None for a share of images."
    )
    top5_pct: float | None = None
    score50_pct: float | None = Field(None, description="mAP at an overlap of 0.5; None but for detection.")
    precision_by_recall_pct: tuple[float, ...] = Field(
        (),
        description="At recalls of 0 to 100 % and an overlap of 0.5, the mean over classes; empty but for detection.",
    )
    chrf_pct: float | None = Field(None, description="chrF2 (Popovic, 2015), 0 to 100; None but for translation.")
    distinct_score_pct: float | None = Field(
        None, description="score_pct without near-duplicates of training images; None where the split holds none."
    )
    delta_points: float | None = Field(None, description="score_pct minus that of FP32.")
    agreement_pct: float | None = Field(None, description="Share of images on which the prediction equals FP32's.")
    ece_pct: float | None = Field(None, description="Expected calibration error over 15 bins of confidence, in %.")
    comparison: PairedComparison | None = Field(
        None, description="Against FP32; None for FP32 and what was not measured."
    )
    worse_classes: tuple[ClassLoss, ...] = Field((), description="Significantly worse than FP32, largest loss first.")
    largest_loss: ClassLoss | None = Field(
        None, description="The class that loses most, whether that is significant or not; None where no class loses."
    )
    num_unseen_classes: int = Field(0, description="Classes without a validation image: nothing is known of them.")
    corrupted: tuple[CorruptedRow, ...] = Field((), description="Empty where degraded images were not measured.")
    note: str = ""

    @property
    def largest_corrupted_drop(self) -> tuple[str, float] | None:
        """The kind of degraded images that costs most against FP32, and the points; None where it was not measured."""
        drops = [(row.name, -row.comparison.delta_points) for row in self.corrupted if row.comparison]
        return max(drops, key=lambda drop: drop[1], default=None)


class AccuracyReport(Record):
    """Accuracy of each precision. All rows saw exactly the same images."""

    dataset_digest: str
    split_digest: str
    bundle_digest: str
    task: TaskName = "classification"
    rows: tuple[AccuracyRow, ...]
    signatures: dict[str, str] = Field({}, description="Of BLEU and chrF, by sacrebleu; empty for images.")
    num_near_duplicates: int = Field(0, description="Validation images with a known near-duplicate in training.")
    most_frequent_class: str = Field("", description="The class with most validation images; empty for detection.")
    most_frequent_pct: float = Field(
        description="Score of a model that always answers it, such as its share of the validation images."
    )

    @property
    def score_name(self) -> str:
        """Name of the task's score: top-1, mIoU."""
        return TASKS[self.task].score_name

    @property
    def unit(self) -> str:
        """Name of the task's samples: images, sentences."""
        return TASKS[self.task].unit

    def row(self, precision: str) -> AccuracyRow:
        """The row of a precision."""
        return next(row for row in self.rows if row.precision == precision)

    def measured_on(self, precision: str) -> tuple[str, ...]:
        """The CPU's instruction sets that a precision was measured with, which are all that a verdict counts for."""
        return tuple(row.instruction_set for row in self.rows if row.precision == precision and row.instruction_set)


class Speedup(Record):
    """Throughput of one precision over that of another: the ratio within each turn, over the turns."""

    median: float
    low: float = Field(
        description="One-sided 95 % bound of the median by order statistics; with five turns the lowest ratio."
    )
    high: float = Field(description="The same from above; with five turns the highest ratio.")
    doubt: str = Field("", description="Why the ratio says nothing, and what to do; empty where it can be relied on.")


class BenchmarkRow(Record):
    """Speed of one precision at one batch size, on trtexec's terms. Precisions are measured in turns."""

    precision: Precision
    runtime: str
    batch_size: int
    num_streams: int = Field(1, description="Batches that ran at the same time.")
    with_transfers: bool = Field(
        True, description="Whether latency and throughput count the copies to and from the GPU; CPUs have none."
    )
    num_repeats: int = Field(1, description="Turns behind the values.")
    images_per_s: float = Field(
        description="Images, or sentences, of whole batches over wall time, after warm-up; the median of the turns."
    )
    tokens_per_s: float | None = Field(
        None, description="Tokens of the translations, with their ends, at images_per_s; None but for translation."
    )
    turns_images_per_s: tuple[float, ...] = Field((), description="Of each turn, in order.")
    lowest_images_per_s: float | None = Field(None, description="Of the turns.")
    highest_images_per_s: float | None = None
    over: dict[Precision, Speedup] = Field({}, description="Speed-up over wider precisions measured the same way.")
    others_pct: float | None = Field(
        None, description="Share of the cores' time that other processes took while measuring."
    )
    steal_pct: float | None = Field(
        None, description="Share of the cores' time that the host gave to others (steal) while measuring."
    )
    mean_ms: float | None = Field(None, description="Mean latency of a batch.")
    p50_ms: float = Field(description="Median latency of all batches of all turns; the other percentiles likewise.")
    p90_ms: float
    p95_ms: float | None = None
    p99_ms: float
    num_iterations: int = Field(description="Batches measured, in all turns.")
    power_w: float | None = Field(
        None, description="Mean power of the GPU's board, from NVML's energy counter; None where nothing tells (CPUs)."
    )
    images_per_s_per_w: float | None = Field(None, description="images_per_s over power_w.")
    memory_bytes: int | None = Field(
        None, description="GPU memory of engine, contexts and buffers: used memory after allocating them minus before."
    )
    sm_clock_mhz: int | None = Field(None, description="Clock of the GPU's multiprocessors while measuring.")
    temperature_c: int | None = Field(None, description="Of the GPU while measuring, in degrees Celsius.")

    @property
    def busy(self) -> str:
        """The reason why the machine was too busy for a reliable speed; empty where it was not, or nothing is known."""
        others_pct, steal_pct = self.others_pct or 0.0, self.steal_pct or 0.0
        if others_pct + steal_pct <= _MAX_BUSY_PCT:
            return ""
        took = f"other processes took {others_pct:.0f} % of the cores' time and the host {steal_pct:.0f} % (steal)"
        return f"{took}: validate again on an idle machine"

    @property
    def sure_p50_ms(self) -> float | None:
        """Median latency, or None where the machine was too busy for it."""
        return None if self.busy else self.p50_ms

    @property
    def way(self) -> tuple[int, int, bool]:
        """Batch size, number of streams, and True with the copies."""
        return self.batch_size, self.num_streams, self.with_transfers

    @property
    def is_plain(self) -> bool:
        """True with the copies and one batch at a time: by this precisions, runs and machines are compared by."""
        return self.with_transfers and self.num_streams == 1


class OperatingPoint(Record):
    """A way to run a model: a row of the benchmark, as the latency budget names it."""

    precision: Precision
    batch_size: int
    num_streams: int
    images_per_s: float
    p99_ms: float


class LatencyBudget(Record):
    """The fastest way to run the model whose latency stays within a budget in 99 of 100 batches."""

    budget_ms: float
    doubt: str = Field("", description="Why the speeds say little; empty where they can be relied on.")
    chosen: OperatingPoint | None = Field(
        description="Highest throughput with p99 within the budget, copies included; None where nothing stays within."
    )
    nearest: OperatingPoint | None = Field(
        None, description="The lowest p99, where nothing stays within the budget; None where something does."
    )
    left_out: tuple[Precision, ...] = Field((), description="Measured, but not as accurate as the gate asks for.")


class LengthRow(Record):
    """Latency of single sentences of some lengths."""

    precision: Precision
    min_tokens: int = Field(description="Of the sentence, with its end.")
    max_tokens: int
    num_sentences: int
    p50_ms: float = Field(description="Of all sentences of all turns.")
    p99_ms: float


class BenchmarkReport(Record):
    """Speed of each precision."""

    bundle_digest: str
    rows: tuple[BenchmarkRow, ...] = Field(
        description="One for each precision, batch size, number of streams, and with or without transfers."
    )
    latency_budget: LatencyBudget | None = Field(None, description="None where no budget was given.")
    lengths: tuple[LengthRow, ...] = Field((), description="By precision and length; of sentences alone.")

    @property
    def plain_rows(self) -> tuple[BenchmarkRow, ...]:
        """The rows with transfers and one stream: one for each precision and batch size."""
        return tuple(row for row in self.rows if row.is_plain)

    def row(self, precision: str, batch_size: int) -> BenchmarkRow | None:
        """The row of a precision and batch size with transfers and one stream, or None where it was not measured."""
        rows = (row for row in self.plain_rows if row.precision == precision and row.batch_size == batch_size)
        return next(rows, None)

    def sure_images_per_s(self, row: BenchmarkRow) -> float | None:
        """Throughput of a row, or None where it, or a speed-up that follows from it, is unsure."""
        same = [entry for entry in self.rows if entry.way == row.way]
        ratios = [*row.over.values(), *(entry.over[row.precision] for entry in same if row.precision in entry.over)]
        return None if row.busy or any(ratio.doubt for ratio in ratios) else row.images_per_s

    def speedup(self, precision: str, reference: Precision, batch_size: int) -> Speedup | None:
        """Throughput over another precision's at a batch size, or None where either was not measured."""
        own = self.row(precision, batch_size)
        return own.over.get(reference) if own is not None else None


def measures(accuracy: AccuracyReport, benchmark: BenchmarkReport) -> dict[str, float]:
    """The numbers of a report, named PRECISION_MEASURE as those of a pipeline's run."""
    largest = max((row.batch_size for row in benchmark.rows), default=0)
    found: dict[str, float | None] = {}
    for row in accuracy.rows:
        single, batched = benchmark.row(row.precision, 1), benchmark.row(row.precision, largest)
        found[f"{row.precision}_score_pct"] = row.score_pct
        found[f"{row.precision}_p50_ms"] = single.sure_p50_ms if single else None
        found[f"{row.precision}_images_per_s"] = benchmark.sure_images_per_s(batched) if batched else None
        if row.precision != "fp32":
            found[f"{row.precision}_delta_points"] = row.delta_points
            found[f"{row.precision}_corrupted_drop_points"] = (row.largest_corrupted_drop or (None, None))[1]
            speedup = benchmark.speedup(row.precision, "fp32", largest)
            found[f"{row.precision}_speedup"] = speedup.median if speedup and not speedup.doubt else None
    return {name: value for name, value in found.items() if value is not None}


class GateCheck(Record):
    """One threshold: what was measured, what is allowed, and whether it holds."""

    name: Annotated[str, AfterValidator(lambda name: _RENAMED_CHECKS.get(name, name))]
    measured: float | None = Field(description="None where it was not measured.")
    threshold: float
    verdict: Literal["pass", "fail", "not enough evidence"] = Field(
        description='"not enough evidence": nothing was measured, or too little to tell pass from fail.'
    )
    explanation: str


class Recommendation(Record):
    """The precision to ship, and why."""

    precision: Precision
    reason: str


class Batching(Record):
    """Batching of a served model's requests, and when it refuses them."""

    preferred_batch_size: int | None = Field(description="Images; None where nothing was measured.")
    queue_delay_us: int = Field(ge=0, description="Longest wait of the first request in a queue for others.")
    max_queue_size: int = Field(ge=1, description="Requests that may wait; what is more is refused.")
    num_instances: int = Field(ge=1, description="Batches that run at the same time.")
    reason: str = Field(description="Where the values come from, for a person.")


class StreamRecord(Record):
    """One video or live stream whose frames were labelled."""

    name: str
    codec: str = Field("", description="FFmpeg's name; empty where it was never opened.")
    decoder: Literal["cpu", "cuda"] = Field("cpu", description='"cuda": NVDEC.')
    width: int = Field(0, description="Of the last frame, in pixels.")
    height: int = 0
    seconds: float = Field(0.0, description="Time of the last labelled frame, by the video's own clock.")
    num_decoded: int = Field(0, description="Frames.")
    num_labelled: int = 0
    num_dropped: int = Field(0, description="Frames of a live stream that came faster than they could be labelled.")
    num_corrupt: int = Field(0, description="Packets that could not be decoded, or not in whole.")
    num_lost: int = Field(0, description="Times that a live source broke off.")
    num_events: int = 0
    shares_pct: dict[str, float] = Field(
        {}, description="Share of the labelled frames by class that they show, the ten largest."
    )
    latency_p50_ms: float | None = Field(None, description="From the decoded frame to its label; None of files.")
    latency_p99_ms: float | None = None
    problem: str = Field("", description="Why it was not read to its end; empty where it was.")
