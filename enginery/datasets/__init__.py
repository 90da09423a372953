"""The built-in data sets of `enginery data`: real handwritten digits, and procedural textures of any number."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What a data set's directory holds, and how it came to."""

    directory: Path
    num_images: int
    """All splits together."""
    num_classes: int
    seconds: float
    """Wall time of this call."""
    already_complete: bool = False
    """True: an earlier call with the same arguments had finished, and this one wrote nothing."""
