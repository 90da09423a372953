"""Settings of merge."""

from typing import Literal

from pydantic import Field

from components.common.contracts.settings import StepConfig


class MergeConfig(StepConfig):
    """Parts to join, and the limits of the whole."""

    parts: tuple[str, ...] = Field(
        min_length=1, description="Output directories of preprocess, one of each part, such as [PART1, PART2]."
    )
    on_leak: Literal["as_packed", "fail", "warn"] = Field(
        "as_packed",
        description="What to do when training and validation hold the same image: what the parts say, stop, or say so.",
    )
    near_duplicates: Literal["as_packed", "drop", "report", "keep"] = Field(
        "as_packed", description="What to do with near-duplicates across the splits: what the parts say, or another."
    )
    max_bad_fraction: float = Field(
        -1,
        ge=-1,
        le=1,
        description="Largest share of unusable files that may be left out before the step stops; below 0 for what the "
        "parts say.",
    )
