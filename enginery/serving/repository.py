"""Write a model repository for Triton: how requests form batches, the config.pbtxt files, and all of it or none."""

import functools
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import Field

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import MANIFEST, Artifact, RepositoryManifest, file_problem, seal
from components.common.contracts.records import (
    STRIPPED,
    VERSION_COMPATIBLE,
    Batching,
    BenchmarkReport,
    BenchmarkRow,
    EngineEntry,
    Precision,
    Record,
)
from components.common.contracts.transforms import ShapeSpec
from components.common.data.baseline import IMAGE_STATISTICS, baseline_file
from components.common.registry.trust import sign_folder
from components.common.runtimes import RUNTIMES
from components.common.tasks import TASKS, TaskName
from components.common.tasks.translation.runners import BATCH_SIZE, ENCODER
from components.serve.repository_check import (
    ANSWER_TENSOR,
    CPU,
    SIZES_TENSOR,
    STATISTICS_TENSOR,
    TEXT_TENSOR,
    TRANSLATION_TENSOR,
    VERSION,
    open_repository,
)
from components.serve.shadow import KEYS
from enginery.new_folders import check_new, new_folder
from enginery.serving.sources import ModelSource

UNMEASURED_QUEUE_SIZE = 128
LARGEST_QUEUE_SIZE = 1024  # what waits is in memory
DEFAULT_MAX_WAIT_S = 2.0
_GOOD_SHARE = 0.95  # of the highest throughput: a larger batch for the rest only makes everybody wait longer


def batching_for(
    precision: Precision,
    runtime: str,
    benchmark: BenchmarkReport | None,
    *,
    max_wait_s: float = DEFAULT_MAX_WAIT_S,
    unit: str = "images",
) -> Batching:
    """Batch size, queue delay and the bounds of the queue.

    In a busy server a request waits for others (the queue delay), then for the batch that runs, then for its own. So
    with a latency budget the preferred batch is the fastest measured one of which p99 fits twice into the budget, and
    the delay at most what is then left. Without a budget it is the smallest one with 95 % of the highest throughput.
    The delay is never longer than a single image takes (p50), so that a request that comes alone takes at most twice
    its time. On a CPU, and where nothing was measured, nobody waits for others, and batches are what has come
    meanwhile: a CPU's batch takes long enough for the next one to gather, and Triton makes batches of the preferred
    size only where there is no delay; other sizes cost OpenVINO more.

    As many requests may wait as the model serves in `max_wait_s` at the measured speed, between 4 batches and 1,024:
    what comes on top is refused at once.

    Args:
        precision: what is served.
        runtime: name of what serves it; rows of others tell nothing about it.
        benchmark: the report on the bundle; None for a bundle without one.
        max_wait_s: longest time in the queue.
        unit: of the speed in the reason: images or sentences.
    """
    rows = [
        row
        for row in (benchmark.rows if benchmark is not None else ())
        if row.precision == precision
        and row.runtime == runtime
        and row.with_transfers
        # The Python backend runs one batch at a time.
        and (row.num_streams == 1 or RUNTIMES[runtime].serves_concurrently)
    ]
    if not rows:
        return Batching(
            preferred_batch_size=None,
            queue_delay_us=0,
            max_queue_size=UNMEASURED_QUEUE_SIZE,
            num_instances=1,
            reason=f"no speed of {precision.upper()} by {runtime} was measured: no request waits for others",
        )
    budget_ms = benchmark.latency_budget.budget_ms if benchmark and benchmark.latency_budget else None
    row, why = _operating_point(rows, budget_ms)
    single = min(rows, key=lambda other: (other.num_streams, other.batch_size))
    delay_ms = single.p50_ms / single.batch_size
    if budget_ms is not None:
        delay_ms = max(0.0, min(delay_ms, budget_ms - 2 * row.p99_ms))
    waits = row.batch_size > 1 and RUNTIMES[runtime].serves_concurrently
    served = math.ceil(row.images_per_s * max_wait_s)
    return Batching(
        preferred_batch_size=row.batch_size,
        queue_delay_us=round(1e3 * delay_ms) if waits else 0,
        max_queue_size=min(LARGEST_QUEUE_SIZE, max(4 * row.batch_size, served)),
        num_instances=row.num_streams,
        reason=f"{why}: batch {row.batch_size}, {row.images_per_s:,.0f} {unit}/s (p99 {row.p99_ms:,.2f} ms)"
        + (f", unsure: {row.busy}" if row.busy else ""),
    )


def _operating_point(rows: Sequence[BenchmarkRow], budget_ms: float | None) -> tuple[BenchmarkRow, str]:
    """The row that the server is set up for, and why."""
    if budget_ms is None:
        enough = _GOOD_SHARE * max(row.images_per_s for row in rows)
        good = [row for row in rows if row.images_per_s >= enough]
        return min(good, key=lambda row: (row.num_streams * row.batch_size, -row.images_per_s)), "no latency budget"
    inside = [row for row in rows if 2 * row.p99_ms <= budget_ms]
    if inside:
        return max(inside, key=lambda row: (row.images_per_s, -row.p99_ms)), f"within {budget_ms:g} ms"
    nearest = min(rows, key=lambda row: row.p99_ms)
    return nearest, f"two batches take longer than the budget of {budget_ms:g} ms whatever their size"


PARAMETER = "max_pending_requests"  # as components/serve/admission_control.py reads it, which needs the server's Python

GPU_PREPROCESS_INSTANCES = 4  # decoders beside a GPU; more cores carry more


@dataclass(frozen=True, kw_only=True)
class ModelNames:
    """The models of a repository."""

    ensemble: str

    @property
    def preprocess(self) -> str:
        """Encoded image to the network's input."""
        return f"{self.ensemble}_preprocess"

    @property
    def network(self) -> str:
        """Input to logits."""
        return f"{self.ensemble}_model"

    @property
    def labels(self) -> str:
        """Logits to names and probabilities."""
        return f"{self.ensemble}_labels"


Kind = Literal["ensemble", "preprocess", "cpu", "gpu", "labels"]  # of a model; cpu and gpu are the network
_TEMPLATES = Environment(  # noqa: S701  # no HTML: `text` quotes
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["text"] = functools.partial(json.dumps, ensure_ascii=False)


def model_config(
    kind: Kind,
    names: ModelNames,
    shapes: ShapeSpec,
    *,
    output_size: Sequence[int],
    top_k: int,
    batching: Batching,
    task: TaskName = "classification",
    counted: Sequence[str] = (),
    instances: int = 1,
    plans: Mapping[str, str] = MappingProxyType({}),
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The config.pbtxt of a model.

    Args:
        kind: of the model: the ensemble, from encoded images to labels and probabilities; decoding by DALI in the
            Python backend, with the same bounds as the network behind it; the network by OpenVINO in the Python backend
            or by TensorRT; the names of classes.
        names: of the models.
        shapes: of the network.
        output_size: of the network, for one image: the number of classes of a classifier.
        top_k: classes for each image.
        batching: of the network.
        task: what it is for: others than classification answer in JSON.
        counted: tensors that the last model counts or hands on besides the network's output: image statistics,
            sizes of images, numbers of samples, and images.
        instances: of the model.
        plans: file in the network's version folder by compute capability, such as "9.0".
        parameters: of the ensemble, which tell a client what is served.
    """
    image = ("IMAGE", "TYPE_STRING", [1])
    pixels = (shapes.input_name, "TYPE_FP32", list(shapes.input_shape(1)[1:]))
    logits = (shapes.output_name, "TYPE_FP32", list(output_size))
    answers = [(ANSWER_TENSOR, "TYPE_STRING", [1])]
    if TASKS[task].classifies:
        answers = [("LABELS", "TYPE_STRING", [top_k]), ("PROBABILITIES", "TYPE_FP32", [top_k])]
    extra = [entry for entry in (*_COUNTED, image) if entry[0] in counted]
    made = [entry for entry in extra if entry is not image]
    ends: dict[Kind, tuple[str, list[Any], list[Any]]] = {
        "ensemble": (names.ensemble, [image], answers),
        "preprocess": (names.preprocess, [image], [pixels, *made]),
        "cpu": (names.network, [pixels], [logits]),
        "gpu": (names.network, [pixels], [logits]),
        "labels": (names.labels, [logits, *extra], answers),
    }
    own = {entry[0]: entry[0] for entry in extra}
    steps = {
        names.preprocess: {
            "input_map": {"IMAGE": "IMAGE"},
            "output_map": {shapes.input_name: "preprocessed"} | {entry[0]: entry[0] for entry in made},
        },
        names.network: {"input_map": {shapes.input_name: "preprocessed"}, "output_map": {shapes.output_name: "scores"}},
        names.labels: {
            "input_map": {shapes.output_name: "scores"} | own,
            "output_map": {entry[0]: entry[0] for entry in answers},
        },
    }
    if kind in ("preprocess", "cpu"):  # our own models check it: see components/serve/admission_control.py
        parameters = {PARAMETER: str(batching.max_queue_size)}
    # Batches that get a CUDA graph: powers of two, and the preferred one.
    largest = batching.preferred_batch_size or shapes.opt_batch
    captured = {2**power for power in range(10)} | {largest}
    sizes = sorted(size for size in captured if shapes.min_batch <= size <= min(largest, shapes.max_batch))
    name, inputs, outputs = ends[kind]
    return _TEMPLATES.get_template("config.pbtxt.j2").render(
        kind=kind,
        name=name,
        version=VERSION,
        shapes=shapes,
        inputs=inputs,
        outputs=outputs,
        steps=steps,
        pixels=pixels,
        batching=batching,
        instances=instances,
        plans=plans,
        graphs=[(below + 1, size) for below, size in zip((0, *sizes), sizes, strict=False)],
        labels_file=LABELS_FILE if TASKS[task].classifies else "",
        parameters=parameters,
    )


_COUNTED = (
    (STATISTICS_TENSOR, "TYPE_FP32", [len(IMAGE_STATISTICS)]),
    (SIZES_TENSOR, "TYPE_INT64", [2]),
    (KEYS, "TYPE_INT64", [1]),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{,199}")  # the names of folders, with what ModelNames adds
LABELS_FILE = "labels.txt"  # of the network, for Triton's classification extension: a class a line
_CONFIG = "config.pbtxt"
# Python's own path first: not every Triton hands PYTHONPATH on to its models.
_MODEL = '''"""Written by `enginery serve export`."""

import os
import sys

sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
try:
    from components.serve.{module} import TritonPythonModel
except ModuleNotFoundError as error:
    raise RuntimeError(
        f"this model needs enginery's own code and libraries, and the server's Python has not all of them ({{error}}): "
        "serve it with enginery's image `serve`, or with `enginery serve`"
    ) from None

__all__ = ["TritonPythonModel"]
'''


class RepositoryConfig(Record):
    """Settings of a model repository."""

    name: str = Field("", description="Of the ensemble; empty for the registered model's.")
    top_k: int = Field(5, ge=1, description="How many classes are named for each image.")
    max_wait_s: float = Field(
        DEFAULT_MAX_WAIT_S, gt=0, le=60, description="Longest time that a request waits in a queue, in seconds."
    )
    keep_examples: bool = Field(
        False, description="Whether the server may keep small copies of images, for the page of `enginery drift`."
    )
    shadow_share: float = Field(
        0.0, ge=0, le=1, description="Share of the images that `enginery shadow` may see; 0 for none, whoever asks."
    )


# Settings that only classifiers have a use for, and what an error calls them.
_OF_CLASSIFIERS = {"top_k": "--top-k", "keep_examples": "keeping examples", "shadow_share": "--shadow-share"}


def write_repository(
    source: ModelSource, output: Path, config: RepositoryConfig, key: Path | None = None
) -> Artifact[RepositoryManifest]:
    """Write the models beside their final place, check all of it, and only then give it its name.

    The statements of its source lie beside the manifest, and the signature where there is a key to sign with.

    Raises:
        UserError: `output` exists, the names of model or classes can't be Triton's, a plan has no weights, or a setting
            is of classifiers alone.
    """
    check_new(output, "a model repository")
    name = config.name or source.name
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise UserError(
            f"{name!r} can't be a model's name in Triton: take up to 200 letters, digits, '_', '.' and '-', and not "
            f"{MANIFEST}; give one with --name",
            code="invalid-model-name",
            setting="name",
        )
    bundle = source.bundle.manifest
    if source.precision not in bundle.models:
        held = ", ".join(sorted(bundle.models))
        message = f"the bundle {source.bundle.path} has no {source.precision.upper()} model; it holds {held}"
        raise UserError(message, code="no-such-precision", setting="precision")
    if broken := [label for label in bundle.classes if "\n" in label]:
        message = (
            f"the class {broken[0]!r} has a line break in its name, which a list of labels can't hold; rename it in "
            "the data, and train again"
        )
        raise UserError(message, code="invalid-class-name")
    if stripped := [entry.file for entry in source.measured_engines if STRIPPED in entry.flags]:
        raise UserError(
            f"the plan {stripped[0]} holds no weights, and nothing in Triton would load those of the ONNX file: build "
            "it again with `enginery engines`, without stripped in export.engine_options",
            code="stripped-plan",
            setting="export.engine_options",
        )
    unused = [name for name in _OF_CLASSIFIERS if getattr(config, name) != RepositoryConfig.model_fields[name].default]
    if unused and not TASKS[bundle.task].classifies:
        raise UserError(
            f"{bundle.architecture} is of {bundle.task}, and {_OF_CLASSIFIERS[unused[0]]} is for classifiers alone; "
            "leave that option out",
            code="other-task",
            setting=unused[0],
        )
    with new_folder(output, "a model repository") as temporary:
        (_TextWriter if bundle.text is not None else _ImageWriter)(source, temporary, name, config).write()
        for file, statement in source.statements.items():
            (temporary / file).write_bytes(statement)
        if key is not None:
            sign_folder(temporary, key)
        repository = open_repository(temporary)
    return Artifact(path=output, manifest=repository.manifest, digest=repository.digest)


def gpu_server_options(repository: RepositoryManifest) -> tuple[str, ...]:
    """Options that tritonserver needs on a GPU, beside the folder.

    A version-compatible plan holds machine code, which Triton runs only where it is told to trust its models.
    """
    if any(VERSION_COMPATIBLE in entry.flags for entry in repository.engines):
        return ("--backend-config=tensorrt,version-compatible=true",)
    return ()


def _output_size(source: ModelSource) -> tuple[int, ...]:
    """Size of the network's output for one image, as its FP32 file says; of a classifier the number of classes."""
    bundle = source.bundle.manifest
    if TASKS[bundle.task].classifies:
        return (len(bundle.classes),)
    import onnx

    file = source.bundle.file(bundle.models["fp32"])
    (output,) = onnx.load(file, load_external_data=False).graph.output
    return tuple(size.dim_value for size in output.type.tensor_type.shape.dim[1:])


class _AnyWriter:
    """Puts one repository into an empty folder."""

    def __init__(self, source: ModelSource, root: Path, name: str, config: RepositoryConfig) -> None:
        self.source, self.root, self.config = source, root, config
        self.bundle = source.bundle.manifest
        self.names = ModelNames(ensemble=name)
        folder = f"{self.names.ensemble if self.bundle.text is not None else self.names.network}/{VERSION}"
        on_cpus = self.bundle.cpu_models if source.precision == "int8" else ()
        self.cpu_models = tuple(model.model_copy(update={"file": f"{folder}/{model.file}"}) for model in on_cpus)
        self.cpu_model = "" if on_cpus else f"{folder}/{self.bundle.models[source.precision]}"

    def _described(self) -> dict[str, str]:
        """Parameters of the model that takes requests."""
        return {
            "model": self.source.name,
            "version": self.source.version,
            "precision": self.source.precision,
            **({} if TASKS[self.bundle.task].classifies else {"task": self.bundle.task}),
            **{f"{part}_digest": digest for part, digest in self.source.digests.items()},
        }

    def _batching(self, runtime: str) -> Batching:
        report = self.source.report
        benchmark = report.manifest.benchmark if report is not None else None
        unit = TASKS[self.bundle.task].unit
        return batching_for(self.source.precision, runtime, benchmark, max_wait_s=self.config.max_wait_s, unit=unit)

    def _model(self, name: str, module: str) -> None:
        folder = self.root / name / VERSION
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL.format(module=module), encoding="utf-8")

    def _copy(self, artifact: Artifact[Any], file: str, target: Path) -> None:
        shutil.copyfile(artifact.file(file), target)
        entry = artifact.manifest.files[file]  # of the copy, since what it was copied from may be swapped at any time
        if problem := file_problem(target.parent, target.name, entry.size_bytes, entry.digest):
            raise EngineryError(
                f"{file} of {artifact.path} was changed while it was copied: {problem}", code="changed-file"
            )

    def _seal(self, **fields: Any) -> None:
        seal(
            self.root,
            RepositoryManifest,
            inputs=self.source.digests,
            config=self.config,
            name=self.names.ensemble,
            version=self.source.version,
            precision=self.source.precision,
            **{name: getattr(self.bundle, name) for name in ("task", "classes", "text", "transform", "shapes")},
            cpu_model=self.cpu_model,
            cpu_models=self.cpu_models,
            measured_on=self.source.measured_on,
            **fields,
        )


class _TextWriter(_AnyWriter):
    """One model, which translates."""

    def write(self) -> None:
        """The model, and the manifest last."""
        text, batching, name = self.bundle.text_spec, self._batching("openvino"), self.names.ensemble
        self._model(name, "translation")
        for file in [model.file for model in self.cpu_models] or [self.cpu_model]:
            for each in (Path(file), Path(file).with_stem(ENCODER.format(Path(file).stem))):
                self._copy(self.source.bundle, each.name, self.root / each)
        self._copy(self.source.bundle, text.vocabulary, self.root / text.vocabulary)
        config = _TEMPLATES.get_template("translator.pbtxt.j2").render(
            name=name,
            version=VERSION,
            max_batch=BATCH_SIZE,
            source=TEXT_TENSOR,
            target=TRANSLATION_TENSOR,
            parameters={**self._described(), "runtime": "openvino", PARAMETER: str(batching.max_queue_size)},
        )
        (self.root / name / _CONFIG).write_text(config, encoding="utf-8")
        self._seal(top_k=1, engines=(), batching={"cpu": batching})


class _ImageWriter(_AnyWriter):
    """An ensemble that takes images."""

    def __init__(self, source: ModelSource, root: Path, name: str, config: RepositoryConfig) -> None:
        super().__init__(source, root, name, config)
        self.top_k = min(config.top_k, len(self.bundle.classes))
        self.engines = source.measured_engines
        baseline, report = baseline_file(source.precision), source.report
        self.baseline = baseline if report is not None and baseline in report.manifest.files else ""  # of older ones
        self.counted = (STATISTICS_TENSOR, *(["IMAGE"] if config.keep_examples else [])) if self.baseline else ()
        self.counted += (KEYS,) if config.shadow_share else ()
        self.counted += (SIZES_TENSOR,) if not TASKS[self.bundle.task].classifies else ()
        self.output_size = _output_size(source)

    def write(self) -> None:
        """All models, and the manifest last."""
        cpu, gpu = self._batching("openvino"), self._batching("tensorrt")
        plans = self._write_network(cpu, gpu)
        if self.baseline and self.source.report is not None:
            self._copy(self.source.report, self.baseline, self.root / self.baseline)
        folder = self.root / self.names.ensemble / VERSION
        folder.mkdir(parents=True)
        # Object stores know no empty folders, and Triton wants one for each version.
        (folder / "README").write_text("The ensemble is config.pbtxt, one folder up.\n", encoding="utf-8")
        for runtime, variant in (("tensorrt", ""), ("openvino", CPU)) if self.engines else (("openvino", ""),):
            parameters = {**self._described(), "runtime": runtime}
            self._config("ensemble", self.names.ensemble, cpu, variant=variant, parameters=parameters)
        self._model(self.names.preprocess, "preprocess")
        batching, instances = (gpu, GPU_PREPROCESS_INSTANCES) if plans else (cpu, 1)
        self._config("preprocess", self.names.preprocess, batching, instances=instances)
        if plans:
            self._config("preprocess", self.names.preprocess, cpu, variant=CPU)
        self._model(self.names.labels, "labels" if TASKS[self.bundle.task].classifies else "answers")
        self._config("labels", self.names.labels, cpu)
        self._seal(
            top_k=self.top_k,
            engines=tuple(self._renamed(entry) for entry in self.engines),
            batching={"cpu": cpu, **({"gpu": gpu} if plans else {})},
        )

    def _write_network(self, cpu: Batching, gpu: Batching) -> dict[str, str]:
        """The network's files and configurations. Returns its plans by compute capability."""
        self._model(self.names.network, "network")
        for file in [model.file for model in self.cpu_models] or [self.cpu_model]:
            self._copy(self.source.bundle, Path(file).name, self.root / file)
        labels = "".join(f"{label}\n" for label in self.bundle.classes)
        (self.root / self.names.network / LABELS_FILE).write_text(labels, encoding="utf-8")
        plans = {}
        for entry in self.engines:
            self._copy(self.source.bundle, entry.file, self.root / self._renamed(entry).file)
            plans[entry.compute_capability] = Path(self._renamed(entry).file).name
        if plans:
            self._config("gpu", self.names.network, gpu, instances=gpu.num_instances, plans=plans)
        self._config("cpu", self.names.network, cpu, variant=CPU if plans else "")
        return plans

    def _renamed(self, entry: EngineEntry) -> EngineEntry:
        """Entries of the plans, one for each compute capability, with their paths in the repository."""
        file = f"{self.names.network}/{VERSION}/{entry.precision}-{entry.compute_capability}.plan"
        return entry.model_copy(update={"file": file, "layers": None})

    def _config(self, kind: Kind, name: str, batching: Batching, *, variant: str = "", **options: Any) -> None:
        folder, bundle = self.root / name, self.bundle
        file = folder / "configs" / f"{variant}.pbtxt" if variant else folder / _CONFIG
        file.parent.mkdir(exist_ok=True)
        sizes = {"output_size": self.output_size, "top_k": self.top_k, "task": bundle.task}
        own = {**sizes, "batching": batching, "counted": self.counted, **options}
        file.write_text(model_config(kind, self.names, bundle.image_shapes, **own), encoding="utf-8")
