"""Images that have annotations, of any format: where they lie, their splits, and what can't be used.

What can't be used is named, image by image, and travels with the image: packing lists it. Boxes are checked there too,
since the image's own size decides.
"""

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

import numpy as np

from components.common.contracts.errors import UserError
from components.preprocess.sources.folders import File, is_image_name, sample_of, shown
from components.preprocess.sources.samples import (
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    check_names_differ,
    hold_out_share,
    split_of,
    with_refused,
)

MAX_NUMBER = 1e9  # of a box


@dataclass(kw_only=True)
class Annotated:
    """A file's annotations of an image."""

    size: tuple[int, int] | None = None  # width and height in pixels that boxes refer to; None where it is not said
    relative: bool = False  # boxes are in shares of the image's sides
    objects: list[tuple[str, float, float, float, float, Any, int]] = field(default_factory=list)
    """Name of the object for messages, x1, y1, x2, y2, class (a label, or what the data calls it), 1 if ignored."""
    refused: list[tuple[str, str, bool]] = field(default_factory=list)
    """Name of an object, what is wrong with it, and whether it is kept all the same."""
    outlines: list[bytes] = field(default_factory=list)
    """Outlines of each object, where masks are made of them: see `outlines`."""

    def encoded(self, labels: Mapping[Any, int]) -> bytes:
        """The annotations that travel with the sample, with labels in place of names; unknown classes are refused.

        A line of JSON, then little-endian float64 [names, 6]: x1, y1, x2, y2, label, 1 if ignored; then the outlines,
        whose lengths the line names.
        """
        names, rows, refused, outlines = [], [], list(self.refused), []
        for place, (name, *box, kind, ignored) in enumerate(self.objects):
            if kind in labels:
                names.append(name)
                rows.append((*box, labels[kind], ignored))
                outlines += self.outlines[place : place + 1]
            else:
                refused.append((name, f"unknown class: {quoted(kind)}", False))
        lengths = [len(outline) for outline in outlines]
        content = {"size": self.size, "relative": self.relative, "names": names, "refused": refused}
        line = json.dumps({**content, "outlines": lengths}).encode()
        return b"".join([line, b"\n", np.array(rows, "<f8").tobytes(), *outlines])


class Encoding(Protocol):
    """Annotations of an image, or what makes them."""

    def encoded(self, labels: Mapping[Any, int]) -> bytes:
        """See Annotated."""
        ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """Annotations of a tree, before classes have labels."""

    images: "Mapping[str, tuple[File, str, Encoding]]"  # by path; split "train", "val" or "" for that of its folder
    classes: ClassNames
    refused: dict[str, str]  # why images can't be used

    def source(self, names: ClassNames, where: str, storage: Storage, options: Options, files: Iterable[str]) -> Source:
        """The images of all `files` as samples, with classes of these names, or of the user's in their order.

        Raises:
            UserError: two classes have one name to people, or as split_samples.
        """
        labels: Mapping[Any, int] = names.labels
        if options.names is not None:
            known = options.names.labels
            labels = {key: known[names.names[label]] for key, label in labels.items() if names.names[label] in known}
            names = options.names
        else:
            check_names_differ(names.names, where)
        samples = [
            (of, replace(sample_of(file, 0), annotation=annotated.encoded(labels)))
            for path, (file, split, annotated) in sorted(self.images.items())
            if (of := split or split_of(folder_of(path))) is not None
        ]
        source = Source(classes=names.names, splits=split_samples(samples, options, self.refused), storage=storage)
        mentioned = {sample.path for _, sample in samples} | self.refused.keys()
        unread = {_split_and_stem(path) for path in self.refused if not is_image_name(path)}  # labels of images
        others = [path for path in files if is_image_name(path) and "masks" not in path.split("/")]
        unused = tuple(path for path in others if path not in mentioned and _split_and_stem(path) not in unread)
        return with_refused(replace(source, unused=unused), self.refused)


def _split_and_stem(path: str) -> tuple[str | None, str]:
    return split_of(folder_of(path)), PurePosixPath(path).stem


def split_samples(
    samples: Sequence[tuple[str, Sample]], options: Options, refused: Mapping[str, str]
) -> dict[str, list[Sample]]:
    """Samples by split, from each one and the split that its path names, "" for none; held out where one is empty.

    Those of no split are training images, unless there are no others to validate with.

    Raises:
        UserError: too few are left besides those that were `refused`.
    """
    if len(samples) < 2:
        raise UserError(
            f"the data has {'1 image' if samples else 'no image'} that can be used, and needs 2{example(refused)}. "
            "Put the images where they are named, or name them as they lie there; test/ and eval/ are not used",
            code="too-few-images",
        )
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "": []}
    for split, sample in samples:
        splits[split].append(sample)
    splits["train"] += splits.pop("")
    if not all(splits.values()):
        train, val = hold_out_share([*splits["train"], *splits["val"]], "the data", options)
        return {"train": train, "val": val}
    return splits


_Fit = tuple[bool, bool, int, bool, bool]
"""Fit of an image to a name: its path ends so; split; folders shared with the file that names it; in images/; in no
other folder than these and those of the name."""


class Index:
    """Finds images that annotations name."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self._by_name: dict[str, list[File]] = {}
        self._by_stem: dict[str, list[File]] = {}
        self._other_names: set[str] = set()  # of what is read as no image
        for path, file in files.items():
            name = composed(path.rpartition("/")[2])
            if not is_image_name(path):
                self._other_names.add(name)
            else:
                self._by_name.setdefault(name, []).append(file)
                self._by_stem.setdefault(name.rpartition(".")[0], []).append(file)

    def assigned(self, named: Iterable[tuple[str, str]], *, by_stem: bool = False) -> dict[tuple[str, str], File]:
        """Find the image of each pair of a file and a name in it, unless another pair fits that image better.

        An image that is not there is so none of the same name in another folder or split, which has its own
        annotations. With `by_stem` first by the stem of the file that names it, since names within files get stale.
        """
        found: dict[tuple[str, str], tuple[File, _Fit]] = {}
        best: dict[str, _Fit] = {}
        for named_in, name in named:
            path = _slashed(name)
            own = self._by_stem.get(composed(PurePosixPath(named_in).stem), []) if by_stem else []
            one = self._best(own, path, named_in) or self._named(path, named_in)
            if one is not None:
                file, fit = found[named_in, name] = one
                best[file.path] = max(fit, best.get(file.path, fit))
        return {pair: file for pair, (file, fit) in found.items() if fit == best[file.path]}

    def absence(self, named_in: str, name: str) -> str:
        """Return why `assigned` finds no image of this name for the file that names it."""
        path = _slashed(name)
        last = path.rpartition("/")[2]
        if last in self._other_names:
            return "it is of a format that is not read; convert it to JPEG or PNG"
        if last in self._by_name and self._named(path, named_in) is None:
            return "several folders hold an image of this name; name its folder, too"
        return "it is not there"

    def _named(self, path: str, named_in: str) -> "tuple[File, _Fit] | None":
        return self._best(self._by_name.get(path.rpartition("/")[2], []), path, named_in)

    @staticmethod
    def _best(found: list[File], name: str, named_in: str) -> "tuple[File, _Fit] | None":
        """The image whose path ends as it was named; of several of the same split, nearest, in images/."""
        parts = named_in.split("/")[:-1]
        beside = composed("/".join(["", *parts]))

        def fit(file: File) -> _Fit:
            own = file.path.split("/")
            shared = next(
                (at for at, pair in enumerate(zip(own, parts, strict=False)) if pair[0] != pair[1]), len(parts)
            )
            before, is_end, _ = f"/{composed(file.path)}\n".rpartition(f"/{name}\n")
            is_whole = before.removesuffix("/images") in ("", beside)
            return bool(is_end), split_of(file.path) == split_of(named_in), shared, "images" in own[:-1], is_whole

        ranked = sorted(((fit(file), file) for file in found), key=lambda pair: pair[0], reverse=True)
        if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
            return None
        return ranked[0][1], ranked[0][0]


def unnamed(
    files: Mapping[str, File], images: Mapping[str, Any], refused: Mapping[str, str], reason: str
) -> dict[str, str]:
    """Images that nothing names, of folders in which others are named."""
    folders = {folder_of(path) for path in images}
    return {
        path: reason
        for path in files
        if is_image_name(path) and folder_of(path) in folders and path not in images and path not in refused
    }


def same_names(found: Mapping[str, tuple[str, ...]], where: str) -> tuple[str, ...]:
    """The names of classes that files of the data at `where` agree on. Raises UserError."""
    first = next(iter(found))
    if other := next((path for path in found if found[path] != found[first]), ""):
        raise UserError(
            f"{shown(where, other)} names other classes than {first}, or in another order; remove the wrong one",
            code="other-classes",
        )
    return found[first]


def folder_of(path: str) -> str:
    """The path of the folder of a file; "" for the uppermost."""
    return path.rpartition("/")[0]


def example(refused: Mapping[str, str]) -> str:
    """One of the files that can't be used, and why; "" for none."""
    return next((f" ({len(refused):,} can't be used, such as {path}: {why})" for path, why in refused.items()), "")


def _slashed(name: str) -> str:
    return composed(name.replace("\\", "/").lstrip("./"))


def composed(name: str) -> str:
    """A name in one of the spellings of its letters: macOS writes an umlaut as two characters."""
    return unicodedata.normalize("NFC", name)


def quoted(value: Any) -> str:
    """A value of the data, as messages show it."""
    return repr(value)[:60]
