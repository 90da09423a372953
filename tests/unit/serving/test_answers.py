"""A real Triton that answers with masks: what the Python model says of the same images, as JSON, table and pictures."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import BundleManifest, load
from components.common.tasks.segmentation.answers import mask_of
from components.promote.pyfunc import BundleModel
from enginery.serving.client.client import Client
from enginery.serving.client.transport import RequestRefused
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.sources import find_source
from tests.unit.refusals import refuses
from tests.unit.registered import enginery
from tests.unit.shapes import Chain

from .conftest import Running, serving


@pytest.fixture(scope="module")
def masks(triton, segmentation_chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("masks")
    with find_source(str(segmentation_chain.bundle), "int8") as source:
        write_repository(source, folder / "models", RepositoryConfig(name="shapes", max_wait_s=60))
    with serving(folder / "models", folder) as running:
        yield running


@pytest.fixture
def files(segmentation_chain: Chain, tmp_path: Path) -> list[Path]:
    """Validation images; the last one is wider than high."""
    found = sorted((segmentation_chain.data / "val" / "images").iterdir())[:6]
    wide = Image.new("RGB", (128, 64))
    wide.paste(Image.open(found[0]), (32, 0))
    wide.save(tmp_path / "wide.png")
    return [*found, tmp_path / "wide.png"]


def test_answers_are_those_of_the_python_model(masks: Running, segmentation_chain: Chain, files: list[Path]) -> None:
    model = BundleModel(load(segmentation_chain.bundle, BundleManifest), "int8", "auto")
    expected = model.predict([file.read_bytes() for file in files]).to_dict("records")
    with Client(f"http://127.0.0.1:{masks.http}") as client:
        found = [client.answer(file.read_bytes()) for file in files]
        assert client.parameters()["task"] == "segmentation"
        with refuses("other-task"):
            client.classify(files[0].read_bytes())
        with pytest.raises(RequestRefused):
            client.answer(b"no image")
        parameters = client.parameters()
    with Client(f"grpc://127.0.0.1:{masks.grpc}") as client:  # whose JSON leaves out what is empty
        assert client.parameters() == parameters
    assert parameters["version"] == ""
    assert found == expected
    assert found[-1]["region"] == [32, 0, 96, 64]


def test_a_detector_answers_as_the_python_model(triton, detection_chain: Chain, files: list[Path], tmp_path) -> None:
    model = BundleModel(load(detection_chain.bundle, BundleManifest), "int8", "auto")
    images = [file.read_bytes() for file in files]
    with find_source(str(detection_chain.bundle), "int8") as source:
        write_repository(source, tmp_path / "models", RepositoryConfig(name="shapes", max_wait_s=60))
    with serving(tmp_path / "models", tmp_path) as running, Client(f"http://127.0.0.1:{running.http}") as client:
        found = [client.answer(image) for image in images]
        logits = client.logits(np.zeros((2, 3, 64, 64), np.float32))
    assert logits.shape == (2, 8 * 8 + 4 * 4 + 2 * 2, 8 + 5)
    assert found == model.predict(images).to_dict("records")


def test_predict_writes_json_and_pictures(masks: Running, files: list[Path], tmp_path: Path) -> None:
    url, folder = ["--url", f"http://127.0.0.1:{masks.http}"], tmp_path / "pictures"
    names = [str(file) for file in files]
    results = json.loads(enginery("predict", *names, *url, "--json", "--picture", folder).output)["results"]
    assert [entry["image"] for entry in results] == names
    drawn = sorted(folder.iterdir())
    assert len(drawn) == len(files)
    # Outside of what the model sees the picture is the image.
    picture, image = (np.asarray(Image.open(file).convert("RGB")) for file in (drawn[-1], files[-1]))
    assert np.array_equal(picture[:, :32], image[:, :32])
    changed = (picture[:, 32:96] != image[:, 32:96]).any(axis=-1)
    assert changed.mean() > 0.9
    assert mask_of(results[-1]).shape == (64, 64)
    assert results[0]["classes"][0] in enginery("predict", names[0], *url, "--picture", tmp_path / "one.png").output
    assert Image.open(tmp_path / "one.png").size == (64, 64)
    enginery("predict", "-", *url, "--picture", tmp_path / "stdin.png", stdin=files[0].read_bytes())
    assert (tmp_path / "stdin.png").read_bytes() == (tmp_path / "one.png").read_bytes()
    for images, name in ((names[:1], "p.txt"), (names[:1], "p.jpg"), (names[:2], "p.png")):
        with refuses("no-output", "--picture"):
            enginery("predict", *images, *url, "--picture", tmp_path / name)
        assert not (tmp_path / name).exists()
    (tmp_path / "v1.2").mkdir()
    enginery("predict", names[0], *url, "--picture", tmp_path / "v1.2")
    assert len(list((tmp_path / "v1.2").iterdir())) == 1
    for option in ("--top-k", "--beam-size"):
        with refuses("other-task", option):
            enginery("predict", names[0], *url, option, 2)


def test_challengers_drift_and_numbers_of_classes_are_of_classifiers(segmentation_chain: Chain, tmp_path: Path) -> None:
    with find_source(str(segmentation_chain.bundle), "int8") as source:
        for setting, value in {"shadow_share": 0.1, "top_k": 2, "keep_examples": True}.items():
            with refuses("other-task", setting):
                write_repository(source, tmp_path / "refused", RepositoryConfig(**{setting: value}))
        write_repository(source, tmp_path / "models", RepositoryConfig())
    for model in (segmentation_chain.bundle, tmp_path / "models"):
        with refuses("other-task"):
            enginery("drift", model)
