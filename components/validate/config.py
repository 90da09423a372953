"""Settings of validate."""

from typing import Literal

from pydantic import Field

from components.common.settings import StepConfig
from components.common.verdict import Thresholds


class ValidateConfig(StepConfig):
    """What is measured, and how long."""

    runtime: Literal["auto", "tensorrt", "openvino", "onnxruntime"] = Field(
        "auto",
        description="What runs the models: TensorRT where the bundle has engines for this GPU, else OpenVINO (auto). "
        "onnxruntime is the numerical reference, also for FP16; its speed says nothing.",
    )
    batch_size: int = Field(32, ge=1, description="Images per batch while accuracy is measured.")
    benchmark_batch_sizes: tuple[int, ...] = Field(
        (), description="Batches whose speed is measured; empty for 1 and 16 on CPUs, and 1, 8, 64 and 128 on GPUs."
    )
    benchmark_seconds: float = Field(3.0, gt=0, description="Time each speed is measured for, in seconds.")
    benchmark_warmup_seconds: float = Field(0.2, ge=0, description="Time each benchmark warms up, in seconds.")
    min_iterations: int = Field(10, ge=1, description="Batches that each benchmark runs at least.")
    loader: Literal["auto", "cpu"] = Field("auto", description="Where images are decoded: on the GPU if there is one.")
    gate: Thresholds = Field(
        Thresholds(),
        description="The gate's thresholds, for the verdict in the report. In a pipeline they are those of gate.",
    )
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the data set's files."
    )
