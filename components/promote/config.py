"""Settings of promote."""

from pydantic import Field, field_validator

from components.common.contracts.settings import StepConfig
from components.common.registry.promotions import CHAMPION, check_alias


class PromoteConfig(StepConfig):
    """Settings of the registration, and of when a model replaces the champion."""

    registered_model: str = Field(
        "",
        pattern=r"^(\w[\w.-]*)?$",
        description="Name of the registered model in MLflow. Empty for that of the model's file, or of its "
        "architecture where it came from no file.",
    )
    source: str = Field("", description="File or folder that the model came from. A pipeline says it.")
    allow_other_model: bool = Field(
        False,
        description="Whether the version may join versions of another architecture or class list, or, under a name "
        "that was not given, of another source file.",
    )
    alias: str = Field("candidate", description="Alias that the new version gets.")
    tolerance_points: float = Field(
        0.0,
        ge=0,
        le=100,
        description="How much lower a new champion's score may be than the present one's, in percentage points.",
    )
    why: str = Field("", max_length=300, description="Reason for the audit log, before the one found by comparing.")

    @field_validator("alias")
    @classmethod
    def _is_not_the_champion(cls, value: str) -> str:
        if value == CHAMPION:
            raise ValueError(
                f"every new version gets this alias, so it can't be {CHAMPION}; name another. A version that is not "
                f"worse than the champion becomes @{CHAMPION} by itself"
            )
        return check_alias(value)
