"""ShapeSpec: the one statement of a model's input shape. ONNX axes, TensorRT profiles and serving read it."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ShapeSpec(BaseModel):
    """Input and output names, image size and batch range of one exported classifier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_name: str = Field("images", description="Name of the ONNX input, [batch, channels, height, width] float32.")
    output_name: str = Field("logits", description="Name of the ONNX output, [batch, classes] float32.")
    channels: int = Field(3, ge=1, description="Colour channels of the input.")
    height: int = Field(ge=1, description="Input height in pixels.")
    width: int = Field(ge=1, description="Input width in pixels.")
    min_batch: int = Field(1, ge=1, description="Smallest batch an engine accepts, in images.")
    opt_batch: int = Field(32, ge=1, description="Batch that TensorRT tunes its kernels for, in images.")
    max_batch: int = Field(128, ge=1, description="Largest batch an engine accepts, in images.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_batch <= self.opt_batch <= self.max_batch:
            raise ValueError(
                f"batches must satisfy min_batch <= opt_batch <= max_batch, "
                f"got {self.min_batch}, {self.opt_batch}, {self.max_batch}"
            )
        return self

    def input_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Shape of a batch of `batch` images, NCHW."""
        return (batch, self.channels, self.height, self.width)
