"""Damaged shards and indexes: digests must tell, and a loader that was not asked must end with a word or all images.

python -m benchmarks.fuzz shards --machine NAME --num-cases 2000
"""

import random
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import ALL_FILES, Artifact, DatasetManifest, load
from components.common.contracts.transforms import transform_for
from components.common.data.loader import Loader
from tests.conftest import preprocess
from tests.fuzz.images import mutate
from tests.fuzz.running import limited

BATCH = 10
_NUM_IMAGES = 12


@lru_cache
def original() -> Artifact[DatasetManifest]:
    """A small dataset, made once in each process."""
    folder = Path(tempfile.mkdtemp(prefix="enginery-fuzz-"))
    chance = np.random.default_rng(0)
    for number in range(2 * _NUM_IMAGES):
        file = folder / "images" / ("train" if number % 2 else "val") / f"class{number // 2 % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(file if number % 3 else file.with_suffix(".jpg"))
    return preprocess(folder / "images", folder / "dataset")


def damage(number: int, seed: int, dataset: Artifact[DatasetManifest]) -> tuple[str, bytes]:
    """Case `number`: which of the val split's two files, and what it holds now."""
    chance = random.Random(f"{seed}:{number}")
    (shard,) = dataset.manifest.splits["val"].shards
    name = chance.choice((shard, str(Path(shard).with_suffix(".idx"))))
    before = dataset.file(name).read_bytes()
    data = bytearray(before)
    while data == before:
        for _ in range(chance.choice((1, 1, 2, 8))):
            mutate(chance, data, [before])
    return name, bytes(data)


def check_batch(numbers: range, seed: int) -> dict[int, str]:
    """Failures by case."""
    dataset, wrong = original(), {}
    folder = dataset.path.parent / "damaged"
    for number in numbers:
        name, data = damage(number, seed, dataset)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(dataset.path, folder)
        (folder / name).write_bytes(data)
        with limited(number, name, wrong):
            if problem := _problem(folder, dataset):
                wrong[number] = f"{name}: {problem}"
    return wrong


def _problem(folder: Path, dataset: Artifact[DatasetManifest]) -> str:
    try:
        load(folder, DatasetManifest, verify=ALL_FILES)
        return "the digests don't tell"
    except EngineryError:
        pass
    spec = transform_for(16, resize_ratio=1.0)
    damaged = Artifact(path=folder, manifest=dataset.manifest, digest=dataset.digest)
    try:
        loader = Loader(damaged, "val", spec, batch_size=5, num_threads=1, read_timeout_s=20)
        num_images = sum(len(batch.labels) for batch in loader)
    except EngineryError:
        return ""
    except Exception as error:
        return f"the loader raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    expected = dataset.manifest.splits["val"].num_images
    return "" if num_images == expected else f"the loader delivered {num_images} of {expected} images without a word"
