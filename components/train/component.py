"""train as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("train"), packages_to_install=[], install_kfp_package=False)
def train(
    dataset: dsl.Input[dsl.Dataset],
    architecture: str,
    image_size: int,
    epochs: int,
    global_batch_size: int,
    learning_rate: float,
    seed: int,
    settings: dict,  # type: ignore[type-arg]
    checkpoint: dsl.Output[dsl.Model],
) -> None:
    """Dataset -> trained weights."""
    from components.train.__main__ import STEP

    values = {
        "architecture": architecture,
        "image_size": image_size,
        "epochs": epochs,
        "global_batch_size": global_batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    STEP.execute({**settings, **values}, dataset=dataset.path, output=checkpoint.path)
