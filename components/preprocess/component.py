"""preprocess as a KFP component: the whole dataset in one step, or one of several parts."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("preprocess"), packages_to_install=[], install_kfp_package=False)
def preprocess(
    data: str,
    task: str,
    seed: int,
    settings: dict,  # type: ignore[type-arg]
    dataset: dsl.Output[dsl.Dataset],
) -> None:
    """Labelled images -> WebDataset shards with splits and statistics."""
    from components.preprocess.__main__ import STEP

    STEP.execute({**settings, "data": data, "task": task, "seed": seed}, output=dataset.path)


@dsl.component(base_image=image_for("preprocess"), packages_to_install=[], install_kfp_package=False)
def list_parts(num_parts: int) -> list:  # type: ignore[type-arg]
    """Return the name of each part, such as 3/8."""
    return [f"{number}/{num_parts}" for number in range(1, num_parts + 1)]


@dsl.component(base_image=image_for("preprocess"), packages_to_install=[], install_kfp_package=False)
def preprocess_part(
    data: str,
    task: str,
    seed: int,
    part: str,
    settings: dict,  # type: ignore[type-arg]
    dataset_part: dsl.Output[dsl.Dataset],
) -> None:
    """Labelled images -> some of the shards."""
    from components.preprocess.__main__ import STEP

    STEP.execute({**settings, "data": data, "task": task, "seed": seed, "part": part}, output=dataset_part.path)
