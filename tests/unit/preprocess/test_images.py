"""Which images preprocess takes, and that DALI decodes whatever is accepted."""

import hashlib
import io
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.data.loader import Loader
from components.common.runtimes.runner import to_numpy

Preprocess = Callable[..., Artifact[DatasetManifest]]
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def with_bad_files(
    tmp_path_factory: pytest.TempPathFactory, gradient: Callable[..., Any], write_tree: Callable[..., Any]
) -> Path:
    root = write_tree(tmp_path_factory.mktemp("bad") / "images", {"good": 12, "bad": 12})
    folder = root / "bad"
    (folder / "text.jpg").write_text("this is no image\n" * 20)
    (folder / "empty.jpg").write_bytes(b"")
    gradient().save(folder / "anim.gif")
    jpeg, png = io.BytesIO(), io.BytesIO()
    gradient(480, 640).save(jpeg, "JPEG")
    gradient().save(png, "PNG")
    (folder / "truncated.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    # Pillow reads the next two without a word, DALI stops at them.
    (folder / "no_end.png").write_bytes(png.getvalue()[:-12])
    quantization = jpeg.getvalue().index(b"\xff\xdb", 30)
    (folder / "marker.jpg").write_bytes(jpeg.getvalue()[:quantization] + b"\x11" + jpeg.getvalue()[quantization + 1 :])
    Image.fromarray(np.full((20, 20), 70000, np.int32)).save(folder / "wide.tif")
    Image.new("RGB", (3000, 2000)).save(folder / "huge.png")
    (folder / "pipe.txt").write_text("")
    return root


BAD = {
    "text.jpg": "not an image",
    "empty.jpg": "empty file",
    "anim.gif": "not an image, or of a format that is not read; convert it to JPEG or PNG",
    "truncated.jpg": "damaged: image file is truncated",
    "no_end.png": "damaged: the end of the PNG is missing",
    "marker.jpg": "damaged: no JPEG marker at byte",
    "wide.tif": "TIFF of mode I is not supported",
    "huge.png": "3000x2000 has more than max_pixels = 1000000 pixels",
    "pipe.txt": "empty file",
}


def test_bad_files_are_left_out_and_listed_with_the_reason(
    with_bad_files: Path,
    tmp_path: Path,
    run_preprocess: Preprocess,
    rejected: Callable[..., Any],
    plain: Callable[..., Any],
) -> None:
    dataset = run_preprocess(with_bad_files, tmp_path / "out", max_bad_fraction=0.5, max_pixels=1_000_000)
    reasons = rejected(dataset.path)
    assert set(reasons) == {f"bad/{name}" for name in BAD}
    for name, reason in BAD.items():
        assert reasons[f"bad/{name}"].startswith(reason), name
    assert dataset.manifest.num_rejected == len(BAD)
    assert sum(split.num_images for split in dataset.manifest.splits.values()) == 24
    for split in ("train", "val"):  # DALI raises for the whole pipeline where one image does not decode
        loader = Loader(dataset, split, plain(32), batch_size=5)
        assert sum(len(batch.labels) for batch in loader) == dataset.manifest.splits[split].num_images


def test_on_bad_fail_stops_with_an_example(
    with_bad_files: Path, tmp_path: Path, run_preprocess: Preprocess, rejected: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match=r"8 of 33 files are no usable image, such as bad/.*rejected\.jsonl") as caught:
        run_preprocess(with_bad_files, tmp_path / "out", on_bad="fail")
    assert set(rejected(tmp_path / "out")) == {f"bad/{name}" for name in BAD if name != "huge.png"}
    assert str(tmp_path / "out") in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_too_many_bad_files_stop_too(with_bad_files: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    with pytest.raises(
        UserError,
        match=r"8 of 33 files .* more than max_bad_fraction = 0\.1 allows.* --max-bad-fraction SHARE\); merge",
    ):
        run_preprocess(with_bad_files, tmp_path / "out")
    run_preprocess(with_bad_files, tmp_path / "at_the_border", max_bad_fraction=8 / 33)


def test_a_split_without_any_usable_image(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 4, "train/b": 4})
    for name in ("a", "b"):
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "x.jpg").write_text("no image")
    with pytest.raises(UserError, match="no usable image is left in the val split"):
        run_preprocess(root, tmp_path / "out", max_bad_fraction=1)


def save_exif(image: Image.Image, orientation: int, path: Path) -> None:
    """Save with an EXIF orientation: 6 is a camera held upright, turned right to show."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif, quality=95)


def save_xmp(image: Image.Image, path: Path) -> None:
    """Save with an orientation that stands in XMP alone, which neither DALI nor torchvision looks at."""
    image.save(path, xmp=b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>', quality=95)


def save_plain_cmyk(image: Image.Image, path: Path) -> None:
    """Save inks as they are, without the marker by which Adobe says that it writes them inverted."""
    encoded = io.BytesIO()
    image.convert("CMYK").save(encoded, "JPEG", quality=95)
    data = encoded.getvalue()
    marker = data.index(b"\xff\xee")
    path.write_bytes(data[:marker] + data[marker + 2 + int.from_bytes(data[marker + 2 : marker + 4]) :])


def save_animation(image: Image.Image, path: Path, **options: Any) -> None:
    """Save with a second frame, the image upside down."""
    image.save(path, save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_180)], **options)


GOOD: dict[str, Callable[[Image.Image, Path], Any]] = {
    "rgb.jpg": lambda image, path: image.save(path, quality=95),
    "progressive.jpg": lambda image, path: image.save(path, progressive=True),
    "gray.jpg": lambda image, path: image.convert("L").save(path),
    "cmyk.jpg": lambda image, path: image.convert("CMYK").save(path, quality=95),
    "mpo.jpg": lambda image, path: image.save(path, format="MPO", save_all=True, append_images=[image]),
    "rgb.png": lambda image, path: image.save(path),
    "rgba.png": lambda image, path: image.convert("RGBA").save(path),
    "gray_alpha.png": lambda image, path: image.convert("LA").save(path),
    "palette.png": lambda image, path: image.convert("P").save(path),
    "bits.png": lambda image, path: image.convert("1").save(path),
    "gray16.png": lambda image, path: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(
        path
    ),
    "png_named.jpg": lambda image, path: image.save(path, format="PNG"),
    "lossy.webp": lambda image, path: image.save(path, quality=95),
    "lossless.webp": lambda image, path: image.convert("RGBA").save(path, lossless=True),
    "rgb.bmp": lambda image, path: image.save(path),
    "palette.bmp": lambda image, path: image.convert("P").save(path),
    "plain.tif": lambda image, path: image.save(path),
    "lzw.tif": lambda image, path: image.save(path, compression="tiff_lzw"),
    "bits.tif": lambda image, path: image.convert("1").save(path),
    "fax.tif": lambda image, path: image.convert("1").save(path, compression="group4"),
    "jpeg.tiff": lambda image, path: image.save(path, compression="jpeg"),
    "gray16.tif": lambda image, path: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(
        path
    ),
    "trailing.jpg": lambda image, path: (image.save(path), path.open("ab").write(b"appended by some tool")),
    "UPPER.JPG": lambda image, path: image.save(path, format="JPEG"),
    "no_suffix": lambda image, path: image.save(path, format="JPEG"),
    "tiny.png": lambda image, path: image.crop((0, 0, 1, 1)).save(path),
    "thin.png": lambda image, path: image.crop((0, 0, 64, 1)).save(path),
    **{f"exif{number}.jpg": lambda image, path, n=number: save_exif(image, n, path) for number in range(1, 9)},
    "exif6.png": lambda image, path: save_exif(image, 6, path),
    "exif8.webp": lambda image, path: save_exif(image, 8, path),
    "xmp6.jpg": save_xmp,
    "xmp6.webp": save_xmp,
    "plain_cmyk.jpg": save_plain_cmyk,
    "animated.png": save_animation,
    "poster.png": lambda image, path: save_animation(image, path, default_image=True),
    "animated.webp": lambda image, path: save_animation(image, path, lossless=True),
    "pages.tif": save_animation,
}
BECOME_PNG = {name for name in GOOD if name.endswith((".bmp", ".tif", ".tiff"))} | {"plain_cmyk.jpg", "poster.png"}


@pytest.fixture(scope="module")
def good(
    tmp_path_factory: pytest.TempPathFactory, run_preprocess: Preprocess, gradient: Callable[..., Any]
) -> tuple[Path, Artifact[DatasetManifest]]:
    """One image in every form that is accepted; the class tells the form."""
    root = tmp_path_factory.mktemp("good")
    for name, write in GOOD.items():
        for split in ("train", "val"):
            folder = root / "images" / split / name.replace(".", "_")
            folder.mkdir(parents=True)
            write(gradient(), folder / name)
    return root / "images", run_preprocess(root / "images", root / "dataset", on_leak="warn")


def test_every_form_is_accepted(
    good: tuple[Path, Artifact[DatasetManifest]], listing: Callable[..., Any], rejected: Callable[..., Any]
) -> None:
    folder, dataset = good
    assert rejected(dataset.path) == {}
    assert {Path(entry["path"]).name for entry in listing(dataset, "val")} == set(GOOD)
    for entry in listing(dataset, "val"):
        as_it_is = entry["sha256"] == hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
        assert as_it_is == (Path(entry["path"]).name not in BECOME_PNG)


def test_the_loader_decodes_every_form_to_the_pixels_that_were_checked(
    good: tuple[Path, Artifact[DatasetManifest]], listing: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    folder, dataset = good
    entries = listing(dataset, "val")
    loader = Loader(dataset, "val", plain(48), batch_size=7)
    batches = list(loader)
    images = np.concatenate([to_numpy(batch.images) for batch in batches])  # [N, 3, 48, 48]
    labels = [label for batch in batches for label in batch.labels.tolist()]
    assert labels == [entry["label"] for entry in entries]
    assert len(images) == len(GOOD)
    for image, entry in zip(images, entries, strict=True):
        with Image.open(folder / entry["path"]) as opened:
            expected = upright(opened)
        assert (entry["width"], entry["height"]) == expected.size, entry["path"]
        if min(expected.size) != 48:
            continue  # scaled up: nothing to compare pixel by pixel
        left, top = ((side - 48) // 2 for side in expected.size)
        pixels = np.asarray(expected.crop((left, top, left + 48, top + 48))).transpose(2, 0, 1).astype(float)
        assert np.abs(image - pixels).max() <= 1.5, entry["path"]


def upright(opened: Image.Image) -> Image.Image:
    from PIL import ImageOps

    opened.info.pop("xmp", None)
    turned = ImageOps.exif_transpose(opened)
    if turned.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8)).convert("RGB")
    return turned.convert("RGB")


def test_training_decodes_every_form_too(
    good: tuple[Path, Artifact[DatasetManifest]], plain: Callable[..., Any]
) -> None:
    from components.common.contracts.transforms import Augmentation

    _, dataset = good
    loader = Loader(dataset, "train", plain(32), batch_size=len(GOOD), augmentation=Augmentation())
    (batch,) = list(loader)
    assert sorted(batch.labels.tolist()) == list(range(len(GOOD)))
    assert np.isfinite(to_numpy(batch.images)).all()


def test_a_damaged_exif_block_does_not_cost_the_image(
    tmp_path: Path,
    run_preprocess: Preprocess,
    gradient: Callable[..., Any],
    write_tree: Callable[..., Any],
    rejected: Callable[..., Any],
) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    save_exif(gradient(), 6, root / "a" / "odd.jpg")
    data = bytearray((root / "a" / "odd.jpg").read_bytes())
    entry = data.index(b"Exif\0\0") + 6 + 8 + 2  # behind the TIFF header and the number of entries
    data[entry + 2 : entry + 8] = struct.pack(">HI", 12, 0x7FFFFFFF)  # no such many doubles are there
    (root / "a" / "odd.jpg").write_bytes(data)
    dataset = run_preprocess(root, tmp_path / "out")
    assert rejected(dataset.path) == {}


TIGHT = """
import io, resource, psutil
from PIL import Image
from components.preprocess.decoding import decode
from components.preprocess.decoding import Rejected
encoded = io.BytesIO()
Image.new("1", (12000, 12000)).save(encoded, "PNG")
limit = psutil.Process().memory_info().vms + 200_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    decode(encoded.getvalue(), 10**9)
except Rejected as reason:
    print(reason)
"""


def test_want_of_memory_is_said_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", TIGHT], cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("takes more memory than is left"), done.stdout + done.stderr
