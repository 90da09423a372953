"""`enginery inspect`: images as the loader has them, predictions as the runners make them, the picture, every error."""

import io
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import Loader
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import to_numpy
from components.common.runtimes.selection import RuntimeSelection, fit_model
from components.common.runtimes.torch import UnsupportedOperators
from components.validate import inspect as inspection
from components.validate.inspect import inspect, load_input
from enginery.cli.commands import cli
from enginery.local.runs import bundle_of_run, latest_bundle
from enginery.local.summary import StepSummary
from tests.conftest import Bundle, Dataset, Preprocess
from tests.unit.conftest import Proved
from tests.unit.refusals import refuses
from tests.unit.runs import write_run

FIRST, SECOND, THIRD = "own-20260101-120000-aaaa", "own-20260102-120000-bbbb", "own-20260103-120000-cccc"
Command = Callable[..., str]


@pytest.fixture(scope="module")
def bundle(proved: Proved) -> Path:
    """A small network that has learned some digits, exported by the step itself."""
    return proved.folder / "bundle"


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return load(bundle, BundleManifest, verify=(".onnx",))


@pytest.fixture(scope="module")
def digit(few_digits: Path) -> Path:
    return sorted((few_digits / "3").iterdir())[0]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command(*arguments)`: in an empty folder. Returns what it says; raises what the process would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")

    def called(*arguments: object) -> str:
        words = ["inspect", *map(str, arguments)]
        return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False).output

    return called


def test_images_are_those_of_the_loader(tmp_path: Path, run_preprocess: Preprocess) -> None:
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
        pixels.convert("1").save(folder / "fax.tif")
    dataset = run_preprocess(tmp_path / "images", tmp_path / "dataset", on_leak="warn", near_duplicates="keep")
    spec = TransformSpec(resize_size=40, crop_size=32, interpolation="bicubic")
    batch = to_numpy(next(iter(Loader(dataset, "val", spec, batch_size=32, num_threads=1))).images)
    files = sorted((tmp_path / "images/val").glob("*/*"))
    assert len(batch) == len(files) == 22
    for expected, file in zip(batch, files, strict=True):
        own = load_input(file, spec)
        assert (own.shape, own.dtype) == ((1, 3, 32, 32), np.float32)
        np.testing.assert_array_equal(own[0], expected, err_msg=file.name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *[("nothing.jpg", "no-file"), ("", "not-a-file"), ("pipe.jpg", "not-a-file"), ("a.gif", "not-an-image")],
        *[("text.jpg", "not-an-image"), ("empty.jpg", "not-an-image"), ("half.jpg", "damaged-image")],
        ("wide.tif", "unsupported-tiff"),
    ],
)
def test_what_is_no_image_is_refused(name: str, code: str, tmp_path: Path, digit: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    Image.new("I", (8, 8)).save(tmp_path / "wide.tif")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "half.jpg").write_bytes(digit.read_bytes()[: digit.stat().st_size // 2])
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UserError, match=str(tmp_path / name)) as refused:
        load_input(tmp_path / name, TransformSpec(resize_size=32, crop_size=32))
    assert refused.value.code == code


def test_predictions_are_those_of_the_runners(opened: Bundle, few_digits: Path) -> None:
    files = [sorted((few_digits / name).iterdir())[1] for name in ("0", "7")]
    result = inspect(opened, files)
    assert result.maps_missing == ""
    for entry, file in zip(result.explanations, files, strict=True):
        image = load_input(file, opened.manifest.transform)
        for precision, name in {"fp32": "fp32.onnx", "int8": fit_model(opened.manifest.cpu_models).file}.items():
            runner = OpenVINORunner(opened.file(name), opened.manifest.shapes)
            logits = torch.from_numpy(runner.infer(image)[0]).double()
            runner.close()
            own = entry.prediction(precision)
            assert own.runtime == "openvino"
            np.testing.assert_allclose(own.probabilities, torch.softmax(logits, 0).numpy(), rtol=1e-9, atol=1e-12)
        fp32, int8 = (entry.prediction(name).probabilities for name in ("fp32", "int8"))
        assert entry.largest_difference("int8") == np.abs(fp32 - int8).max() > 0
        assert entry.class_index == fp32.argmax()
        missing = entry.prediction("fp16")
        assert (missing.runtime, missing.probabilities, entry.largest_difference("fp16")) == ("n/a", None, None)
        assert "needs TensorRT" in missing.note
        assert [(each.layer.height, each.fp32.shape) for each in entry.layers] == [(16, (16, 16)), (8, (8, 8))]
        assert all(each.int8.shape == each.fp32.shape for each in entry.layers)
        with Image.open(file) as source:  # 32 x 32 pixels, neither resized nor cropped
            expected = np.asarray(source.convert("RGB"))
        assert np.abs(entry.pixels.astype(int) - expected).max() <= 3  # of two JPEG decoders


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


def test_probabilities_stay_and_nan_is_no_prediction(
    command: Command, opened: Bundle, digit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certain = [0.99] + [0.01 / 9] * 9  # the output of a softmax
    serve(monkeypatch, Fixed(*certain), Fixed(*np.log(certain)))
    (entry,) = inspect(opened, [digit]).explanations
    for precision in ("fp32", "int8"):
        np.testing.assert_allclose(entry.prediction(precision).probabilities, certain, rtol=1e-5)
    nothing = Fixed(*[np.nan] * 10)
    serve(monkeypatch, Fixed(*range(10)), nothing)
    text = command(digit, "--bundle", opened.path)
    assert "nan" not in text.replace("NaN", "")
    assert "INT8: its logits hold NaN or infinity" in text
    serve(monkeypatch, nothing, nothing)
    with pytest.raises(EngineryError, match="FP32: its logits hold NaN") as refused:
        inspect(opened, [digit])
    assert refused.value.code == "no-prediction"


def test_what_has_no_maps_is_shown_without(command: Command, opened: Bundle, digit: Path, monkeypatch) -> None:
    models = {name: file for name, file in opened.manifest.models.items() if name != "int8"}
    result = inspect(replace(opened, manifest=opened.manifest.model_copy(update={"models": models})), [digit])
    assert result.maps_missing == "the bundle has no INT8 model to set beside FP32"
    missing = result.explanations[0].prediction("int8")
    assert (missing.probabilities, missing.note) == (None, "the bundle has no INT8 model")
    assert result.explanations[0].prediction("fp32").probabilities is not None

    with monkeypatch.context() as patch:
        patch.setattr(inspection, "feature_layers", lambda *_: [])
        assert inspect(opened, [digit]).maps_missing == "the model has no feature maps of more than one pixel"
        with refuses("no-feature-maps"):
            inspect(opened, [digit], layers=["0.0 Conv"])

    def refuse(*_: object) -> None:
        raise UnsupportedOperators("PyTorch runner: operators Einsum are not supported")

    monkeypatch.setattr(inspection, "TorchGraph", refuse)
    text = command(digit, "--bundle", opened.path)
    assert "no maps: PyTorch runner: operators Einsum are not supported" in text
    assert "INT8 openvino" in " ".join(text.split())
    with Image.open("inspect.png") as picture:
        assert picture.width < 1.8 * picture.height


def test_the_command_shows_tables_and_draws(command: Command, opened: Bundle, few_digits: Path, tmp_path: Path) -> None:
    files, here = [sorted((few_digits / name).iterdir())[0] for name in ("2", "5")], ("--bundle", opened.path)
    text = command(*files, *here, "--output", "seen.png", "--layers", "1.0 Conv, 0.2", "--maps", "activation")
    (first, _) = inspect(opened, files).explanations
    for precision in ("fp32", "int8"):
        probabilities = first.prediction(precision).probabilities
        best = int(probabilities.argmax())
        assert f"{precision.upper()} openvino {best} {100 * probabilities[best]:.2f} %" in " ".join(text.split())
    assert f"{100 * first.largest_difference('int8'):.2f}" in text
    assert "FP16: needs TensorRT" in text
    assert re.search(r"^1.0 Conv: cosine of FP32's and INT8's map (0\.9|1\.0)", text, re.MULTILINE)
    assert [str(file) in text for file in files] == [True, True]
    with Image.open(io.BytesIO((tmp_path / "seen.png").read_bytes())) as picture:
        width, height = picture.size
        assert picture.format == "PNG"
        assert height > width / 2
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 500  # text, bars, maps
    assert "picture: inspect.png" in command(files[0], *here)
    with Image.open(tmp_path / "inspect.png") as picture:
        assert picture.size[1] < 0.6 * height


def finished(home: Path, run_id: str, bundle: Path | None, **values: object) -> Path:
    """A run that ended, with its bundle."""
    directory = home / "runs" / run_id
    if bundle is not None:
        place = directory / "artifacts" / "own-2026" / "export-own" / "bundle"
        place.parent.mkdir(parents=True)
        place.symlink_to(bundle)
        values = {"bundle_digest": digest_file(bundle / "manifest.json"), **values}
    return write_run(directory, **values)


def test_the_bundle_of_a_run(command: Command, tmp_path: Path, bundle: Path, digit: Path) -> None:
    runs = tmp_path / "home" / "runs"
    place = finished(runs.parent, FIRST, bundle) / "artifacts/own-2026/export-own/bundle"
    assert f"bundle home/runs/{FIRST}/artifacts" in command(digit)
    assert f"bundle home/runs/{FIRST}/artifacts" in command(digit, "--run", "own-2026")
    reused = StepSummary(name="export", status="reused", outcome=f"reused from {FIRST}", seconds_total=0.0)
    finished(runs.parent, SECOND, None, steps=[reused], bundle_digest=digest_file(bundle / "manifest.json"))
    finished(runs.parent, THIRD, None, status="failed", exit_code=1)
    assert bundle_of_run(FIRST, runs) == bundle_of_run("own-20260102", runs) == place
    assert latest_bundle(runs) == place  # the newest run that has one
    with refuses("no-bundle"):
        bundle_of_run("latest", runs)
    with refuses("no-such-run"):
        bundle_of_run("x", runs)
    place.unlink()
    with refuses("no-bundle", "--bundle"):
        latest_bundle(runs)


def test_mistakes_are_refused_before_anything_is_written(
    command: Command,
    tmp_path: Path,
    bundle: Path,
    digit: Path,
    digits_dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "folder.png").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "inspect.png")
    here = ("--bundle", bundle)
    for arguments, code in (
        ((), "no-images"),
        ([digit] * 33, "too-many-images"),
        (("no.jpg", *here), "no-file"),
        ((digit, *here, "--run", "latest"), "two-models"),
        ((digit, "--bundle", "nowhere"), "no-manifest"),
        ((digit, "--bundle", digits_dataset.path), "other-kind"),
        ((digit, *here, "--output", "a.jpg"), "no-output"),
        ((digit, *here, "--output", "no/a.png"), "no-output"),
        ((digit, *here, "--output", "folder.png"), "no-output"),
        (("inspect.png", *here), "no-output"),
        ((digit, *here, "--layers", "0.0 Con"), "no-layer"),
    ):
        with pytest.raises(UserError) as refused:
            command(*arguments)
        assert (refused.value.code, refused.value.exit_code) == (code, 2)
    for arguments, fix in (
        ((digit,), "enginery run resnet50 --data DIR"),
        ((digit, "--run", "latest"), "enginery run"),
    ):
        with refuses("no-runs", "ENGINERY_HOME", says=fix):
            command(*arguments)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # root may write anywhere
    with refuses("no-output", "--output"):
        command(digit, *here, "--output", "new.png")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["folder.png", "inspect.png"]
