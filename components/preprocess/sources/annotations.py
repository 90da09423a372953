"""Images with boxes, in the formats that users have: COCO JSON, Pascal VOC XML, YOLO text files.

What can't be used is named, image by image, and travels with the image: packing lists it. Boxes are checked there too,
since the image's own size decides.
"""

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeGuard
from xml.etree import ElementTree

import numpy as np
import yaml

from components.common.contracts.errors import UserError
from components.common.data.places import MAX_TEXT_BYTES, Unreadable, check_size, translate_errors
from components.preprocess.outlines import packed_outline
from components.preprocess.sources.folders import File, Tree, is_image_name, sample_of, shown
from components.preprocess.sources.json_stream import json_arrays
from components.preprocess.sources.samples import (
    VAL_NAMES,
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    hold_out_share,
    parse_class_names,
    plain_names,
    with_refused,
)

WANTED = (
    "put the annotations beside the images: COCO JSON (annotations.json or instances_train.json), Pascal VOC "
    "(Annotations/*.xml) or YOLO (labels/*.txt and data.yaml), in train/ and val/ or in one folder"
)
_MAX_OBJECTS = 20_000_000
_MAX_UNNAMED = 10_000  # classes
_MAX_KEY = 1 << 62
_NO_BOX = (math.nan,) * 4
_NUMBERS = frozenset((int, float))
_MAX_NUMBER = 1e9
_NO_PLACES = np.empty(0, np.int64)
_MAX_XML_BYTES = 1 << 22
_MAX_REASON = 200
_MOST_SHARE = 2.0  # of YOLO's numbers: a box may reach out of the image
_NUM_READERS = 8  # of many small files
_NAME_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names", "_darknet.labels")
_LISTS = "ImageSets/Main"
_VOC = re.compile(r"<annotation[\s/>]")


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
                refused.append((name, f"unknown class: {_short(kind)}", False))
        lengths = [len(outline) for outline in outlines]
        content = {"size": self.size, "relative": self.relative, "names": names, "refused": refused}
        line = json.dumps({**content, "outlines": lengths}).encode()
        return b"".join([line, b"\n", np.array(rows, "<f8").tobytes(), *outlines])


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Annotations of a tree, before classes have labels."""

    images: "dict[str, tuple[File, str, Annotated | _CocoImage]]"  # by path; split "train", "val" or "" for either
    classes: ClassNames
    refused: dict[str, str]  # why images can't be used

    def source(self, names: ClassNames, storage: Storage, options: Options) -> Source:
        """The images as samples, with classes of these names, or of the user's in an order of his own."""
        labels: Mapping[Any, int] = names.labels
        if options.names is not None:
            known = options.names.labels
            labels = {key: known[names.names[label]] for key, label in labels.items() if names.names[label] in known}
            names = options.names
        samples = [
            (split, replace(sample_of(file, 0), annotation=annotated.encoded(labels)))
            for _, (file, split, annotated) in sorted(self.images.items())
        ]
        source = Source(classes=names.names, splits=split_samples(samples, options, self.refused), storage=storage)
        return with_refused(source, self.refused)


def boxes_source(tree: Tree, storage: Storage, options: Options) -> Source:
    """List the images of a tree that have annotations, and split them.

    Raises:
        UserError: there are none, or a file of them can't be read.
    """
    files = {file.path: file for file in tree.files("")}
    with translate_errors(tree.name):
        found = coco(tree, files) or _voc(tree, storage, files) or _yolo(tree, storage, files)
    if found is None:
        raise UserError(f"{tree.name} has no boxes; {WANTED}", code="no-annotations", setting="data")
    if not (options.names or found.classes).names:
        raise UserError(
            f"{tree.name} has annotations, and no object in them{_example(found.refused)}; {WANTED}", code="no-objects"
        )
    return found.source(found.classes, storage, options)


def split_samples(
    samples: Sequence[tuple[str, Sample]], options: Options, refused: Mapping[str, str]
) -> dict[str, list[Sample]]:
    """Samples by split, from each one and the split that its path names, "" for none; held out where one is empty.

    Raises:
        UserError: too few are left besides those that were `refused`.
    """
    if len(samples) < 2:
        raise UserError(
            f"the data has {'1 image' if samples else 'no image'} that can be used, and needs 2{_example(refused)}. "
            "Put the images where they are named, or name them as they lie there; what lies in test/ is not used",
            code="too-few-images",
        )
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "": []}
    for split, sample in samples:
        splits[split].append(sample)
    free = splits.pop("")
    if not all(splits.values()):
        train, val = hold_out_share([*splits["train"], *splits["val"], *free], "the data", options)
        return {"train": train, "val": val}
    splits["train"] += free
    return splits


def split_of(path: str) -> str | None:
    """The split that a path names; "" for none, None for a test split, which is neither."""
    words = re.split("[^a-z]+", path.lower())
    if "train" in words:
        return "train"
    if any(name in words for name in VAL_NAMES):
        return "val"
    return None if "test" in words else ""


# --- COCO


def coco(tree: Tree, files: Mapping[str, File], *, with_outlines: bool = False) -> _Found | None:
    """Annotations of COCO's files, with polygons and run lengths or with boxes; None without such files.

    Source: https://cocodataset.org/#format-data.
    """
    named = [path for path in files if path.lower().endswith(".json")]
    # captions and keypoints lie beside the objects' file in COCO's own archives
    named = [path for path in named if "instances_" in path] or named
    parsed = {path: found for path in sorted(named) if (found := _coco_file(tree, path, with_outlines)) is not None}
    if not parsed:
        return None
    index = _Index(files)
    images: dict[str, tuple[File, str, Annotated | _CocoImage]] = {}
    refused: dict[str, str] = {}
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
            what = "annotations of an image" if len(unlisted) == 1 else f"annotations of {len(unlisted):,} images"
            number = sum(len(places[key]) for key in unlisted)
            refused[f"{path}: image {_short(min(unlisted, key=str))}"] = (
                f"{what} that the file does not list: {number:,}"
            )
    if not classes and any(len(content.objects) for content in parsed.values()):
        raise _no_coco(shown(tree.name, next(iter(parsed))), "it lists no categories, which annotations name by id")
    for path, name, key in shared:
        file = own_files.get((path, name))
        place = file.path if file else name
        # an image that another file annotates is not lost
        place = f"{path}: {name}" if place in images else place
        refused[place] = f"its id is that of another image, too: {_short(key)} in {path}"
    used = {kind for content in parsed.values() for kind in content.objects.kinds()}
    taken = {classes[key] for key in used & classes.keys()}
    # Roboflow's files begin with a category that no annotation has, at times of a class's own name.
    classes = {key: name for key, name in classes.items() if key in used or name not in taken}
    keys = sorted(classes, key=lambda key: (str(type(key)), key))
    names = tuple(classes[key] for key in keys)
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(
            f"{tree.name} has two categories {twice[0]!r}; give each another name", code="duplicate-class-names"
        )
    refused |= _unnamed(files, images, refused, "no annotation file names it")
    return _Found(
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
        box, image, kind = entry.get("bbox"), entry.get("image_id"), entry.get("category_id")
        self._boxes.extend(box if _is_box(box) else _NO_BOX)
        image = image if isinstance(image, int | str) else None
        kind = kind if isinstance(kind, int | str) else str(kind)
        self._keys.extend(map(self._number, (entry.get("id"), image, kind)))
        self._crowds.append(bool(entry.get("iscrowd")))
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
        return set(map(self._key, np.unique(self._table[:, 2]).tolist())) if len(self) else set()

    def firsts(self, images: Container[Any]) -> dict[int, int]:
        """Find ids that several annotations of these images have: each as `_table` has it, with its first place."""
        if not len(self):
            return {}
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
            name = f"annotation {_short(self._key(number))}"
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
                raise _no_coco(where, f"{kind} holds {_short(entry)}")
            if not isinstance(entry.get("id", 0), int | str):
                raise _no_coco(where, f"{kind} holds an id that is neither integer nor text: {_short(entry['id'])}")
            if kind == "images":
                if not isinstance(entry.get("file_name"), str) or "id" not in entry:
                    raise _no_coco(where, f"an image has no id or file_name: {_short(entry)}")
                size = entry.get("width"), entry.get("height")
                known = size if all(isinstance(side, int) and side > 0 for side in size) else None
                named = content.images.get(entry["id"])
                if named is not None and named != (entry["file_name"], known):  # the same image twice is one
                    content.twice |= dict.fromkeys((named[0], entry["file_name"]), entry["id"])
                content.images[entry["id"]] = entry["file_name"], known  # type: ignore[assignment]
            elif kind == "categories":
                if "id" not in entry or entry.get("name") in (None, ""):
                    raise _no_coco(where, f"a category has no id or name: {_short(entry)}")
                name = str(entry["name"])
                if content.categories.setdefault(entry.get("id"), name) != name:
                    other = content.categories[entry.get("id")]
                    raise UserError(
                        f"{where} calls category {_short(entry.get('id'))} {other!r} and {name!r}; give each an id of "
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


# --- Pascal VOC


def _voc(tree: Tree, storage: Storage, files: Mapping[str, File]) -> _Found | None:
    """Pixels are counted from 1, and a box includes both corners (Everingham et al., VOC development kit, 2012)."""
    xml = [file for path, file in files.items() if path.lower().endswith(".xml")]
    texts = dict(_texts(storage, xml, _MAX_XML_BYTES))
    read = {path: text for path, text in texts.items() if _VOC.search(text.value)}
    if not read:
        return None
    folders = {_folder(path) for path in read}
    index = _Index(files)
    listed = {
        split: set(map(_stem, tree.read(path).decode(errors="replace").split())) if path in files else None
        for split in ("train", "val")
        for path in [next((each for each in files if each.endswith(f"{_LISTS}/{split}.txt")), "")]
    }
    images: dict[str, tuple[File, str, Annotated | _CocoImage]] = {}
    refused = {
        path: f"no annotations of Pascal VOC: {text.problem}"
        for path, text in texts.items()
        if text.problem and _folder(path) in folders
    }
    kinds: set[str] = set()
    parsed: dict[str, tuple[Annotated, str, str]] = {}  # with the split and the image's name
    for path, text in sorted(read.items()):
        stem = PurePosixPath(path).stem
        split = split_of(_folder(path))
        if listed["train"] and listed["val"]:
            split = next((name for name, stems in listed.items() if stems and stem in stems), None)
        if split is None:
            continue
        try:
            annotated, name = _voc_image(text.value)
            parsed[path] = annotated, split, name or f"{stem}.jpg"
        except (ValueError, ElementTree.ParseError) as error:
            refused[path] = f"no annotations of Pascal VOC: {str(error)[:_MAX_REASON]}"
    own_files = index.assigned(((path, name) for path, (_, _, name) in parsed.items()), by_stem=True)
    for path, (annotated, split, name) in parsed.items():
        file = own_files.get((path, name))
        if file is None:
            place = f"{path}: {name}" if name in refused else name
            refused[place] = f"{path} names it, and {index.absence(path, name)}"
        elif file.path in images:
            refused[path] = f"a second file of {file.path}"
        else:
            images[file.path] = (file, split, annotated)
            kinds |= {kind for *_, kind, _ in annotated.objects}
    refused |= _unnamed(files, images, refused, "no XML file names it") if listed["train"] is None else {}
    return _Found(images=images, classes=plain_names(sorted(kinds)), refused=refused)


def _voc_image(text: str) -> tuple[Annotated, str]:
    """Raises ValueError or ParseError."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("it declares entities")
    root = ElementTree.fromstring(text)  # noqa: S314  # without entities, and of bounded size
    sides = [root.findtext(f"size/{side}") or "" for side in ("width", "height")]
    size = (int(sides[0]), int(sides[1])) if all(side.isdecimal() and int(side) for side in sides) else None
    annotated = Annotated(size=size)
    for number, entry in enumerate(root.iter("object"), 1):
        name, kind = f"object {number}", (entry.findtext("name") or "").strip()
        corners = [entry.findtext(f"bndbox/{corner}") or "" for corner in ("xmin", "ymin", "xmax", "ymax")]
        values = [_number(corner) for corner in corners]
        if None in values or not kind:
            annotated.refused.append((name, "no name" if not kind else "no box of four numbers", False))
            continue
        x1, y1, x2, y2 = (float(value or 0) for value in values)
        ignored = int((entry.findtext("difficult") or "0").strip() == "1")
        annotated.objects.append((name, x1 - 1, y1 - 1, x2, y2, kind, ignored))
    return annotated, (root.findtext("filename") or "").strip()


# --- YOLO


def _yolo(tree: Tree, storage: Storage, files: Mapping[str, File]) -> _Found | None:
    """A line per object: class, then centre and size in shares of the image, or a polygon's corners."""
    names = _yolo_names(tree, files)
    texts = {
        path: file
        for path, file in files.items()
        if path.endswith(".txt") and path.rpartition("/")[2] not in _NAME_FILES
    }
    own = {path: _label_path(path) for path in files if is_image_name(path)}
    own = {path: found for path, found in own.items() if split_of(_folder(path)) is not None}
    labelled = {path: next((each for each in paths if each in texts), "") for path, paths in own.items()}
    if not any(labelled.values()):
        return None
    read = dict(_texts(storage, [files[path] for path in labelled.values() if path], MAX_TEXT_BYTES))
    images: dict[str, tuple[File, str, Annotated | _CocoImage]] = {}
    refused: dict[str, str] = {}
    most = -1  # of all classes
    for path, label_path in labelled.items():
        annotated = Annotated(relative=True)
        if label_path and read[label_path].problem:
            refused[path] = f"its labels {label_path} can't be read: {read[label_path].problem}"
            continue
        for number, line in enumerate(read[label_path].value.splitlines() if label_path else (), 1):
            if line.strip():
                _add_yolo_object(annotated, f"line {number}", line)
        images[path] = (files[path], split_of(_folder(path)) or "", annotated)
        most = max([most, *(kind for *_, kind, _ in annotated.objects)])
    used = set(labelled.values())
    folders = {_folder(path) for path in used if path}
    for path in sorted(texts):
        if path not in used and _folder(path) in folders and split_of(_folder(path)) is not None:
            refused[path] = "labels of an image that is not there"
    if names is None:
        names = tuple(str(label) for label in range(min(most + 1, _MAX_UNNAMED)))
    keys: dict[Any, int] = {label: label for label in range(len(names))}
    return _Found(images=images, classes=ClassNames(names, keys), refused=refused)


def _label_path(image: str) -> list[str]:
    """Where YOLO looks for an image's labels: labels/ in place of images/, or beside it."""
    stem = image.rpartition(".")[0]
    parts = stem.split("/")
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    moved = ["/".join([*parts[:place], "labels", *parts[place + 1 :]]) for place in reversed(places)]
    return [f"{each}.txt" for each in (*moved, stem)]


def _add_yolo_object(annotated: Annotated, name: str, line: str) -> None:
    values = [_number(word) for word in line.split()]
    if None in values or len(values) < 5 or (len(values) > 5 and len(values) % 2 == 0):
        annotated.refused.append((name, "no class and box of five numbers", False))
        return
    kind, *rest = (float(value or 0) for value in values)
    if kind != int(kind):
        annotated.refused.append((name, f"unknown class: {kind:g}", False))
        return
    if max(rest) > _MOST_SHARE:
        what = f"in pixels, and YOLO asks for shares of the image's sides: {_short(line)}"
        annotated.refused.append((name, what, False))
        return
    if len(rest) == 4:
        x, y, width, height = rest
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    else:
        corners = (min(rest[::2]), min(rest[1::2]), max(rest[::2]), max(rest[1::2]))
    annotated.objects.append((name, *corners, int(kind), 0))


def _yolo_names(tree: Tree, files: Mapping[str, File]) -> tuple[str, ...] | None:
    """The classes' names in order; None where no file tells."""
    named = sorted((path.count("/"), path) for path in files if path.rpartition("/")[2].lower() in _NAME_FILES)
    for _, path in named:
        where, text = shown(tree.name, path), tree.read(path).decode("utf-8-sig", errors="replace")
        if not path.lower().endswith((".yaml", ".yml")):
            return parse_class_names(text, where).names
        try:
            names = (yaml.safe_load(text) or {}).get("names")
        except (yaml.YAMLError, AttributeError, RecursionError):
            raise UserError(
                f"{where} is no YAML that can be read; write it again", code="damaged-annotations"
            ) from None
        if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
            names = [{str(key): value for key, value in names.items()}[str(label)] for label in range(len(names))]
        if isinstance(names, list) and names:
            return parse_class_names("\n".join(map(str, names)), where).names
        if names:
            raise UserError(
                f"{where} has names that are neither a list nor numbered from 0 to {len(names) - 1} without a gap; "
                "number the classes as the labels do"
                if isinstance(names, dict)
                else f"{where} has names that are no list: {_short(names)}; list the classes in the labels' order",
                code="damaged-annotations",
            )
    return None


# --- all formats


_Fit = tuple[bool, bool, int, bool]
"""How well an image fits a name: its path ends so; split; folders shared with the file that names it; in images/."""


class _Index:
    """Finds images that annotations name."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self._by_name: dict[str, list[File]] = {}
        self._by_stem: dict[str, list[File]] = {}
        self._other_names: set[str] = set()  # of what is read as no image
        for path, file in files.items():
            name = path.rpartition("/")[2]
            if not is_image_name(path):
                self._other_names.add(name)
            else:
                self._by_name.setdefault(name, []).append(file)
                self._by_stem.setdefault(name.rpartition(".")[0], []).append(file)

    def assigned(self, named: Iterable[tuple[str, str]], *, by_stem: bool = False) -> dict[tuple[str, str], File]:
        """Find the image of each pair of a file and a name in it, unless another pair fits that image better.

        An image that is not there is so none of the same name in another folder or split, which has its own
        annotations. With `by_stem` also by the stem of the file that names it.
        """
        found: dict[tuple[str, str], tuple[File, _Fit]] = {}
        best: dict[str, _Fit] = {}
        for named_in, name in named:
            path = _slashed(name)
            one = self._named(path, named_in)
            if one is None and by_stem:
                one = self._best(self._by_stem.get(PurePosixPath(named_in).stem, []), path, named_in)
            if one is not None:
                file, fit = found[named_in, name] = one
                best[file.path] = max(fit, best.get(file.path, fit))
        return {pair: file for pair, (file, fit) in found.items() if fit == best[file.path]}

    def absence(self, named_in: str, name: str) -> str:
        """Why `assigned` finds no image of this name for the file that names it."""
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

        def fit(file: File) -> _Fit:
            own = file.path.split("/")
            shared = next(
                (at for at, pair in enumerate(zip(own, parts, strict=False)) if pair[0] != pair[1]), len(parts)
            )
            is_end = f"/{file.path}".endswith(f"/{name}")
            return is_end, split_of(file.path) == split_of(named_in), shared, "images" in own[:-1]

        ranked = sorted(((fit(file), file) for file in found), key=lambda pair: pair[0], reverse=True)
        if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
            return None
        return ranked[0][1], ranked[0][0]


@dataclass(frozen=True)
class _Text:
    value: str
    problem: str = ""  # why it could not be read


def _texts(storage: Storage, files: list[File], most_bytes: int) -> Iterator[tuple[str, _Text]]:
    """Small files, several at a time: servers answer slowly."""

    def read(file: File) -> _Text:
        try:
            check_size(file.size_bytes, most_bytes)
            return _Text(storage.read(sample_of(file, 0)).decode("utf-8-sig"))
        except (OSError, Unreadable, UnicodeDecodeError) as error:
            return _Text("", str(error)[:_MAX_REASON])

    with ThreadPoolExecutor(_NUM_READERS) as readers:
        yield from zip((file.path for file in files), readers.map(read, files), strict=True)


def _unnamed(
    files: Mapping[str, File], images: Mapping[str, Any], refused: Mapping[str, str], reason: str
) -> dict[str, str]:
    """Images that nothing names, of folders in which others are named."""
    folders = {_folder(path) for path in images}
    return {
        path: reason
        for path in files
        if is_image_name(path) and _folder(path) in folders and path not in images and path not in refused
    }


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _stem(path: str) -> str:
    """The name of an image, with or without its folder and extension."""
    name = path.rpartition("/")[2]
    return name.rpartition(".")[0] if is_image_name(name) else name


def _is_box(value: Any) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 4
        and _NUMBERS.issuperset(map(type, value))
        and all(-_MAX_NUMBER < each < _MAX_NUMBER for each in value)  # not of NaN
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if -_MAX_NUMBER < value < _MAX_NUMBER else None


def _example(refused: Mapping[str, str]) -> str:
    """One of the files that can't be used, and why; "" for none."""
    return next((f" ({len(refused):,} can't be used, such as {path}: {why})" for path, why in refused.items()), "")


def _slashed(name: str) -> str:
    return name.replace("\\", "/").lstrip("./")


def _short(value: Any) -> str:
    return repr(value)[:60]
