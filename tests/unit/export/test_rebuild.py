"""A bundle's plans for another GPU. TensorRT is replaced by a writer of bytes; tests/gpu builds real ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ConfigDict

from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.manifests import (
    ALL_FILES,
    MANIFEST,
    Artifact,
    BundleManifest,
    DatasetManifest,
    load,
    seal,
)
from components.common.contracts.records import CalibrationEntry, EngineEntry, EngineLayers
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.export import plans, rebuild
from components.export.calibration import Samples
from components.export.config import ExportConfig
from components.export.inspection import UnreadableLayers
from components.export.onnx_export import export_onnx
from components.export.run import run

SHAPES = ShapeSpec(height=32, width=32, opt_batch=4, max_batch=16)
MODELS = {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8.onnx", "int8_fp16": "int8_fp16.onnx"}


def entry(gpu: str, precision: str = "int8", **changes: Any) -> EngineEntry:
    fields = {
        "file": f"{precision}.plan",
        "precision": precision,
        "source_onnx": "int8.onnx",
        "tensorrt_version": "8.6.0",
        "gpu_name": gpu,
        "compute_capability": "9.0",
        "driver_version": "580",
        "build_seconds": 1.0,
    }
    return EngineEntry.model_validate(fields | changes)


@pytest.fixture
def original(tmp_path: Path, digits_dataset: Artifact[DatasetManifest]) -> Artifact[BundleManifest]:
    """A bundle with a plan for another GPU."""
    folder = tmp_path / "original"
    folder.mkdir()
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 10, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    export_onnx(network.eval(), folder / "fp32.onnx", SHAPES)
    for name in ("fp16.onnx", "int8.onnx", "int8_fp16.onnx", "scales.json", "int8.plan"):
        (folder / name).write_bytes(f"{name} of the original".encode())
    return seal(
        folder,
        BundleManifest,
        inputs={"model": "sha256:checkpoint", "dataset": digits_dataset.digest},
        config=ExportConfig(calibration_percentile=99.5, optimization_level=1),
        architecture="resnet18",
        classes=digits_dataset.manifest.classes,
        transform=transform_for(32, resize_ratio=1.0),
        shapes=SHAPES,
        models=MODELS,
        engines=(entry("NVIDIA A100"),),
        calibration=CalibrationEntry(method="mse", num_images=7, split="train", seconds=2.0, excluded=("/a/Conv",)),
        num_quantized_layers=20,
        num_quantizable_layers=21,
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and TensorRT, whose plans are a few bytes."""

    def build(onnx_path: Path, plan_path: Path, *, precision: str, shapes: ShapeSpec, **others: Any) -> EngineEntry:
        assert shapes == SHAPES
        assert onnx_path.exists()
        plan_path.write_bytes(f"{precision} here".encode())
        told = {name: others[name] for name in ("optimization_level", "mantissa_bits")}
        return entry("NVIDIA Orin", precision, **told)

    def inspect(plan: Path, built: EngineEntry, shapes: ShapeSpec, convolutions: list[str]) -> EngineLayers:
        assert convolutions == ["/0/Conv"]
        layers = EngineLayers(file="f", num_layers=1, num_reformats=0, convolutions={"INT8": 1}, exceptions={})
        return layers

    monkeypatch.setattr(tensorrt, "why_unavailable", lambda: None)
    monkeypatch.setattr(plans, "check_options", lambda options: None)
    monkeypatch.setattr(plans, "onnx_file_for", lambda precision: "int8.onnx")
    monkeypatch.setattr(plans, "build_engine", build)
    monkeypatch.setattr(plans, "inspect_engine", inspect)


def export(bundle: Path, dataset: Path, output: Path, **settings: Any) -> str:
    return run(ExportConfig(**settings), StepLog("export"), model=bundle, dataset=dataset, output=output)


@pytest.mark.usefixtures("here")
def test_only_the_plans_are_new(original, digits_dataset, tmp_path):
    settings = {"optimization_level": 5, "fp16_mantissa_bits": 7}
    outcome = export(original.path, digits_dataset.path, tmp_path / "new", **settings)
    assert outcome.startswith("3 TensorRT engines, 1 of 1 convolutions in INT8 from the bundle sha256:")
    new = load(tmp_path / "new", BundleManifest, verify=ALL_FILES)
    assert new.digest != original.digest
    assert new.manifest.inputs == {"model": original.digest, "dataset": digits_dataset.digest}
    built = [(engine.gpu_name, engine.optimization_level, engine.mantissa_bits) for engine in new.manifest.engines]
    assert built == [("NVIDIA Orin", 5, 7)] * 3
    for name in (*MODELS.values(), "scales.json"):
        assert new.manifest.files[name] == original.manifest.files[name]
    for name in ("architecture", "classes", "transform", "shapes", "models", "calibration", "num_quantized_layers"):
        assert getattr(new.manifest, name) == getattr(original.manifest, name)
    assert {name: new.manifest.config[name] for name in settings} == settings  # of this build
    assert new.manifest.config["calibration_percentile"] == 99.5  # of the calibration, which is the original's
    assert new.file("int8.plan").read_bytes() == b"int8 here"
    assert original.file("int8.plan").read_bytes() == b"int8.plan of the original"


@pytest.mark.usefixtures("here")
def test_a_plan_that_cannot_be_built_ends_it(original, digits_dataset, tmp_path, monkeypatch):
    """With auto, a new bundle gets by without engines; here there would be nothing new."""

    def fail(*arguments: Any, **others: Any) -> EngineEntry:
        raise EngineryError("no kernel")

    monkeypatch.setattr(plans, "build_engine", fail)
    with pytest.raises(EngineryError, match="no kernel"):
        export(original.path, digits_dataset.path, tmp_path / "new")
    assert not (tmp_path / "new" / "manifest.json").exists()


@pytest.mark.usefixtures("here")
def test_no_plan_stays_that_the_manifest_does_not_name(original, tmp_path, monkeypatch):
    """A plan that can be built but not run goes again: nobody would measure it, but it would be shipped."""

    def fail(plan: Path, built: EngineEntry, *others: Any) -> EngineLayers:
        if built.precision == "int8":
            raise EngineryError("no memory")
        return EngineLayers(file="f", num_layers=1, num_reformats=0, convolutions={}, exceptions={})

    monkeypatch.setattr(plans, "inspect_engine", fail)
    entries, missing = plans.build_plans(ExportConfig(), SHAPES, original.path, None, StepLog("export"))
    assert [built.file for built in entries] == ["fp32.plan", "fp16.plan"]
    assert missing == "no memory"
    assert sorted(file.name for file in original.path.glob("*.plan")) == ["fp16.plan", "fp32.plan"]


@pytest.mark.usefixtures("here")
def test_a_plan_is_as_good_without_its_layers(original, digits_dataset, tmp_path, monkeypatch, capsys):
    def fail(*arguments: Any) -> EngineLayers:
        raise UnreadableLayers("what the engine inspector says can't be read")

    monkeypatch.setattr(plans, "inspect_engine", fail)
    assert export(original.path, digits_dataset.path, tmp_path / "new").startswith("3 TensorRT engines from")
    assert [built.layers for built in load(tmp_path / "new", BundleManifest).manifest.engines] == [None] * 3
    assert "the report says nothing of the layers of int8.plan" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("here")
def test_an_option_that_tensorrt_lacks_ends_it_with_auto_too(original, tmp_path, monkeypatch):
    def refuse(options: tuple[str, ...]) -> None:
        raise UserError(f"builds no {options[0]} plans")

    monkeypatch.setattr(plans, "check_options", refuse)
    config = ExportConfig(engine_options=("stripped",))
    with pytest.raises(UserError, match="builds no stripped plans"):
        plans.build_plans(config, SHAPES, original.path, None, StepLog("export"))


@pytest.mark.usefixtures("here")
def test_settings_that_change_nothing_are_named(original, digits_dataset, tmp_path, capsys):
    given = {"max_batch": 4, "opt_batch": 32, "optimization_level": 1}  # 32 is the default
    export(original.path, digits_dataset.path, tmp_path / "new", **given)
    said = "".join(capsys.readouterr())
    assert "without effect here: export.max_batch. A bundle keeps its shapes" in said
    assert load(tmp_path / "new", BundleManifest).manifest.shapes == SHAPES


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("calibrated_with", ["the first seven", "others", "nothing said"])
def test_images_of_another_split_are_noted(original, digits_dataset, tmp_path, capsys, calibrated_with):
    """The data set is never the same file by file on another machine; its images can be."""
    transform = original.manifest.transform
    first = Samples(
        dataset=digits_dataset, transform=transform, start=0, num_images=7, batch_size=1, device_id=None
    ).digest()
    digest = {"the first seven": first, "others": "sha256:others", "nothing said": ""}[calibrated_with]
    elsewhere = original.manifest.model_copy(
        update={
            "inputs": {"model": "sha256:checkpoint", "dataset": "sha256:of the other machine"},
            "calibration": original.manifest.calibration.model_copy(update={"images_digest": digest}),
        }
    )
    (original.path / MANIFEST).unlink()
    fields = elsewhere.model_dump(exclude={"schema_version", "seal", "kind", "files", "config", "environment"})
    again = seal(original.path, BundleManifest, config=ExportConfig(), **fields)
    export(again.path, digits_dataset.path, tmp_path / "new")
    said = "".join(capsys.readouterr())
    assert ("does not begin with the images that calibrated the bundle" in said) == (
        calibrated_with != "the first seven"
    )


@pytest.mark.usefixtures("here")
def test_settings_of_another_version_stay(original, digits_dataset, tmp_path):
    class Config(ExportConfig):
        model_config = ConfigDict(extra="allow")

    older = tmp_path / "older"
    older.mkdir()
    for file in original.path.iterdir():
        if file.name != "manifest.json":
            (older / file.name).write_bytes(file.read_bytes())
    left_out = {"schema_version", "seal", "kind", "files", "inputs", "config", "environment"}
    fields = original.manifest.model_dump(exclude=left_out)
    seal(older, BundleManifest, inputs={}, config=Config(seed=7, optimization_level=1), **fields)
    export(older, digits_dataset.path, tmp_path / "new", optimization_level=4)
    config = load(tmp_path / "new", BundleManifest).manifest.config
    assert (config["seed"], config["optimization_level"]) == (7, 4)


def test_without_tensorrt(original, digits_dataset, tmp_path):
    with pytest.raises(RuntimeUnavailable, match=r"no plans can be built of the bundle .*CUDA GPU"):
        export(original.path, digits_dataset.path, tmp_path / "new")


@pytest.mark.usefixtures("here")
def test_tensorrt_off(original, digits_dataset, tmp_path):
    with pytest.raises(UserError, match=r"export\.tensorrt is off: set it to auto"):
        export(original.path, digits_dataset.path, tmp_path / "new", tensorrt="off")


def sealed_again(bundle: Artifact[BundleManifest], **changes: Any) -> Path:
    """The bundle with another manifest."""
    (bundle.path / MANIFEST).unlink()
    left_out = {"schema_version", "seal", "kind", "files", "config", "environment"}
    fields = bundle.manifest.model_dump(exclude=left_out) | changes
    return seal(bundle.path, BundleManifest, config=ExportConfig(), **fields).path


@pytest.mark.usefixtures("here")
def test_other_classes(original, digits_dataset, tmp_path):
    classes = digits_dataset.manifest.classes
    bundle = sealed_again(original, classes=("nought", *classes[1:]))
    with pytest.raises(UserError, match=r"other classes than .*: class 0 is 'nought' against '0'\. Name the images"):
        export(bundle, digits_dataset.path, tmp_path / "new")
    bundle = sealed_again(load(bundle, BundleManifest), classes=classes[:3])
    with pytest.raises(UserError, match=r"other classes than .*: 3 against 10"):
        export(bundle, digits_dataset.path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("gone", "named"), [("*.onnx", "fp16.onnx, fp32.onnx, int8"), ("scales.*", "scales.json")])
def test_a_bundle_that_was_sealed_without_a_file(original, digits_dataset, tmp_path, gone, named):
    for file in original.path.glob(gone):
        file.unlink()
    bundle = sealed_again(original, models={} if gone == "*.onnx" else MODELS)
    with pytest.raises(UserError, match=f"has no {named}.*, so export the model again"):
        export(bundle, digits_dataset.path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("here")
def test_a_damaged_bundle_is_refused(original, digits_dataset, tmp_path):
    original.file("int8.onnx").write_bytes(b"int8.onnx of the Original")
    with pytest.raises(EngineryError, match=r"int8\.onnx was changed after it was sealed"):
        export(original.path, digits_dataset.path, tmp_path / "new")


def test_what_is_a_bundle(original, digits_dataset, tmp_path):
    assert rebuild.is_bundle(original.path)
    assert not rebuild.is_bundle(digits_dataset.path)
    assert not rebuild.is_bundle(tmp_path / "missing")
    np.save(tmp_path / "manifest.json", np.zeros(1))
    assert not rebuild.is_bundle(tmp_path)
