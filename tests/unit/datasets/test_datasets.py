"""`enginery data`: what is written, that it is reproducible, and what happens to directories."""

import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from components.common.contracts.errors import EngineryError
from enginery.cli.data import _translate_errors
from enginery.datasets.digits import write_digits
from enginery.datasets.phrases import write_phrases
from enginery.datasets.shapes import write_shapes
from enginery.datasets.textures import FAMILIES, TRAITS, class_traits, texture_image, texture_jpeg, write_textures
from tests.processes import start_python
from tests.unit.refusals import refuses
from tests.unit.registered import enginery, files
from tests.waiting import wait_until

SMALL: dict[str, Any] = {"num_classes": 3, "num_train": 10, "num_val": 4, "image_size": 32, "num_workers": 1}


def refused(code: str, directory: Path, **arguments: Any) -> None:
    with refuses(code):
        write_textures(directory, **{**SMALL, **arguments})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("textures") / "small"
    write_textures(directory, **SMALL)
    return directory


def test_digits_are_the_same_1797_gray_jpegs_each_time(tmp_path: Path, all_digits: Path) -> None:
    summary = write_digits(tmp_path / "a")
    assert (summary.num_images, summary.num_classes, summary.already_complete) == (1797, 10, False)
    assert write_digits(tmp_path / "a").already_complete
    assert files(tmp_path / "a") == files(all_digits)
    images = sorted((tmp_path / "a").glob("*/*.jpg"))
    assert (len(images), {path.parent.name for path in images}) == (1797, set("0123456789"))
    for path in images[::200]:
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "L", (32, 32))
    from sklearn.datasets import load_digits

    digits = load_digits()  # the first one is a zero
    shown = np.asarray(Image.open(tmp_path / "a" / "0" / "0000.jpg").resize((8, 8), Image.Resampling.BOX))
    assert np.corrcoef(shown.ravel(), digits.images[0].ravel())[0, 1] > 0.95


def test_textures_are_the_same_for_any_number_of_workers_and_others_for_another_seed(small: Path, tmp_path) -> None:
    # A remainder goes to the first classes.
    counts = {split: [len(list((small / split / f"00{n}").iterdir())) for n in range(3)] for split in ("train", "val")}
    assert counts == {"train": [4, 3, 3], "val": [2, 1, 1]}
    with Image.open(small / "train" / "000" / "00000.jpg") as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))
    ours = files(small)
    assert len({data for name, data in ours.items() if name.endswith(".jpg")}) == 14  # none is in both splits
    write_textures(tmp_path / "two", **{**SMALL, "num_workers": 2})
    assert files(tmp_path / "two") == ours
    write_textures(tmp_path / "other", **SMALL, seed=1)
    others = files(tmp_path / "other")
    assert ours.keys() == others.keys()
    assert not set(ours.values()) & set(others.values())


def test_directories_of_something_else_are_refused_and_kept(small: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert write_textures(small, **{**SMALL, "num_workers": 2}).already_complete
    refused("other-dataset", small, seed=5)
    with refuses("other-dataset"):
        write_digits(small)
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    refused("directory-not-empty", tmp_path)
    refused("no-directory", tmp_path / "holiday.jpg")
    assert files(tmp_path).keys() == {"holiday.jpg"}
    (tmp_path / "holiday.jpg").rename(tmp_path / "dataset.json")
    refused("damaged-arguments", tmp_path)


BOTH = (("seed", -1), ("image_size", 8), ("image_size", 5000))


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        *((write_textures, {name: value}) for name, value in (("num_classes", 0), ("num_val", 2), *BOTH)),
        *((write_shapes, {name: value}) for name, value in (("num_train", 0), ("num_val", 0), *BOTH)),
        *((write_phrases, {name: value}) for name, value in (("num_pairs", 99), ("num_pairs", 10**10), BOTH[0])),
    ],
)
def test_arguments_out_of_range(tmp_path: Path, write: Callable[..., object], changed: dict[str, int]) -> None:
    with refuses("invalid-setting", "--" + next(iter(changed)).replace("_", "-")):
        write(tmp_path / "new", **({**SMALL, **changed} if write is write_textures else changed))
    assert not (tmp_path / "new").exists()


def test_a_partial_run_is_continued(small: Path, tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    write_textures(directory, **SMALL)
    (directory / "dataset.json").rename(directory / "dataset.partial.json")
    (directory / "train" / "001" / "00002.jpg").unlink()
    (directory / "val" / "000" / "00000.jpg").write_bytes(b"")  # what a power cut leaves
    kept = directory / "train" / "000" / "00000.jpg"
    written_ns = kept.stat().st_mtime_ns
    refused("other-dataset", directory, seed=1)
    assert not write_textures(directory, **SMALL).already_complete
    assert files(directory) == files(small)
    assert kept.stat().st_mtime_ns == written_ns


def test_a_killed_run_takes_its_workers_along_and_is_continued(tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    arguments: dict[str, Any] = {"num_classes": 2, "num_train": 400, "num_val": 2, "image_size": 128, "num_workers": 2}
    script = tmp_path / "write.py"
    script.write_text(
        "from pathlib import Path\n"
        "from enginery.datasets.textures import write_textures\n"
        f"if __name__ == '__main__':\n    write_textures(Path({str(directory)!r}), **{arguments!r})\n"
    )
    process = start_python(script, stderr=None)
    wait_until(lambda: list(directory.glob("train/*/*.jpg")), process=process)
    process.kill()
    process.wait()

    time.sleep(0.5)
    written = sorted(directory.glob("train/*/*.jpg"))
    time.sleep(0.5)
    assert sorted(directory.glob("train/*/*.jpg")) == written  # no worker outlived its parent
    assert len(written) < 400
    assert (directory / "dataset.partial.json").exists()
    for path in written:
        Image.open(path).load()  # whole, or not there
    write_textures(directory, **arguments)
    assert len(list(directory.glob("train/*/*.jpg"))) == 400
    assert {path.suffix for path in directory.rglob("*") if path.is_file()} == {".jpg", ".json"}
    assert not (directory / "dataset.partial.json").exists()


def test_classes_fill_the_space_of_traits_evenly() -> None:
    traits = np.stack([class_traits(index) for index in range(50)])
    assert traits.shape == (50, len(TRAITS))
    assert ((traits >= 0) & (traits < 1)).all()
    for family in range(len(FAMILIES)):
        members = traits[family :: len(FAMILIES)]
        distances = np.linalg.norm(members[:, None] - members[None], axis=-1)
        assert distances[~np.eye(len(members), dtype=bool)].min() > 0.3


@pytest.mark.parametrize("class_index", range(len(FAMILIES)))
def test_every_family_draws_a_picture(class_index: int) -> None:
    image = texture_image(np.random.default_rng(0), class_index, 96)
    assert image.size == (96, 96)
    assert np.asarray(image).std() > 8
    decoded = Image.open(io.BytesIO(texture_jpeg(0, 0, class_index, 0, 97)))  # odd sizes too
    assert decoded.size == (97, 97)


def test_colours_alone_do_not_tell_the_classes() -> None:
    """Nearest class mean of colour histograms over 10 classes (chance: 10 %): far from solving it."""
    means = np.stack([np.mean([_histogram(0, label, index) for index in range(24)], axis=0) for label in range(10)])
    hits = [
        np.abs(means - _histogram(1, label, index)).sum(axis=1).argmin() == label
        for label in range(10)
        for index in range(8)
    ]
    assert np.mean(hits) < 0.5


def _histogram(split: int, class_index: int, index: int) -> npt.NDArray[np.float64]:
    """[64] shares of the colours, 4 levels per channel, of one 64 px image."""
    pixels = np.asarray(Image.open(io.BytesIO(texture_jpeg(0, split, class_index, index, 64)))) >> 6
    codes = (pixels[..., 0].astype(int) * 4 + pixels[..., 1]) * 4 + pixels[..., 2]
    shares: npt.NDArray[np.float64] = np.bincount(codes.ravel(), minlength=64) / codes.size
    return shares


@pytest.mark.parametrize(
    ("kind", "options", "wrote", "recipe"),
    [
        (
            "textures",
            "--num-classes=2 --num-train=4 --num-val=2 --image-size=32 --num-workers=1",
            "6 images in 2 classes",
            "resnet50 --config textures",
        ),
        ("shapes", "--num-train=4 --num-val=2 --image-size=32 --num-workers=1", "6 images in 5 classes", ""),
        ("digits", "", "1,797 images in 10 classes", ""),
        ("phrases", "--num-pairs=200", "200 pairs of sentences", "translation --config phrases"),
    ],
)
def test_the_command_says_what_it_wrote_and_what_comes_next(
    kind: str, options: str, wrote: str, recipe: str, tmp_path: Path
) -> None:
    command = ("data", kind, tmp_path / "my data", *options.split())
    first = enginery(*command)
    assert f"{wrote} are in" in first.stdout
    assert f"enginery run {recipe}" in first.stdout
    assert f" --data '{tmp_path / 'my data'}'" in first.stdout
    assert f"already holds these {wrote}; nothing was written" in enginery(*command).stdout


@pytest.mark.parametrize(
    "arguments", [("digits",), ("textures", "--num-classes", "2", "--num-train", "2"), ("shapes",)]
)
def test_a_place_that_may_not_be_written(arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    with refuses("unwritable-directory"):
        enginery("data", name, "/sys/images", *options)  # closed to root too


def test_a_full_disk_is_a_failure_and_not_the_users(tmp_path: Path) -> None:
    with pytest.raises(EngineryError) as caught, _translate_errors(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (type(caught.value), caught.value.code) == (EngineryError, "disk-full")
