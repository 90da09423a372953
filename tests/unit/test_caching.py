"""The keys that decide whether a finished step is taken over."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.common.contracts import environment as machine
from components.common.contracts.environment import Gpu
from components.common.contracts.manifests import UNFINISHED, DatasetManifest, seal
from components.preprocess.config import PreprocessConfig
from enginery.local import caching
from enginery.local.caching import (
    begun_elsewhere,
    confirm,
    enable,
    fingerprint,
    finished_steps,
    note_begun,
    offer,
    source_digest,
    step_keys,
    unfinished_outputs,
)
from enginery.local.parameters import PipelineFile, load_pipeline, resolve_arguments

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["preprocess", "train", "export", "validate", "gate"]


@pytest.fixture
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in ("a", "b"):
        (root / name).mkdir()
        for index in range(3):
            (root / name / f"{index}.jpg").write_bytes(f"{name}{index}".encode())
    return root


@pytest.fixture(scope="module")
def file() -> PipelineFile:
    return load_pipeline(ROOT / "pipelines/resnet50.py")


def keys_of(file, data, *assignments, **flags):
    return step_keys(file, arguments_of(file, data, *assignments, **flags))


def arguments_of(file, data, *assignments, **flags):
    return resolve_arguments(file, config_file=None, flags={"data": str(data), **flags}, assignments=assignments)


def changed(before, after):
    return [step for step in STEPS if before[step] != after[step]]


def test_promote_has_no_key(file, data):
    keys = keys_of(file, data)
    assert list(keys) == STEPS
    enable(file, keys)
    options = {task: spec.caching_options for task, spec in file.pipeline.pipeline_spec.root.dag.tasks.items()}
    assert {task: option.enable_cache for task, option in options.items()} == dict.fromkeys(STEPS, True) | {
        "promote": False
    }
    assert {step: options[step].cache_key for step in STEPS} == keys


def test_same_arguments_same_keys(file, data):
    assert keys_of(file, data) == keys_of(file, data)


@pytest.mark.parametrize(
    ("assignment", "first"),
    [
        ("preprocess.val_fraction=0.3", "preprocess"),
        ("train.weight_decay=0.1", "train"),
        ("export.max_batch=64", "export"),
        ("validate.batch_size=8", "validate"),
        ("gate.max_top1_drop_points=1", "export"),  # the budget of INT8
        ("gate.min_top1_pct=1", "validate"),  # whose report opens with the verdict
    ],
)
def test_a_setting_repeats_its_step_and_what_follows(file, data, assignment, first):
    assert changed(keys_of(file, data), keys_of(file, data, assignment))[0] == first
    assert changed(keys_of(file, data), keys_of(file, data, assignment)) == STEPS[STEPS.index(first) :]


def test_settings_of_promote_repeat_nothing(file, data):
    assert changed(keys_of(file, data), keys_of(file, data, "promote.alias=other", registered_model="x")) == []


def test_how_many_processes_pack_repeats_nothing(file, data):
    assert changed(keys_of(file, data), keys_of(file, data, "preprocess.num_workers=3")) == []


def test_data_may_move_but_not_change(file, data, tmp_path):
    before = keys_of(file, data)
    moved = tmp_path / "elsewhere"
    shutil.copytree(data, moved)
    assert keys_of(file, moved) == before
    (moved / "a/0.jpg").write_bytes(b"A0")  # same size
    assert changed(before, keys_of(file, moved)) == STEPS


@pytest.mark.parametrize("change", ["add", "remove", "rename"])
def test_fingerprint_sees_every_change_of_a_folder(data, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    assert fingerprint(copy) == fingerprint(data)
    if change == "add":
        (copy / "b/new.jpg").write_bytes(b"")
    elif change == "remove":
        (copy / "b/1.jpg").unlink()
    else:
        (copy / "b/1.jpg").rename(copy / "a/9.jpg")
    assert fingerprint(copy) != fingerprint(data)


def test_large_folders_are_known_by_size_and_time(data, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "_HASHED_BYTES", 1)
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)  # keeps times
    assert fingerprint(copy) == fingerprint(data)
    (copy / "a/0.jpg").write_bytes(b"A0")
    assert fingerprint(copy) != fingerprint(data)


def test_another_gpu_repeats_from_training_on(file, data, monkeypatch):
    before = keys_of(file, data)
    gpu = Gpu(name="NVIDIA H200", memory_bytes=1, driver="580")
    monkeypatch.setattr(machine, "gpus", lambda: (gpu,))
    assert changed(before, keys_of(file, data)) == ["train", "export", "validate", "gate"]


def test_another_library_version_repeats_the_steps_that_use_it(file, data, monkeypatch):
    before = keys_of(file, data)
    real = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0" if name == "openvino" else real(name))
    assert changed(before, keys_of(file, data)) == ["export", "validate", "gate"]


def test_an_edited_source_file_repeats_its_step(file, data, monkeypatch):
    before = keys_of(file, data)
    monkeypatch.setattr(caching, "source_digest", lambda step: "edited" if step == "export" else source_digest(step))
    assert changed(before, keys_of(file, data)) == ["export", "validate", "gate"]


def test_source_digest_reads_the_step_and_what_steps_share(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "components", tmp_path / "components", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pipelines").mkdir()
    monkeypatch.setattr(caching, "__file__", str(tmp_path / "enginery/local/caching.py"))
    before = {step: source_digest(step) for step in STEPS}
    assert before["train"] == before["train"]
    with (tmp_path / "components/train/trainer.py").open("a") as source:
        source.write("# edited\n")
    after = {step: source_digest(step) for step in STEPS}
    assert [step for step in STEPS if before[step] != after[step]] == ["train"]
    with (tmp_path / "components/common/data/loader.py").open("a") as source:
        source.write("# edited\n")
    assert all(after[step] != source_digest(step) for step in STEPS)


class TestFinishedSteps:
    """What later runs take over, with a real data set as the finished step's artifact."""

    @pytest.fixture
    def noted(self, file, data, digits_dataset, tmp_path):
        """`noted("run")`: a run in which preprocess finished. Returns its artifact's directory."""
        from kfp import dsl
        from kfp.local.cache import LocalCache

        def finished(run="resnet50-1", keys=None):
            keys = keys or keys_of(file, data)
            artifact = tmp_path / "runs" / run / "artifacts/dataset"
            shutil.copytree(digits_dataset.path, artifact)
            cache = LocalCache(str(tmp_path / "runs" / run / "cache"))
            key = cache.compute_key("comp-preprocess", "", [], {}, custom_cache_key=keys["preprocess"])
            cache.put(key, {"dataset": dsl.Dataset(name="dataset", uri=str(artifact))})
            confirm(file, keys, arguments_of(file, data), "preprocess", digits_dataset.digest, Path(cache.cache_root))
            return artifact

        return finished

    def test_served(self, file, data, noted, tmp_path, digits_dataset):
        artifact = noted()
        (step,) = finished_steps(file, keys_of(file, data), tmp_path / "runs")
        assert (step.step, step.path, step.run_id) == ("preprocess", artifact, "resnet50-1")
        assert step.digest == digits_dataset.digest

    def test_the_newest_is_served_and_an_older_one_when_it_is_gone(self, file, data, noted, tmp_path):
        old, new = noted("resnet50-1"), noted("resnet50-2")
        os.utime(next((tmp_path / "runs/resnet50-1/cache").glob("*.digest")), (1, 1))
        assert finished_steps(file, keys_of(file, data), tmp_path / "runs")[0].path == new
        shutil.rmtree(new)
        assert finished_steps(file, keys_of(file, data), tmp_path / "runs")[0].path == old

    def test_not_for_other_keys(self, file, noted, data, tmp_path):
        noted()
        assert finished_steps(file, keys_of(file, data, seed="5"), tmp_path / "runs") == []

    @pytest.mark.parametrize("damage", ["no manifest", "short file", "gone"])
    def test_damaged_artifacts_run_again(self, file, data, noted, damage, tmp_path):
        artifact = noted()
        if damage == "no manifest":
            (artifact / "manifest.json").unlink()
        elif damage == "short file":
            shard = next(artifact.glob("*.tar"))
            shard.write_bytes(shard.read_bytes()[:-1])
        else:
            shutil.rmtree(artifact)
        assert finished_steps(file, keys_of(file, data), tmp_path / "runs") == []

    def test_another_manifest_runs_again(self, file, data, noted, run_preprocess, few_digits, tmp_path):
        artifact = noted()
        shutil.rmtree(artifact)
        run_preprocess(few_digits, artifact, seed=1)  # whole, and not what was noted
        assert finished_steps(file, keys_of(file, data), tmp_path / "runs") == []

    def test_a_step_whose_data_changed_meanwhile_is_not_noted(self, file, data, noted, tmp_path):
        before = keys_of(file, data)
        (data / "a/0.jpg").write_bytes(b"changed while the step ran")
        noted(keys=before)
        assert finished_steps(file, before, tmp_path / "runs") == []
        assert not list(tmp_path.glob("runs/*/cache/*.digest"))

    def test_a_step_goes_with_the_artifacts_before_it(self, file, data, noted, digits_dataset, tmp_path, monkeypatch):
        """Of two runs at once, what is taken over of one step is made from what is taken over of the step before."""
        from kfp import dsl
        from kfp.local.cache import LocalCache

        keys, runs = keys_of(file, data), tmp_path / "runs"
        noted()
        monkeypatch.setitem(caching._MANIFESTS, "train", DatasetManifest)  # any sealed artifact will do
        for number, source in (("2", "sha256:another data set"), ("3", digits_dataset.digest)):
            artifact = runs / f"resnet50-{number}/artifacts/checkpoint"
            shutil.copytree(digits_dataset.path, artifact)
            (artifact / "manifest.json").unlink()
            record = digits_dataset.manifest
            sealed = seal(
                artifact,
                DatasetManifest,
                inputs={"dataset": source},
                config=PreprocessConfig(data="images"),
                classes=record.classes,
                splits=record.splits,
                statistics=record.statistics,
                num_rejected=0,
            )
            cache = LocalCache(str(runs / f"resnet50-{number}/cache"))
            key = cache.compute_key("comp-train", "", [], {}, custom_cache_key=keys["train"])
            cache.put(key, {"checkpoint": dsl.Model(name="checkpoint", uri=str(artifact))})
            (Path(cache.cache_root) / f"{key}.digest").write_text(sealed.digest)
            found = [step.step for step in finished_steps(file, keys, runs)]
            assert found == (["preprocess"] if number == "2" else ["preprocess", "train"])
        shutil.rmtree(runs / "resnet50-1")
        assert finished_steps(file, keys, runs) == []  # nothing stands on what runs again

    def test_offered_to_kfp_in_a_cache_of_the_run_alone(self, file, data, noted, tmp_path):
        noted()
        (tmp_path / "runs/new").mkdir()
        steps = finished_steps(file, keys_of(file, data), tmp_path / "runs")
        root = offer(steps, tmp_path / "runs/new")
        assert [entry.name for entry in root.iterdir()] == [steps[0].entry.name]


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
def test_engines_that_could_not_be_built_are_tried_again(monkeypatch, missing, setting, gpus, versions, again):
    monkeypatch.setattr(caching, "environment", lambda: SimpleNamespace(gpus=("GPU",) * gpus, versions=versions))
    bundle = SimpleNamespace(engines_missing=missing, config={"tensorrt": setting})
    assert caching._may_get_engines(bundle) is again


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_what_links_lead_to_is_content(data, tmp_path, linked):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0.jpg").write_bytes(b"first")
    if linked == "folder":
        (data / "linked").symlink_to(outside)
    else:
        (data / "a/linked.jpg").symlink_to(outside / "0.jpg")
    before = fingerprint(data)
    (outside / "0.jpg").write_bytes(b"other")
    assert fingerprint(data) != before


def test_a_loop_of_links_ends_and_an_empty_folder_counts(data):
    (data / "a/above").symlink_to(data)
    before = fingerprint(data)
    (data / "empty").mkdir()
    assert fingerprint(data) != before


def test_unfinished_packing_is_found_by_runs_of_the_same_key(file, data, tmp_path):
    keys = keys_of(file, data)
    outputs = {}
    for name, seed in (("one", 0), ("two", 0), ("other", 1), (".trash-three", 0), ("done", 0)):
        root = tmp_path / name / "cache"
        root.mkdir(parents=True)
        note_begun(file, keys_of(file, data, seed=seed), arguments_of(file, data, seed=seed), root)
        outputs[name] = tmp_path / name / "artifacts/resnet50-1/preprocess/dataset"
        (outputs[name] / UNFINISHED if name != "done" else outputs[name]).mkdir(parents=True)
    assert unfinished_outputs(file, keys, tmp_path) == [outputs["one"], outputs["two"]]
    assert unfinished_outputs(file, {}, tmp_path) == []  # of a run that reuses nothing
    (data / "a" / "0.jpg").write_bytes(b"changed")
    assert unfinished_outputs(file, keys_of(file, data), tmp_path) == []


def test_training_that_other_hardware_began_is_told(file, data, tmp_path, monkeypatch):
    here, arguments = machine.environment(), arguments_of(file, data)
    gpu = Gpu(name="NVIDIA H200", memory_bytes=150 << 30, driver="580.95.05")
    monkeypatch.setattr(caching, "environment", lambda: here.model_copy(update={"gpus": (gpu, gpu)}))
    root = tmp_path / "one" / "cache"
    root.mkdir(parents=True)
    note_begun(file, keys_of(file, data), arguments, root)
    (tmp_path / "one/artifacts/resnet50-1/train/checkpoint" / UNFINISHED).mkdir(parents=True)
    assert begun_elsewhere(file, keys_of(file, data), arguments, tmp_path) == []

    monkeypatch.setattr(caching, "environment", lambda: here)
    keys = keys_of(file, data)
    assert unfinished_outputs(file, keys, tmp_path) == []
    assert begun_elsewhere(file, keys, arguments, tmp_path) == [("train", "one", "2 x NVIDIA H200")]
    other = arguments_of(file, data, seed=1)
    assert begun_elsewhere(file, keys_of(file, data, seed=1), other, tmp_path) == []
