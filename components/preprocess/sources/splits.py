"""Which images are held out for validation where the data does not say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.common.digests import digest_bytes
from components.common.errors import UserError
from components.preprocess.sources.classnames import ClassNames
from components.preprocess.sources.samples import Sample

VAL_NAMES = ("val", "validation", "valid")  # what the validation split is called, in folders, tars and tables


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked of every kind of source."""

    names: ClassNames | None  # of class_names_file
    val_fraction: float
    seed: int


def hold_out(samples: Mapping[int, list[Sample]], classes: Sequence[str], options: Options) -> dict[str, list[Sample]]:
    """Split each class, in the order of the labels. Classes without an entry in `samples` are left alone.

    Raises:
        UserError: a class has too few files.
    """
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for label in sorted(samples):
        train, val = _split_class(samples[label], classes[label], options)
        splits["train"] += train
        splits["val"] += val
    return splits


def _split_class(samples: list[Sample], name: str, options: Options) -> tuple[list[Sample], list[Sample]]:
    """Hold out a share of one class. The choice of a file depends on its name and the seed alone."""
    if len(samples) < 2:
        raise UserError(
            f"class {name!r} has {'1 file' if samples else 'no files'}; at least 2 are needed to split it into train "
            "and val. Add images or remove the class"
        )
    drawn = sorted(
        samples, key=lambda sample: digest_bytes(f"{options.seed}:{sample.path}".encode(errors="surrogateescape"))
    )
    num_val = min(max(1, round(len(samples) * options.val_fraction)), len(samples) - 1)
    held_out = {sample.path for sample in drawn[:num_val]}
    return (
        [sample for sample in samples if sample.path not in held_out],
        [sample for sample in samples if sample.path in held_out],
    )
