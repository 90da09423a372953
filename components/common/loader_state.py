"""What a training loader writes down to go on in the middle of an epoch."""

from typing import Any

from pydantic import Field, model_validator

from components.common.digests import digest_json
from components.common.records import Record


class LoaderState(Record):
    """Where a training loader stands: numbers and text only."""

    num_delivered: int = Field(ge=0, description="Batches since the first epoch began.")
    identity: dict[str, Any] = Field(description="What decides which batches come, by name.")
    checkpoints: list[str] = Field(description="DALI's own of each pipeline, in base64.")
    digest: str = Field(description="Of the rest: DALI believes a damaged checkpoint, or ends with the process.")

    @classmethod
    def sealed(cls, **fields: Any) -> "LoaderState":
        """The state of these fields, with its digest."""
        return cls(**fields, digest=digest_json(fields))

    @model_validator(mode="after")
    def _whole(self) -> "LoaderState":
        if self.digest != digest_json(self.model_dump(mode="json", exclude={"digest"})):
            raise ValueError("its content does not fit its digest")
        return self

    def differences(self, identity: dict[str, Any]) -> list[str]:
        """What `identity` has otherwise, for a person."""
        return [
            f"{name} {self.identity.get(name)} instead of {value}"
            for name, value in identity.items()
            if self.identity.get(name) != value
        ]
