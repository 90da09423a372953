"""Damaged tables, archives, labels, models and manifests: each ends with an error of ours or with what can be read.

python -m benchmarks.fuzz parsers --machine NAME --num-cases 10000
"""

import contextlib
import gzip
import io
import json
import lzma
import random
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import (
    MANIFEST,
    CheckpointManifest,
    DatasetManifest,
    claims_of,
    digest_file,
    load,
)
from components.common.data.read_alike import Rejected
from components.common.runtimes.architectures import load_weights, read_weights
from components.common.tasks import TaskName
from components.export.onnx_export import read_user_onnx
from components.preprocess.sources import Unreadable, read_sample
from components.preprocess.tasks import labels_of
from tests.fuzz.images import mutate
from tests.fuzz.running import limited
from tests.unit.networks import onnx_model
from tests.unit.preprocess.builders import find, member, write_tar, write_zip
from tests.unit.registered import make_dataset

BATCH = 50
_NUM_READ = 4  # samples of a source


def _content(write: Callable[[Path], object]) -> bytes:
    """Content that `write(file)` writes."""
    with tempfile.TemporaryDirectory() as folder:
        write(file := Path(folder, "x.tar"))
        return file.read_bytes()


def _tar(members: dict[str, bytes], form: int) -> bytes:
    return _content(lambda file: write_tar(file, *(member(*own) for own in members.items()), form=form))


def _parquet(rows: dict[str, list[str]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(rows), stream)
    return stream.getvalue()


def _onnx() -> bytes:
    shape = numpy_helper.from_array(np.array([1.0, 2.0], np.float32), "value")
    nodes = [
        helper.make_node("Constant", [], ["b"], value=shape),
        helper.make_node("Conv", ["x", "w", "b"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    weights = {"w": np.full((2, 3, 1, 1), 0.5, np.float32)}
    content: bytes = onnx_model(nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 2]}, weights).SerializeToString()
    return content


def _weights() -> bytes:
    stream = io.BytesIO()
    torch.save(_network().state_dict(), stream)
    return stream.getvalue()


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))


def _manifest() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (make_dataset(Path(folder, "dataset")) / MANIFEST).read_bytes()


def _read_source(file: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = find(file, Path(scratch))
        for sample in source.splits["train"][:_NUM_READ]:
            with contextlib.suppress(OSError, Unreadable):
                read_sample(source.storage, sample)


def _coco() -> bytes:
    outlines = [
        [[5, 5, 25.5, 5, 25, 25]],
        {"size": [48, 64], "counts": [10, 20, 48 * 64 - 30]},
        [],
        [[1, 1, 9, 1, 9, 9]],
    ]
    return json.dumps(
        {
            "images": [{"id": n, "file_name": f"{n}.png", "width": 64, "height": 48} for n in range(4)],
            "annotations": [
                {"id": n, "image_id": n, "category_id": n % 2, "bbox": [5, 5.5, 20, 20], "segmentation": outline}
                for n, outline in enumerate(outlines)
            ],
            "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}],
        }
    ).encode()


_VOC = b"""<annotation><size><width>64</width><height>48</height></size><object><name>a</name>
<bndbox><xmin>5</xmin><ymin>5</ymin><xmax>25</xmax><ymax>25</ymax></bndbox></object></annotation>"""
_YOLO = b"0 0.5 0.5 0.2 0.2\n1 0.25 0.25 0.75 0.25 0.75 0.75\n"


def _read_labels(file: Path, tasks: Sequence[TaskName] = ("detection",)) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            Path(folder, f"{number}.png").touch()
        for name in (file.name, f"1{file.suffix}"):  # of two images, if it is of one
            shutil.copy(file, Path(folder, name))
        for task in tasks:
            source = find(folder, Path(folder), task=task)
            for sample in (*source.splits["train"], *source.splits["val"]):
                if sample.annotation is not None:  # else it is refused
                    with contextlib.suppress(Rejected):
                        labels_of(task).pack(sample, (64, 48), (32, 24), source.storage)


def _read_weights(file: Path) -> None:
    load_weights(_network(), read_weights(file), str(file))


def _read_manifest(file: Path) -> None:
    claims_of(file.read_bytes())
    digest_file(file)
    for kind in (DatasetManifest, CheckpointManifest):
        with contextlib.suppress(EngineryError):
            load(file.parent, kind)


@cache
def originals() -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """A file of each kind by its name, and what reads it."""
    members = {f"{name}/{number}.png": f"image {number}".encode() * 9 for name in "ab" for number in range(4)}
    samples = {f"{key:03d}.{end}": b"1" if end == "cls" else b"x" * 99 for key in range(6) for end in ("cls", "png")}
    long = {path.replace("/", f"/{'folder/' * 30}"): data for path, data in members.items()}
    plain = _tar(members, tarfile.GNU_FORMAT)
    rows = {"path": [*members], "label": [path[0] for path in members], "split": ["train", "val"] * 4}
    table = "\n".join([",".join(rows), *(",".join(row) for row in zip(*rows.values(), strict=True))])
    files: dict[str, bytes] = {
        "gnu.tar": plain,
        "long.tar": _tar(long, tarfile.GNU_FORMAT),
        "pax.tar": _tar({f"ü{path}": data for path, data in long.items()}, tarfile.PAX_FORMAT),
        "webdataset.tar": _tar(samples, tarfile.USTAR_FORMAT),
        "x.tar.gz": gzip.compress(plain),
        "x.tar.xz": lzma.compress(plain),
        "stored.zip": _content(lambda file: write_zip(file, members, zipfile.ZIP_STORED)),
        "deflated.zip": _content(lambda file: write_zip(file, members)),
        "t.csv": table.encode(),
        "t.parquet": _parquet(rows),
    }
    readers: dict[str, tuple[bytes, Callable[[Path], object]]] = {
        name: (data, _read_source) for name, data in files.items()
    }
    return readers | {
        "annotations.json": (_coco(), partial(_read_labels, tasks=("detection", "segmentation"))),
        "0.xml": (_VOC, _read_labels),
        "0.txt": (_YOLO, _read_labels),
        "model.onnx": (_onnx(), read_user_onnx),
        "weights.pt": (_weights(), _read_weights),
        "weights.safetensors": (save(_network().state_dict()), _read_weights),
        MANIFEST: (_manifest(), _read_manifest),
    }


def damaged(number: int, seed: int) -> tuple[str, bytes]:
    """Case `number`: the name of one of the files, each in its turn, and what it holds now."""
    chance = random.Random(f"{seed}:{number}")
    name = [*originals()][number % len(originals())]
    data = bytearray(originals()[name][0])
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if chance.randrange(8):
            mutate(chance, data, [file for file, _ in originals().values()])
            continue
        # Of a tar: another type or size of a member.
        head = chance.randrange(len(data)) // 512 * 512 if data else 0
        data[head + 156 : head + 157] = chance.choice(b"01234567LKxgSV").to_bytes()
        data[head + 124 : head + 136] = f"{chance.choice((0, 1, 511, 8**10, 8**11 - 1)):011o}\0".encode()
        _set_checksum(data, head)
    return name, bytes(data)


def _set_checksum(data: bytearray, head: int) -> None:
    block = data[head : head + 512]
    if len(block) == 512:
        block[148:156] = b" " * 8
        data[head + 148 : head + 156] = f"{sum(block):06o}\0 ".encode()


def check_batch(numbers: range, seed: int) -> dict[int, str]:
    """Failures by case."""
    cases = ((number, *damaged(number, seed)) for number in numbers)
    return judged(cases, {name: read for name, (_, read) in originals().items()})


def judged(cases: Iterable[tuple[int, str, bytes]], readers: Mapping[str, Callable[[Path], object]]) -> dict[int, str]:
    """Failures by case, of (number, name of the file, what is in it)."""
    wrong = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name, data in cases:
            file = Path(folder, Path(name).name)
            file.write_bytes(data)
            with limited(number, name, wrong):
                try:
                    readers[name](file)
                except (EngineryError, Unreadable):
                    pass
                except Exception as error:
                    wrong[number] = f"{name} raised {type(error).__name__}: {error}"
            file.unlink()
    return wrong
