"""COCO's JSON: objects with boxes, polygons or run lengths."""

import math
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from components.common.contracts.errors import UserError
from components.preprocess.outlines import packed_outline
from components.preprocess.sources.annotations import MAX_NUMBER, Annotated, Found, Index, quoted, unnamed
from components.preprocess.sources.folders import File, Tree, shown
from components.preprocess.sources.json_stream import json_arrays
from components.preprocess.sources.samples import ClassNames, split_of

_MAX_OBJECTS = 20_000_000
_MAX_KEY = 1 << 62
_NO_BOX = (math.nan,) * 4
_NUMBERS = frozenset((int, float))
_NO_PLACES = np.empty(0, np.int64)


def coco(tree: Tree, files: Mapping[str, File], *, with_outlines: bool = False) -> Found | None:
    """Annotations of COCO's files, with polygons and run lengths or with boxes; None without such files.

    Source: https://cocodataset.org/#format-data.
    """
    named = [path for path in files if path.lower().endswith(".json")]
    # captions and keypoints lie beside the objects' file in COCO's own archives
    named = [path for path in named if "instances_" in path] or named
    parsed = {path: found for path in sorted(named) if (found := _coco_file(tree, path, with_outlines)) is not None}
    if not parsed:
        return None
    index = Index(files)
    images: dict[str, tuple[File, str, _CocoImage]] = {}
    refused: dict[str, str] = {}
    not_used: dict[str, str] = {}  # images of a test split
    shared: list[tuple[str, str, Any]] = []  # of ids: the file, the name of an image, its id
    classes: dict[Any, str] = {}
    own_files = index.assigned((path, name) for path, content in parsed.items() for name in content.names())
    for path, content in parsed.items():
        for key, name in content.categories.items():
            if classes.setdefault(key, name) != name:
                raise UserError(
                    f"{shown(tree.name, path)} calls category {key} {name!r}, another file {classes[key]!r}; give "
                    "all files the same categories",
                    code="other-classes",
                )
        split = split_of(path)
        if split is None:
            not_used |= {file.path: "" for name in content.names() if (file := own_files.get((path, name)))}
            continue
        places = content.objects.by_image()
        firsts = content.objects.firsts(content.images)
        for key, (name, size) in content.images.items():
            file = own_files.get((path, name))
            if key in content.twice.values():
                continue
            if file is None:
                place = f"{path}: {name}" if name in refused else name
                refused[place] = f"{path} names it, and {index.absence(path, name)}"
            elif file.path in images:
                refused[f"{path}: {name}"] = "named again, with annotations of its own"
            else:
                own = places.get(key, _NO_PLACES)
                images[file.path] = (file, split, _CocoImage(content.objects, own, firsts, size))
        shared += [(path, name, key) for name, key in content.twice.items()]
        if unlisted := places.keys() - content.images.keys():
            number, of = sum(len(places[key]) for key in unlisted), len(unlisted)
            refused[f"{path}: image {quoted(min(unlisted, key=str))}"] = (
                f"{number:,} annotation{'s' * (number > 1)} of {of:,} image{'s' * (of > 1)} that the file does not list"
            )
    if not classes and any(len(content.objects) for content in parsed.values()):
        raise _no_coco(shown(tree.name, next(iter(parsed))), "it lists no categories, which annotations name by id")
    for path, name, key in shared:
        file = own_files.get((path, name))
        place = file.path if file else name
        # an image that another file annotates is not lost
        place = f"{path}: {name}" if place in images else place
        refused[place] = f"its id is that of another image, too: {quoted(key)} in {path}"
    used = {kind for content in parsed.values() for kind in content.objects.kinds()}
    taken = {classes[key] for key in used & classes.keys()}
    # Files of Roboflow and labelme begin with a category that no annotation has: that of all others, or of a class's
    # own name, or the background's.
    taken |= {name for content in parsed.values() for name in content.groups} | {"_background_"}
    classes = {key: name for key, name in classes.items() if key in used or name not in taken}
    keys = sorted(classes, key=lambda key: (str(type(key)), key))
    names = tuple(classes[key] for key in keys)
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(
            f"{tree.name} has two categories {twice[0]!r}; give each another name", code="duplicate-class-names"
        )
    refused |= unnamed(files, images, not_used | refused, "no annotation file names it")
    return Found(
        images=images, classes=ClassNames(names, {key: label for label, key in enumerate(keys)}), refused=refused
    )


class _CocoObjects:
    """The annotations of a file, in its order, 60 bytes each: lists of millions of them would take gigabytes.

    Polygons and run lengths, which are most of a file, are kept only where they are needed.
    """

    def __init__(self, with_outlines: bool) -> None:
        self._outlines: list[bytes] | None = [] if with_outlines else None
        self._boxes = array("d")  # of each x, y, width and height; NaN where it has no box
        self._keys = array("q")  # of each its id, that of its image, and its class
        self._crowds = array("b")
        self._others: dict[Any, int] = {}  # keys that are no integers of 62 bits, numbered

    def __len__(self) -> int:
        return len(self._crowds)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take an annotation."""
        box, image, kind = entry.get("bbox"), _whole(entry.get("image_id")), _whole(entry.get("category_id"))
        self._boxes.extend(box if _is_box(box) else _NO_BOX)
        image = image if isinstance(image, int | str) else None
        kind = kind if isinstance(kind, int | str) else str(kind)
        self._keys.extend(map(self._number, (entry.get("id"), image, kind)))
        self._crowds.append(entry.get("iscrowd") not in (None, 0, "", "0"))
        if self._outlines is not None:
            self._outlines.append(packed_outline(entry.get("segmentation")))

    def by_image(self) -> dict[Any, np.ndarray]:
        """Places of the annotations of each image, by its id."""
        if not len(self):
            return {}
        order = np.argsort(self._table[:, 1], kind="stable")
        owners, starts = np.unique(self._table[order, 1], return_index=True)
        return dict(zip(map(self._key, owners.tolist()), np.split(order, starts[1:]), strict=True))

    def kinds(self) -> set[Any]:
        """Ids of the categories that annotations have."""
        return set(map(self._key, np.unique(self._table[:, 2]).tolist()))

    def firsts(self, images: Container[Any]) -> dict[int, int]:
        """Find ids that several annotations of these images have: each as `_table` has it, with its first place."""
        ids, none = self._table[:, 0], self._number(None)
        values, counts = np.unique(ids, return_counts=True)
        found: dict[int, int] = {}
        for place in np.flatnonzero(np.isin(ids, values[(counts > 1) & (values != none)])).tolist():
            if self._key(int(self._table[place, 1])) in images:
                found.setdefault(int(ids[place]), place)
        return found

    def annotated(self, places: np.ndarray, firsts: Mapping[int, int], size: tuple[int, int] | None) -> Annotated:
        """Those of an image."""
        found, seen = Annotated(size=size), set()
        keys, boxes = self._table[places].tolist(), np.frombuffer(self._boxes).reshape(-1, 4)[places].tolist()
        for place, (number, _, kind), (x, y, width, height) in zip(places.tolist(), keys, boxes, strict=True):
            name = f"annotation {quoted(self._key(number))}"
            if number in firsts:
                if (content := self._content(place)) in seen:
                    found.refused.append((name, "listed twice", False))
                    continue
                seen.add(content)
                if firsts[number] != place:
                    found.refused.append((name, "its id is that of another annotation; both are kept", True))
            outline = self._outlines[place] if self._outlines is not None else None
            if outline is None and math.isnan(x):
                found.refused.append((name, "no box of four numbers", False))
            elif outline == b"":
                found.refused.append((name, "no polygons or run lengths", False))
            else:
                found.outlines += [outline] if outline else []
                found.objects.append((name, x, y, x + width, y + height, self._key(kind), self._crowds[place]))
        return found

    def _content(self, place: int) -> tuple[Any, ...]:
        outline = self._outlines[place] if self._outlines is not None else None
        box = self._boxes[4 * place : 4 * place + 4].tobytes()
        return self._table[place].tobytes(), box, self._crowds[place], outline

    @cached_property
    def _table(self) -> np.ndarray:
        """[N, 3] int64 of `_keys`, to which nothing can be added from now on."""
        return np.frombuffer(self._keys, np.int64).reshape(-1, 3)

    def _number(self, key: Any) -> int:
        if isinstance(key, int) and abs(key) < _MAX_KEY:
            return int(key)
        return -_MAX_KEY - self._others.setdefault(key, len(self._others))

    def _key(self, number: int) -> Any:
        return number if number > -_MAX_KEY else self._other_keys[-_MAX_KEY - number]

    @cached_property
    def _other_keys(self) -> list[Any]:
        return list(self._others)


class _CocoImage(NamedTuple):
    """An image of a file: its annotations are made of it only when they are needed."""

    objects: _CocoObjects
    places: np.ndarray
    firsts: Mapping[int, int]
    size: tuple[int, int] | None

    def encoded(self, labels: Mapping[Any, int]) -> bytes:
        """As Annotated."""
        return self.objects.annotated(self.places, self.firsts, self.size).encoded(labels)


@dataclass(kw_only=True)
class _CocoFile:
    images: dict[Any, tuple[str, tuple[int, int] | None]] = field(default_factory=dict)  # by id: name and size
    categories: dict[Any, str] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)  # names of categories of categories
    twice: dict[str, Any] = field(default_factory=dict)  # names of images whose id is that of another, too
    objects: _CocoObjects

    def names(self) -> set[str]:
        """Those of all its images."""
        return {name for name, _ in self.images.values()} | self.twice.keys()


def _coco_file(tree: Tree, path: str, with_outlines: bool) -> _CocoFile | None:
    """Read a file; None for JSON of another kind. Objects without boxes, as in captions, are refused one by one."""
    where, content = shown(tree.name, path), _CocoFile(objects=_CocoObjects(with_outlines))
    kinds: set[str] = set()
    with tree.open(path) as file:
        for kind, entry in _entries(file, where, kinds):
            if not isinstance(entry, dict):
                raise _no_coco(where, f"{kind} holds {quoted(entry)}")
            if "id" in entry:
                entry["id"] = _whole(entry["id"])
            if not isinstance(entry.get("id", 0), int | str):
                raise _no_coco(where, f"{kind} holds an id that is neither integer nor text: {quoted(entry['id'])}")
            if kind == "images":
                if not isinstance(entry.get("file_name"), str) or "id" not in entry:
                    raise _no_coco(where, f"an image has no id or file_name: {quoted(entry)}")
                size = _whole(entry.get("width")), _whole(entry.get("height"))
                known = size if all(isinstance(side, int) and side > 0 for side in size) else None
                named = content.images.get(entry["id"])
                if named is not None and named != (entry["file_name"], known):  # the same image twice is one
                    content.twice |= dict.fromkeys((named[0], entry["file_name"]), entry["id"])
                content.images[entry["id"]] = entry["file_name"], known
            elif kind == "categories":
                if "id" not in entry or entry.get("name") in (None, ""):
                    raise _no_coco(where, f"a category has no id or name: {quoted(entry)}")
                name = str(entry["name"])
                content.groups |= {str(entry.get("supercategory"))} - {name}
                if content.categories.setdefault(entry.get("id"), name) != name:
                    other = content.categories[entry.get("id")]
                    raise UserError(
                        f"{where} calls category {quoted(entry.get('id'))} {other!r} and {name!r}; give each an id of "
                        "its own",
                        code="other-classes",
                    )
            else:
                content.objects.add(entry)
                if len(content.objects) > _MAX_OBJECTS:
                    message = f"{where} has more than {_MAX_OBJECTS:,} annotations; write several files"
                    raise UserError(message, code="annotations-too-large")
    return content if {"images", "annotations"} <= kinds else None


def _entries(file: BinaryIO, where: str, kinds: set[str]) -> Iterator[tuple[str, Any]]:
    """Each element of the arrays of a file, with the name of its array; `kinds` gets those of all."""
    for kind, entries in json_arrays(file, where, ("images", "annotations", "categories")):
        kinds.add(kind)
        for entry in entries:
            yield kind, entry


def _no_coco(where: str, reason: str) -> UserError:
    return UserError(f"{where} is not as COCO asks: {reason}; export it again", code="damaged-annotations")


def _whole(value: Any) -> Any:
    """A number as an integer where it is one: tables with gaps write 1 as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_box(value: Any) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 4
        and _NUMBERS.issuperset(map(type, value))
        and all(-MAX_NUMBER < each < MAX_NUMBER for each in value)  # not of NaN
    )
