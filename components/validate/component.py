"""validate as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("validate"), packages_to_install=[], install_kfp_package=False)
def validate(
    bundle: dsl.Input[dsl.Model],
    dataset: dsl.Input[dsl.Dataset],
    max_drop_points: float,
    latency_budget: str,
    settings: dict,  # type: ignore[type-arg]
    gate_settings: dict,  # type: ignore[type-arg]
    report: dsl.Output[dsl.Artifact],
) -> None:
    """Bundle + validation split -> accuracy and speed of each precision."""
    from components.validate.__main__ import STEP

    # The report starts with the verdict, so it needs the thresholds that the gate will apply.
    gate = {**gate_settings, "max_drop_points": max_drop_points}
    values = {"latency_budget": latency_budget, "gate": gate}
    STEP.execute({**settings, **values}, bundle=bundle.path, dataset=dataset.path, output=report.path)
