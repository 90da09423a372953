"""Settings of promote."""

from pydantic import Field

from components.common.settings import StepConfig


class PromoteConfig(StepConfig):
    """Where the model is registered."""

    registered_model: str = Field(
        "classifier", pattern=r"^[\w.-]+$", description="Name of the registered model in MLflow."
    )
    alias: str = Field("candidate", pattern=r"^[\w-]+$", description="Alias that the new version gets.")
