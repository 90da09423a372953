"""preprocess as a KFP component."""

from kfp import dsl

from components.common.images import image_for


@dsl.component(base_image=image_for("preprocess"), packages_to_install=[], install_kfp_package=False)
def preprocess(data: str, seed: int, settings: dict, dataset: dsl.Output[dsl.Dataset]) -> None:  # type: ignore[type-arg]
    """Image folder -> WebDataset shards with splits and statistics."""
    from components.preprocess.__main__ import STEP

    STEP.execute({**settings, "data": data, "seed": seed}, output=dataset.path)
