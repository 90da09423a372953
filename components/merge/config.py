"""Settings of merge."""

from pydantic import Field

from components.common.settings import StepConfig


class MergeConfig(StepConfig):
    """What is joined."""

    parts: tuple[str, ...] = Field(min_length=1, description="Output directories of preprocess, one of each part.")
