"""Settings that a dataset is made with."""

from typing import Literal

from pydantic import Field

from components.common.contracts.foreign import MAX_PIXELS
from components.common.contracts.settings import SPEED_ONLY, StepConfig
from components.common.tasks import TASKS, TaskName


class DatasetSettings(StepConfig):
    """Settings of finding, splitting, checking and packing images; a dataset of parts has those of its parts."""

    data: str = Field(min_length=1, description=TASKS["classification"].data)
    task: TaskName = Field(
        "classification",
        description=f"What the data is labelled for: {', '.join(TASKS)}; docs/data.md says how it lies there.",
    )
    val_fraction: float = Field(
        0.2, gt=0, lt=1, description="Share of each class held out for validation; unused when the folder has val/."
    )
    seed: int = Field(0, ge=0, description="Seed of the split and of the order of the training images.")
    shard_bytes: int = Field(128_000_000, ge=1_000_000, description="Size that a shard aims at, in bytes.")
    num_workers: int = Field(
        0, ge=0, json_schema_extra=SPEED_ONLY, description="Processes that decode and pack; 0 for one per core."
    )
    on_bad: Literal["skip", "fail"] = Field(
        "skip", description="What to do with files that are no usable image: list and leave them out, or stop."
    )
    max_bad_fraction: float = Field(
        0.1, ge=0, le=1, description="Largest share of unusable files that may be left out before the step stops."
    )
    max_pixels: int = Field(MAX_PIXELS, ge=1, description="Images with more pixels are rejected (decompression bombs).")
    on_leak: Literal["fail", "warn"] = Field(
        "fail", description="What to do when training and validation hold the same image: stop, or say so."
    )
    near_duplicates: Literal["drop", "report", "keep"] = Field(
        "drop",
        description="What to do with validation images that are training images but for size, compression, brightness, "
        "a mirror or a crop of up to 10 %: leave them out, keep them and say so, or keep them without a look.",
    )
    max_short_side: int = Field(
        0,
        ge=0,
        description="Images whose shorter side is longer are scaled down to it and encoded as JPEG, in pixels, "
        "also those of validation, while servers take images as they are sent; 0 packs every file as it is.",
    )
    jpeg_quality: int = Field(90, ge=1, le=100, description="Quality of images that are encoded again.")
    part: str = Field(
        "",
        pattern=r"^(|[1-9]\d*/[1-9]\d*)$",
        description='Pack only this part of the shards, such as 3/8; the step "merge" joins all parts. Empty for all.',
    )
    class_names_file: str = Field(
        "",
        description="Text file with one class name per line, in the order of an existing model's outputs, or "
        "ImageNet's synset map; empty for the data's own names, sorted.",
    )
    source_language: str = Field(
        "en", pattern="^[A-Za-z0-9-]{1,35}$", description="Text: the language that is translated, such as en or pt-BR."
    )
    target_language: str = Field(
        "de", pattern="^[A-Za-z0-9-]{1,35}$", description="Text: the language that it is translated to."
    )
    max_words: int = Field(200, ge=1, description="Text: pairs with a sentence of more words are rejected.")
    max_length_ratio: float = Field(
        5,
        ge=1,
        description="Text: pairs with a sentence of 100 characters or more, and more than so many times those of the "
        "other, are rejected.",
    )
    vocabulary_size: int = Field(
        8000,
        ge=4,
        le=65536,
        description="Text: tokens of both languages' vocabulary; fewer where the text has no more.",
    )
    max_tokens: int = Field(
        256,
        ge=8,
        le=1024,
        description="Text: longest sentence that a model takes, in tokens; longer ones are rejected.",
    )
