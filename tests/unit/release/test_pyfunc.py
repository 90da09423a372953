"""The registered version as MLflow loads it: the validated predictions, what may be sent, and what is refused."""

import base64
import io
import json
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.pyfunc import scoring_server
from PIL import Image

from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import BundleManifest, VerdictManifest, load
from components.common.data.evaluation import predict
from components.common.data.loader import Loader
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from components.promote import pyfunc
from components.promote.packaging import write_model
from components.promote.pyfunc import table

from .making import NAME, reseal

COLUMNS = ["label", "probability", "labels", "probabilities"]


def validation_images(proved) -> tuple[list[bytes], list[int]]:
    """Image files and labels of the split, in the order of its listing, from the shards themselves."""
    images, labels = [], []
    for shard in proved.dataset.manifest.splits["val"].shards:
        with tarfile.open(proved.dataset.path / shard) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                if member.name.endswith(".cls"):
                    labels.append(int(data))
                else:
                    images.append(data)
    return images, labels


@pytest.fixture(scope="module")
def model(proved, tmp_path_factory):
    """The model from a folder, which is what MLflow downloads."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(proved.parts["bundle"], folder / "bundle")
    write_model(load(folder / "bundle", BundleManifest), "int8", folder)
    return mlflow.pyfunc.load_model(str(folder))


@pytest.fixture(scope="module")
def images(proved) -> list[bytes]:
    return validation_images(proved)[0]


def test_links_swapped_between_check_and_load(proved, images, model, tmp_path: Path, monkeypatch) -> None:
    """Whoever can write where the model lies turns its files to others once they were checked."""
    bundle = Path(shutil.copytree(proved.parts["bundle"], tmp_path / "bundle"))
    write_model(load(bundle, BundleManifest), "int8", tmp_path)
    files = list(bundle.glob("*.onnx"))
    for file in files:
        file.rename(file.with_suffix(".original"))
        file.symlink_to(file.with_suffix(".original").name)
    checked = pyfunc.load

    def check(*arguments: Any, **options: Any) -> Any:
        found = checked(*arguments, **options)
        for file in files:
            file.unlink()
            file.write_bytes(b"another network")
        return found

    monkeypatch.setattr(pyfunc, "load", check)
    loaded = mlflow.pyfunc.load_model(str(tmp_path))
    assert files[0].read_bytes() == b"another network"
    pd.testing.assert_frame_equal(loaded.predict(images[:3]), model.predict(images[:3]))


# --- the validated predictions


def test_the_registered_version_gives_the_validated_predictions(promoted, proved) -> None:
    loaded = mlflow.pyfunc.load_model(f"models:/{NAME}@candidate")
    images, labels = validation_images(proved)
    found = loaded.predict(images, params={"top_k": 5})
    recorded = np.load(proved.parts["report"] / "predictions.npz")
    precision = load(proved.parts["verdict"], VerdictManifest).manifest.served_precision
    assert loaded._model_impl.serving.precision == precision
    classes = proved.dataset.manifest.classes
    assert len(found) == len(images) == 120
    np.testing.assert_array_equal(recorded["labels"], labels)
    for row, top in zip(found.itertuples(), recorded[precision], strict=True):
        assert row.labels == [classes[index] for index in top]
        assert row.label == row.labels[0]
        assert row.probability == row.probabilities[0] == max(row.probabilities)
    assert len({*found["label"]}) > 1  # the network tells some digits apart


def test_probabilities_are_those_of_the_evaluation(model, proved, images) -> None:
    bundle = load(proved.parts["bundle"], BundleManifest)
    loader = Loader(proved.dataset, "val", bundle.manifest.transform, batch_size=32, num_threads=1)
    runner = OpenVINORunner(bundle.file(fit_model(bundle.manifest.cpu_models).file), bundle.manifest.shapes)
    expected = predict({"int8": runner}, loader, 120, lambda *_: None)["int8"]
    found = model.predict(images, params={"top_k": 5})
    recorded = np.load(proved.parts["report"] / "predictions.npz")["int8"]
    np.testing.assert_array_equal(recorded, expected.top)
    names = [[bundle.manifest.classes[index] for index in row] for row in recorded]
    assert found["labels"].tolist() == names
    assert found["probability"].sum() == pytest.approx(expected.bins.confidences.sum(), abs=1e-3)


def test_all_classes_add_up_to_one(model, images) -> None:
    found = model.predict(images[:3], params={"top_k": 0})
    assert [len(row) for row in found["labels"]] == [10, 10, 10]
    assert [sum(row) for row in found["probabilities"]] == pytest.approx([1, 1, 1])
    assert model.predict(images[:1], params={"top_k": 100})["labels"][0] == found["labels"][0]
    assert [len(row) for row in model.predict(images[:1])["labels"]] == [5]


def test_logits_with_nan_name_no_class() -> None:
    logits = np.array([[0, 1, np.nan], [0, 3, 3]], np.float32)
    found = table(logits, ("a", "b", "c"), 2)
    assert found["label"][0] is None or pd.isna(found["label"][0])
    assert (found["labels"][0], found["labels"][1]) == ([], ["b", "c"])  # ties in the order of the classes


# --- what may be sent


def test_every_form_of_an_image_gives_the_same(model, images, tmp_path: Path) -> None:
    expected = model.predict(images[:2])
    files = [tmp_path / "0.img", tmp_path / "1.img"]
    for file, data in zip(files, images, strict=False):
        file.write_bytes(data)
    texts = [base64.b64encode(data).decode() for data in images[:2]]
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in images[:2]]
    for sent in (
        tuple(images[:2]),
        [bytearray(images[0]), memoryview(images[1])],
        texts,
        files,
        pixels,
        np.stack(pixels),
        np.array(texts),
        np.array(images[:2], dtype=object),
        pd.Series(images[:2]),
        pd.DataFrame({"image": images[:2]}),
        pd.DataFrame({"id": [7, 8], "image": texts}),
        pd.DataFrame({"whatever": files}),
        pd.DataFrame({"image": pixels}),
        {"image": texts},
    ):
        pd.testing.assert_frame_equal(model.predict(sent), expected)
    for one in (images[0], texts[0], files[0], pixels[0]):
        pd.testing.assert_frame_equal(model.predict(one), expected[:1])


@pytest.mark.parametrize("form", ["dataframe_records", "dataframe_split", "inputs", "instances", "columns", "pixels"])
def test_the_scoring_server_takes_base64(model, images, form: str) -> None:
    texts = [base64.b64encode(data).decode() for data in images[:2]]
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).tolist() for data in images[:2]]
    sent = {
        "dataframe_records": {"dataframe_records": [{"image": text} for text in texts]},
        "dataframe_split": {"dataframe_split": {"columns": ["image"], "data": [[text] for text in texts]}},
        "inputs": {"inputs": texts},
        "instances": {"instances": [{"image": text} for text in texts]},
        "columns": {"inputs": {"image": texts}},
        "pixels": {"inputs": pixels},
    }[form]
    body = json.dumps({**sent, "params": {"top_k": 2}})
    answer = scoring_server.invocations(body, "application/json", model, model.metadata.get_input_schema())
    assert answer.status == 200, answer.response
    rows = json.loads(answer.response)["predictions"]
    expected = model.predict(images[:2], params={"top_k": 2}).to_dict("records")
    assert [row["labels"] for row in rows] == [row["labels"] for row in expected]
    assert rows[1]["probabilities"] == pytest.approx(expected[1]["probabilities"], abs=1e-6)


def test_more_images_than_a_batch_in_any_number(model, images) -> None:
    whole = model.predict(images)
    for size in (1, 31, 32, 33, 65):
        pd.testing.assert_frame_equal(model.predict(images[:size]), whole[:size], rtol=1e-5)


def test_several_threads_at_once(model, images) -> None:
    expected = model.predict(images)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: model.predict(images[start : start + 15]), range(0, 120, 15)))
    pd.testing.assert_frame_equal(pd.concat(found, ignore_index=True), expected, rtol=1e-5)


# --- what is refused


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([], "no image was sent; give images as bytes"),
        (pd.DataFrame({"image": []}), "no image was sent"),
        (b"", "image 0 is not an image; take a JPEG"),
        ([b"text"], "image 0 is not an image"),
        (None, "image 0 is a NoneType; give images as bytes"),
        ([3], "image 0 is a int"),
        ("digits/3.png", "image 0 is the text 'digits/3.png', which is not base64; .* pathlib.Path"),
        (Path("nothing.png"), "can't read nothing.png: No such file"),
        (np.zeros((4, 4), np.uint8), r"an array of shape \(4, 4\); pixels are \[height, width, 3\]"),
        (np.zeros((4, 4, 4), np.uint8), r"shape \(4, 4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), "array of float32; pixels are uint8, 0 to 255"),
        (np.full((4, 4, 3), 256), "pixels from 256 to 256; they go from 0 to 255"),
        (np.array([b"ab\0"]), "cuts bytes off; use a list"),
        ([[[1, 2], [3]]], "a list whose rows differ"),
        (pd.DataFrame({"a": [1], "b": [2]}), "no column 'image', its columns: 'a', 'b'"),
        ({"picture": ["x"]}, "no key 'image', the keys are 'picture'"),
    ],
)
def test_what_is_no_image_is_said(model, sent, said: str) -> None:
    with pytest.raises(UserError, match=said):
        model.predict(sent)


def test_the_bad_one_of_many_is_named_and_the_next_call_works(model, images) -> None:
    for bad in (images[40][: len(images[40]) // 2], b"GIF89a", b"nothing"):
        with pytest.raises(UserError, match=r"^image 40 is "):
            model.predict([*images[:40], bad, *images[41:]])
    assert len(model.predict(images[:2])) == 2


def test_what_dali_alone_refuses_is_named(model, images, monkeypatch) -> None:
    monkeypatch.setattr("components.common.data.image_batches.check_encoded", lambda *_: None)
    with pytest.raises(UserError, match="image 1 can't be decoded"):
        model.predict([images[0], b"\xff\xd8\xff\xe0 no JPEG", images[1]])
    assert len(model.predict(images[:2])) == 2


@pytest.mark.parametrize("top_k", [-1, 1.5, "all"])
def test_a_top_k_that_is_none(model, images, top_k) -> None:
    with pytest.raises(Exception, match=r"top_k|param"):
        model.predict(images[:1], params={"top_k": top_k})


def test_a_gray_and_a_turned_image_are_those_of_the_loader(model) -> None:
    rng = np.random.default_rng(0)
    gray = Image.fromarray(rng.integers(0, 255, (40, 60), np.uint8))
    assert len(model.predict([png(gray), png(gray.convert("RGB"))])["label"].unique()) == 1


# --- loading


def test_the_files_of_a_model_hold_no_pickle(promoted, proved, tmp_path: Path) -> None:
    version = MlflowClient().get_model_version_by_alias(NAME, "candidate")
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{NAME}@candidate", dst_path=str(tmp_path / "down")))
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"MLmodel", "requirements.txt", "python_env.yaml", "bundle/int8.onnx", "report/report.html"} <= names
    assert "verdict/manifest.json" in names
    assert [name for name in names if name.endswith((".pkl", ".pickle"))] == []
    description = yaml.safe_load((folder / "MLmodel").read_text())
    assert "cloudpickle" not in (folder / "MLmodel").read_text() + (folder / "requirements.txt").read_text()
    assert description["flavors"]["python_function"]["loader_module"] == "components.promote.pyfunc"
    assert (folder / "requirements.txt").read_text().startswith("enginery==")
    logged = MlflowClient().get_logged_model(description["model_id"])
    assert version.source == f"models:/{logged.model_id}"
    assert json.loads(logged.tags["mlflow.modelVersions"]) == [{"name": NAME, "version": "1"}]
    assert (str(logged.status), logged.tags["bundle_digest"]) == ("READY", version.tags["bundle_digest"])
    for part, path in proved.parts.items():
        assert (folder / part / "manifest.json").read_bytes() == (path / "manifest.json").read_bytes()


@pytest.mark.parametrize("file", ["int8.onnx", "fp32.onnx", "scales.json"])
def test_a_tampered_bundle_is_not_loaded(proved, tmp_path: Path, file: str) -> None:
    shutil.copytree(proved.parts["bundle"], tmp_path / "bundle")
    write_model(load(tmp_path / "bundle", BundleManifest), "int8", tmp_path)
    target = tmp_path / "bundle" / file
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    with pytest.raises(EngineryError, match=f"{file} was changed after it was sealed"):
        mlflow.pyfunc.load_model(str(tmp_path))


def test_on_another_instruction_set(proved, tmp_path: Path, images, caplog) -> None:
    """A verdict counts for what it was measured on, and no file is loaded whose sums would saturate."""
    shutil.copytree(proved.parts["bundle"], tmp_path / "bundle")
    write_model(load(tmp_path / "bundle", BundleManifest), "int8", tmp_path, ["AVX9"])
    assert len(mlflow.pyfunc.load_model(str(tmp_path)).predict(images[:2])) == 2
    assert f"measured with AVX9, and this CPU runs INT8 with {instruction_set()}" in caplog.text

    def saturate(record: dict[str, Any]) -> None:
        for model in record["cpu_models"]:
            model["saturates_on"] = [instruction_set()]

    reseal(tmp_path / "bundle/manifest.json", saturate)
    write_model(load(tmp_path / "bundle", BundleManifest), "int8", tmp_path)
    with pytest.raises(RuntimeUnavailable, match=rf"no INT8 file is fit for this CPU, .* {instruction_set()}"):
        mlflow.pyfunc.load_model(str(tmp_path))


def test_another_bundle_is_not_loaded(proved, tmp_path: Path) -> None:
    shutil.copytree(proved.parts["bundle"], tmp_path / "bundle")
    write_model(load(tmp_path / "bundle", BundleManifest), "int8", tmp_path)
    reseal(tmp_path / "bundle/manifest.json", lambda record: record.update(architecture="another"))
    with pytest.raises(EngineryError, match="is another bundle than was promoted"):
        mlflow.pyfunc.load_model(str(tmp_path))


def test_the_runtime_can_be_asked_for(proved, tmp_path: Path, images) -> None:
    shutil.copytree(proved.parts["bundle"], tmp_path / "bundle")
    write_model(load(tmp_path / "bundle", BundleManifest), "fp16", tmp_path)
    with pytest.raises(RuntimeUnavailable, match="tensorrt was asked for, but the bundle has no engines"):
        mlflow.pyfunc.load_model(str(tmp_path), model_config={"runtime": "tensorrt"})
    with pytest.raises(UserError, match="runtime 'cuda' is unknown"):
        mlflow.pyfunc.load_model(str(tmp_path), model_config={"runtime": "cuda"})
    for runtime in ("openvino", "auto"):
        model = mlflow.pyfunc.load_model(str(tmp_path), model_config={"runtime": runtime})
        serving = model._model_impl.serving
        assert (serving.runner.runtime, serving.file.name) == ("openvino", "fp16.onnx")
        assert "a CPU has no FP16 arithmetic" in serving.note
        assert len(model.predict(images[:2])) == 2
