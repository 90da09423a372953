"""Degraded images: the same whatever the batches, and those of the source's formulas."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from components.common.data.corruptions import CORRUPTIONS, Corruption
from components.common.data.loader import Loader
from tests.conftest import Dataset, preprocess
from tests.unit.positions import plain

NUM_VAL, SIDE = 11, 64
SPEC = plain(72, SIDE)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Smooth colours with some texture, wider than high; black and white among them."""
    root, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(0)
    for index in range(NUM_VAL + 2):
        folder = root / "images" / ("val" if index < NUM_VAL else "train") / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (5, 6, 3), np.uint8)
        coarse[0, 0], coarse[4, 5] = 0, 255
        levels = np.asarray(Image.fromarray(coarse).resize((100 + index, 80))).astype(float)
        levels += rng.normal(0, 4, levels.shape)
        Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    return preprocess(root / "images", root / "dataset")


def delivered(
    dataset: Dataset, *corruptions: Corruption, batch_size: int = 30, num_shards: int = 1, **options: int
) -> np.ndarray:
    """The second pass over all parts: [images, versions, H, W, 3], levels."""
    parts = []
    for shard_id in range(num_shards):
        part = {"batch_size": batch_size, "shard_id": shard_id, "num_shards": num_shards, **options}
        loader = Loader(dataset, "val", SPEC, corruptions=corruptions, **part)
        for _ in range(2):
            batches = list(loader)
        assert max(len(batch.images) for batch in batches) <= batch_size
        labels = torch.cat([batch.labels for batch in batches])
        assert labels.reshape(-1, max(1, len(corruptions))).unique(dim=1).shape[1] == 1
        parts += [batch.images.permute(0, 2, 3, 1).numpy() for batch in batches]
    return np.concatenate(parts).reshape(NUM_VAL, -1, SIDE, SIDE, 3)


def test_the_seed_alone_decides(scenes: Dataset) -> None:
    first = delivered(scenes, *CORRUPTIONS)
    assert first.shape[1] == len(CORRUPTIONS) == 15
    for options in ({"batch_size": 7}, {"batch_size": 64, "num_threads": 1}, {"num_shards": 3}, {"num_shards": 2}):
        np.testing.assert_array_equal(delivered(scenes, *CORRUPTIONS, **options), first)
    other = delivered(scenes, *CORRUPTIONS, seed=1)
    kinds = {one.kind for place, one in enumerate(CORRUPTIONS) if (other[:, place] != first[:, place]).any()}
    assert kinds == {"noise"}
    noise = first[:, 0] - delivered(scenes)[:, 0]
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.05  # each image has its own


@pytest.mark.parametrize(("kind", "neutral"), [("noise", 0.0), ("brightness", 0.0), ("contrast", 1.0)])
def test_no_corruption_is_the_validated_image(scenes: Dataset, kind: str, neutral: float) -> None:
    found = delivered(scenes, Corruption(kind=kind, strength=neutral))
    np.testing.assert_allclose(found, delivered(scenes), atol=0.01)


def expected(image: np.ndarray, kind: str, strength: float) -> np.ndarray:
    """Hendrycks and Dietterich's formulas, of other libraries. image: [H, W, 3] in 0..1."""
    if kind == "blur":
        sigma = strength * SIDE / 224
        size = 2 * int(np.ceil(3 * sigma)) + 1
        blurred = v2.functional.gaussian_blur(torch.from_numpy(image).permute(2, 0, 1), [size, size], [sigma, sigma])
        return blurred.permute(1, 2, 0).numpy()
    if kind == "jpeg":
        file = io.BytesIO()
        Image.fromarray((255 * image).round().astype(np.uint8)).save(file, "JPEG", quality=int(strength))
        return np.asarray(Image.open(file)) / 255
    if kind == "brightness":
        from matplotlib.colors import hsv_to_rgb, rgb_to_hsv

        hsv = rgb_to_hsv(image)
        hsv[..., 2] = (hsv[..., 2] + strength).clip(0, 1)
        return hsv_to_rgb(hsv)
    mean = image.mean(axis=(0, 1), keepdims=True)
    return ((image - mean) * strength + mean).clip(0, 1)


@pytest.mark.parametrize("corruption", [one for one in CORRUPTIONS if one.kind != "noise"], ids=str)
def test_images_are_those_of_the_sources_formulas(scenes: Dataset, corruption: Corruption) -> None:
    plain, found = delivered(scenes)[:, 0] / 255, delivered(scenes, corruption)[:, 0]
    for image, own in zip(plain, found, strict=True):
        difference = np.abs(own - 255 * expected(image, corruption.kind, corruption.strength))
        assert difference.max() <= (12 if corruption.kind == "jpeg" else 1.01)
        assert difference.mean() < 0.6


@pytest.mark.parametrize("corruption", CORRUPTIONS[:3], ids=str)
def test_noise_has_its_standard_deviation(scenes: Dataset, corruption: Corruption) -> None:
    plain, found = delivered(scenes)[:, 0], delivered(scenes, corruption)[:, 0]
    middle = (plain > 120) & (plain < 135)
    added = (found - plain)[middle & (found > 0) & (found < 255)]
    within = 120 / (255 * corruption.strength)  # sigmas that are not clipped
    drawn = np.random.default_rng(0).standard_normal(10**6)
    drawn = drawn[np.abs(drawn) < within]
    assert added.std() == pytest.approx(255 * corruption.strength * drawn.std(), rel=0.06)
    assert abs(added.mean()) < 0.05 * 255 * corruption.strength
