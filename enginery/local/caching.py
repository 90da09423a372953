"""The steps of a local run that need not be repeated.

A step's key holds what its result depends on, by content: its code, its settings, the data it reads, the hardware and
libraries that matter, and the keys of the steps before it. KFP's own cache does the rest. Paths are not in a key, so
data may move; a changed image, an edited source file or another GPU makes a new key.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local.cache import LocalCache

from components.common.contracts.digests import digest_file, digest_json
from components.common.contracts.environment import environment
from components.common.contracts.errors import EngineryError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import (
    PARTIAL_OUTPUT,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    Manifest,
    ReportManifest,
    VerdictManifest,
    load,
    write_atomically,
)
from components.common.contracts.settings import fingerprinted
from components.common.contracts.verdict import SPEED_SETTINGS
from components.common.registry.keys import KEY_VARIABLE
from components.common.runtimes import RUNTIMES
from components.preprocess.sources import is_uri, kind_of, local_path
from enginery.local.parameters import STEP_CONFIGS, PipelineFile, step_of
from enginery.local.state import CACHE

# Of each step its manifest, the libraries that its result depends on beside its inputs, and whether GPU and CPU matter.
# promote is not here: it acts on the registry, so it always runs.
_STEPS: dict[str, tuple[type[Manifest], tuple[str, ...], bool]] = {
    "preprocess": (DatasetManifest, ("numpy", "pillow", "dali"), False),
    "train": (CheckpointManifest, ("torch", "torchvision", "timm", "dali"), True),
    "export": (BundleManifest, ("torchvision", "timm", "dali", "onnx", "numpy", *RUNTIMES), True),
    "validate": (ReportManifest, ("dali", *RUNTIMES), True),
    "gate": (VerdictManifest, (), False),
}
# Settings that say where something is, not what it is; their content is in the key instead.
_PATH_SETTINGS = ("data", "class_names_file", "pretrained", "cache")
_BUDGET = ("max_drop_points", "min_relative_score_pct")  # of the gate's thresholds, what export keeps to
_BEGUN = ".begun"  # ending of a note in a run's cache directory
_RESUMABLE = ("preprocess", "train")  # steps that resume what a killed run has left of them
_HASHED_BYTES = 4 << 30  # larger datasets are known by the names, sizes and times of their files


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """A step whose finished artifact is reused."""

    task: str
    step: str
    manifest: Manifest
    path: Path
    run_id: str  # of the run that made it
    digest: str  # of its manifest
    entry: Path  # its entry in KFP's cache


@dataclass(kw_only=True)
class StepCache:
    """The steps of a run by their keys, and what earlier runs have of them.

    Each run has a cache directory: KFP's cache of that run alone, a note of the digest for each step that finished in
    it, and a note of the work for each long step that began.

    Attributes:
        keys: cache key of every cacheable task, in the order in which they run; empty before `enable`.
    """

    file: PipelineFile
    arguments: Mapping[str, Any]
    runs: Path  # directory of all runs
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def _tasks(self) -> Any:
        return self.file.pipeline.pipeline_spec.root.dag.tasks

    def _before(self, task: str) -> list[str]:
        return list(self._tasks[task].dependent_tasks)

    def _entry(self, task: str) -> str:
        """The name of a task in KFP's cache."""
        component = self._tasks[task].component_ref.name
        return LocalCache.compute_key(None, component, "", [], {}, custom_cache_key=self.keys[task])

    def enable(self, reuse: bool = True) -> None:
        """Make the keys from data, code and machine as they are now, and put them into the pipeline.

        Into this process's alone: a compiled file does not hold them. Without `reuse` there are none.
        """
        graph = {task: self._before(task) for task in self._tasks}
        for task in TopologicalSorter(graph).static_order() if reuse else ():
            if step_of(task) == "gate" and os.environ.get(KEY_VARIABLE):
                continue  # an earlier verdict is unsigned, or signed by another key
            # A dataset packed in parts has no key, nor has anything made of it.
            if step_of(task) in _STEPS and all(name in self.keys for name in self._before(task)):
                self.keys[task] = self._key(task)
        for task, spec in self._tasks.items():
            spec.caching_options.enable_cache = task in self.keys
            spec.caching_options.cache_key = self.keys.get(task, "")

    def finished(self) -> list[CachedStep]:
        """The steps that need not run, in the order of the keys, each made from the artifacts of those before it.

        Two runs that worked at the same time hold two results of one key, and only one goes with what is reused of the
        steps before. So a step is reused only if all steps before it are, and if its manifest names their digests.
        """
        finished: dict[str, CachedStep] = {}
        for task in self.keys:
            if any(name not in finished for name in self._before(task)):
                continue
            needed = {finished[name].digest for name in self._before(task)}
            notes = self.runs.glob(f"*/{CACHE}/{self._entry(task)}.digest")
            for note in sorted(notes, key=_modified, reverse=True):  # the newest first
                if cached := self._read_note(note, task, needed):
                    finished[task] = cached
                    break
        return list(finished.values())

    def _read_note(self, note: Path, task: str, needed: set[str]) -> CachedStep | None:
        """The finished step of a note; None if it is gone, damaged, edited, or made from something else."""
        step = step_of(task)
        manifest = _STEPS[step][0]
        try:
            outputs = LocalCache(str(note.parent)).get(note.stem)
            if outputs is None:  # the run was killed before KFP wrote it, or the artifact is gone
                return None
            (artifact,) = (value for value in outputs.values() if isinstance(value, dsl.Artifact))
            path = Path(artifact.uri)
            loaded = load(path, manifest)
            if loaded.digest != note.read_text(encoding="utf-8") or not needed <= set(loaded.manifest.inputs.values()):
                return None
            if isinstance(loaded.manifest, BundleManifest) and _may_get_engines(loaded.manifest):
                return None
            if isinstance(loaded.manifest, ReportManifest) and self._lacks_speed(loaded.manifest):
                return None
            load(path, manifest, verify=(".safetensors", ".onnx", ".plan"))
        except (EngineryError, OSError):
            return None
        run_id = path.relative_to(self.runs).parts[0] if path.is_relative_to(self.runs) else str(path)
        return CachedStep(
            task=task,
            step=step,
            manifest=loaded.manifest,
            path=path,
            run_id=run_id,
            digest=loaded.digest,
            entry=note.with_suffix(".json"),
        )

    def _lacks_speed(self, report: ReportManifest) -> bool:
        """True if a speed is asked for, and the machine was too busy to measure it: it may be idle now."""
        thresholds = self._config("gate") if "gate" in self.file.steps else {}
        asked = [report.config.get("latency_budget"), *map(thresholds.get, SPEED_SETTINGS)]
        return any(asked) and any(row.busy for row in report.benchmark.rows)

    def confirm(self, step: str, digest: str, root: Path) -> None:
        """Note that a step has finished, for later runs, if what its key stands for is still the same.

        Data or code that changed while the step ran may or may not be what it saw: then nothing is noted.

        Args:
            step: the step that finished.
            digest: of its manifest.
            root: cache directory of the run, where KFP writes the step's outputs.
        """
        for task, key in self.keys.items():
            if step_of(task) == step and self._key(task) == key:
                write_atomically(root / f"{self._entry(task)}.digest", digest.encode())

    def note_begun(self, root: Path) -> None:
        """Note in a run's cache directory what its longest steps work at, for a later run that resumes it."""
        for task in self._resumable():
            write_atomically(root / f"{self._entry(task)}{_BEGUN}", b"")

    def partial_outputs(self) -> list[Path]:
        """Partial outputs of steps that had the same key. One may belong to a run that is going."""
        found: list[Path] = []
        for task in self._resumable():
            for note in sorted(self.runs.glob(f"[!.]*/{CACHE}/{self._entry(task)}{_BEGUN}")):
                found += [path.parent for path in note.parent.parent.glob(f"artifacts/*/{task}/*/{PARTIAL_OUTPUT}")]
        return found

    def _resumable(self) -> list[str]:
        return [task for task in self.keys if step_of(task) in _RESUMABLE]

    def _key(self, task: str) -> str:
        """The key of a task as things are now."""
        step = step_of(task)
        config = self._config(step)
        if "gate" in self.file.steps:
            thresholds = self._config("gate")
            if step == "validate":
                config["gate"] = thresholds  # its report opens with the gate's verdict
            elif step == "export":
                config["gate"] = {name: thresholds[name] for name in _BUDGET}
        contents = {name: _contents(name, str(config.pop(name))) for name in _PATH_SETTINGS if config.get(name)}
        contents.pop("cache", None)  # makes the step faster, not different
        _, libraries, hardware = _STEPS[step]
        here = environment()
        machine = {
            "cpu": here.cpu,  # which is no more than "AMD EPYC" of many a virtual one
            "instruction_set": instruction_set(),
            "num_cores": here.num_cores,
            "gpus": [gpu.model_dump() for gpu in here.gpus],
        }
        return digest_json(
            {
                "step": step,
                "source": source_digest(step),
                "config": config,
                "inputs": self._inputs(task),
                "contents": contents,
                "upstream": {name: self.keys[name] for name in self._before(task)},
                "libraries": {name: here.versions.get(name) for name in libraries},
                "machine": machine if hardware else None,
            }
        )

    def _inputs(self, task: str) -> dict[str, str]:
        """Constants of the pipeline, such as the task of a dataset, and its inputs that are no setting of the step."""
        found = {}
        for name, value in sorted(self._tasks[task].inputs.parameters.items()):
            source = value.component_input_parameter
            if value.WhichOneof("kind") == "runtime_value":
                found[name] = value.runtime_value.constant.SerializeToString(deterministic=True).hex()
            elif source in self.file.plain_inputs() and step_of(task) not in self.file.owners(source):
                given = self.arguments[source]
                found[name] = _contents(name, given) if given and name in ("model", *_PATH_SETTINGS) else repr(given)
        return found

    def _config(self, step: str) -> dict[str, Any]:
        plain = {name: self.arguments[name] for name in self.file.plain_inputs() if step in self.file.owners(name)}
        return fingerprinted(STEP_CONFIGS[step].model_validate({**self.arguments[step], **plain}))


def offer(steps: Sequence[CachedStep], run_directory: Path) -> Path:
    """Put what is reused where KFP looks for it: a cache of this run alone. Returns its directory."""
    root = run_directory / CACHE
    root.mkdir(exist_ok=True)
    for cached in steps:
        write_atomically(root / cached.entry.name, cached.entry.read_bytes())
    return root


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # its run has just been removed
        return 0.0


def _may_get_engines(bundle: BundleManifest) -> bool:
    """True if a bundle lacks plans on a machine with a GPU and TensorRT.

    Whatever failed there, such as memory that another process held, is in no key, and a second try may succeed.
    """
    here = environment()
    wanted = bundle.config.get("tensorrt") != "off"
    return bool(bundle.engines_missing and wanted and here.gpus and "tensorrt" in here.versions)


def source_digest(step: str) -> str:
    """Digest of the code a step runs: its package and what all steps share."""
    root = Path(__file__).resolve().parents[2] / "components"
    files = sorted(
        path
        for folder in ("common", step)
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts  # templates are code, too
    )
    return digest_json({file.relative_to(root).as_posix(): digest_file(file) for file in files})


def _contents(setting: str, value: str) -> str:
    """The content behind a setting that says where something is."""
    if setting == "pretrained" and not local_path(value).exists():
        return value  # a URI, or published weights: training from them again takes hours
    if setting != "data":
        return fingerprint(Path(value))
    if is_uri(value):
        return uuid.uuid4().hex  # whether a remote folder is still the same is unknown: it is read again
    # A table names images beside and below it.
    return fingerprint(local_path(value).parent if kind_of(value).is_table else local_path(value))


def fingerprint(path: Path) -> str:
    """Digest of what is in a file or folder, wherever it lies.

    The content of every file; of folders and archives beyond 4 GiB names, sizes and modification times, since reading
    a large dataset would take longer than what the cache saves.
    """
    if not path.exists():
        return "missing"  # the step says so in its own words
    if path.is_file():
        stat = path.stat()
        return digest_file(path) if stat.st_size <= _HASHED_BYTES else digest_json([stat.st_size, stat.st_mtime_ns])
    files = sorted(_files_below(path))
    stats = [file.stat() for file in files]
    # File names need not be UTF-8; escaped they can be written as JSON.
    names = [os.fsencode(file.relative_to(path)).decode(errors="backslashreplace") for file in files]
    if sum(stat.st_size for stat in stats) <= _HASHED_BYTES:
        return digest_json([[name, _content(file)] for name, file in zip(names, files, strict=True)])
    return digest_json([[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(names, stats, strict=True)])


def _content(file: Path) -> str:
    if file.is_dir():
        return "empty folder"
    try:
        return digest_file(file)
    except OSError as error:
        return f"unreadable: {error.strerror}"  # preprocess lists it as rejected


def _files_below(root: Path) -> list[Path]:
    """Files and empty folders, through links too, as preprocess sees them; hidden ones left out."""
    found = []
    seen = set()  # a link to a folder above itself would never end
    for directory, subdirectories, files in os.walk(root, followlinks=True):
        real = os.path.realpath(directory)
        visible = [name for name in files if not name.startswith(".")]
        subdirectories[:] = [] if real in seen else [name for name in subdirectories if not name.startswith(".")]
        seen.add(real)
        found += [path for name in visible if (path := Path(directory, name)).is_file()]
        if not visible and not subdirectories:
            found.append(Path(directory))  # an empty class folder is a class
    return found
