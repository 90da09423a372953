"""gate as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


# The gate needs nothing but Python, so it shares the slim image of promote.
@dsl.component(base_image=image_for("gate"), packages_to_install=[], install_kfp_package=False)
def gate(
    report: dsl.Input[dsl.Artifact],
    max_drop_points: float,
    settings: dict,  # type: ignore[type-arg]
    verdict: dsl.Output[dsl.Artifact],
) -> None:
    """Report -> verdict; fails when a threshold does not hold."""
    from components.gate.__main__ import STEP

    values = {"max_drop_points": max_drop_points}
    STEP.execute({**settings, **values}, report=report.path, output=verdict.path)
