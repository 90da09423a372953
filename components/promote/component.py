"""promote as a KFP component."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("promote"), packages_to_install=[], install_kfp_package=False)
def promote(
    bundle: dsl.Input[dsl.Model],
    report: dsl.Input[dsl.Artifact],
    verdict: dsl.Input[dsl.Artifact],
    dataset: dsl.Input[dsl.Dataset],
    registered_model: str,
    source: str,
    settings: dict,  # type: ignore[type-arg]
    promotion: dsl.Output[dsl.Artifact],
) -> None:
    """Bundle that passed -> MLflow model version, the champion if it is not worse."""
    from components.promote.__main__ import STEP

    STEP.execute(
        {**settings, "registered_model": registered_model, "source": source},
        bundle=bundle.path,
        report=report.path,
        verdict=verdict.path,
        dataset=dataset.path,
        output=promotion.path,
    )
