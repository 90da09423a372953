"""merge as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("merge"), packages_to_install=[], install_kfp_package=False)
def merge(parts: dsl.Input[list[dsl.Dataset]], dataset: dsl.Output[dsl.Dataset]) -> None:
    """Parts of a dataset -> the dataset."""
    from components.merge.__main__ import STEP

    STEP.execute({"parts": [part.path for part in parts]}, output=dataset.path)
