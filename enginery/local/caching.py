"""Which steps of a local run need not be repeated.

A step's key holds what its result depends on, by content: its code, its settings, the data it reads, the hardware and
libraries that matter, and the keys of the steps before it. KFP's own cache does the rest. Paths are not in a key, so
data may move; a changed image, an edited source file or another GPU makes a new key.
"""

import json
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local.cache import LocalCache

from components.common.contracts.digests import digest_file, digest_json
from components.common.contracts.environment import environment
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import (
    UNFINISHED,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    Manifest,
    ReportManifest,
    VerdictManifest,
    load,
    write_atomically,
)
from components.common.contracts.settings import decisive
from components.common.runtimes import RUNTIMES
from components.preprocess.sources import is_uri, kind_of, local_path
from enginery.local.parameters import STEP_CONFIGS, PipelineFile
from enginery.local.state import CACHE

# What a step's result depends on beside its inputs: libraries, and whether GPU and CPU matter. promote is not here: it
# acts on the registry, so it always runs.
_DEPENDS_ON: dict[str, tuple[tuple[str, ...], bool]] = {
    "preprocess": (("numpy", "pillow", "dali"), False),
    "train": (("torch", "torchvision", "timm", "dali"), True),
    "export": (("torchvision", "timm", "dali", "onnx", "numpy", *RUNTIMES), True),
    "validate": (("dali", *RUNTIMES), True),
    "gate": ((), False),
}
_MANIFESTS: dict[str, type[Manifest]] = {
    "preprocess": DatasetManifest,
    "train": CheckpointManifest,
    "export": BundleManifest,
    "validate": ReportManifest,
    "gate": VerdictManifest,
}
# Settings that say where something is, not what it is; their content is in the key instead.
_PATH_SETTINGS = ("data", "class_names_file", "cache")
_BUDGET = ("max_top1_drop_points", "min_relative_top1_pct")  # of the gate's thresholds, what export keeps to
_BEGUN = ".begun"  # ending of a note in a run's cache directory
_CONTINUED = ("preprocess", "train")  # steps that go on with what a killed run has left of them
_HASHED_BYTES = 4 << 30  # larger data sets are known by the names, sizes and times of their files


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """A step whose finished artifact is taken over."""

    task: str
    step: str
    manifest: Manifest
    path: Path
    run_id: str  # of the run that made it
    digest: str  # of its manifest
    entry: Path  # what KFP's cache knows of it


def step_of(task: str) -> str:
    """The step that a KFP task runs: "export-own" is export."""
    return task.split("-")[0]


def step_keys(file: PipelineFile, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The cache key of every cacheable task, in the order in which they run."""
    tasks = file.pipeline.pipeline_spec.root.dag.tasks
    keys: dict[str, str] = {}
    left = [task for task in tasks if step_of(task) in _DEPENDS_ON]
    while left:
        ready = [task for task in left if not set(tasks[task].dependent_tasks) & set(left)]
        for task in ready:
            if any(name not in keys for name in tasks[task].dependent_tasks):
                left.remove(task)  # what is packed in parts has no key, nor has what is made of it
                continue
            upstream = {name: keys[name] for name in tasks[task].dependent_tasks}
            keys[task] = _key(file, step_of(task), arguments, upstream)
            left.remove(task)
    return keys


def enable(file: PipelineFile, keys: Mapping[str, str]) -> None:
    """Put the keys into the pipeline, for this process alone: a compiled file does not hold them."""
    for task, spec in file.pipeline.pipeline_spec.root.dag.tasks.items():
        spec.caching_options.enable_cache = task in keys
        spec.caching_options.cache_key = keys.get(task, "")


def finished_steps(file: PipelineFile, keys: Mapping[str, str], runs: Path) -> list[CachedStep]:
    """The steps that need not run, in the order of `keys`, each made from the artifacts of those before it.

    Two runs that worked at the same time hold two results of one key, and only one goes with what is taken over of the
    steps before. So a step is taken over only if all steps before it are, and if its manifest names their digests.

    Args:
        file: the pipeline.
        keys: from `step_keys`.
        runs: directory of all runs; what each finished is noted in its cache directory.
    """
    tasks = file.pipeline.pipeline_spec.root.dag.tasks
    finished: dict[str, CachedStep] = {}
    for task, key in keys.items():
        before = [name for name in tasks[task].dependent_tasks if name in keys]
        if any(name not in finished for name in before):
            continue
        needed = {finished[name].digest for name in before}
        name = _entry_name(file, task, key)
        notes = sorted(runs.glob(f"*/{CACHE}/{name}.digest"), key=_modified, reverse=True)  # the newest first
        found = (_read_note(note, task, needed, runs) for note in notes)
        if cached := next(filter(None, found), None):
            finished[task] = cached
    return list(finished.values())


def offer(steps: Sequence[CachedStep], run_directory: Path) -> Path:
    """Put what is taken over where KFP looks for it: a cache of this run alone. Returns its directory."""
    root = run_directory / CACHE
    root.mkdir(exist_ok=True)
    for cached in steps:
        write_atomically(root / cached.entry.name, cached.entry.read_bytes())
    return root


def note_begun(file: PipelineFile, keys: Mapping[str, str], arguments: Mapping[str, Any], root: Path) -> None:
    """Note in a run's cache directory what its longest steps work at, for a later run that goes on with it."""
    for task in _continued_tasks(keys):
        note = {"work": _work(file, task, keys, arguments), "machine": _machine_text()}
        write_atomically(root / f"{_entry_name(file, task, keys[task])}{_BEGUN}", json.dumps(note).encode())


def unfinished_outputs(file: PipelineFile, keys: Mapping[str, str], runs: Path) -> list[Path]:
    """Outputs that runs left unfinished of steps that had the same key. One may belong to a run that is going."""
    found: list[Path] = []
    for task in _continued_tasks(keys):
        for note in sorted(runs.glob(f"[!.]*/{CACHE}/{_entry_name(file, task, keys[task])}{_BEGUN}")):
            found += [path.parent for path in note.parent.parent.glob(f"artifacts/*/{task}/*/{UNFINISHED}")]
    return found


def begun_elsewhere(
    file: PipelineFile, keys: Mapping[str, str], arguments: Mapping[str, Any], runs: Path
) -> list[tuple[str, str, str]]:
    """Step, run and machine of the same work that other hardware left unfinished, which does not go on here."""
    found = []
    for task in _continued_tasks(keys):
        work, own = _work(file, task, keys, arguments), f"{_entry_name(file, task, keys[task])}{_BEGUN}"
        for note in sorted(runs.glob(f"[!.]*/{CACHE}/*{_BEGUN}")):
            run = note.parent.parent
            if note.name == own or not any(run.glob(f"artifacts/*/{task}/*/{UNFINISHED}")):
                continue
            with suppress(OSError, ValueError):
                told = json.loads(note.read_text(encoding="utf-8"))
                if told["work"] == work:
                    found.append((step_of(task), run.name, str(told["machine"])))
    return found


def _work(file: PipelineFile, task: str, keys: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """What a task's key stands for, on whatever machine."""
    upstream = {name: keys[name] for name in file.pipeline.pipeline_spec.root.dag.tasks[task].dependent_tasks}
    return _key(file, step_of(task), arguments, upstream, any_machine=True)


def _machine_text() -> str:
    here = environment()
    names = Counter(gpu.name for gpu in here.gpus)
    return ", ".join(f"{num} x {name}" for name, num in names.items()) or f"{here.num_cores} cores of {here.cpu}"


def _continued_tasks(keys: Mapping[str, str]) -> list[str]:
    return [task for task in keys if step_of(task) in _CONTINUED]


def confirm(
    file: PipelineFile, keys: Mapping[str, str], arguments: Mapping[str, Any], step: str, digest: str, root: Path
) -> None:
    """Note that a step has finished, for later runs, if what its key stands for is still the same.

    Data or code that changed while the step ran may or may not be what it saw: then nothing is noted.

    Args:
        file: the pipeline.
        keys: the keys from the beginning of the run.
        arguments: of the run.
        step: the step that finished.
        digest: of its manifest.
        root: cache directory of the run, where KFP writes the step's outputs.
    """
    tasks = file.pipeline.pipeline_spec.root.dag.tasks
    for task in [task for task in keys if step_of(task) == step]:
        upstream = {name: keys[name] for name in tasks[task].dependent_tasks}
        if _key(file, step, arguments, upstream) == keys[task]:
            write_atomically(root / f"{_entry_name(file, task, keys[task])}.digest", digest.encode())


def _entry_name(file: PipelineFile, task: str, key: str) -> str:
    component = file.pipeline.pipeline_spec.root.dag.tasks[task].component_ref.name
    return LocalCache.compute_key(None, component, "", [], {}, custom_cache_key=key)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # its run has just been removed
        return 0.0


def _read_note(note: Path, task: str, needed: set[str], runs: Path) -> CachedStep | None:
    """The finished step that a note tells of; None if it is gone, damaged, edited, or made from something else."""
    entry, step = note.with_suffix(".json"), step_of(task)
    try:
        outputs = LocalCache(str(note.parent)).get(note.stem)
        if outputs is None:  # the run was killed before KFP wrote it, or the artifact is gone
            return None
        (artifact,) = (value for value in outputs.values() if isinstance(value, dsl.Artifact))
        path = Path(artifact.uri)
        loaded = load(path, _MANIFESTS[step])
        if loaded.digest != note.read_text(encoding="utf-8") or not needed <= set(loaded.manifest.inputs.values()):
            return None
        if isinstance(loaded.manifest, BundleManifest) and _may_get_engines(loaded.manifest):
            return None
        load(path, _MANIFESTS[step], verify=(".safetensors", ".onnx", ".plan"))
    except (EngineryError, OSError):
        return None
    run_id = path.relative_to(runs).parts[0] if path.is_relative_to(runs) else str(path)
    return CachedStep(
        task=task, step=step, manifest=loaded.manifest, path=path, run_id=run_id, digest=loaded.digest, entry=entry
    )


def _may_get_engines(bundle: BundleManifest) -> bool:
    """Whether a bundle lacks plans on a machine with a GPU and TensorRT.

    Whatever failed there, such as memory that another process held, is in no key, and a second try may succeed.
    """
    here = environment()
    wanted = bundle.config.get("tensorrt") != "off"
    return bool(bundle.engines_missing and wanted and here.gpus and "tensorrt" in here.versions)


def _key(
    file: PipelineFile,
    step: str,
    arguments: Mapping[str, Any],
    upstream: Mapping[str, str],
    *,
    any_machine: bool = False,
) -> str:
    config = _config(file, step, arguments)
    if "gate" in file.steps:
        thresholds = _config(file, "gate", arguments)
        if step == "validate":
            config["gate"] = thresholds  # its report opens with the gate's verdict
        elif step == "export":
            config["gate"] = {name: thresholds[name] for name in _BUDGET}
    contents = {name: _contents(name, str(config.pop(name))) for name in _PATH_SETTINGS if config.get(name)}
    if step == "export" and arguments.get("model"):
        contents["model"] = fingerprint(Path(str(arguments["model"])))
    contents.pop("cache", None)  # makes the step faster, not different
    libraries, hardware = _DEPENDS_ON[step]
    here = environment()
    machine = {"cpu": here.cpu, "num_cores": here.num_cores, "gpus": [gpu.model_dump() for gpu in here.gpus]}
    return digest_json(
        {
            "step": step,
            "source": source_digest(step),
            "config": config,
            "contents": contents,
            "upstream": dict(upstream),
            "libraries": {name: here.versions.get(name) for name in libraries},
            "machine": machine if hardware and not any_machine else None,
        }
    )


def _config(file: PipelineFile, step: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: arguments[name] for name in file.plain_inputs() if step in file.owners(name)}
    return decisive(STEP_CONFIGS[step].model_validate({**arguments[step], **plain}))


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
    """What stands behind a setting that says where something is."""
    if setting != "data":
        return fingerprint(Path(value))
    if is_uri(value):
        return uuid.uuid4().hex  # nobody knows whether a remote place is still the same: it is read again
    # A table names images beside and below it.
    return fingerprint(local_path(value).parent if kind_of(value) in ("csv", "parquet") else local_path(value))


def fingerprint(path: Path) -> str:
    """What is in a file or folder, wherever it lies.

    The content of every file; of folders and archives beyond 4 GiB names, sizes and modification times, since reading
    a large data set would take longer than what the cache saves.
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
