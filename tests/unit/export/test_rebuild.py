"""A bundle's plans for another GPU. TensorRT is replaced by a writer of bytes; tests/gpu builds real ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ConfigDict

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import ALL_FILES, MANIFEST, BundleManifest, load, seal
from components.common.contracts.records import CalibrationEntry, CpuModel, EngineEntry, EngineLayers
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.export import engines, rebuild
from components.export.calibration import Samples
from components.export.config import ExportConfig
from components.export.inspection import UnreadableLayers
from components.export.onnx_export import export_onnx
from components.export.run import run
from tests.conftest import Bundle, Dataset
from tests.unit.measurements import engine_entry
from tests.unit.refusals import refuses

SHAPES = ShapeSpec(height=32, width=32, opt_batch=4, max_batch=16)
MODELS = {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8.onnx", "int8_fp16": "int8_fp16.onnx"}


def layers_of(plan: Path, num_int8: int) -> EngineLayers:
    """The layers of a plan with as many convolutions in INT8, and their file."""
    file = plan.with_suffix(".layers.json")
    file.write_text("[]")
    convolutions = {"INT8": num_int8} if num_int8 else {}
    return EngineLayers(file=file.name, num_layers=1, num_reformats=0, convolutions=convolutions, exceptions={})


@pytest.fixture
def original(tmp_path: Path, digits_dataset: Dataset) -> Bundle:
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
        cpu_models=(CpuModel(file="int8.onnx", weight_bits=8, activations="signed", saturates_on=()),),
        engines=(engine_entry(gpu_name="NVIDIA A100"),),
        calibration=CalibrationEntry(method="mse", num_images=7, split="train", seconds=2.0, excluded=("/a/Conv",)),
        num_quantized_layers=20,
        num_quantizable_layers=21,
    )


def sealed_again(bundle: Bundle, config: ExportConfig | None = None, **changes: Any) -> Path:
    """The bundle with another manifest."""
    (bundle.path / MANIFEST).unlink()
    left_out = {"schema_version", "seal", "kind", "files", "config", "environment"}
    fields = bundle.manifest.model_dump(exclude=left_out) | changes
    return seal(bundle.path, BundleManifest, config=config or ExportConfig(), **fields).path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and TensorRT, whose plans are a few bytes."""

    def build(onnx_path: Path, plan_path: Path, *, precision: str, shapes: ShapeSpec, **others: Any) -> EngineEntry:
        assert shapes == SHAPES
        assert onnx_path.exists()
        plan_path.write_bytes(f"{precision} here".encode())
        kept = {name: others[name] for name in ("optimization_level", "mantissa_bits")}
        return engine_entry(precision, gpu_name="NVIDIA Orin", **kept)

    def inspect(plan: Path, built: EngineEntry, shapes: ShapeSpec, convolutions: list[str]) -> EngineLayers:
        assert convolutions == ["/0/Conv"]
        return layers_of(plan, num_int8=1)

    monkeypatch.setattr(tensorrt, "why_unavailable", lambda: None)
    monkeypatch.setattr(engines, "check_options", lambda options: None)
    monkeypatch.setattr(engines, "onnx_file_for", lambda precision: "int8.onnx")
    monkeypatch.setattr(engines, "build_engine", build)
    monkeypatch.setattr(engines, "inspect_engine", inspect)


@pytest.fixture
def export(digits_dataset, tmp_path):
    """`export(bundle, **settings)`: the step into the folder `new`. Returns its closing sentence."""

    def exported(bundle: Path, **settings: Any) -> str:
        paths = {"model": bundle, "dataset": digits_dataset.path, "output": tmp_path / "new"}
        return run(ExportConfig(**settings), StepLog("export"), **paths)

    return exported


@pytest.mark.usefixtures("here")
def test_only_the_plans_are_new(original, export, digits_dataset, tmp_path):
    settings = {"optimization_level": 5, "fp16_mantissa_bits": 7}
    outcome = export(original.path, **settings)
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
def test_a_plan_that_can_not_be_built_or_run(original, export, tmp_path, monkeypatch):
    """Its file goes again: nobody would measure it. A new bundle gets by without; of a bundle, nothing would be new."""

    def fail(plan: Path, built: EngineEntry, *others: Any) -> EngineLayers:
        if built.precision == "int8":
            raise EngineryError("no memory", code="no-memory")
        return layers_of(plan, num_int8=0)

    monkeypatch.setattr(engines, "inspect_engine", fail)
    entries, missing = engines.build_plans(ExportConfig(), SHAPES, original.path, None, StepLog("export"))
    assert ([built.file for built in entries], missing) == (["fp32.plan", "fp16.plan"], "no memory")
    assert sorted(file.name for file in original.path.glob("*.plan")) == ["fp16.plan", "fp32.plan"]
    again = sealed_again(original, engines=())
    with refuses("no-memory"):
        export(again)
    assert not (tmp_path / "new" / MANIFEST).exists()


@pytest.mark.usefixtures("here")
def test_a_plan_is_as_good_without_its_layers(original, export, tmp_path, monkeypatch, capsys):
    def fail(*arguments: Any) -> EngineLayers:
        raise UnreadableLayers("unreadable", code="layers-unreadable")

    monkeypatch.setattr(engines, "inspect_engine", fail)
    assert export(original.path).startswith("3 TensorRT engines from")
    assert [built.layers for built in load(tmp_path / "new", BundleManifest).manifest.engines] == [None] * 3
    assert "the report says nothing of the layers of int8.plan" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("here")
def test_an_option_that_tensorrt_lacks_ends_it_with_auto_too(original, monkeypatch):
    def refuse(options: tuple[str, ...]) -> None:
        raise UserError("", code=options[0])

    monkeypatch.setattr(engines, "check_options", refuse)
    with refuses("stripped"):
        engines.build_plans(ExportConfig(engine_options=("stripped",)), SHAPES, original.path, None, StepLog("export"))


@pytest.mark.usefixtures("here")
def test_settings_that_change_nothing_are_named(original, export, tmp_path, capsys):
    export(original.path, max_batch=4, opt_batch=32, optimization_level=1)  # 32 is the default
    assert "without effect here: export.max_batch. A bundle keeps its shapes" in "".join(capsys.readouterr())
    assert load(tmp_path / "new", BundleManifest).manifest.shapes == SHAPES


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("calibrated_with", ["the first seven", "others", ""])
def test_images_of_another_split_are_noted(original, export, digits_dataset, capsys, calibrated_with):
    """The dataset is never the same file by file on another machine; its images can be."""
    first = {"start": 0, "num_images": 7, "batch_size": 1, "device_id": None}
    samples = Samples(dataset=digits_dataset, transform=original.manifest.transform, **first)
    digest = samples.digest() if calibrated_with == "the first seven" else calibrated_with
    calibration = original.manifest.calibration.model_copy(update={"images_digest": digest}).model_dump()
    export(sealed_again(original, calibration=calibration, inputs={"dataset": "sha256:of the other machine"}))
    is_noted = "does not begin with the images that calibrated the bundle" in "".join(capsys.readouterr())
    assert is_noted == (calibrated_with != "the first seven")


@pytest.mark.usefixtures("here")
def test_settings_of_another_version_stay(original, export, tmp_path):
    class Config(ExportConfig):
        model_config = ConfigDict(extra="allow")

    export(sealed_again(original, Config(seed=7, optimization_level=1)), optimization_level=4)
    config = load(tmp_path / "new", BundleManifest).manifest.config
    assert (config["seed"], config["optimization_level"]) == (7, 4)


def without_scales(bundle: Bundle) -> Path:
    bundle.file("scales.json").unlink()
    return sealed_again(bundle)


def damaged(bundle: Bundle) -> Path:
    bundle.file("int8.onnx").write_bytes(b"int8.onnx of the Original")
    return bundle.path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda bundle: bundle.path, {"tensorrt": "off"}, "export.tensorrt is off: set it to auto"),
        (
            lambda bundle: sealed_again(bundle, classes=("nought", *bundle.manifest.classes[1:])),
            {},
            "class 0 is 'nought' against '0'. Name the images",
        ),
        (lambda bundle: sealed_again(bundle, classes=bundle.manifest.classes[:3]), {}, "3 against 10"),
        (without_scales, {}, "has no scales.json, so export the model again"),
        (damaged, {}, "int8.onnx was changed after it was sealed"),
    ],
)
def test_what_no_plans_are_built_of(original, export, tmp_path, change, settings, said):
    with pytest.raises(EngineryError) as error:
        export(change(original), **settings)
    assert said in str(error.value)
    assert not (tmp_path / "new").exists()


def test_without_tensorrt(original, export, tmp_path):
    for model, settings in ((original.path, {}), (tmp_path / "absent.onnx", {"tensorrt": "on"})):
        with refuses("tensorrt-unavailable"):
            export(model, **settings)


def test_what_is_a_bundle(original, digits_dataset, tmp_path):
    assert rebuild.is_bundle(original.path)
    np.save(tmp_path / "manifest.json", np.zeros(1))
    for folder in (digits_dataset.path, tmp_path / "missing", tmp_path):
        assert not rebuild.is_bundle(folder)
