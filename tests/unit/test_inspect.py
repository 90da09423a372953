"""`enginery inspect`: images as the loader has them, predictions as the runners make them, the picture, every error."""

import io
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from components.common.contracts.digests import digest_file
from components.common.contracts.environment import environment
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec, TransformSpec
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import to_numpy
from components.common.runtimes.selection import RuntimeSelection, fit_model
from components.common.runtimes.torch import UnsupportedOperators
from components.export.config import ExportConfig
from components.export.onnx_export import export_onnx
from components.export.run import run as export
from components.validate import inspect as inspection
from components.validate.inspect import load_input, look
from enginery.cli.commands import cli
from enginery.local.runs import bundle_of_run, latest_bundle
from enginery.local.summary import RunSummary, StepSummary

from .networks import digits_network

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPES = ShapeSpec(height=32, width=32)
FIRST, SECOND, THIRD = "own-20260101-120000-aaaa", "own-20260102-120000-bbbb", "own-20260103-120000-cccc"


@pytest.fixture(scope="module")
def bundle(digits_dataset: Artifact[DatasetManifest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network that has learned some digits, exported by the step itself."""
    net = digits_network(digits_dataset)
    folder = tmp_path_factory.mktemp("bundle")
    export_onnx(net, folder / "digits.onnx", SHAPES)
    settings = {"tensorrt": "off", "resize_ratio": 1.0, "calibration_method": "max", "num_ranking_images": 0}
    config = resolve(ExportConfig, "export", settings)
    export(config, StepLog("export"), model=folder / "digits.onnx", dataset=digits_dataset.path, output=folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def digit(few_digits: Path) -> Path:
    return sorted((few_digits / "3").iterdir())[0]


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`inspect(*arguments)`: the command in an empty folder. Returns what it says; raises what the process would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")

    def called(*arguments: object) -> str:
        words = ["inspect", *map(str, arguments)]
        return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False).output

    return called


# --- images


def test_images_are_those_of_the_loader(tmp_path: Path, run_preprocess, few_digits: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 255, (50, 70, 3), np.uint8))
    turned = Image.Exif()
    turned[274] = 6  # to be turned by 90 degrees
    for split, name in itertools.product(("train", "val"), "ab"):
        folder = tmp_path / "images" / split / name
        folder.mkdir(parents=True)
        pixels.save(folder / "rgb.jpg", quality=90)
        pixels.save(folder / "turned.jpg", exif=turned)
        pixels.convert("CMYK").save(folder / "cmyk.jpg")
        pixels.convert("L").save(folder / "gray.png")
        pixels.convert("P").save(folder / "palette.png")
        pixels.convert("RGBA").save(folder / "alpha.png")
        Image.fromarray(rng.integers(0, 65535, (33, 90), np.uint16)).save(folder / "deep.png")
        pixels.save(folder / "lossless.webp", lossless=True)
        pixels.save(folder / "old.bmp")
        pixels.save(folder / "scan.tif")
    dataset = run_preprocess(tmp_path / "images", tmp_path / "dataset", on_leak="warn")
    spec = TransformSpec(resize_size=40, crop_size=32, interpolation="bicubic")
    batch = to_numpy(next(iter(Loader(dataset, "val", spec, batch_size=32, num_threads=1))).images)
    files = sorted((tmp_path / "images/val").glob("*/*"))
    assert len(batch) == len(files) == 20
    for expected, file in zip(batch, files, strict=True):
        own = load_input(file, spec)
        assert (own.shape, own.dtype) == ((1, 3, 32, 32), np.float32)
        np.testing.assert_array_equal(own[0], expected, err_msg=file.name)


def test_what_is_no_image_is_said(tmp_path: Path, digit: Path) -> None:
    spec = TransformSpec(resize_size=32, crop_size=32)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    Image.new("1", (8, 8)).save(tmp_path / "bits.tif")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "half.jpg").write_bytes(digit.read_bytes()[: digit.stat().st_size // 2])
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, said in (
        ("nothing.jpg", "there is no file .*nothing.jpg"),
        ("", "is a folder; name image files in it"),
        ("a.gif", "is not an image; take a JPEG"),
        ("bits.tif", "is a TIFF of mode 1, which is not supported"),
        ("text.jpg", "is not an image; take a JPEG"),
        ("empty.jpg", "is not an image; take a JPEG"),
        ("half.jpg", "is damaged: .*save it anew"),
        ("pipe.jpg", "is not a regular file"),
    ):
        with pytest.raises(UserError, match=said):
            load_input(tmp_path / name, spec)


# --- predictions and maps


def test_predictions_are_those_of_the_runners(bundle: Path, few_digits: Path) -> None:
    opened = load(bundle, BundleManifest, verify=(".onnx",))
    files = [sorted((few_digits / name).iterdir())[1] for name in ("0", "7")]
    result = look(opened, files)
    assert result.maps_missing == ""
    for entry, file in zip(result.looks, files, strict=True):
        image = load_input(file, opened.manifest.transform)
        for precision, name in {"fp32": "fp32.onnx", "int8": fit_model(opened.manifest.cpu_models).file}.items():
            runner = OpenVINORunner(bundle / name, opened.manifest.shapes)
            logits = torch.from_numpy(runner.infer(image)[0]).double()
            runner.close()
            own = entry.prediction(precision)
            assert own.runtime == "openvino"
            np.testing.assert_allclose(own.probabilities, torch.softmax(logits, 0).numpy(), rtol=1e-9, atol=1e-12)
        fp32, int8 = (entry.prediction(name).probabilities for name in ("fp32", "int8"))
        assert entry.largest_difference("int8") == np.abs(fp32 - int8).max() > 0
        assert entry.explained == fp32.argmax()
        missing = entry.prediction("fp16")
        assert (missing.runtime, missing.probabilities, entry.largest_difference("fp16")) == ("n/a", None, None)
        assert "needs TensorRT" in missing.note
        assert [(each.layer.height, each.fp32.shape) for each in entry.layers] == [(16, (16, 16)), (8, (8, 8))]
        assert all(each.int8.shape == each.fp32.shape for each in entry.layers)


def test_a_model_that_pytorch_cannot_run_is_shown_without_maps(inspect, bundle: Path, digit: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedOperators("PyTorch runner: operators Einsum are not supported")

    monkeypatch.setattr(inspection, "TorchGraph", refuse)
    text = inspect(digit, "--bundle", bundle)
    assert "no maps: PyTorch runner: operators Einsum are not supported" in text
    assert "INT8        openvino" in text
    with Image.open("inspect.png") as picture:
        assert picture.width < 1.8 * picture.height


class Fixed:
    """A runner that says the same of every image."""

    runtime, device = "fake", "none"

    def __init__(self, *logits: float) -> None:
        self._logits = np.array([logits], np.float32)

    def infer(self, images: np.ndarray) -> np.ndarray:
        return self._logits

    def close(self) -> None:
        pass


def serve(monkeypatch: pytest.MonkeyPatch, fp32: Fixed, int8: Fixed) -> None:
    found = [RuntimeSelection(precision=n, file=None, runner=r, note="") for n, r in (("fp32", fp32), ("int8", int8))]
    monkeypatch.setattr(inspection, "select_runtimes", lambda *_: found)


def test_the_output_of_a_softmax_is_taken_as_it_is(bundle: Path, digit: Path, monkeypatch) -> None:
    certain = [0.99] + [0.01 / 9] * 9
    serve(monkeypatch, Fixed(*certain), Fixed(*np.log(certain)))
    (entry,) = look(load(bundle, BundleManifest), [digit]).looks
    for precision in ("fp32", "int8"):
        np.testing.assert_allclose(entry.prediction(precision).probabilities, certain, rtol=1e-5)


def test_nan_is_no_prediction(inspect, bundle: Path, digit: Path, monkeypatch) -> None:
    right, nothing = Fixed(*range(10)), Fixed(*[np.nan] * 10)
    serve(monkeypatch, right, nothing)
    text = inspect(digit, "--bundle", bundle)
    assert "nan" not in text.replace("NaN", "")
    assert "INT8: its logits hold NaN or infinity" in text
    serve(monkeypatch, nothing, nothing)
    with pytest.raises(EngineryError, match=r"no precision has a prediction for .*FP32: its logits hold NaN"):
        inspect(digit, "--bundle", bundle)


def test_a_model_without_maps_is_shown_without(bundle: Path, digit: Path, monkeypatch) -> None:
    opened = load(bundle, BundleManifest)
    monkeypatch.setattr(inspection, "feature_layers", lambda *_: [])
    assert look(opened, [digit]).maps_missing == "the model has no feature maps of more than one pixel"
    with pytest.raises(UserError, match="nothing to look into"):
        look(opened, [digit], layers=["0.0 Conv"])


def test_a_bundle_without_int8_is_shown_as_far_as_it_goes(bundle: Path, digit: Path) -> None:
    opened = load(bundle, BundleManifest)
    models = {name: file for name, file in opened.manifest.models.items() if name != "int8"}
    less = replace(opened, manifest=opened.manifest.model_copy(update={"models": models}))
    result = look(less, [digit])
    assert result.maps_missing == "the bundle has no INT8 model to set beside FP32"
    missing = result.looks[0].prediction("int8")
    assert (missing.probabilities, missing.note) == (None, "the bundle has no INT8 model")
    assert result.looks[0].prediction("fp32").probabilities is not None


def test_pixels_are_the_image_that_the_model_sees(bundle: Path, digit: Path) -> None:
    opened = load(bundle, BundleManifest)
    (entry,) = look(opened, [digit]).looks
    with Image.open(digit) as image:
        expected = np.asarray(image.convert("RGB"))
    assert expected.shape == (32, 32, 3)  # neither resized nor cropped
    assert np.abs(entry.pixels.astype(int) - expected).max() <= 3  # of two JPEG decoders


def test_the_command_shows_tables_and_writes_a_picture(inspect, bundle: Path, few_digits: Path, tmp_path: Path) -> None:
    files = [sorted((few_digits / name).iterdir())[0] for name in ("2", "5")]
    text = inspect(
        *files, "--bundle", bundle, "--output", "seen.png", "--layers", "1.0 Conv, 0.2", "--maps", "activation"
    )
    (first, _) = look(load(bundle, BundleManifest), files).looks
    for precision in ("fp32", "int8"):
        probabilities = first.prediction(precision).probabilities
        best = int(probabilities.argmax())
        assert f"{precision.upper()}        openvino   {best} {100 * probabilities[best]:.2f} %" in text
    assert f"{100 * first.largest_difference('int8'):.2f}" in text
    assert "FP16: needs TensorRT" in text
    assert re.search(r"^1.0 Conv: cosine of FP32's and INT8's map (0\.9|1\.0)", text, re.MULTILINE)
    assert [str(file) in text for file in files] == [True, True]
    with Image.open(io.BytesIO((tmp_path / "seen.png").read_bytes())) as picture:
        width, height = picture.size
        assert picture.format == "PNG"
        assert height > width / 2
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 500  # text, bars, maps
    one = inspect(files[0], "--bundle", bundle)
    assert "picture: inspect.png" in one
    with Image.open(tmp_path / "inspect.png") as picture:
        assert picture.size[1] < 0.6 * height


# --- runs


def finished(home: Path, run_id: str, bundle: Path | None, **values: object) -> Path:
    """A run that ended, with its bundle."""
    directory = home / "runs" / run_id
    digest = ""
    directory.mkdir(parents=True)
    if bundle is not None:
        digest = digest_file(bundle / "manifest.json")
        place = directory / "artifacts" / "own-2026" / "export-own" / "bundle"
        place.parent.mkdir(parents=True)
        place.symlink_to(bundle)
    fields = {
        "pipeline": "own",
        "run_id": run_id,
        "status": "done",
        "exit_code": 0,
        "message": "",
        "seconds_total": 1.0,
        "arguments": {},
        "steps": [],
        "rows": [],
        "checks": [],
        "run_directory": str(directory),
        "tracking_uri": "sqlite:///mlflow.db",
        "mlflow_run_id": "m",
        "environment": environment(),
        "bundle_digest": digest,
    }
    (directory / "summary.json").write_text(RunSummary.model_validate({**fields, **values}).model_dump_json())
    return directory


def test_the_bundle_of_a_run(tmp_path: Path, bundle: Path) -> None:
    runs = tmp_path / "runs"
    place = finished(tmp_path, FIRST, bundle) / "artifacts/own-2026/export-own/bundle"
    reused = StepSummary(name="export", status="reused", outcome=f"reused from {FIRST}", seconds_total=0.0)
    finished(tmp_path, SECOND, None, steps=[reused], bundle_digest=digest_file(bundle / "manifest.json"))
    finished(tmp_path, THIRD, None, status="failed", exit_code=1)
    assert bundle_of_run(FIRST, runs) == bundle_of_run("own-20260102", runs) == place
    assert latest_bundle(runs) == place  # the newest run that has one
    with pytest.raises(UserError, match=f"the run {THIRD} .failed. has no bundle: .* --run, .* --bundle DIR"):
        bundle_of_run("latest", runs)
    with pytest.raises(UserError, match="there is no run 'x' in"):
        bundle_of_run("x", runs)
    place.unlink()
    with pytest.raises(UserError, match=r"none of the 3 runs in .* --bundle DIR"):
        latest_bundle(runs)


def test_the_last_run_is_the_default(inspect, tmp_path: Path, bundle: Path, digit: Path) -> None:
    finished(tmp_path / "home", FIRST, bundle)
    assert f"bundle home/runs/{FIRST}/artifacts" in inspect(digit)
    assert f"bundle home/runs/{FIRST}/artifacts" in inspect(digit, "--run", "own-2026")


# --- mistakes


def test_each_mistake_has_one_message_with_the_fix(
    inspect, tmp_path: Path, bundle: Path, digit: Path, digits_dataset: Artifact[DatasetManifest]
) -> None:
    (tmp_path / "folder.png").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "inspect.png")
    here = ("--bundle", bundle)
    for arguments, said in (
        ((), "takes one or more images"),
        ([digit] * 33, "takes up to 32 images, got 33"),
        (("no.jpg", *here), "there is no file no.jpg; name an image"),
        ((digit,), "there are no runs in .*home/runs; start one: .* --bundle DIR"),
        ((digit, "--run", "latest"), "there are no runs in"),
        ((digit, *here, "--run", "latest"), "--bundle and --run both say which model; name one"),
        ((digit, "--bundle", "nowhere"), "nowhere is no finished bundle"),
        ((digit, "--bundle", digits_dataset.path), "is a dataset, and a bundle is needed here"),
        ((digit, *here, "--output", "a.jpg"), "--output is a.jpg; name a file that ends in .png"),
        ((digit, *here, "--output", "no/a.png"), "there is no folder .*no; make it"),
        ((digit, *here, "--output", "folder.png"), "is a folder; name a file in it, such as folder.png/inspect.png"),
        (("inspect.png", *here), "would replace the image inspect.png"),
        ((digit, *here, "--layers", "0.0 Con"), "no layer '0.0 Con' among the .* nearest are '0.0 Conv'"),
    ):
        with pytest.raises(UserError, match=said):
            inspect(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["folder.png", "inspect.png"]


def test_a_picture_that_cannot_be_written(inspect, tmp_path: Path, bundle: Path, digit: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # root may write anywhere
    with pytest.raises(UserError, match=r"can't write inspect.png: .* is not writable; name another place"):
        inspect(digit, "--bundle", bundle)


def test_the_process_ends_with_2_and_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "ENGINERY_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "enginery.cli.main", "inspect", "no.jpg"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no file no.jpg; name an image\n"
