"""Small folders of images, archives of them, and views of what preprocess makes of them."""

import io
import json
import pickle
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from components.preprocess.sources import Source, Unreadable, find_samples
from tests.conftest import Dataset

SHARD_BYTES = 1_000_000  # the fewest there may be
MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}
OUTSIDE, IRREGULAR = "a path out of the archive", "no regular file of the archive"


def gradient(height: int = 48, width: int = 64, shift: int = 0) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 4 + shift, y * 5, (x + y) * 2], axis=-1).astype(np.uint8))


def write_tree(root: Path, counts: Mapping[str, int], **options: int) -> Path:
    """PNG images, as many as said, in folders of these names."""
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True)
        for index in range(count):
            gradient(shift=number * 20 + index, **options).save(root / folder / f"{index:03d}.png")
    return root


def listing(dataset: Dataset, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dataset.file(f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def every_path(dataset: Dataset) -> set[str]:
    return {entry["path"] for split in ("train", "val") for entry in listing(dataset, split)}


def rejected(folder: Path) -> dict[str, str]:
    """Reason by path."""
    lines = [json.loads(line) for line in (folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    return {entry["path"]: entry["reason"] for entry in lines}


def find(data: Path | str, scratch: Path = Path("none"), **options: Any) -> Source:
    if scratch != Path("none"):
        scratch.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(str(data), scratch=scratch, **settings)


@contextmanager
def peak_below(num_bytes: int) -> Iterator[None]:
    """Assert that Python allocates less than that in the body, whatever it reads."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def paths(source: Source) -> list[str]:
    return sorted(sample.path for samples in source.splits.values() for sample in samples)


def contents(source: Source) -> dict[str, dict[str, tuple[str, bytes]]]:
    """Class and bytes of each path of each split, as another process reads them."""
    storage = pickle.loads(pickle.dumps(source.storage))
    return {
        split: {sample.path: (source.classes[sample.label], storage.read(sample)) for sample in samples}
        for split, samples in source.splits.items()
    }


def reasons(source: Source) -> dict[str, str]:
    """Reasons why samples can't be used, by path."""
    storage = pickle.loads(pickle.dumps(source.storage))
    found = {}
    for sample in source.splits["train"] + source.splits["val"]:
        try:
            storage.read(sample)
        except (Unreadable, OSError) as error:
            found[sample.path] = str(error)
    return found


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, target
    return info, data


def write_tar(file: Path, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, MODES["".join(file.suffixes)], errors="surrogateescape", format=form) as packed:
        for info, data in members:
            packed.addfile(info, io.BytesIO(data))
    return file


def write_zip(file: Path, members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", method) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    return file


def archive(file: Path, root: Path, top: str = "") -> Path:
    """The files of `root`, sorted backwards, below a folder `top`."""
    files = sorted((path for path in root.rglob("*") if path.is_file()), reverse=True)
    named = {f"{top}{path.relative_to(root)}": path.read_bytes() for path in files}
    if file.suffix == ".zip":
        return write_zip(file, named)
    return write_tar(file, *(member(name, data) for name, data in named.items()))


def shard(labels: list[str], first: int = 0, suffix: str = "jpg") -> dict[str, str]:
    """Members of a WebDataset tar."""
    members = {}
    for number, label in enumerate(labels, first):
        members |= {f"{number:03d}.{suffix}": f"image {number}", f"{number:03d}.cls": label}
    return members


def write_shard(file: Path, members: Mapping[str, str]) -> Path:
    return write_tar(file, *(member(name, data.encode()) for name, data in members.items()))
