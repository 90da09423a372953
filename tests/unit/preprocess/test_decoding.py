"""The images that preprocess takes, and that DALI decodes whatever is accepted to the pixels that were checked."""

import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from components.common.contracts.transforms import Augmentation
from components.common.data.dali_pipelines import ImageBatches, load_image
from components.common.data.image_files import encode_image, rgb, upright_size
from components.common.data.loader import Loader
from components.common.data.read_alike import Rejected, as_png, check_encoded, decode
from components.common.runtimes.runner import to_numpy
from components.preprocess.config import PreprocessConfig
from components.preprocess.decoding import shrink
from tests.conftest import Dataset, preprocess
from tests.processes import ROOT, run_python
from tests.unit.positions import plain
from tests.unit.refusals import refuses

from .builders import gradient, listing, rejected, write_tree

SIDE = 24
MAKE, X_RESOLUTION, ORIENTATION, SOFTWARE = 0x10F, 0x11A, 0x112, 0x131
TURNED, UPRIGHT = ((ORIENTATION, 3, 1, struct.pack(">HH", value, 0)) for value in (6, 1))
FAR = struct.pack(">I", 5000)  # a place behind the end
BAD = {
    "text.jpg": "not an image",
    "empty.jpg": "empty file",
    "anim.gif": "not an image, or of a format that is not read; convert it to JPEG or PNG",
    "truncated.jpg": "damaged: image file is truncated",
    "no_end.png": "damaged: the end of the PNG is missing",
    "marker.jpg": "damaged: no JPEG marker at byte",
    "wide.tif": "TIFF of mode I is not supported",
    "huge.png": "3000x2000 has more than max_pixels = 1000000 pixels",
    "long.png": "1x101 has a side of more than 100 times the other",
}


@pytest.fixture(scope="module")
def with_bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("bad") / "images", {"good": 12, "bad": 12})
    folder = root / "bad"
    (folder / "text.jpg").write_text("this is no image\n" * 20)
    (folder / "empty.jpg").write_bytes(b"")
    gradient().save(folder / "anim.gif")
    jpeg, png = encode_image(gradient(480, 640), "JPEG"), encode_image(gradient(), "PNG")
    (folder / "truncated.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    # Pillow reads the next two without a word, DALI stops at them.
    (folder / "no_end.png").write_bytes(png[:-12])
    quantization = jpeg.index(b"\xff\xdb", 30)
    (folder / "marker.jpg").write_bytes(jpeg[:quantization] + b"\x11" + jpeg[quantization + 1 :])
    Image.fromarray(np.full((20, 20), 70000, np.int32)).save(folder / "wide.tif")
    Image.new("RGB", (3000, 2000)).save(folder / "huge.png")
    Image.new("RGB", (1, 101)).save(folder / "long.png")
    return root


def test_bad_files_are_left_out_and_listed_with_the_reason(with_bad_files: Path, tmp_path: Path) -> None:
    dataset = preprocess(
        with_bad_files, tmp_path / "out", max_bad_fraction=0.5, max_pixels=1_000_000, near_duplicates="keep"
    )
    reasons = rejected(dataset.path)
    assert {name: reasons[f"bad/{name}"][: len(reason)] for name, reason in BAD.items()} == BAD
    assert dataset.manifest.num_rejected == len(reasons) == len(BAD)
    assert sum(split.num_images for split in dataset.manifest.splits.values()) == 24
    for split in ("train", "val"):  # DALI raises for the whole pipeline where one image does not decode
        loader = Loader(dataset, split, plain(32), batch_size=5)
        assert sum(len(batch.labels) for batch in loader) == dataset.manifest.splits[split].num_images


def test_more_bad_files_than_may_be_left_out(with_bad_files: Path, tmp_path: Path) -> None:
    for setting, value in (("on_bad", "fail"), ("max_bad_fraction", 0.1)):
        output = tmp_path / setting
        with refuses("unusable-files", f"preprocess.{setting}") as caught:
            preprocess(with_bad_files, output, **{setting: value})
        assert str(caught.value).startswith("8 of 33 files are no usable image")
        assert set(rejected(output)) == {f"bad/{name}" for name in BAD if name != "huge.png"}
        assert not (output / "manifest.json").exists()
    preprocess(with_bad_files, tmp_path / "at_the_border", max_bad_fraction=8 / 33)
    root = write_tree(tmp_path / "images", {"train/a": 2, "train/b": 2, "val/a": 0, "val/b": 0})
    for name in ("a", "b"):
        (root / "val" / name / "x.jpg").write_text("no image")
    with refuses("no-usable-image"):
        preprocess(root, tmp_path / "out", max_bad_fraction=1)


def exif(orientation: int) -> Image.Exif:
    """6 is a camera held upright, turned right to show."""
    block = Image.Exif()
    block[ORIENTATION] = orientation
    return block


def plain_cmyk(image: Image.Image) -> bytes:
    """Inks as they are, without the marker by which Adobe says that it writes them inverted."""
    data = encode_image(image.convert("CMYK"), "JPEG", quality=95)
    marker = data.index(b"\xff\xee")
    return data[:marker] + data[marker + 2 + int.from_bytes(data[marker + 2 : marker + 4]) :]


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'  # which neither DALI nor torchvision looks at
IMAGE = gradient()
GRAY_16_BIT = Image.fromarray(np.asarray(IMAGE.convert("L")).astype(np.uint16) * 257)
SECOND_FRAME: dict[str, Any] = {"save_all": True, "append_images": [IMAGE.transpose(Image.Transpose.ROTATE_180)]}
GOOD: dict[str, bytes] = {
    "rgb.jpg": encode_image(IMAGE, "JPEG", quality=95),
    "progressive.jpg": encode_image(IMAGE, "JPEG", progressive=True),
    "gray.jpg": encode_image(IMAGE.convert("L"), "JPEG"),
    "cmyk.jpg": encode_image(IMAGE.convert("CMYK"), "JPEG", quality=95),
    "mpo.jpg": encode_image(IMAGE, "MPO", save_all=True, append_images=[IMAGE]),
    "rgb.png": encode_image(IMAGE, "PNG"),
    **{f"{mode}.png": encode_image(IMAGE.convert(mode), "PNG") for mode in ("RGBA", "LA", "P", "1")},
    "gray16.png": encode_image(GRAY_16_BIT, "PNG"),
    "png_named.jpg": encode_image(IMAGE, "PNG"),
    "lossy.webp": encode_image(IMAGE, "WEBP", quality=95),
    "lossless.webp": encode_image(IMAGE.convert("RGBA"), "WEBP", lossless=True),
    "rgb.bmp": encode_image(IMAGE, "BMP"),
    "palette.bmp": encode_image(IMAGE.convert("P"), "BMP"),
    "plain.tif": encode_image(IMAGE, "TIFF"),
    "lzw.tif": encode_image(IMAGE, "TIFF", compression="tiff_lzw"),
    "bits.tif": encode_image(IMAGE.convert("1"), "TIFF"),
    "fax.tif": encode_image(IMAGE.convert("1"), "TIFF", compression="group4"),
    "jpeg.tiff": encode_image(IMAGE, "TIFF", compression="jpeg"),
    "gray16.tif": encode_image(GRAY_16_BIT, "TIFF"),
    "trailing.jpg": encode_image(IMAGE, "JPEG") + b"appended by some tool",
    "UPPER.JPG": encode_image(IMAGE, "JPEG"),
    "no_suffix": encode_image(IMAGE, "JPEG"),
    "tiny.png": encode_image(IMAGE.crop((0, 0, 1, 1)), "PNG"),
    "thin.png": encode_image(IMAGE.crop((0, 0, 64, 1)), "PNG"),
    **{f"exif{number}.jpg": encode_image(IMAGE, "JPEG", quality=95, exif=exif(number)) for number in range(1, 9)},
    "exif6.png": encode_image(IMAGE, "PNG", exif=exif(6)),
    "exif8.webp": encode_image(IMAGE, "WEBP", quality=95, exif=exif(8)),
    "xmp6.jpg": encode_image(IMAGE, "JPEG", quality=95, xmp=XMP),
    "xmp6.webp": encode_image(IMAGE, "WEBP", quality=95, xmp=XMP),
    "plain_cmyk.jpg": plain_cmyk(IMAGE),
    "animated.png": encode_image(IMAGE, "PNG", **SECOND_FRAME),
    "poster.png": encode_image(IMAGE, "PNG", default_image=True, **SECOND_FRAME),
    "animated.webp": encode_image(IMAGE, "WEBP", lossless=True, **SECOND_FRAME),
    "pages.tif": encode_image(IMAGE, "TIFF", **SECOND_FRAME),
}
BECOME_PNG = {name for name in GOOD if name.endswith((".bmp", ".tif", ".tiff"))} | {"plain_cmyk.jpg", "poster.png"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """One image in every form that is accepted; the class tells the form."""
    root = tmp_path_factory.mktemp("good")
    for name, data in GOOD.items():
        for split in ("train", "val"):
            file = root / "images" / split / name.replace(".", "_") / name
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
    return root / "images", preprocess(root / "images", root / "dataset", on_leak="warn", near_duplicates="keep")


def upright(opened: Image.Image) -> Image.Image:
    opened.info.pop("xmp", None)
    turned = ImageOps.exif_transpose(opened)
    if turned.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8)).convert("RGB")
    return turned.convert("RGB")


def test_every_form_is_packed_and_decoded_to_the_pixels_that_were_checked(good: tuple[Path, Dataset]) -> None:
    folder, dataset = good
    entries = listing(dataset, "val")
    assert rejected(dataset.path) == {}
    assert {Path(entry["path"]).name for entry in entries} == set(GOOD)
    batches = list(Loader(dataset, "val", plain(48), batch_size=7))
    images = np.concatenate([to_numpy(batch.images) for batch in batches])  # [N, 3, 48, 48]
    assert [label for batch in batches for label in batch.labels.tolist()] == [entry["label"] for entry in entries]
    for image, entry in zip(images, entries, strict=True):
        name = Path(entry["path"]).name
        assert (entry["sha256"] == hashlib.sha256(GOOD[name]).hexdigest()) == (name not in BECOME_PNG)
        with Image.open(folder / entry["path"]) as opened:
            expected = upright(opened)
        assert (entry["width"], entry["height"]) == expected.size, name
        if min(expected.size) == 48:  # others are scaled up: nothing to compare pixel by pixel
            left, top = ((side - 48) // 2 for side in expected.size)
            pixels = np.asarray(expected.crop((left, top, left + 48, top + 48))).transpose(2, 0, 1).astype(float)
            assert np.abs(image - pixels).max() <= 1.5, name
    (batch,) = Loader(dataset, "train", plain(32), batch_size=len(GOOD), augmentation=Augmentation())
    assert sorted(batch.labels.tolist()) == list(range(len(GOOD)))
    assert np.isfinite(to_numpy(batch.images)).all()


def block(*entries: tuple[int, int, int, bytes]) -> bytes:
    """A big-endian EXIF block of entries: tag, type, count, value."""
    listed = b"".join(struct.pack(">HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + listed + bytes(4)


PICTURE = gradient(SIDE, 40)
BLACK = Image.new("RGB", PICTURE.size)


def jpeg(*blocks: bytes) -> bytes:
    data = encode_image(PICTURE, "JPEG", quality=95)
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in blocks)
    return data[:20] + segments + data[20:]


def png(*chunks: tuple[bytes, bytes], before: bytes = b"IDAT") -> bytes:
    data = encode_image(PICTURE, "PNG")
    place = data.index(before) - 4
    added = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return data[:place] + added + data[place:]


def webp(**options: Any) -> bytes:
    return encode_image(PICTURE, "WEBP", quality=95, **options)


def imagemagick_png() -> bytes:
    data = block(TURNED)
    return png((b"tEXt", b"Raw profile type exif\0\nexif\n%8d\n" % len(data) + data.hex().encode() + b"\n"))


def without_its_flag(data: bytes) -> bytes:
    return data[:20] + bytes([data[20] & ~0x08]) + data[21:]


TURNED_CHUNK = (b"eXIf", block(TURNED)[6:])
OTHERS = ((MAKE, 2, 4, b"abc\0"), TURNED, (X_RESOLUTION, 5, 1, struct.pack(">I", 8)), (0xC000, 1, 1, bytes(4)))
# Orientations that Pillow and DALI may read in different ways.
AS_IT_IS: dict[str, bytes] = {
    "turned": jpeg(block(TURNED)),
    "with others": jpeg(block(*OTHERS)),
    "upright, damaged elsewhere": jpeg(block((MAKE, 2, 40, FAR), UPRIGHT)),
    "PNG": png(TURNED_CHUNK),
    "PNG, behind the picture": png(TURNED_CHUNK, before=b"IEND"),
    "lossy WebP": webp(exif=block(TURNED)),
    "lossless WebP": encode_image(PICTURE, "WEBP", lossless=True),
    "even WebP": webp(icc_profile=b"even", exif=block(TURNED)),
    "odd WebP without a block": webp(icc_profile=b"odd"),
    "WebP that does not say it has a block": without_its_flag(webp(exif=block(TURNED))),
}
AS_PNG: dict[str, bytes] = {
    "long": jpeg(block((ORIENTATION, 4, 1, struct.pack(">I", 6)))),
    "many": jpeg(block((ORIENTATION, 3, 8193, TURNED[3]))),
    "doubles outside": jpeg(block((ORIENTATION, 12, 0x7FFFFFFF, TURNED[3]))),
    "no type": jpeg(block((ORIENTATION, 0, 1, TURNED[3]))),
    "two blocks": jpeg(block(TURNED), block(UPRIGHT)),
    "a text outside": jpeg(block((MAKE, 2, 40, FAR), TURNED)),
    "a later text outside": jpeg(block(TURNED, (SOFTWARE, 2, 40, FAR))),
    "a text of another type": jpeg(block((MAKE, 3, 3, FAR), TURNED)),
    "a fraction of another type": jpeg(block(TURNED, (X_RESOLUTION, 3, 1, struct.pack(">HH", 72, 0)))),
    "ImageMagick's PNG": imagemagick_png(),
    "PNG with two blocks": png(TURNED_CHUNK, TURNED_CHUNK),
    "odd WebP": webp(icc_profile=b"odd", exif=block(TURNED)),
    "odd WebP, upright": webp(icc_profile=b"odd", exif=block((MAKE, 2, 4, b"abc\0"))),
    "animated PNG": encode_image(PICTURE, "PNG", save_all=True, append_images=[BLACK], exif=block(TURNED)),
    "WebP that only says it has a block": webp(exif=block(TURNED)).replace(b"EXIF", b"EXI_"),
    "animated WebP": encode_image(
        PICTURE, "WEBP", save_all=True, append_images=[BLACK], lossless=True, exif=block(TURNED)
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged blocks
@pytest.mark.parametrize(
    ("data", "becomes_png"), [pytest.param(data, name in AS_PNG, id=name) for name, data in (AS_IT_IS | AS_PNG).items()]
)
def test_the_loader_shows_the_side_up_that_preprocess_saw(data: bytes, becomes_png: bool) -> None:
    extension, image = decode(data, max_pixels=1_000_000)
    assert (extension == "") == becomes_png
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert image.tobytes() == expected.tobytes()
    seen = load_image(as_png(image) if becomes_png else data, plain(SIDE))[0]  # [3, 24, 24]
    left, top = ((side - SIDE) // 2 for side in expected.size)
    pixels = np.asarray(expected.crop((left, top, left + SIDE, top + SIDE))).transpose(2, 0, 1)
    assert np.abs(seen - pixels).max() <= 3


ASKED = (
    GOOD
    | AS_IT_IS
    | AS_PNG
    | {f"exif{turn}.tif": encode_image(PICTURE, "TIFF", exif=exif(turn)) for turn in range(2, 9)}
)
ASKED["gray_alpha.tif"] = encode_image(PICTURE.convert("LA"), "TIFF")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged blocks
@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in ASKED.items()])
def test_a_model_is_asked_with_the_pixels_that_it_was_trained_on(data: bytes) -> None:
    """An image that is sent to a server is not packed, and DALI alone would read some in its own way."""
    extension, image = decode(data, max_pixels=1_000_000)
    packed = load_image(data if extension else as_png(image), plain(SIDE))
    asked = ImageBatches(plain(SIDE), 1).load([data], ["x"])
    assert np.array_equal(asked, packed)
    assert (upright_size(data), rgb(data).tobytes()) == (image.size, image.tobytes())


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (65, 4000), (64 * 3, 64 * 3)])
def test_the_shorter_side_of_a_large_image_becomes_exactly_the_limit(size: tuple[int, int]) -> None:
    data, image = shrink(gradient(*size), 64, 90)
    assert min(image.size) == 64
    assert max(image.size) == pytest.approx(max(size) * 64 / min(size), abs=0.51)
    assert (image.width > image.height) == (size[1] > size[0])
    assert Image.open(io.BytesIO(data)).tobytes() == image.tobytes()


TIGHT = """
import io, resource, psutil
from PIL import Image
from components.common.data.read_alike import Rejected, decode
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
    done = run_python("-c", TIGHT)
    assert done.stdout.startswith("takes more memory than is left"), done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_too_large_for_memory_is_refused_by_its_header() -> None:
    png = bytearray(encode_image(Image.new("RGB", (16, 16)), "PNG"))
    png[16:24] = struct.pack(">II", 10_001, 10_000)  # where more is read, the file is damaged
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4)
    with refuses("image-too-large"):
        check_encoded(bytes(png), "x")
    with pytest.raises(Rejected, match="10001x10000 has more than max_pixels"):
        decode(bytes(png), PreprocessConfig(data="x").max_pixels)


def test_a_jpeg_whose_picture_is_passed_over_again_and_again() -> None:
    """Hundred thousand scans of 40 bytes take many minutes; a file behind the picture may hold anything."""
    data = encode_image(gradient(480, 640), "JPEG", progressive=True)
    first = data.index(b"\xff\xda")
    hidden = b"\xff\xfe\0\4\xff\xd9"  # a comment
    data, behind = data[:first] + hidden + data[first : first + 40] * 100 + data[first:], data + b"\xff\xda" * 200
    with refuses("damaged-image"):
        check_encoded(data, "x")
    with pytest.raises(Rejected, match="110 scans"):
        decode(data, max_pixels=10**6)
    assert check_encoded(behind, "x")[0] == behind


TAKEN = {"JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF"}


def saved_in_every_format() -> dict[str, bytes]:
    Image.init()
    found = {"EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none": b"text"}
    for form in sorted(set(Image.SAVE) & set(Image.OPEN) - TAKEN):
        for mode in ("RGB", "L", "1"):
            try:
                found.setdefault(form, encode_image(Image.new(mode, (16, 16)), form))
            except (OSError, ValueError, KeyError, SystemError):  # needs a library or another mode
                continue
    return found


def test_no_other_plugin_of_pillow_is_offered_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = saved_in_every_format()
    assert len(files) > 8
    asked: list[str] = []
    for form in set(Image.OPEN) - TAKEN:
        factory, _ = Image.OPEN[form]
        monkeypatch.setitem(Image.OPEN, form, (factory, lambda _, form=form: asked.append(form)))
    for data in files.values():
        with refuses("not-an-image"):
            check_encoded(data, "x")
        with pytest.raises(Rejected, match="not an image, or of a format that is not read"):
            decode(data, max_pixels=10**6)
    assert asked == []
    sources = [path for folder in ("components", "enginery", "pipelines") for path in ROOT.glob(f"{folder}/**/*.py")]
    assert {path.name for path in sources if "Image.open(" in path.read_text(encoding="utf-8")} == {"image_files.py"}
