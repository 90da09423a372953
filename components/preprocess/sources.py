"""Find labelled images in a folder and decide which split each belongs to."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.digests import digest_bytes
from components.common.errors import UserError
from components.preprocess.config import check_data_folder

_SPLIT_NAMES = ("train", "val")
_WANTED = "DIR/<class>/image.jpg for two classes or more, or DIR/train/<class>/ and DIR/val/<class>/"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image file before it was opened."""

    path: str  # relative to the data folder, forward slashes
    label: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a data folder holds."""

    classes: tuple[str, ...]
    splits: dict[str, list[Sample]]


def find_samples(root: Path, *, val_fraction: float, seed: int, class_names_file: str) -> Source:
    """List the images under `root` and split them.

    Raises:
        UserError: no folder, no classes, no images, or too few images of a class to split.
    """
    check_data_folder(str(root))
    folders = _subfolders(root)
    if not folders:
        raise UserError(f"{root} has no sub-folders, so no classes; arrange the images as {_WANTED}")
    names = _read_class_names(Path(class_names_file)) if class_names_file else None
    if "train" in folders or "val" in folders:
        return _presplit(root, folders, names)
    classes = _check_classes(names or folders, folders, root)
    samples = {label: _images_of(root, name, label) for label, name in enumerate(classes) if name in folders}
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for label, listed in samples.items():
        train, val = _split_class(listed, classes[label], val_fraction, seed)
        splits["train"] += train
        splits["val"] += val
    return Source(classes=classes, splits=splits)


def _presplit(root: Path, folders: Sequence[str], names: tuple[str, ...] | None) -> Source:
    missing = [name for name in _SPLIT_NAMES if name not in folders]
    if missing:
        raise UserError(
            f"{root} has {'/, '.join(folders[:5])}/ but no {missing[0]}/; it needs both train/ and val/. Add "
            f"{root / missing[0]}, or name the folder that holds the classes, and it is split for you"
        )
    of_split = {split: _subfolders(root / split) for split in _SPLIT_NAMES}
    if not of_split["train"]:
        raise UserError(f"{root / 'train'} has no sub-folders, so no classes; arrange the images as {_WANTED}")
    extra = sorted(set(of_split["val"]) - set(of_split["train"]))
    if extra:
        raise UserError(
            f"{root / 'val'} has classes that train/ has not: {', '.join(extra[:5])}. Add them to train/ or remove "
            "them; folder names must agree to the letter"
        )
    classes = _check_classes(names or of_split["train"], of_split["train"], root / "train")
    splits = {
        split: [
            sample
            for label, name in enumerate(classes)
            if name in of_split[split]
            for sample in _images_of(root, f"{split}/{name}", label)
        ]
        for split in _SPLIT_NAMES
    }
    for split, samples in splits.items():
        if not samples:
            raise UserError(f"{root / split} holds no files; put images into its folders, one folder per class")
    return Source(classes=classes, splits=splits)


def _check_classes(names: Sequence[str], folders: Sequence[str], root: Path) -> tuple[str, ...]:
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise UserError(
            f"{root} has folders that class_names_file does not name: {', '.join(unknown[:5])}. Add their names to "
            "the file, or take the folders away"
        )
    if len(names) < 2:
        raise UserError(
            f"{root} has only the class {names[0]!r}; a classifier needs at least two. Add a folder of images of "
            "another class, or name the folder above if this one is a class"
        )
    return tuple(names)


def _read_class_names(path: Path) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"can't read class_names_file {path}: {error}; name a text file in UTF-8 with one class per line"
        ) from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path} names a class twice: {', '.join(twice[:5])}. Each line must name another class")
    return names


def _subfolders(root: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"can't read {root}: {error.strerror}; make it readable for you (chmod -R u+rX)") from None
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:  # it becomes a class name, which travels in JSON
            raise UserError(f"{root} has a folder whose name is not UTF-8: {name!r}; rename it") from None
    return names


def _images_of(root: Path, folder: str, label: int) -> list[Sample]:
    samples = []
    for directory, subdirectories, files in os.walk(root / folder):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        for name in sorted(files):
            if name.startswith("."):
                continue
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            samples.append(Sample(path=relative, label=label, size_bytes=_size_bytes(path)))
    return samples


def _size_bytes(path: Path) -> int:
    """Of the file behind a link; a link to nothing is rejected when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _split_class(samples: list[Sample], name: str, val_fraction: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Hold out a share of one class. The choice of a file depends on its name and the seed alone."""
    if len(samples) < 2:
        raise UserError(
            f"class {name!r} has {len(samples)} file(s); at least 2 are needed to split it into train and val. "
            "Add images or remove the folder"
        )
    drawn = sorted(samples, key=lambda sample: digest_bytes(f"{seed}:{sample.path}".encode(errors="surrogateescape")))
    num_val = min(max(1, round(len(samples) * val_fraction)), len(samples) - 1)
    held_out = {sample.path for sample in drawn[:num_val]}
    return (
        [sample for sample in samples if sample.path not in held_out],
        [sample for sample in samples if sample.path in held_out],
    )


def counts_by_label(labels: Sequence[int], num_classes: int) -> tuple[int, ...]:
    """Images per class."""
    counts: dict[int, int] = defaultdict(int)
    for label in labels:
        counts[label] += 1
    return tuple(counts[label] for label in range(num_classes))
