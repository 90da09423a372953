"""Refusals before anything runs: files that are not there, models that can't be, and memory that can't suffice."""

import math
import re
import shutil
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torchvision
from onnx import helper
from safetensors.torch import save_file

import enginery
from components.common.contracts.environment import Gpu
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import CheckpointManifest, seal
from components.common.contracts.statistics import drop_upper
from components.common.contracts.transforms import transform_for
from components.common.runtimes.architectures import check_image_size
from components.export import model_check
from components.export.config import ExportConfig
from components.export.sources import check_model, write_fp32_onnx
from components.train.config import TrainConfig
from enginery.cli.run import pipeline_command
from enginery.datasets.shapes import write_shapes
from enginery.local import preflight
from enginery.local.preflight import (
    check_inputs,
    check_measurements,
    check_memory,
    check_paths,
    check_validation,
    images_to_prove,
    training_memory,
)
from tests.conftest import Dataset
from tests.pipelines.running import ROOT, load_once
from tests.steps import step
from tests.unit import registered
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses

GB = 10**9
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
LARGE = {"architecture": "resnet50", "image_size": 224, "global_batch_size": 256, "train": {}}


BEGUN = ("--data", "{digits}", "--set")
WEIGHTS = ("--data", "{digits}", "--model", "{tmp}/m.pth", "--architecture", "resnet18")


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("resnet50", ("--data", "{tmp}/ab sent"), "no-data", "{tmp}/ab sent"),
        ("resnet50", ("--data", "{tmp}/images.rar"), "unknown-data-kind", "images.rar"),
        ("resnet50", ("--data", "{tmp}/empty"), "no-class-folders", "{tmp}/empty"),
        ("detection", ("--data", "{tmp}/absent"), "no-data", "Pascal VOC"),
        ("detection", (), "missing-input", "--data is required: Images with boxes: a folder, or a tar or zip of it"),
        ("segmentation", ("--data", "{tmp}/absent"), "no-data", "enginery data shapes shapes"),
        ("segmentation", (), "missing-input", "--data is required: Images with masks: "),
        ("translation", ("--data", "{digits}"), "no-parallel-text", "languages en and de"),
        ("translation", (), "missing-input", "--data is required: Pairs of sentences: "),
        ("resnet50", (), "missing-input", "--data is required: Labelled images: a folder with one sub-folder per"),
        ("resnet50", ("--data", "{digits}", "--summary", "absent/s.json"), "no-folder", "--summary"),
        ("resnet50", ("--data", "{digits}", "--summary", "."), "is-folder", "--summary"),
        ("resnet50", ("--data", "{digits}", "--global-batch-size", "1000000"), "too-little-memory", "85.9 TB"),
        ("resnet50", ("--data", "{shapes}"), "other-task", "`enginery run detection` or `enginery run segmentation`"),
        ("quantize", ("--data", "{shapes}", "--model", "{tmp}/m.pth", "--architecture", "resnet18"), "other-task", ""),
        ("detection", ("--data", "{tmp}", "--config", "digits"), "other-task", "take one for it (shapes)"),
        ("segmentation", ("--data", "{tmp}", "--config", "strong"), "other-task", "take one for it (shapes_masks)"),
        ("resnet50", ("--data", "{tmp}", "--config", "phrases"), "other-task", "(digits, fast, reference, strong, tex"),
        ("detection", ("--data", "{tmp}", "--architecture", "fcos"), "other-task", "such as detection/retinanet_"),
        ("resnet50", ("--data", "{digits}", "--architecture", "resnet51"), "unknown-architecture", "resnet50"),
        ("resnet50", ("--data", "{digits}", "--architecture", "timm/resnet51"), "unknown-architecture", "resnet50"),
        (
            "resnet50",
            (*BEGUN[:2], "--image-size", "64", "--architecture", "timm/test_vit"),
            "exporter-failed",
            "bicubic2d_aa",
        ),
        ("detection", ("--data", "{tmp}", "--architecture", "detection/fcs_small"), "unknown-architecture", "fcos_s"),
        ("segmentation", ("--data", "{tmp}", "--architecture", "segmentation/u"), "unknown-architecture", "/fpn_small"),
        ("translation", ("--data", "{tmp}", "--architecture", "translation/ls"), "unknown-architecture", "/lstm_small"),
        ("resnet50", (*BEGUN, "train.pretrained={tmp}/absent.pt"), "weights-missing", "{tmp}/absent.pt"),
        ("resnet50", (*BEGUN, "train.pretrained=IMAGENET1K_V9"), "no-weights", "torchvision has of resnet50 "),
        ("resnet50", (*BEGUN, "train.pretrained={tmp}/empty"), "no-weights", "{tmp}/empty, neither a weights file"),
        ("resnet50", (*BEGUN, "train.pretrained={tmp}/m.pth"), "not-weights", "{tmp}/m.pth"),
        ("resnet50", (*BEGUN, "train.pretrained=http://a.org/w.zip"), "no-weights", "w.zip, which names no weights"),
        (
            "resnet50",
            (*BEGUN, "train.pretrained={tmp}/m.pth", "--set", "train.pretrained_sha256=00000000"),
            "weights-of-another-digest",
            "should have 00000000",
        ),
        ("resnet50", ("--data", "{digits}", "--config", "digit"), "no-config-file", "digits, fast, reference, strong"),
        ("quantize", ("--data", "{digits}", "--model", "{tmp}/absent"), "no-model", "{tmp}/absent"),
        ("quantize", ("--data", "{digits}", "--model", "{tmp}/m.pth"), "not-weights", "{tmp}/m.pth"),
        ("quantize", ("--data", "{digits}", "--model", "{tmp}"), "no-model", "{tmp}"),
        ("quantize", ("--data", "{digits}"), "missing-input", "--model is required"),
        ("quantize", WEIGHTS, "not-weights", "can't read the weights in {tmp}/m.pth"),
    ],
)
def test_a_run_that_can_not_be_is_refused_and_leaves_nothing(
    tmp_path: Path,
    few_digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: tuple[str, ...],
    code: str,
    words: str,
) -> None:
    (folder := tmp_path / "folder").mkdir()
    (folder / "empty").mkdir()
    for file in ("images.rar", "m.pth"):
        (folder / file).write_bytes(b"not a model")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("enginery.cli.run.load_pipeline", load_once)
    if "{shapes}" in options:
        write_shapes(folder / "shapes", num_train=4, num_val=2, image_size=64)
    filled = [option.format(tmp=folder, digits=few_digits, shapes=folder / "shapes") for option in options]
    with refuses(code, says=words.format(tmp=folder)):
        registered.enginery("run", ROOT / f"pipelines/{name}.py", *filled, "--set", "gate.confident=false")
    assert not (tmp_path / "home").exists()


def test_python_refuses_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    options: dict[str, Any] = {"settings": ["gate.confident=false"], "model": tmp_path / "absent.onnx"}
    with refuses("no-model"):
        enginery.run("quantize", data=tmp_path, **options)
    assert not (tmp_path / "home").exists()


def test_uris_are_not_opened_and_models_that_are_there_pass(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "manifest.json").write_bytes(b"")
    check_paths({"data": "memory://images", "model": "models://a/1"})
    with refuses("secret-in-uri"):
        check_paths({"data": "http://me:secret@example.org/images.tar"})
    for model in ("model.onnx", "checkpoint"):
        check_paths({"data": str(tmp_path), "model": str(tmp_path / model)})
    check_paths({"numbers": 3})  # a pipeline of one's own


def run_of(data: Path, **arguments: Any) -> dict[str, Any]:
    """Arguments of a run, as `resolve_arguments` gives them."""
    return {"data": str(data), "seed": 0, "preprocess": {}, "gate": {}, "max_drop_points": 0.5, **arguments}


@pytest.mark.parametrize(
    ("name", "files", "code"),
    [
        ("images", ("0.txt",), "no-class-folders"),
        ("images", ("a/0.txt", "a/1.jpg", "b/0.txt", "b/1.png"), "no-usable-image"),
        ("images.zip", (), "no-class-folders"),
        ("images.tar", (), "git-lfs-pointer"),
    ],
)
def test_data_without_images_is_refused(tmp_path: Path, name: str, files: tuple[str, ...], code: str) -> None:
    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_bytes(POINTER)
    if name.endswith(".zip"):
        zipfile.ZipFile(tmp_path / name, "w").close()
    if name.endswith(".tar"):
        (tmp_path / name).write_bytes(POINTER)
    with refuses(code) as caught:
        check_inputs(run_of(tmp_path / name))
    assert ("run `git lfs pull`" in str(caught.value)) == (code in ("no-usable-image", "git-lfs-pointer"))


def too_few(data: Path | str, gate: dict[str, Any], **arguments: Any) -> str:
    """The refusal of a run whose validation images are too few."""
    with refuses("too-few-validation-images") as caught:
        check_inputs({**run_of(Path(), gate=gate, **arguments), "data": str(data)})
    return str(caught.value)


def test_too_few_validation_images_are_refused_with_what_would_do(few_digits: Path, tmp_path: Path) -> None:
    """The data validates 120 of its 600 images: a folder, a small archive, or a table or folder behind a URI."""
    import fsspec

    point = {"confident": False}
    demand = {**point, "min_validation_images": 200}
    assert check_inputs(run_of(few_digits, gate=point)) == ""
    assert "60 of the 600 images validate" in too_few(few_digits, point, preprocess={"val_fraction": 0.1})
    with tarfile.open(tmp_path / "few.tar.gz", "w:gz") as archive:
        archive.add(few_digits, "digits")
    files = sorted(file.relative_to(few_digits) for file in few_digits.glob("*/*.*"))
    fsspec.filesystem("memory").put(str(few_digits), "/few", recursive=True)
    rows = "\n".join(f"{file},{file.parent}" for file in files)
    fsspec.filesystem("memory").pipe("/few/table.csv", f"path,label\n{rows}\n".encode())
    for data in (few_digits, tmp_path / "few.tar.gz", "memory://few/table.csv", "memory://few"):
        text = too_few(data, demand)
        assert text.startswith("120 of the 600 images validate, and at least 200 are needed")
        assert "preprocess.val_fraction=0.34" in text
    fsspec.filesystem("memory").pipe("/packed/train-0.tar", b"")
    assert "is checked after preprocess" in check_inputs({**run_of(few_digits, gate=demand), "data": "memory://packed"})


@pytest.mark.parametrize(("dataset", "num_val"), [("shapes", 20), ("shapes", 300), ("textures", 60), ("textures", 598)])
def test_the_command_that_follows_the_data_is_not_refused(dataset: str, num_val: int, tmp_path: Path) -> None:
    options = ("--num-train", 60, "--num-val", num_val, "--image-size", 32, "--num-workers", 1)
    said = registered.enginery("data", dataset, tmp_path / "data", *options).output
    _, name, *words = said.partition("Next: enginery ")[2].split()
    assert ("gate.confident=false" in words) == (num_val < 100)
    file = load_once(ROOT / f"pipelines/{name}.py")
    pipeline_command(file, check_inputs, [], local=True).main(words, standalone_mode=False)


def test_links_that_lead_nowhere_do_not_count(tmp_path: Path, few_digits: Path) -> None:
    shutil.copytree(few_digits, tmp_path / "few")
    for folder in (tmp_path / "few").iterdir():
        (folder / "self.jpg").symlink_to("self.jpg")
    text = too_few(tmp_path / "few", {"confident": False, "min_validation_images": 200})
    assert text.startswith("120 of the 600 images validate")


def test_what_no_answer_could_prove_is_refused(few_digits: Path) -> None:
    proof = {"confident": True, "min_relative_score_pct": 0.0}
    check_inputs(run_of(few_digits, gate=proof, max_drop_points=2.5))
    assert "at least 149 are needed" in too_few(few_digits, proof, max_drop_points=2.0)
    # 99 % of FP32's top-1: the limit that is too tight for so few images is the one to change
    text = too_few(few_digits, {"confident": True}, max_drop_points=2.5)
    assert "at least 299 are needed" in text
    assert ", or a smaller gate.min_relative_score_pct, or" in text
    both = "a larger --max-drop-points and a smaller gate.min_relative_score_pct, or"
    assert both in too_few(few_digits, {"confident": True}, max_drop_points=1.5)
    text = too_few(few_digits, {**proof, "min_validation_images": 130}, max_drop_points=2.0)
    assert text.endswith("; either also needs --set gate.min_validation_images=120")
    text = too_few(few_digits, proof, max_drop_points=0.0)
    assert "no number is enough" in text
    assert "Give a larger --max-drop-points" in text
    for architecture in ("detection/fcos_small", "segmentation/fpn_small"):  # a share of a score not known yet
        boxes = run_of(Path(), gate={"confident": True}, max_drop_points=0.1, architecture=architecture)
        check_validation(boxes, 1000, num_val=300, num_of_class=0)
        with refuses("too-few-validation-images"):
            check_validation(boxes, 1000, num_val=299, num_of_class=0)
    numbers = [images_to_prove(points, is_share=False) for points in (0.0, 100 - 99.9, 1.0, 3.5)]
    assert numbers == [math.inf, 3000, 300, 86]
    for points in (0.1, 0.5, 1.0, 5.0, 50.0):  # the gate's own interval lies within from so many images on
        number = images_to_prove(points)
        assert drop_upper(number, 0, 0) <= points < drop_upper(number - 1, 0, 0)


@pytest.mark.parametrize(
    ("class_counts", "gate", "is_refused"),
    [
        ((97, 3), {}, False),
        ((98, 2), {}, True),  # all right by chance: p = 0.13
        ((98, 2), {"require_above_chance": False}, False),
    ],
)
def test_images_of_nearly_one_class(class_counts: tuple[int, ...], gate: dict[str, Any], is_refused: bool) -> None:
    arguments = run_of(Path(), gate={"confident": False, **gate})
    with refuses("one-sided-validation-images", "gate.require_above_chance") if is_refused else nullcontext():
        check_validation(arguments, 400, num_val=sum(class_counts), num_of_class=max(class_counts))


GPU = (Gpu(name="H100", memory_bytes=80 * GB, driver="580"),)
P99 = {"gate": {"max_p99_ms": 5.0, "p99_batch_size": 4}}


@pytest.mark.parametrize(
    ("gpus", "arguments", "setting"),
    [
        ((), {}, None),
        ((), {"gate": {"precision": "fp16"}}, "gate.precision"),
        (GPU, {"gate": {"precision": "fp16"}}, None),
        (GPU, {"gate": {"precision": "fp16"}, "export": {"tensorrt": "off"}}, "gate.precision"),
        (GPU, {"gate": {"precision": "fp16"}, "validate": {"runtime": "openvino"}}, "gate.precision"),
        ((), {"gate": {"precision": "fp16"}, "validate": {"runtime": "onnxruntime"}}, None),
        ((), {"gate": {"min_speedup_fp16": 1.2}}, "gate.min_speedup_fp16"),
        (GPU, {"gate": {"min_speedup_fp16": 1.2}}, None),
        ((), {"gate": {"min_speedup": 1.2}, "validate": {"runtime": "onnxruntime"}}, "gate.min_speedup"),
        ((), {"export": {"tensorrt": "on"}}, "export.tensorrt"),
        ((), {"validate": {"runtime": "tensorrt"}}, "validate.runtime"),
        ((), {"model": "bundle"}, "--model"),
        ((), P99, "gate.p99_batch_size"),
        (GPU, P99, None),
        (GPU, {**P99, "export": {"max_batch": 2}}, "gate.p99_batch_size"),
        ((), {**P99, "latency_budget": "7ms"}, None),
        ((), {**P99, "validate": {"benchmark_batch_sizes": [4]}}, None),
    ],
)
def test_what_would_not_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], arguments: dict[str, Any], setting: str
) -> None:
    monkeypatch.setattr(preflight, "gpus", lambda: gpus)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/manifest.json").write_text('{"kind": "bundle"}')
    monkeypatch.chdir(tmp_path)
    run = {"gate": {}, "export": {}, "validate": {}, **arguments}
    with refuses("not-measured-here", setting) if setting else nullcontext():
        check_measurements(run, in_containers=True)


TRANSLATOR = {"architecture": "translation/lstm_small"}
DEGRADED = {"gate": {"max_corrupted_drop_points": 2.0}, "validate": {"corruptions": True}}


@pytest.mark.parametrize(
    ("arguments", "changed", "code", "setting"),
    [
        ({"calibration_method": "smoothquant"}, TRANSLATOR, "not-measured-here", "export.calibration_method"),
        ({"validate": {"corruptions": True}}, TRANSLATOR, "not-measured-here", "validate.corruptions"),
        ({"gate": {"max_class_drop_points": 1.0}}, TRANSLATOR, "not-measured-here", "gate.max_class_drop_points"),
        ({"train": {"image_sizes": [64]}}, TRANSLATOR, "not-measured-here", "train.image_sizes"),
        (DEGRADED, {"validate": {}}, "invalid-setting", "validate.corruptions"),  # a limit on what is not measured
    ],
)
def test_incompatible_settings(arguments: dict[str, Any], changed: dict[str, Any], code: str, setting: str) -> None:
    run = {"gate": {}, "export": {}, "validate": {}, **arguments}
    check_measurements(run, in_containers=True)
    with refuses(code, setting):
        check_measurements({**run, **changed}, in_containers=True)


_LAYERS = {"script": torch.nn.Linear(1, 1), "script with packed code": torch.nn.BatchNorm2d(1)}


@pytest.mark.parametrize(
    ("name", "made", "architecture", "words"),
    [
        ("m.onnx", None, "resnet18", "{model}: not an ONNX file"),
        ("m.pth", None, "resnet18", "can't read the weights in {model}"),
        ("m.safetensors", None, "resnet18", "can't read the weights in {model}: the file is damaged or cut short"),
        ("m.safetensors", "resnet18", "", "{model} holds weights only: name their architecture"),
        ("m.pth", None, "", "can't read the weights in {model}"),
        ("m.safetensors", "resnet18", "resnet18", "the weights in {model} don't fit this model: "),
        ("m.safetensors", "squeezenet1_1", "squeezenet1_1", "squeezenet1_1 can't run on images of 8 x 8 pixels: "),
        ("m.checkpoint", None, "resnet18", "{model} is neither .onnx nor weights (.safetensors, .pt, .pth): write "),
        ("a/m.onnx", None, "", "there is no model at {model}; name a Checkpoint or Bundle directory"),
        ("m.ONNX", None, "", "{model}: not an ONNX file"),
        ("m.PTH", None, "", "can't read the weights in {model}"),
        ("m.pt", "script", "", "{model} is a TorchScript program, not weights"),
        ("m.onnx", "pointer", "", "{model} is a pointer of Git LFS, not the file itself; run `git lfs pull`"),
        ("m.pt", "script", "resnet18", "{model} is a TorchScript program, not weights"),
        ("m.pt", "script with packed code", "resnet18", "{model} is a TorchScript program, not weights"),
    ],
)
def test_unusable_models_are_refused(tmp_path, name: str, made: str | None, architecture: str, words: str) -> None:
    model = tmp_path / name
    if model.parent.exists():
        model.write_bytes(b"not a model")
    if made == "pointer":
        model.write_bytes(POINTER)
    elif made in _LAYERS:
        torch.jit.save(torch.jit.script(_LAYERS[made]), model)
    elif made:
        num_classes = 3 if made == "resnet18" else 2
        save_file(torchvision.models.get_model(made, num_classes=num_classes).state_dict(), model)
    with pytest.raises(UserError) as caught:
        check_model(model, architecture, ("a", "b"), 8)
    assert str(caught.value).startswith(words.format(model=model))


def test_an_image_size_that_a_network_asserts_against_without_a_text_is_named() -> None:
    class Windows(torch.nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with refuses("image-size-unsupported") as caught:
        check_image_size(Windows(1, 1), "halo", 8)
    assert "8 x 8 pixels: AssertionError. Choose another" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "architecture", "tensor", "value", "code"),
    [
        ("weights", "shufflenet_v2_x0_5", "fc.weight", 0.0, "constant-answers"),
        ("checkpoint", "shufflenet_v2_x0_5", "fc.weight", 0.0, "constant-answers"),
        ("checkpoint", "shufflenet_v2_x0_5", "conv1.1.running_var", -1.0, "answers-not-finite"),
        ("weights", "alexnet", "classifier.6.bias", 0.0, "size-not-exportable"),
    ],
)
def test_weights_that_give_no_answers_are_refused_before_and_in_export(
    digits_dataset: Dataset, tmp_path: Path, kind: str, architecture: str, tensor: str, value: float, code: str
) -> None:
    classes = digits_dataset.manifest.classes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = torchvision.models.get_model(architecture, num_classes=len(classes)).state_dict()
    model = tmp_path / "weights.safetensors"
    save_file({**weights, tensor: torch.full_like(weights[tensor], value)}, model)
    if kind == "checkpoint":
        model = tmp_path
        spec = transform_for(64, resize_ratio=1.0, interpolation="bilinear")
        fields = {"architecture": architecture, "classes": classes, "transform": spec, "metrics": {}}
        seal(model, CheckpointManifest, inputs={}, config=TrainConfig(), **fields)
    with refuses(code) as caught:
        check_model(model, architecture, classes, 64)
    assert str(caught.value).startswith(architecture if code == "size-not-exportable" else str(model))
    with refuses(code):
        config = ExportConfig(architecture=architecture, image_size=64)
        write_fp32_onnx(model, digits_dataset, config, tmp_path / "fp32.onnx")
    assert not (tmp_path / "fp32.onnx").exists()


def test_small_models_that_take_much_memory(few_digits: Path, tmp_path, digits_dataset: Dataset, monkeypatch) -> None:
    """Its constants are computed: 10 GB, which there may be, and for which other processes may be ended."""
    monkeypatch.setattr("components.export.run.check_apart", model_check.check_apart)
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["scores"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceMean", ["zeros"], ["mean"], keepdims=0),
        helper.make_node("Add", ["scores", "mean"], ["y"]),
    ]
    weights = {"w": np.eye(3, 10, dtype=np.float32), "shape": np.array([50_000, 50_000])}
    model = onnx_model(nodes, {"x": ["N", 3, 16, 16]}, {"y": ["N", 10]}, weights)
    onnx.save(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").stat().st_size < 1000
    with refuses("onnx-does-not-run", "--model", says="ConstantOfShape"):
        check_inputs(run_of(few_digits, model=str(tmp_path / "m.onnx"), gate={"confident": False}))
    # As on a cluster, where nothing is checked before a run.
    with refuses("onnx-does-not-run", "--model", says="ConstantOfShape"):
        step("export", tmp_path / "b", model=tmp_path / "m.onnx", dataset=digits_dataset.path)


def test_a_model_whose_reading_kills_the_process_is_refused(few_digits: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    (tmp_path / "components/export").mkdir(parents=True)
    for folder in ("components", "components/export"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "components/export/model_check.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(model_check, "_ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with refuses("model-kills-reader", "--model"):
        check_inputs(run_of(few_digits, model=str(tmp_path / "m.onnx"), gate={"confident": False}))


def test_memory_grows_with_batch_and_pixels() -> None:
    needed = training_memory(LARGE)
    assert needed.needed_bytes(256) == pytest.approx(22.3 * GB, rel=0.01)
    small = training_memory({**LARGE, "image_size": 112})
    half = training_memory({**LARGE, "train": {"precision": "bf16"}})
    assert small.per_image_bytes == pytest.approx(needed.per_image_bytes / 4, rel=0.02)
    assert half.per_image_bytes == pytest.approx(needed.per_image_bytes / 2, rel=0.03)
    frozen = training_memory({**LARGE, "train": {"freeze_backbone": True}})
    assert frozen.per_image_bytes < 0.02 * needed.per_image_bytes
    assert training_memory({**LARGE, "architecture": "timm/unknown"}) is None
    assert training_memory({"architecture": "resnet50", "image_size": 224}) is None  # a pipeline that does not train


def test_images_at_once() -> None:
    """Processes share the memory of a CPU, and each has a GPU of its own."""
    parts = {**LARGE, "train": {"per_gpu_batch_size": 32, "num_processes": 2}}
    assert [preflight._images_at_once(LARGE, num_gpus) for num_gpus in (0, 1, 4)] == [256, 256, 64]
    assert [preflight._images_at_once(parts, num_gpus) for num_gpus in (0, 2)] == [64, 32]


def memory(monkeypatch: pytest.MonkeyPatch, total_bytes: int, available_bytes: int, gpus: tuple[Gpu, ...] = ()) -> None:
    monkeypatch.setattr(preflight, "_memory", lambda: (total_bytes, available_bytes))
    monkeypatch.setattr(preflight, "gpus", lambda: gpus)


def test_more_memory_than_there_is_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for total_gb, available_gb, fix in ((16, 14, "Try --global-batch-size 136, a smaller"), (3, 2, "Try a smaller")):
        memory(monkeypatch, total_gb * GB, available_gb * GB)
        with refuses("too-little-memory", "--global-batch-size") as caught:
            check_memory(LARGE)
        assert "takes about 24.3 GB of memory" in str(caught.value)
        assert fix in str(caught.value)
    memory(monkeypatch, 32 * GB, 12 * GB)
    assert "12.0 GB are available: it may be killed. Try --global-batch-size 112, " in check_memory(LARGE)
    memory(monkeypatch, 32 * GB, 30 * GB)
    assert check_memory(LARGE) == ""
    memory(monkeypatch, 4 * GB, 3 * GB)
    assert check_memory({**LARGE, "image_size": 32, "global_batch_size": 128}) == ""  # the quickstart
    memory(monkeypatch, 4 * GB, 3 * GB, (Gpu(name="H100", memory_bytes=80 * GB, driver="580"),))
    assert check_memory(LARGE) == ""
    too_many = {**LARGE, "global_batch_size": 2048}
    assert "train.per_gpu_batch_size=1024, " in check_memory(too_many)
    memory(monkeypatch, 4 * GB, 3 * GB, (Gpu(name="H100", memory_bytes=80 * GB, driver="580"),) * 2)
    assert check_memory(too_many) == ""


def test_memory_of_translators_is_that_of_short_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"architecture": "translation/transformer_base", "global_batch_size": 4096}
    memory(monkeypatch, 16 * GB, 14 * GB)
    with refuses("too-little-memory", "--global-batch-size") as caught:
        check_memory(arguments)
    fitting = re.search(r"sentences of 16 tokens.* Try --global-batch-size (\d+), a smaller --arch", str(caught.value))
    assert check_memory({**arguments, "global_batch_size": int(fitting[1])}) == ""
    assert "it may be killed" in check_memory({**arguments, "global_batch_size": int(fitting[1]) + 8})
    memory(monkeypatch, 16 * GB, 14 * GB, (Gpu(name="T4", memory_bytes=16 * GB, driver="580"),))
    text = check_memory(arguments)
    largest, some = map(int, re.search(r"At most (\d+) sentences fit: .*per_gpu_batch_size=(\d+), or", text).groups())
    assert some <= largest < 4096
    assert check_memory({**arguments, "train": {"per_gpu_batch_size": some}}) == ""


def test_weights_alone_can_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = {**LARGE, "global_batch_size": 1, "train": {"precision": "bf16"}}
    memory(monkeypatch, 4 * GB, 3 * GB, (Gpu(name="P4", memory_bytes=preflight._REST_BYTES + GB // 4, driver="580"),))
    assert "weights, gradients and optimizer alone take" in check_memory(huge)
    memory(monkeypatch, 4 * GB, 3 * GB, (Gpu(name="T4", memory_bytes=preflight._REST_BYTES + GB, driver="580"),))
    text = check_memory({**huge, "global_batch_size": 64})
    largest = int(re.search(r"At most (\d+) images fit: try --set train.per_gpu_batch_size=(\d+)", text)[1])
    needed = training_memory(huge)
    assert needed.needed_bytes(largest) <= GB < needed.needed_bytes(largest + 1)
    memory(monkeypatch, preflight._REST_BYTES + GB // 4, preflight._REST_BYTES)
    with refuses("too-little-memory", "--global-batch-size", says="for weights, gradients and optimizer at any batch"):
        check_memory({**huge, "train": {}})


def test_small_images_that_a_network_pads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swin fills its windows, whose pixels are many times those of the image."""
    memory(monkeypatch, 4 * GB, 3 * GB, (Gpu(name="H100", memory_bytes=80 * GB, driver="580"),))
    swin = {"architecture": "swin_v2_b", "image_size": 32, "global_batch_size": 4096, "train": {"precision": "fp32"}}
    assert "At most" in check_memory(swin)


def test_masks_and_boxes_are_counted() -> None:
    for architecture in ("segmentation/fpn_small", "detection/fcos_small"):
        needed = training_memory({**LARGE, "architecture": architecture, "image_size": 64})
        assert needed.needed_bytes(64) > 64 * 64**2 * 100


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory_limit", lambda: None)
    total_bytes, available_bytes = preflight._memory()
    assert 0 < available_bytes < total_bytes
    monkeypatch.setattr(preflight, "memory_limit", lambda: 5 * GB)
    assert max(preflight._memory()) <= 5 * GB
