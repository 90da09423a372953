"""The registered version as MLflow loads it: the validated predictions, what may be sent, and what is refused."""

import base64
import io
import json
import os
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient
from PIL import Image

import enginery as public
from components.common.contracts.errors import EngineryError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import BundleManifest, VerdictManifest, load
from components.common.data.evaluation import predict
from components.common.data.loader import Loader
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from components.promote import pyfunc
from components.promote.packaging import write_model
from components.promote.pyfunc import table
from tests.unit.registered import CHANGED, NAME, flip, refuses, reseal


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


def write(proved, folder: Path, precision: str = "int8", measured_on: tuple[str, ...] = ()) -> Path:
    """The folder of a model, which is what MLflow downloads."""
    shutil.copytree(proved.parts["bundle"], folder / "bundle")
    return write_model(load(folder / "bundle", BundleManifest), precision, folder, measured_on)


def load_model(folder: Path, **config: str):
    return mlflow.pyfunc.load_model(str(folder), model_config=config)


@pytest.fixture(scope="module")
def model(proved, tmp_path_factory):
    return load_model(write(proved, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def images(proved) -> list[bytes]:
    return validation_images(proved)[0]


def test_links_swapped_between_check_and_load(proved, images, model, tmp_path: Path, monkeypatch) -> None:
    """Whoever can write where the model lies turns its files to others once they were checked."""
    bundle = write(proved, tmp_path) / "bundle"
    files = list(bundle.glob("*.onnx"))
    for file in files:
        file.rename(file.with_suffix(".original"))
        file.symlink_to(file.with_suffix(".original").name)
    checked = pyfunc.load

    def check(*arguments: Any, **options: Any) -> Any:
        found = checked(*arguments, **options)
        for file in files if options else ():  # digests are checked
            file.unlink()
            file.write_bytes(b"another network")
        return found

    monkeypatch.setattr(pyfunc, "load", check)
    loaded = load_model(tmp_path)
    assert files[0].read_bytes() == b"another network"
    pd.testing.assert_frame_equal(loaded.predict(images[:3]), model.predict(images[:3]))


# --- the validated predictions


def test_what_the_manifest_does_not_name_is_not_copied(proved, images, model, tmp_path: Path) -> None:
    """A pipe or device beside the files has no end."""
    folder = write(proved, tmp_path)
    os.mkfifo(folder / "bundle/pipe")
    pd.testing.assert_frame_equal(load_model(folder).predict(images[:1]), model.predict(images[:1]))


def test_the_registered_version_gives_the_validated_predictions(promoted, proved) -> None:
    loaded = mlflow.pyfunc.load_model(f"models:/{NAME}@candidate")
    images, labels = validation_images(proved)
    found = loaded.predict(images, params={"top_k": 5})
    recorded = np.load(proved.parts["report"] / "predictions.npz")
    precision = load(proved.parts["verdict"], VerdictManifest).manifest.served_precision
    assert loaded._model_impl.selected.precision == precision
    classes = proved.dataset.manifest.classes
    assert len(found) == len(images) == 120
    np.testing.assert_array_equal(recorded["labels"], labels)
    for row, top in zip(found.itertuples(), recorded[precision], strict=True):
        assert row.labels == [classes[index] for index in top]
        assert row.label == row.labels[0]
        assert row.probability == row.probabilities[0] == max(row.probabilities)
    assert len({*found["label"]}) > 1  # the network tells some digits apart


FOREIGN_LOADER = """
from pathlib import Path
Path({proof!r}).touch()
_load_pyfunc = None
"""


def test_code_that_the_registry_names_is_not_run(promoted, proved, tmp_path: Path) -> None:
    """Whoever can write the registry's files names a loader of his own; MLflow runs it before anybody is asked."""
    root = Path(MlflowClient().get_model_version_download_uri(NAME, "1").removeprefix("file://"))
    described = yaml.safe_load((root / "MLmodel").read_text())
    described["flavors"]["python_function"] |= {"loader_module": "foreign_loader", "code": "code"}
    (root / "MLmodel").write_text(yaml.safe_dump(described))
    (root / "code").mkdir()
    (root / "code/foreign_loader.py").write_text(FOREIGN_LOADER.format(proof=str(tmp_path / "proof")))
    images, _ = validation_images(proved)
    found = public.load_model(f"{NAME}@candidate").predict(images[:20])
    expected = load_model(write(proved, tmp_path / "model")).predict(images[:20])
    pd.testing.assert_frame_equal(found, expected)
    assert not (tmp_path / "proof").exists()
    with suppress(Exception):
        mlflow.pyfunc.load_model(f"models:/{NAME}@candidate")
    assert (tmp_path / "proof").exists()  # so the attack is one
    flip(root / "bundle/int8.onnx")
    with pytest.raises(EngineryError, match=f"int8.onnx {CHANGED}"):
        public.load_model(f"{NAME}/1")


def test_probabilities_are_those_of_the_evaluation(model, proved, images) -> None:
    bundle = load(proved.parts["bundle"], BundleManifest)
    loader = Loader(proved.dataset, "val", bundle.manifest.transform, batch_size=32, num_threads=1)
    runner = OpenVINORunner(bundle.file(fit_model(bundle.manifest.cpu_models).file), bundle.manifest.shapes)
    expected = predict({"int8": runner}, loader, 120, lambda *_: None)["int8"]
    found = model.predict(images, params={"top_k": 5})
    assert found["probability"].sum() == pytest.approx(expected.confidences.sum(), abs=1e-3)


def test_top_k(model, images) -> None:
    found = model.predict(images[:3], params={"top_k": 0})
    assert [len(row) for row in found["labels"]] == [10, 10, 10]
    assert [sum(row) for row in found["probabilities"]] == pytest.approx([1, 1, 1])
    assert model.predict(images[:1], params={"top_k": 100})["labels"][0] == found["labels"][0]
    assert [len(row) for row in model.predict(images[:1])["labels"]] == [5]
    for top_k in (-1, 1.5, "all"):
        with pytest.raises(Exception, match=r"top_k|param"):
            model.predict(images[:1], params={"top_k": top_k})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_name_no_class(value: float) -> None:
    logits = np.array([[0, 1, value], [-np.inf, 3, 3]], np.float32)
    found = table(logits, ("a", "b", "c"), 2)
    assert found["label"][0] is None or pd.isna(found["label"][0])
    assert (found["labels"][0], found["labels"][1]) == ([], ["b", "c"])  # ties in the order of the classes


# --- what may be sent


def test_every_form_of_an_image_gives_the_same(model, images, tmp_path: Path) -> None:
    expected = model.predict(images[:2])
    assert Image.open(io.BytesIO(images[0])).mode == "L"  # the loader shows the network a gray image as an RGB one
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
    chosen = pd.DataFrame({"image": images[:2]}, index=[5, 3])
    pd.testing.assert_frame_equal(model.predict(chosen), expected.set_axis(chosen.index))


@pytest.mark.parametrize("form", ["dataframe_records", "dataframe_split", "inputs", "instances", "columns", "pixels"])
def test_the_scoring_server_takes_base64(model, images, form: str) -> None:
    from mlflow.pyfunc import scoring_server  # which imports a web framework

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


def test_any_number_of_images_in_several_threads_at_once(model, images) -> None:
    whole = model.predict(images)
    ends = (1, 31, 32, 33, 65)  # around the batch size
    with ThreadPoolExecutor(len(ends)) as pool:
        for end, found in zip(ends, pool.map(lambda end: model.predict(images[:end]), ends), strict=True):
            pd.testing.assert_frame_equal(found, whole[:end], rtol=1e-5)


# --- what is refused


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([], "no-image"),
        (pd.DataFrame({"image": []}), "no-image"),
        (None, "not-an-image"),
        ([3], "not-an-image"),
        ("digits/3.png", "not-base64"),
        (Path("nothing.png"), "unreadable-file"),
        (np.zeros((4, 4), np.uint8), "pixel-shape"),
        (np.zeros((4, 4, 4), np.uint8), "pixel-shape"),
        (np.zeros((4, 4, 3), np.float32), "pixel-type"),
        (np.full((4, 4, 3), 256), "pixel-range"),
        (np.array([b"ab\0"]), "fixed-width-bytes"),
        ([[[1, 2], [3]]], "ragged-list"),
        (pd.DataFrame({"a": [1], "b": [2]}), "no-column"),
        ({"picture": ["x"]}, "no-column"),
    ],
)
def test_what_is_no_image(model, sent, code: str) -> None:
    with refuses(code):
        model.predict(sent)


def test_the_bad_one_of_many_is_named_and_the_next_call_works(model, images) -> None:
    for bad in (b"", b"text", b"GIF89a", images[40][: len(images[40]) // 2]):
        with pytest.raises(EngineryError, match=r"^image 40 is "):
            model.predict([*images[:40], bad, *images[41:]])
    assert len(model.predict(images[:2])) == 2


def test_what_dali_alone_refuses_is_named(model, images, monkeypatch) -> None:
    monkeypatch.setattr("components.common.data.dali_pipelines.check_encoded", lambda data, _: (data, 1))
    with pytest.raises(EngineryError, match="image 1 can't be decoded"):
        model.predict([images[0], b"\xff\xd8\xff\xe0 no JPEG", images[1]])
    assert len(model.predict(images[:2])) == 2


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


def test_a_bundle_that_was_changed_is_not_loaded(proved, tmp_path: Path) -> None:
    bundle = write(proved, tmp_path) / "bundle"
    for file in ("int8.onnx", "fp32.onnx", "scales.json"):
        flip(bundle / file)
        with pytest.raises(EngineryError, match=f"{file} {CHANGED}"):
            load_model(tmp_path)
        flip(bundle / file)
    reseal(bundle, lambda record: record.update(architecture="another"))
    with refuses("other-bundle"):
        load_model(tmp_path)


def test_on_another_instruction_set(proved, tmp_path: Path, images, caplog) -> None:
    """A verdict counts for what it was measured on, and no file is loaded whose sums would saturate."""
    write(proved, tmp_path, measured_on=("AVX9",))
    assert len(load_model(tmp_path).predict(images[:2])) == 2
    assert f"measured with AVX9, and this CPU runs INT8 with {instruction_set()}" in caplog.text

    def saturate(record: dict[str, Any]) -> None:
        for model in record["cpu_models"]:
            model["saturates_on"] = [instruction_set()]

    reseal(tmp_path / "bundle", saturate)
    write_model(load(tmp_path / "bundle", BundleManifest), "int8", tmp_path)
    with pytest.raises(EngineryError, match="no INT8 file is fit for this CPU"):
        load_model(tmp_path)


def test_the_runtime_can_be_asked_for(proved, tmp_path: Path, images) -> None:
    write(proved, tmp_path, "fp16")
    with pytest.raises(EngineryError, match="tensorrt was asked for, but the bundle has no engines"):
        load_model(tmp_path, runtime="tensorrt")
    with refuses("unknown-runtime", "runtime"):
        load_model(tmp_path, runtime="cuda")
    for runtime in ("openvino", "auto"):
        model = load_model(tmp_path, runtime=runtime)
        selected = model._model_impl.selected
        assert (selected.runner.runtime, selected.file.name) == ("openvino", "fp16.onnx")
        assert "a CPU has no FP16 arithmetic" in selected.note
        assert len(model.predict(images[:2])) == 2
