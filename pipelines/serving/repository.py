"""Writes a model repository for Triton: all of it or none."""

import os
import re
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from components.common.artifacts import MANIFEST, Artifact, RepositoryManifest, seal
from components.common.errors import EngineryError, UserError
from components.common.integrity import file_problem
from components.common.records import STRIPPED, VERSION_COMPATIBLE, Batching, EngineEntry
from components.common.triton.opening import CPU, VERSION, open_repository
from components.common.trust import sign_folder
from pipelines.new_folders import check_new, give_name, to_disk
from pipelines.serving.batching import DEFAULT_MAX_WAIT_S, batching_for
from pipelines.serving.model_config import (
    GPU_PREPROCESS_INSTANCES,
    ModelNames,
    cpu_network_config,
    ensemble_config,
    gpu_network_config,
    labels_config,
    pbtxt,
    preprocess_config,
)
from pipelines.serving.sources import Source

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{,199}")  # the names of folders, with what ModelNames adds
LABELS_FILE = "labels.txt"  # of the network, for Triton's classification extension: a class a line
_CONFIG = "config.pbtxt"
# Python's own path first: not every Triton hands PYTHONPATH on to its models.
_MODEL = '''"""Written by `enginery serve export`."""

import os
import sys

sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
try:
    from components.common.triton.{module} import TritonPythonModel
except ModuleNotFoundError as error:
    raise RuntimeError(
        f"this model needs enginery's own code and libraries, and the server's Python has not all of them ({{error}}): "
        "serve it with enginery's image `serve`, or with `enginery serve`"
    ) from None

__all__ = ["TritonPythonModel"]
'''


class RepositoryConfig(BaseModel):
    """What a model repository is set up with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("", description="Of the ensemble; empty for the registered model's.")
    top_k: int = Field(5, ge=1, description="How many classes are named for each image.")
    max_wait_s: float = Field(
        DEFAULT_MAX_WAIT_S, gt=0, le=60, description="Longest time that a request waits in a queue, in seconds."
    )


def write_repository(
    source: Source, output: Path, config: RepositoryConfig, key: Path | None = None
) -> Artifact[RepositoryManifest]:
    """Write the models beside their final place, check all of it, and only then give it its name.

    The statements of its source lie beside the manifest, and the signature where there is a key to sign with.

    Raises:
        UserError: `output` exists, the names of model or classes can't be Triton's, or a plan has no weights.
    """
    check_new(output, "a model repository")
    name = config.name or source.name
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise UserError(
            f"{name!r} can't be a model's name in Triton: take up to 200 letters, digits, '_', '.' and '-', and not "
            f"{MANIFEST}; give one with --name"
        )
    bundle = source.bundle.manifest
    if source.precision not in bundle.models:
        held = ", ".join(sorted(bundle.models))
        raise UserError(f"the bundle {source.bundle.path} has no {source.precision.upper()} model; it holds {held}")
    if broken := [label for label in bundle.classes if "\n" in label]:
        raise UserError(f"the class {broken[0]!r} has a line break in its name, which a list of labels can't hold")
    if stripped := [entry.file for entry in source.measured_engines if STRIPPED in entry.flags]:
        raise UserError(
            f"the plan {stripped[0]} holds no weights, and nothing in Triton would load those of the ONNX file: build "
            "it again with `enginery engines`, without stripped in export.engine_options"
        )
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        _Writer(source, temporary, name, config).write()
        for file, statement in source.statements.items():
            (temporary / file).write_bytes(statement)
        if key is not None:
            sign_folder(temporary, key)
        repository = open_repository(temporary)
        to_disk(temporary)
        give_name(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there only if something failed
    return Artifact(path=output, manifest=repository.manifest, digest=repository.digest)


def gpu_server_options(repository: RepositoryManifest) -> tuple[str, ...]:
    """Options that tritonserver needs on a GPU, beside the folder.

    A version-compatible plan holds machine code, which Triton runs only where it is told to trust its models.
    """
    if any(VERSION_COMPATIBLE in entry.flags for entry in repository.engines):
        return ("--backend-config=tensorrt,version-compatible=true",)
    return ()


class _Writer:
    """Puts one repository into an empty folder."""

    def __init__(self, source: Source, root: Path, name: str, config: RepositoryConfig) -> None:
        self.source, self.root, self.config = source, root, config
        self.bundle = source.bundle.manifest
        self.names = ModelNames(ensemble=name)
        self.top_k = min(config.top_k, len(self.bundle.classes))
        self.engines = source.measured_engines
        folder = f"{self.names.network}/{VERSION}"
        on_cpus = self.bundle.int8_on_cpus if source.precision == "int8" else ()
        self.cpu_models = tuple(model.model_copy(update={"file": f"{folder}/{model.file}"}) for model in on_cpus)
        self.cpu_model = "" if on_cpus else f"{folder}/{self.bundle.models[source.precision]}"

    def write(self) -> None:
        """All models, and the manifest last."""
        cpu, gpu = self._batching("openvino"), self._batching("tensorrt")
        plans = self._write_network(cpu, gpu)
        self._write_ensemble()
        self._model(self.names.preprocess, "preprocess")
        preprocess = preprocess_config(self.names, self.bundle.shapes, gpu if plans else cpu, self._decoders(plans))
        self._config(self.names.preprocess, preprocess)
        if plans:
            self._config(self.names.preprocess, preprocess_config(self.names, self.bundle.shapes, cpu, 1), variant=CPU)
        self._model(self.names.labels, "labels")
        num_classes = len(self.bundle.classes)
        self._config(self.names.labels, labels_config(self.names, self.bundle.shapes, num_classes, self.top_k))
        seal(
            self.root,
            RepositoryManifest,
            inputs=self.source.digests,
            config=self.config,
            name=self.names.ensemble,
            version=self.source.version,
            precision=self.source.precision,
            classes=self.bundle.classes,
            transform=self.bundle.transform,
            shapes=self.bundle.shapes,
            top_k=self.top_k,
            cpu_model=self.cpu_model,
            cpu_models=self.cpu_models,
            measured_on=self.source.measured_on,
            engines=tuple(self._renamed(entry) for entry in self.engines),
            batching={"cpu": cpu, **({"gpu": gpu} if plans else {})},
        )

    def _batching(self, runtime: str) -> Batching:
        report = self.source.report
        benchmark = report.manifest.benchmark if report is not None else None
        return batching_for(self.source.precision, runtime, benchmark, max_wait_s=self.config.max_wait_s)

    def _decoders(self, plans: dict[str, str]) -> int:
        return GPU_PREPROCESS_INSTANCES if plans else 1

    def _write_network(self, cpu: Batching, gpu: Batching) -> dict[str, str]:
        """The network's files and configurations. Returns its plans by compute capability."""
        shapes, num_classes = self.bundle.shapes, len(self.bundle.classes)
        self._model(self.names.network, "network")
        for file in [model.file for model in self.cpu_models] or [self.cpu_model]:
            self._copy(Path(file).name, self.root / file)
        labels = "".join(f"{label}\n" for label in self.bundle.classes)
        (self.root / self.names.network / LABELS_FILE).write_text(labels, encoding="utf-8")
        plans = {}
        for entry in self.engines:
            self._copy(entry.file, self.root / self._renamed(entry).file)
            plans[entry.compute_capability] = Path(self._renamed(entry).file).name
        on_cpu = cpu_network_config(self.names, shapes, num_classes, cpu, LABELS_FILE)
        if plans:
            on_gpu = gpu_network_config(self.names, shapes, num_classes, gpu, LABELS_FILE, plans)
            self._config(self.names.network, on_gpu)
        self._config(self.names.network, on_cpu, variant=CPU if plans else "")
        return plans

    def _write_ensemble(self) -> None:
        folder = self.root / self.names.ensemble / VERSION
        folder.mkdir(parents=True)
        # Object stores know no empty folders, and Triton wants one for each version.
        (folder / "README").write_text("The ensemble is config.pbtxt, one folder up.\n", encoding="utf-8")
        told = {
            "model": self.source.name,
            "version": self.source.version,
            "precision": self.source.precision,
            **{f"{part}_digest": digest for part, digest in self.source.digests.items()},
        }
        for runtime, variant in (("tensorrt", ""), ("openvino", CPU)) if self.engines else (("openvino", ""),):
            parameters = {**told, "runtime": runtime}
            config = ensemble_config(self.names, self.bundle.shapes, self.top_k, parameters)
            self._config(self.names.ensemble, config, variant=variant)

    def _renamed(self, entry: EngineEntry) -> EngineEntry:
        """Of one file a compute capability, at its place in the repository."""
        file = f"{self.names.network}/{VERSION}/{entry.precision}-{entry.compute_capability}.plan"
        return entry.model_copy(update={"file": file, "layers": None})

    def _model(self, name: str, module: str) -> None:
        folder = self.root / name / VERSION
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL.format(module=module), encoding="utf-8")

    def _config(self, name: str, config: dict[str, object], variant: str = "") -> None:
        folder = self.root / name
        file = folder / "configs" / f"{variant}.pbtxt" if variant else folder / _CONFIG
        file.parent.mkdir(exist_ok=True)
        file.write_text(pbtxt(config), encoding="utf-8")

    def _copy(self, file: str, target: Path) -> None:
        shutil.copyfile(self.source.bundle.file(file), target)
        entry = self.bundle.files[file]  # of the copy, since what it was copied from may be swapped at any time
        if problem := file_problem(target.parent, target.name, entry.size_bytes, entry.digest):
            raise EngineryError(f"{file} of {self.source.bundle.path} was changed while it was copied: {problem}")
