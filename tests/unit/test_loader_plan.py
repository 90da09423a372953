"""Images and batches of an epoch: the same number of batches on every rank, and no more than its shares hold."""

import pytest

from components.common.contracts.errors import UserError
from components.common.data.loader import EpochPlan, plan_training


def plan(num_images: int, batch_size: int = 10, num_shards: int = 1, **options: int | bool) -> EpochPlan:
    options = {"batches_per_step": 1, "num_pipelines": 0, "on_gpu": True, **options}
    return plan_training(num_images, batch_size, 0, num_shards, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "num_pipelines"),
    [
        ({"num_images": 320}, 2),
        ({"num_images": 319}, 1),
        ({"num_images": 100_000, "on_gpu": False}, 1),
        ({"num_images": 319, "num_pipelines": 3}, 3),
        ({"num_images": 639, "num_shards": 2}, 1),
        ({"num_images": 640, "num_shards": 2}, 2),
        # What a second pipeline leaves out would be a step of few.
        ({"num_images": 330, "batches_per_step": 33}, 1),
        ({"num_images": 990, "batches_per_step": 33}, 1),
        ({"num_images": 31 * 330 + 329, "batches_per_step": 33}, 1),
        ({"num_images": 32 * 330, "batches_per_step": 33}, 2),
    ],
)
def test_two_pipelines_where_an_epoch_has_many_steps(options: dict[str, int], num_pipelines: int) -> None:
    assert plan(**options).num_pipelines == num_pipelines  # type: ignore[arg-type]


@pytest.mark.parametrize("num_images", [320, 329, 330, 333, 350, 1281])
@pytest.mark.parametrize("batches_per_step", [1, 3, 4])
def test_a_second_pipeline_costs_a_step_at_most(num_images: int, batches_per_step: int) -> None:
    options = {"batch_size": 2, "batches_per_step": batches_per_step}
    one, two = (plan(num_images, **options, num_pipelines=number) for number in (1, 2))
    assert one.num_batches % batches_per_step == two.num_batches % batches_per_step == 0
    assert 0 <= one.num_batches - two.num_batches <= batches_per_step
    assert two.num_batches // 2 <= num_images // 2 // 2
    assert two.num_dropped >= 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_images": 9}, r"9 training images .* batch of 10 on each of 1 .*global_batch_size to 9 or less"),
        ({"num_images": 59, "num_shards": 3, "batches_per_step": 2}, r"batch of 20 on each .*to 57 or less"),
        ({"num_images": 35, "num_pipelines": 4}, r"each with 4 pipelines; leave num_pipelines at 0, or take fewer"),
        ({"num_images": 3, "num_shards": 4}, r"on each of 4 processes; train with 3 or fewer, or add images"),
    ],
)
def test_too_few_images_for_a_step_everywhere(options: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        plan(**options)  # type: ignore[arg-type]
