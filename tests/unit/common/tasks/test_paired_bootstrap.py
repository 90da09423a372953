"""The paired bootstrap of scores that are no share of images: of boxes, masks and sentences."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from components.common.contracts.statistics import holm
from components.common.tasks.predictions import Predictions, ScoreDrop, bootstrap_comparison, p_of, p_values
from components.common.tasks.segmentation.predictions import MaskPredictions
from components.common.tasks.translation.predictions import TextPredictions
from tests.unit.common.tasks import test_box_predictions, test_mask_predictions
from tests.unit.common.tasks.test_text_predictions import RIGHTS, disturbed, references

Predict = Callable[..., Predictions]


def boxes(num_images: int, noise: float, seed: int = 1) -> Predictions:
    return test_box_predictions.predicted(test_box_predictions.labels(num_images), noise, seed)


def masks(num_images: int, wrong: float, seed: int = 1) -> Predictions:
    labels = test_mask_predictions.labels(num_images, side=24 if num_images > 1000 else 48)
    return MaskPredictions.of(test_mask_predictions.outputs(labels, wrong, seed), labels)


def sentences(num: int, share: float, seed: int = 1) -> Predictions:
    texts = references(num // len(RIGHTS))
    return TextPredictions.of_texts(disturbed(texts, share, seed), texts, "en")


@pytest.mark.parametrize(
    ("predict", "num_images", "wrong"),
    [(boxes, 300, (1.0, 1.6)), (masks, 200, (0.05, 0.10)), (sentences, 192, (0.05, 0.10))],
)
def test_worse_models_are_seen_and_equal_ones_lose_nothing(
    predict: Predict, num_images: int, wrong: tuple[float, float]
) -> None:
    fp32, worse = (predict(num_images, share) for share in wrong)
    found = worse.comparison(fp32)
    assert found.delta_points == pytest.approx(worse.score_pct - fp32.score_pct)
    assert 0 < found.drop_lower_points < -found.delta_points < found.drop_upper_points
    assert found.mcnemar_p < 1e-6
    assert found.num_regressed > 2 * found.num_improved
    assert (found.mcnemar_test, found.num_images) == ("bootstrap", num_images)
    same = fp32.comparison(fp32)
    rule_of_three = 3 * fp32.score_pct / num_images  # what so many images prove at most
    assert (same.drop_lower_points, same.mcnemar_p) == (0.0, 1.0)
    assert same.drop_upper_points == pytest.approx(rule_of_three)
    assert same.images_needed(rule_of_three / 2) == pytest.approx(2 * num_images, abs=1)
    assert fp32.drop(fp32, num_images).proved(2 * num_images, 100.0) == pytest.approx(rule_of_three / 2)
    assert fp32.drop(fp32, num_images).proved(num_images, rule_of_three / 2) == 0.0  # no INT8 could prove it
    few, many = worse.drop(fp32, num_images), worse.drop(fp32, 10 * num_images)
    assert isinstance(few, ScoreDrop)
    assert many.points < few.points == pytest.approx(-found.delta_points)  # at best
    assert few.proved(num_images, 100.0) > few.proved(100 * num_images, 100.0) > few.points
    assert worse.score_low_pct < worse.score_pct
    assert (p_of(-1.959964, 1.0, 10**6), p_of(3.919928, 2.0, 10**6)) == pytest.approx((0.05, 0.05), abs=1e-6)
    ten = np.random.default_rng(0).normal(0.5, 1, 10)
    assert p_of(ten.mean(), ten.std() / 10**0.5, 10) == pytest.approx(stats.ttest_1samp(ten, 0).pvalue)
    six = 2 / 2**6  # McNemar's of six that all regressed
    assert (p_of(-5.0, 1e-9, 6), p_of(-5.0, 0.0, 6), p_of(-5.0, 1.0, 1), p_of(0.0, 0.0, 6)) == (six, six, 1.0, 1.0)
    deltas, none = np.array([-100.0, 0.0, np.nan]), np.array([0.0, 0.0, np.nan])
    found_p = p_values(deltas, np.stack([deltas, none + deltas]), np.array([6, 6, 0]))
    np.testing.assert_array_equal(found_p, [six, np.nan, np.nan])  # a class found always, then never


@pytest.mark.parametrize(("predict", "num_images", "wrong"), [(boxes, 300, (1.0, 1.6)), (masks, 200, (0.05, 0.10))])
def test_each_class_that_is_worse_is_seen_to_be(predict: Predict, num_images: int, wrong: tuple[float, float]) -> None:
    fp32, worse = (predict(num_images, share) for share in wrong)
    changes = worse.by_class(fp32, 4)
    assert (changes.p_values[:3] < 0.01).all()
    assert np.isnan([changes.p_values[3], changes.own_pct[3]]).all()
    assert np.nanmean(changes.own_pct) == pytest.approx(worse.score_pct)
    assert changes.num_images[3] == 0 < changes.num_regressed[0]


def num_missed(fp32: Predictions, own: Predictions, num_samples: int, sample_size: int) -> int:
    """Samples of the images whose interval ends below the drop on all of them."""
    random, drop = np.random.default_rng(5), fp32.score_pct - own.score_pct
    samples = [random.choice(fp32.num_images, sample_size) for _ in range(num_samples)]
    uppers = [own.select(which).comparison(fp32.select(which)).drop_upper_points for which in samples]
    return sum(upper < drop for upper in uppers)


@pytest.mark.parametrize(
    ("predict", "wrong", "num_samples", "sample_size", "most"),
    [(boxes, (1.0, 1.2), 40, 100, 6), (masks, (0.10, 0.12), 200, 100, 20), (sentences, (0.10, 0.12), 100, 50, 11)],
)
def test_the_interval_covers_the_difference_of_many_images_as_often_as_it_says(
    predict: Predict, wrong: tuple[float, float], num_samples: int, sample_size: int, most: int
) -> None:
    """The one-sided 95 % interval of a sample misses the true drop in at most about 5 of 100."""
    fp32, own = (predict(2000, share, seed) for seed, share in enumerate(wrong, 1))
    assert num_missed(fp32, own, num_samples, sample_size) <= most


@pytest.mark.parametrize("std", [0.1, 0.25, 0.5, 2.0])
def test_a_drop_that_is_unsure_is_not_proved(std: float) -> None:
    """1,000 images at a score of 40 prove 0.12 points of a model without a difference, so 0.2 can be proved."""
    fp32 = np.full(2001, 40.0)
    own = fp32 + np.r_[-0.05, np.random.default_rng(0).normal(-0.05, std, 2000)]
    found = bootstrap_comparison(fp32, own, np.zeros(1000), np.zeros(1000))
    drop = ScoreDrop.of(found, 40.0, 1000)
    assert drop.proved(1000, 0.2) == pytest.approx(found.drop_upper_points)
    assert drop.proved(1000, 0.1) == pytest.approx(0.05)  # no INT8 could prove it


def test_images_that_are_lost_seldom_are_in_the_interval() -> None:
    """One of 200 sentences is lost, which most samples of 100 do not show at all."""
    texts = references(2000 // len(RIGHTS))
    lost = ["" if place % 200 == 0 else text for place, text in enumerate(texts)]
    fp32, own = (TextPredictions.of_texts(said, texts, "en") for said in (texts, lost))
    assert fp32.score_pct - own.score_pct > 0.4
    assert num_missed(fp32, own, 60, 100) <= 6


@pytest.mark.parametrize("num_shown", [2, 4, 12])
def test_equal_models_are_significantly_worse_on_hardly_any_class_of_few_images(num_shown: int) -> None:
    """20 classes in each of 40 datasets: with Holm's correction one of 20 datasets has a false alarm."""
    random, alarms = np.random.default_rng(2), 0
    for _ in range(40):
        labelled = np.zeros((60, 20), np.int32)
        for column in labelled.T:
            column[random.choice(60, num_shown, replace=False)] = 100
        fp32, own = (masks_of(labelled, random) for _ in range(2))
        found = own.by_class(fp32, 20)
        assert not np.isnan(found.p_values).all()
        alarms += min(holm(found.p_values[~np.isnan(found.p_values)].tolist())) < 0.05
    assert alarms <= 5


def masks_of(labelled: np.ndarray, random: np.random.Generator) -> MaskPredictions:
    """Masks of which about 70 % of the labelled pixels of each image are right. labelled: [N, classes]."""
    right = random.binomial(labelled, random.normal(0.7, 0.05, labelled.shape).clip(0, 1))
    grid = np.zeros((len(labelled), 1, 1), np.uint8)
    return MaskPredictions(pixels=np.stack([right, right, labelled], -1).astype(np.int32), grid=grid, labels=grid)
