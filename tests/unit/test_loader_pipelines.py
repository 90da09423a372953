"""What reaches DALI's operators: the hardware decoder's settings on GPUs only, and colour jitter as asked for."""

import colorsys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.records import DatasetStatistics
from components.common.contracts.transforms import Augmentation, TransformSpec, transform_for
from components.common.data.loader import Loader
from components.common.data.loader_pipelines import decoder_options, evaluation_pipeline, training_pipeline
from components.common.runtimes.runner import to_numpy

# Normalization that leaves pixel values in 0..255, so that colours can be read back.
PLAIN = TransformSpec(resize_size=32, crop_size=32, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
COLOUR = np.array([180.0, 90.0, 60.0])
HW_ARGUMENTS = ("hw_decoder_load: 0.800000", "preallocate_width_hint: 500", "preallocate_height_hint: 375")
# As data sets had them whose manifests say no more.
OLD_STATISTICS = {"mean": (0, 0, 0), "std": (1, 1, 1), "min_side": 10, "median_side": 100, "max_side": 375}


def statistics(width: int, height: int) -> DatasetStatistics:
    return DatasetStatistics.model_validate({**OLD_STATISTICS, "max_width": width, "max_height": height})


def decoder_spec(pipe: Any) -> str:
    """Arguments of the pipeline's image decoder as DALI holds them."""
    pipe._build_graph()
    (spec,) = (str(op._spec) for op in pipe._ops if "decoders__Image" in str(op._spec))
    return spec


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device_id", [None, 0])
def test_hardware_decoder_settings_reach_the_operator_on_gpus_only(training: bool, device_id: int | None) -> None:
    decoder = decoder_options(statistics(500, 375), 64, device_id=device_id, hw_decoder_load=0.8)
    reader = {"paths": ["x.tar"], "ext": ["jpg", "cls"]}
    options = {"batch_size": 64, "num_threads": 1, "device_id": device_id}
    spec = transform_for(32, resize_ratio=1.0)
    if training:
        pipe = training_pipeline(reader, spec, Augmentation(), decoder, None, False, **options)
    else:
        pipe = evaluation_pipeline(reader, spec, decoder, **options)
    text = decoder_spec(pipe)
    on_gpu = device_id is not None
    assert ("device: mixed" if on_gpu else "device: cpu") in text
    for argument in HW_ARGUMENTS:
        assert (argument in text) == on_gpu, text
    assert ("hw_decoder_load" in text) == on_gpu


@pytest.mark.parametrize(
    ("batch_size", "num_pipelines", "size", "expected"),
    [
        (256, 1, (500, 375), (500, 375)),
        (256, 2, (500, 375), (500, 375)),
        (256, 1, (9000, 9000), (2364, 2364)),
        (256, 2, (9000, 9000), (1672, 1672)),
        (256, 1, (18000, 4500), (4729, 1182)),
        (1, 1, (9000, 6000), (9000, 6000)),
        (256, 1, (0, 0), (375, 375)),
    ],
)
def test_memory_is_reserved_for_the_largest_image_within_4_gib(
    batch_size: int, num_pipelines: int, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    options = decoder_options(statistics(*size), batch_size, num_pipelines, device_id=0, hw_decoder_load=0.9)
    width, height = options["preallocate_width_hint"], options["preallocate_height_hint"]
    assert (width, height) == expected
    assert num_pipelines * batch_size * 3 * width * height <= 4 << 30


def test_statistics_of_older_data_sets_are_read() -> None:
    assert DatasetStatistics.model_validate(OLD_STATISTICS).max_width == 0


@pytest.fixture(scope="module")
def orange(
    tmp_path_factory: pytest.TempPathFactory, run_preprocess: Callable[..., Artifact[DatasetManifest]]
) -> Artifact[DatasetManifest]:
    root = tmp_path_factory.mktemp("orange")
    for index in range(64):
        folder = root / "images" / ("train" if index < 48 else "val") / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        colour = np.full((32, 32 + index % 7, 3), COLOUR, np.uint8)
        colour[0, 0] = index  # no two files alike; the crop below never shows it
        Image.fromarray(colour).save(folder / f"{index}.png")
    return run_preprocess(root / "images", root / "dataset")


def jittered(dataset: Artifact[DatasetManifest], **jitter: float) -> np.ndarray:
    """Colour in the middle of each image: [48, 3], levels."""
    loader = Loader(dataset, "train", PLAIN, batch_size=48, augmentation=Augmentation(min_area=0.5, **jitter))
    (batch,) = loader
    return to_numpy(batch.images)[:, :, 20, 16]


def test_without_jitter_colours_stay(orange: Artifact[DatasetManifest]) -> None:
    np.testing.assert_allclose(jittered(orange), np.tile(COLOUR, (48, 1)), atol=0.01)


def test_brightness_scales_levels(orange: Artifact[DatasetManifest]) -> None:
    factors = jittered(orange, brightness=0.4) / COLOUR
    assert np.ptp(factors, axis=1).max() < 0.02
    assert 0.59 < factors.min() < 0.75
    assert 1.25 < factors.max() < 1.41


def test_contrast_scales_the_distance_from_gray(orange: Artifact[DatasetManifest]) -> None:
    factors = (jittered(orange, contrast=0.4) - 128) / (COLOUR - 128)
    assert np.ptp(factors, axis=1).max() < 0.05
    assert 0.57 < factors.min() < 0.75
    assert 1.25 < factors.max() < 1.43


def test_saturation_scales_the_distance_of_channels(orange: Artifact[DatasetManifest]) -> None:
    colours = jittered(orange, saturation=0.4)
    factors = (colours[:, 0] - colours[:, 2]) / (COLOUR[0] - COLOUR[2])
    assert 0.59 < factors.min() < 0.75
    assert 1.25 < factors.max() < 1.41
    luma = colours @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(luma, luma.mean(), atol=1.5)


def test_hue_turns_the_colour_both_ways(orange: Artifact[DatasetManifest]) -> None:
    hues = np.array([colorsys.rgb_to_hsv(*(colour / 255))[0] for colour in jittered(orange, hue=0.1)])
    turned = (hues - colorsys.rgb_to_hsv(*(COLOUR / 255))[0] + 0.5) % 1 - 0.5
    assert -0.16 < turned.min() < -0.05  # DALI turns in YIQ, which is not quite HSV
    assert 0.05 < turned.max() < 0.16
