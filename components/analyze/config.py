"""Settings of analyze."""

from typing import Literal

from pydantic import Field, field_validator

from components.common.contracts.errors import without_secrets
from components.common.contracts.records import Precision
from components.common.contracts.settings import StepConfig
from components.common.runtimes import RuntimeOption


class AnalyzeConfig(StepConfig):
    """Videos, what looks at their frames, and what is written of them."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        max_length=1000,
        description="Videos: files, folders of them, live addresses (rtsp://, rtsps://, srt://, tcp://, udp://), or - "
        "for the standard input. Users and passwords of addresses belong in ~/.netrc, or the file that NETRC names.",
    )
    precision: Precision = Field("int8", description="The precision of the model.")
    runtime: RuntimeOption = Field("auto", description="What runs the model, as in validate.")
    decoder: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="What decodes: NVDEC where there is a GPU that has the codec, else the CPU (auto)."
    )
    live: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether frames are dropped where they come faster than they are labelled: those of live addresses "
        "(auto). Files wait instead.",
    )
    queue_frames: int = Field(
        8,
        ge=1,
        le=1024,
        description="Decoded frames of a stream that may wait; of a live one the oldest is dropped, of files "
        "up to four times as many wait where all take less than 512 MiB.",
    )
    batch_size: int = Field(0, ge=0, description="Most frames in a batch, over all streams; 0 for 32, on GPUs 64.")
    max_wait_ms: float = Field(
        20.0, ge=0, le=10_000, description="Longest wait of a frame for others of its batch, in milliseconds."
    )
    num_processes: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that share the streams and hold the model each; 0 for one, and where a GPU labels for "
        "one per 4 cores, 4 at most.",
    )
    every: int = Field(1, ge=1, description="Label each so-many-th frame of a stream.")
    top_k: int = Field(3, ge=1, le=100, description="Classes that a classifier's answer names.")
    hold_frames: int = Field(
        5,
        ge=1,
        description="Labelled frames in a row that show a class, from which on it is held; one of boxes or masks until "
        "as many don't show it.",
    )
    min_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Least probability of the likeliest class, score of a box, or share of a mask, from which on a "
        "frame shows a class; of boxes at least 0.3, of masks 0.01.",
    )
    stall_seconds: float = Field(
        5.0,
        gt=0,
        description="Time without a frame after which a live stream counts as stalled; after twice as long without "
        "data, and a second at least, it is lost.",
    )
    reconnect_seconds: float = Field(
        30.0,
        ge=0,
        description="How long a live source that was lost is tried again, every second; 0 for not at all.",
    )
    max_seconds: float = Field(0.0, ge=0, description="End after this time; 0 for the end of all streams, or Ctrl-C.")
    annotate: bool = Field(False, description="Whether each stream is written as an MP4 file with its answers.")

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        if sources.count("-") > 1:
            raise ValueError("- is the standard input, which holds one video; name it once")
        return tuple(without_secrets(source) for source in sources)
