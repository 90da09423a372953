"""Data that ends a run in its first step, after what is checked before it."""

from pathlib import Path

from PIL import Image

MESSAGE = "validation images are training images too"


def write_leaking(folder: Path) -> Path:
    """Two classes whose validation image is the training image."""
    for name, colour in (("a", "red"), ("b", "blue")):
        for split in ("train", "val"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), colour).save(folder / split / name / "0.png")
    return folder
