"""analyze as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("analyze"), packages_to_install=[], install_kfp_package=False)
def analyze(
    bundle: dsl.Input[dsl.Model],
    sources: list,  # type: ignore[type-arg]
    settings: dict,  # type: ignore[type-arg]
    analysis: dsl.Output[dsl.Artifact],
) -> None:
    """Videos + bundle -> labels of their frames."""
    from components.analyze.__main__ import STEP

    STEP.execute({**settings, "sources": sources}, bundle=bundle.path, output=analysis.path)
