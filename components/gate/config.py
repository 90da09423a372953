"""Settings of gate."""

from typing import Literal

from pydantic import Field

from components.common.settings import StepConfig


class GateConfig(StepConfig):
    """What a model must fulfil."""

    precision: Literal["fp16", "int8"] = Field("int8", description="The precision that is to be promoted.")
    max_top1_drop_points: float = Field(
        0.5, ge=0, le=100, description="Most top-1 that the precision may lose against FP32, in percentage points."
    )
    min_relative_top1_pct: float = Field(
        99.0, ge=0, le=100, description="Least top-1 that must remain, as a share of FP32's, in % (MLPerf asks for 99)."
    )
    min_top1_pct: float = Field(0.0, ge=0, le=100, description="Least top-1 of the precision itself, in %; 0 for none.")
    min_speedup: float = Field(
        0.0, ge=0, description="Least throughput over FP32 at the largest measured batch, as a ratio; 0 for none."
    )
