"""Which of Pillow's plugins see foreign bytes."""

import io
from pathlib import Path

import pytest
from PIL import Image

from components.common.contracts.errors import UserError
from components.common.data.image_files import check_encoded
from components.preprocess.decoding import Rejected, decode

REPOSITORY = Path(__file__).resolve().parents[2]
TAKEN = {"JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF"}


def saved_in_every_format() -> dict[str, bytes]:
    Image.init()
    found = {}
    for form in sorted(set(Image.SAVE) & set(Image.OPEN) - TAKEN):
        for mode in ("RGB", "L", "1"):
            encoded = io.BytesIO()
            try:
                Image.new(mode, (16, 16)).save(encoded, form)
            except (OSError, ValueError, KeyError, SystemError):  # needs a library or another mode
                continue
            found[form] = encoded.getvalue()
            break
    return found


def test_no_other_plugin_is_offered_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**saved_in_every_format(), "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none": b"text"}
    assert len(files) > 8
    asked: list[str] = []
    for form in set(Image.OPEN) - TAKEN:
        factory, _ = Image.OPEN[form]
        monkeypatch.setitem(Image.OPEN, form, (factory, lambda _, form=form: asked.append(form)))
    for data in files.values():
        with pytest.raises(UserError, match="x is not an image; take a JPEG"):
            check_encoded(data, "x")
        with pytest.raises(Rejected, match="not an image, or of a format that is not read"):
            decode(data, max_pixels=10**6)
    assert asked == []


def test_one_place_opens_images() -> None:
    sources = [*REPOSITORY.glob("components/**/*.py"), *REPOSITORY.glob("pipelines/**/*.py")]
    found = {path.name for path in sources if "Image.open(" in path.read_text(encoding="utf-8")}
    assert found == {"image_files.py"}
