"""Settings of validate."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from components.common.contracts.settings import StepConfig
from components.common.contracts.verdict import Thresholds
from components.common.runtimes import RuntimeOption

_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}  # of a unit; a bare number is milliseconds
_CPU_BATCHES, _GPU_BATCHES = (1, 16), (1, 2, 4, 8, 16, 32, 64, 128)
_CPU_BUDGET_BATCHES = (1, 2, 4, 8, 16)  # a latency budget asks for the best of many ways
_Count = Annotated[int, Field(ge=1)]


class ValidateConfig(StepConfig):
    """Measurements and how long they take."""

    runtime: RuntimeOption = Field(
        "auto",
        description="What runs the models: TensorRT where the bundle has engines for this GPU, else OpenVINO (auto). "
        "onnxruntime is the numerical reference, also for FP16; its speed says nothing and is not measured.",
    )
    batch_size: int = Field(
        0,
        ge=0,
        description="Images per batch while accuracy is measured; 0 for 32 on CPUs and the largest that the engines "
        "take on GPUs.",
    )
    benchmark_batch_sizes: tuple[_Count, ...] = Field(
        (),
        description="Batches whose speed is measured, of which the gate judges the largest; empty for 1 and 16 on CPUs "
        "(1, 2, 4, 8 and 16 with a latency budget), and 1, 2, 4, 8, 16, 32, 64 and 128 on GPUs.",
    )
    benchmark_streams: tuple[_Count, ...] = Field(
        (),
        description="How many batches run at the same time, besides one; empty for 2 and 4 on GPUs and with a latency "
        "budget, else for one only. [1] for one only. OpenVINO and TensorRT can do it.",
    )
    benchmark_stream_batch_sizes: tuple[_Count, ...] = Field(
        (1, 8, 128), description="Those of the measured batches that are also run on several streams."
    )
    benchmark_no_transfer_batch_sizes: tuple[_Count, ...] = Field(
        (1, 128),
        description="Those of the measured batches that are also measured without copies to and from the GPU; empty "
        "for none. Without effect on CPUs.",
    )
    benchmark_repeats: int = Field(
        5,
        ge=1,
        description="Turns: precisions are measured one after the other, so many times over. A speed-up needs five.",
    )
    benchmark_seconds: float = Field(
        2.0, gt=0, description="Time that each speed is measured for, all turns together, in seconds."
    )
    benchmark_warmup_seconds: float = Field(0.1, ge=0, description="Time that each turn warms up, in seconds.")
    min_iterations: int = Field(2, ge=1, description="Batches that each turn runs at least.")
    latency_budget: str = Field(
        "",
        description="Longest p99 latency of a batch, such as 7ms, 0.5s or 700us: the report names precision, batch "
        "size and streams with the highest throughput within it. Empty for none.",
    )
    benchmark_sentences: int = Field(
        128, ge=1, description="Sentences of translation whose speed is measured, all of them in each turn."
    )
    beam_size: int = Field(
        1, ge=1, le=32, description="Of translation: how many beginnings the search keeps; 1 is greedy."
    )
    loader: Literal["auto", "cpu"] = Field("auto", description="Where images are decoded: on the GPU if there is one.")
    gate: Thresholds = Field(
        Thresholds(),
        description="The gate's thresholds, for the verdict in the report. In a pipeline they are those of gate.",
    )
    corruptions: bool = Field(
        False,
        description="Whether accuracy is also measured on images with noise, blur, JPEG artefacts, more light and less "
        "contrast, in three strengths each: 15 times the work of the validation images.",
    )
    corruption_seed: int = Field(0, ge=0, description="Seed of the noise.")
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the dataset's files."
    )

    @field_validator("corruptions")
    @classmethod
    def _judged(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and "gate" in info.data and info.data["gate"].max_corrupted_drop_points:
            raise ValueError(
                "gate.max_corrupted_drop_points is about degraded images, which are not measured: set "
                "validate.corruptions=true, or gate.max_corrupted_drop_points=0"
            )
        return value

    @field_validator("latency_budget", mode="before")
    @classmethod
    def _in_milliseconds(cls, value: Any) -> str:
        """One way to write each budget, so that "7", "7 ms" and "0.007s" are the same setting."""
        if value == "" or value is None:
            return ""
        text = re.fullmatch(r"(\d+\.?\d*|\.\d+) *(us|ms|s|)", str(value).strip())
        milliseconds = float(text[1]) * _MS[text[2]] if text else 0.0
        if not 0 < milliseconds < float("inf"):
            raise ValueError(
                f"can't read {value!r} as a latency; write a number above 0 with its unit, such as 7ms, 0.5s or 700us "
                "(without one it is milliseconds), or leave it empty for none"
            )
        return f"{milliseconds:.10g}ms"

    @property
    def latency_budget_ms(self) -> float | None:
        """The latency budget in milliseconds, None where there is none."""
        return float(self.latency_budget.removesuffix("ms")) if self.latency_budget else None

    def batch_sizes(self, *, on_gpu: bool) -> tuple[int, ...]:
        """Batches whose speed is measured, of those that the models take."""
        on_cpu = _CPU_BUDGET_BATCHES if self.latency_budget else _CPU_BATCHES
        return self.benchmark_batch_sizes or (_GPU_BATCHES if on_gpu else on_cpu)
