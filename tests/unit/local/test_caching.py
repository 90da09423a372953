"""The keys that decide whether a finished step is reused."""

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import dsl
from kfp.local.cache import LocalCache

from components.common.contracts import environment as machine
from components.common.contracts.environment import Gpu
from components.common.contracts.manifests import PARTIAL_OUTPUT, Artifact, DatasetManifest
from components.common.registry.keys import KEY_VARIABLE
from enginery.local import caching
from enginery.local.caching import StepCache, fingerprint, offer, source_digest
from enginery.local.parameters import PipelineFile, load_pipeline, resolve_arguments
from tests.unit.measurements import benchmark_row
from tests.unit.registered import ROOT, reseal

STEPS = ["preprocess", "train", "export", "validate", "gate"]
H200 = Gpu(name="NVIDIA H200", memory_bytes=150 << 30, driver="580.95.05")


@pytest.fixture
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name in ("a", "b"):
        (root / name).mkdir()
        for index in range(3):
            (root / name / f"{index}.jpg").write_bytes(f"{name}{index}".encode())
    return root


@pytest.fixture(scope="module")
def file() -> PipelineFile:
    return load_pipeline(ROOT / "pipelines/resnet50.py")


Cached = Callable[..., StepCache]


@pytest.fixture
def cached(file: PipelineFile, data: Path, tmp_path: Path) -> Cached:
    """`cached(*assignments, **flags)`: the cache of a run as data, code and machine are now."""

    def made(*assignments: str, file: PipelineFile = file, **flags: str) -> StepCache:
        flags = {"data": str(data), **flags}
        arguments = resolve_arguments(file, config_file=None, flags=flags, assignments=assignments)
        cache = StepCache(file=file, arguments=arguments, runs=tmp_path / "runs")
        cache.enable()
        return cache

    return made


def changed(before: StepCache, after: StepCache) -> list[str]:
    return [step for step in STEPS if before.keys[step] != after.keys[step]]


def test_promote_has_no_key_and_the_same_arguments_have_the_same_keys(cached: Cached, file: PipelineFile) -> None:
    cache = cached()
    assert list(cache.keys) == STEPS
    assert cached().keys == cache.keys
    options = {task: spec.caching_options for task, spec in file.pipeline.pipeline_spec.root.dag.tasks.items()}
    assert [task for task, option in options.items() if not option.enable_cache] == ["promote"]
    assert {step: options[step].cache_key for step in STEPS} == cache.keys


def test_a_gate_that_is_to_sign_runs_again(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "enginery.key")
    assert list(cached().keys) == STEPS[:-1]


@pytest.mark.parametrize(
    ("assignment", "first"),
    [
        ("preprocess.val_fraction=0.3", "preprocess"),
        ("train.weight_decay=0.1", "train"),
        ("export.max_batch=64", "export"),
        ("validate.batch_size=8", "validate"),
        ("gate.max_drop_points=1", "export"),  # the budget of INT8
        ("gate.min_score_pct=1", "validate"),  # whose report opens with the verdict
        ("promote.alias=other", None),
        ("preprocess.num_workers=3", None),
    ],
)
def test_a_setting_repeats_its_step_and_what_follows(cached: Cached, assignment: str, first: str | None) -> None:
    assert changed(cached(), cached(assignment)) == (STEPS[STEPS.index(first) :] if first else [])


def test_the_same_data_labelled_for_another_task_is_packed_again(cached: Cached) -> None:
    files = [load_pipeline(ROOT / f"pipelines/{name}.py") for name in ("resnet50", "detection", "segmentation")]
    assert len({cached(file=file).keys["preprocess"] for file in files}) == 3


def test_inputs_of_a_pipeline_of_ones_own_are_in_the_key(cached: Cached, tmp_path: Path) -> None:
    source = (ROOT / "pipelines/quantize.py").read_text()
    source = source.replace("    num_calibration_images: int", "    number: int")
    source = source.replace("=num_calibration_images,", "=number,")
    source = source.replace("    model: str", "    network: str").replace("=model,", "=network,")
    (tmp_path / "quantize.py").write_text(source)
    file = load_pipeline(tmp_path / "quantize.py")
    keys = []
    for number, content in (("100", b"a"), ("200", b"a"), ("200", b"b")):
        (tmp_path / "model.onnx").write_bytes(content)
        keys.append(cached(file=file, network=str(tmp_path / "model.onnx"), number=number).keys)
    for before, after in pairwise(keys):
        assert [task for task in before if before[task] != after[task]] == ["export-own", "validate", "gate"]


def test_data_may_move_but_not_change(cached: Cached, data: Path, tmp_path: Path) -> None:
    before, moved = cached(), tmp_path / "elsewhere"
    shutil.copytree(data, moved)
    assert cached(data=str(moved)).keys == before.keys
    (moved / "a/0.jpg").write_bytes(b"A0")  # same size
    assert changed(before, cached(data=str(moved))) == STEPS


def test_weights_to_begin_with_may_move_but_not_change(cached: Cached, tmp_path: Path) -> None:
    first, moved = tmp_path / "first.pt", tmp_path / "moved.pt"
    first.write_bytes(b"weights")
    moved.write_bytes(b"weights")
    before = cached(f"train.pretrained={first}")
    assert cached(f"train.pretrained={moved}").keys == before.keys
    moved.write_bytes(b"WEIGHTS")
    assert changed(before, cached(f"train.pretrained={moved}")) == STEPS[1:]
    uris = [cached(f"train.pretrained=s3://bucket/{name}.pt").keys for name in ("a", "a", "b")]
    assert uris[0] == uris[1] != uris[2]


def test_fingerprint_sees_every_change_of_a_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, outside = tmp_path / "copy", tmp_path / "outside"
    outside.mkdir()
    (outside / "0.jpg").write_bytes(b"first")
    shutil.copytree(data, copy)
    assert fingerprint(copy) == fingerprint(data)
    (copy / "a/above").symlink_to(copy)  # a loop, which must end
    seen = {fingerprint(copy)}
    for number, change in enumerate(
        (
            lambda: (copy / "b/new.jpg").write_bytes(b""),
            lambda: (copy / "b/1.jpg").unlink(),
            lambda: (copy / "b/2.jpg").rename(copy / "a/9.jpg"),
            lambda: (copy / "empty").mkdir(),  # an empty class
            lambda: (copy / "linked").symlink_to(outside),
            lambda: (copy / "a/linked.jpg").symlink_to(outside / "0.jpg"),
            lambda: (outside / "0.jpg").write_bytes(b"other"),  # what links lead to is content
        )
    ):
        change()
        seen.add(fingerprint(copy))
        assert len(seen) == number + 2
    monkeypatch.setattr(caching, "_HASHED_BYTES", 1)  # large folders are known by size and time
    shutil.copytree(data, tmp_path / "large")  # keeps times
    assert fingerprint(tmp_path / "large") == fingerprint(data)
    (tmp_path / "large/a/0.jpg").write_bytes(b"A0")
    assert fingerprint(tmp_path / "large") != fingerprint(data)


def test_hardware_libraries_and_code_repeat_the_steps_that_use_them(cached: Cached, monkeypatch) -> None:
    before, versions, edited = cached(), machine._library_versions(), {"export": "edited"}
    for owner, name, value, first in (
        (machine, "gpus", lambda: (H200,), "train"),
        (machine, "_library_versions", lambda: versions | {"openvino": "0"}, "export"),
        (caching, "source_digest", lambda step: edited.get(step) or source_digest(step), "export"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert changed(before, cached()) == STEPS[STEPS.index(first) :]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # such as a machine of the same name without VNNI
    assert changed(before, cached()) == STEPS[STEPS.index("train") :]


def test_source_digest_reads_the_step_and_what_steps_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "components", tmp_path / "components", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(caching, "__file__", str(tmp_path / "enginery/local/caching.py"))
    before = {step: source_digest(step) for step in STEPS}
    with (tmp_path / "components/train/trainer.py").open("a") as source:
        source.write("# edited\n")
    after = {step: source_digest(step) for step in STEPS}
    assert [step for step in STEPS if before[step] != after[step]] == ["train"]
    with (tmp_path / "components/common/data/loader.py").open("a") as source:
        source.write("# edited\n")
    assert all(after[step] != source_digest(step) for step in STEPS)


# Reuse of finished steps, with a real dataset as the step's artifact

Finish = Callable[..., Path]


def put(cache: StepCache, run: str, step: str, artifact: dsl.Artifact) -> str:
    """Note a step's output as KFP does. Returns the entry's key."""
    store = LocalCache(str(cache.runs / run / "cache"))
    key: str = store.compute_key(f"comp-{step}", "", [], {}, custom_cache_key=cache.keys[step])
    store.put(key, {artifact.name: artifact})
    return key


@pytest.fixture
def finish(cached: Cached, digits_dataset: Artifact[DatasetManifest], tmp_path: Path) -> Finish:
    """`finish("run")`: a run in which preprocess finished. Returns its artifact's directory."""

    def finished(run: str = "resnet50-1", cache: StepCache | None = None) -> Path:
        cache = cache or cached()
        artifact = tmp_path / "runs" / run / "artifacts/dataset"
        shutil.copytree(digits_dataset.path, artifact)
        put(cache, run, "preprocess", dsl.Dataset(name="dataset", uri=str(artifact)))
        cache.confirm("preprocess", digits_dataset.digest, tmp_path / "runs" / run / "cache")
        return artifact

    return finished


def test_the_newest_that_is_there_is_reused(
    cached: Cached, finish: Finish, digits_dataset: Artifact[DatasetManifest], tmp_path: Path
) -> None:
    old, new = finish("resnet50-1"), finish("resnet50-2")
    os.utime(next((tmp_path / "runs/resnet50-1/cache").glob("*.digest")), (1, 1))
    (step,) = cached().finished()
    assert (step.step, step.path, step.run_id) == ("preprocess", new, "resnet50-2")
    assert step.digest == digits_dataset.digest
    assert cached(seed="5").finished() == []
    (tmp_path / "runs/new").mkdir()
    root = offer([step], tmp_path / "runs/new")
    assert [entry.name for entry in root.iterdir()] == [step.entry.name]  # a cache of the run alone
    shutil.rmtree(root)
    shutil.rmtree(new)
    assert cached().finished()[0].path == old


@pytest.mark.parametrize("damage", ["no manifest", "short file", "gone", "another"])
def test_damaged_ones_run_again(
    cached: Cached, finish: Finish, run_preprocess: Any, few_digits: Path, damage: str
) -> None:
    artifact = finish()
    if damage == "no manifest":
        (artifact / "manifest.json").unlink()
    elif damage == "short file":
        shard = next(artifact.glob("*.tar"))
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shutil.rmtree(artifact)
    if damage == "another":
        run_preprocess(few_digits, artifact, seed=1)  # whole, and not what was noted
    assert cached().finished() == []


def test_a_step_whose_data_changed_meanwhile_is_not_noted(cached: Cached, finish: Finish, data: Path) -> None:
    before = cached()
    (data / "a/0.jpg").write_bytes(b"changed while the step ran")
    finish(cache=before)
    assert before.finished() == []
    assert not list(before.runs.glob("*/cache/*.digest"))


def test_a_step_goes_with_the_artifacts_before_it(
    cached: Cached, finish: Finish, digits_dataset: Artifact[DatasetManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs at once, what is reused of one step is made from what is reused of the step before."""
    monkeypatch.setitem(caching._STEPS, "train", (DatasetManifest, (), False))  # any sealed artifact will do
    cache = cached()
    finish()
    for number, source in (("2", "sha256:another dataset"), ("3", digits_dataset.digest)):
        artifact = cache.runs / f"resnet50-{number}/artifacts/checkpoint"
        shutil.copytree(digits_dataset.path, artifact)
        digest = reseal(artifact, lambda record, source=source: record["inputs"].update(dataset=source))
        key = put(cache, f"resnet50-{number}", "train", dsl.Model(name="checkpoint", uri=str(artifact)))
        (cache.runs / f"resnet50-{number}/cache/{key}.digest").write_text(digest)
        found = [step.step for step in cache.finished()]
        assert found == (["preprocess"] if number == "2" else ["preprocess", "train"])
    shutil.rmtree(cache.runs / "resnet50-1")
    assert cache.finished() == []  # nothing stands on what runs again


@pytest.mark.parametrize(
    ("missing", "setting", "gpus", "versions", "again"),
    [
        ("out of memory", "auto", 1, {"tensorrt": "10.16"}, True),
        ("", "auto", 1, {"tensorrt": "10.16"}, False),  # it has them
        ("export.tensorrt is off", "off", 1, {"tensorrt": "10.16"}, False),
        ("no GPU", "auto", 0, {"tensorrt": "10.16"}, False),  # a GPU makes another key
        ("not installed", "auto", 1, {}, False),  # so does TensorRT
    ],
)
def test_engines_that_could_not_be_built_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, missing: str, setting: str, gpus: int, versions: dict[str, str], again: bool
) -> None:
    monkeypatch.setattr(caching, "environment", lambda: SimpleNamespace(gpus=("GPU",) * gpus, versions=versions))
    bundle: Any = SimpleNamespace(engines_missing=missing, config={"tensorrt": setting})
    assert caching._may_get_engines(bundle) is again


@pytest.mark.parametrize(
    ("assignments", "others_pct", "again"),
    [((), 60, False), (("gate.min_speedup=1.5",), 60, True), (("gate.min_speedup=1.5",), 1, False)],
)
def test_a_speed_that_is_asked_for_is_measured_again_after_a_busy_machine(
    cached: Cached, assignments: tuple[str, ...], others_pct: float, again: bool
) -> None:
    row = benchmark_row("int8", 100.0, others_pct=others_pct)
    report: Any = SimpleNamespace(config={"latency_budget": ""}, benchmark=SimpleNamespace(rows=[row]))
    assert cached(*assignments)._lacks_speed(report) is again
    report.config["latency_budget"] = "7ms"
    assert cached()._lacks_speed(report) is (others_pct > 1)


def begin(cache: StepCache, run: str, task: str, *, is_partial: bool = True) -> Path:
    """A run that began a task. Returns the task's output."""
    (root := cache.runs / run / "cache").mkdir(parents=True)
    cache.note_begun(root)
    output = cache.runs / run / f"artifacts/resnet50-1/{task}/output"
    (output / PARTIAL_OUTPUT if is_partial else output).mkdir(parents=True)
    return output


def test_partial_output_is_found_by_runs_of_the_same_key(cached: Cached, file: PipelineFile, data: Path) -> None:
    begin(cached(seed="1"), "other", "preprocess")
    outputs = [begin(cached(), run, "preprocess") for run in ("one", "two", ".trash-three")]
    begin(cached(), "done", "preprocess", is_partial=False)
    assert cached().partial_outputs() == outputs[:2]
    without = StepCache(file=file, arguments=cached().arguments, runs=cached().runs)
    without.enable(reuse=False)
    assert without.partial_outputs() == []
    (data / "a" / "0.jpg").write_bytes(b"changed")
    assert cached().partial_outputs() == []
