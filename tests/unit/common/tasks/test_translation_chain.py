"""A translator from pairs of sentences to a bundle: what its artifacts say, and that it resumes and translates."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from components.common.contracts.errors import Preempted
from components.common.contracts.manifests import BundleManifest, CheckpointManifest, DatasetManifest, load
from components.common.tasks.translation.networks import AttentionLstm
from components.common.tasks.translation.runners import open_translator
from components.export.translation import read_pairs
from components.train.trainer import Trainer
from enginery.local.preflight import check_inputs
from tests.steps import step
from tests.unit.measurements import engine_entry
from tests.unit.refusals import refuses
from tests.unit.registered import replace_file
from tests.unit.shapes import Chain


def test_every_artifact_says_what_it_is_of(translator: Chain) -> None:
    dataset = load(translator.dataset, DatasetManifest).manifest
    checkpoint = load(translator.checkpoint, CheckpointManifest).manifest
    bundle = load(translator.bundle, BundleManifest).manifest
    for manifest in (dataset, checkpoint, bundle):
        assert (manifest.task, manifest.classes, manifest.text) == ("translation", (), dataset.text)
        assert "vocabulary.model" in manifest.files
    assert checkpoint.history[-1].train_loss < 0.7 * checkpoint.history[0].train_loss
    assert checkpoint.metrics["val_score_pct"] > 40  # of the next tokens
    assert set(bundle.models) == {"fp32", "fp32_encoder", "int8", "int8_encoder"}
    assert bundle.num_quantized_layers == bundle.num_quantizable_layers == 5
    places = set(map(int, bundle.calibration.ids))
    assert len(places) == bundle.calibration.num_images
    assert max(places) > dataset.splits["train"].num_images / 2  # from everywhere in the text
    (trial, *_) = bundle.calibration.selection.trials
    assert trial.agreement_pct > 50
    assert 0 < trial.chrf_pct <= 100


def test_sentences_are_translated_alike_in_any_batch(translator: Chain) -> None:
    bundle = load(translator.bundle, BundleManifest)
    sources = [source for source, _ in read_pairs(load(translator.dataset, DatasetManifest), "val")[:20]]
    for precision in ("fp32", "int8"):
        opened = open_translator(bundle, precision)
        together = opened.translate(sources)
        assert together == [opened.translate([source])[0] for source in sources]
        assert len(set(together)) > 10
        assert len(opened.translate(sources, beam_size=3, batch_size=7)) == 20
        with refuses("sentence-too-long"):
            opened.translate(["word " * 10_000])
        with refuses("sentence-too-long"):
            opened.translate(["ö ß " * 300])


def test_why_plans_are_not_run_is_said(translator: Chain) -> None:
    bundle = load(translator.bundle, BundleManifest)
    assert open_translator(bundle, "fp32").note == ""
    with refuses("unknown-runtime", "runtime"):  # OpenVINO's answers would pass for those of the reference
        open_translator(bundle, "fp32", "onnxruntime")
    plan = engine_entry(file="fp32.plan", precision="fp32", source_onnx="fp32.onnx", onnx_digest="")
    with_plan = replace(bundle, manifest=bundle.manifest.model_copy(update={"engines": (plan,)}))
    assert open_translator(with_plan, "fp32").note.startswith("OpenVINO ran the ONNX file, not the plan: ")


def test_training_resumes_within_an_epoch(translator: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"architecture": "translation/lstm_small", "epochs": 1, "optimizer": "adamw", "num_processes": 1}
    settings |= {"global_batch_size": 64, "learning_rate": 0.03}
    step("train", tmp_path / "whole", settings, dataset=translator.dataset)
    after_step = Trainer._after_step

    def stop(trainer: Trainer) -> None:
        if trainer.num_steps_done == 7:
            signal.raise_signal(signal.SIGTERM)
        after_step(trainer)

    monkeypatch.setattr(Trainer, "_after_step", stop)
    with pytest.raises(Preempted):
        step("train", tmp_path / "resumed", settings, dataset=translator.dataset)
    monkeypatch.undo()
    step("train", tmp_path / "resumed", settings, dataset=translator.dataset)
    digests = [
        load(tmp_path / name, CheckpointManifest).manifest.files["weights.safetensors"].digest
        for name in ("whole", "resumed")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("settings", "fix"), [({}, "to 32. Gradients"), ({"per_gpu_batch_size": 1}, ": leave out")])
def test_out_of_memory_is_named(settings: dict[str, int], fix: str, translator: Chain, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(AttentionLstm, "forward", full)
    recipe = {"architecture": "translation/lstm_small", "global_batch_size": 64, "num_processes": 1}
    with refuses("out-of-memory", "train.per_gpu_batch_size") as caught:
        step("train", tmp_path / "checkpoint", {**recipe, **settings}, dataset=translator.dataset)
    size = settings.get("per_gpu_batch_size", 64)
    assert f"does not hold a batch of {size} sentences (train.per_gpu_batch_size)" in str(caught.value)
    assert fix in str(caught.value)


def test_a_method_of_other_networks_is_refused(translator: Chain, tmp_path: Path) -> None:
    settings, source = {"calibration_method": "smoothquant"}, translator.checkpoint
    with refuses("other-task", "export.calibration_method"):
        step("export", tmp_path / "bundle", settings, model=source, dataset=translator.dataset)


def test_a_translator_is_refused_before_its_data_is_read_as_images(translator: Chain, tmp_path: Path) -> None:
    for model in (translator.checkpoint, translator.bundle):
        with refuses("other-task", says="enginery run translation"):
            check_inputs({"model": str(model), "data": str(tmp_path), "preprocess": {}})


def test_another_vocabulary_is_refused(translator: Chain, tmp_path: Path) -> None:
    other = shutil.copytree(translator.dataset, tmp_path / "other")
    replace_file(other, "vocabulary.model", b"\x00" + (other / "vocabulary.model").read_bytes())
    with refuses("other-vocabulary"):
        step("export", tmp_path / "bundle", model=translator.checkpoint, dataset=other)
