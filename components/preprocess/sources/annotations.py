"""Images with boxes, in the formats that users have: COCO JSON, Pascal VOC XML, YOLO text files.

What can't be used is named, image by image, and travels with the image: packing lists it. Boxes are checked there too,
since the image's own size decides.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from xml.etree import ElementTree

import yaml

from components.common.contracts.errors import UserError
from components.common.data.places import MAX_TEXT_BYTES, Unreadable, check_size, translate_errors
from components.preprocess.sources.folders import File, Tree, is_image_name, sample_of, shown
from components.preprocess.sources.samples import (
    VAL_NAMES,
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    hold_out,
    parse_class_names,
    plain_names,
    with_refused,
)

WANTED = (
    "put the annotations beside the images: COCO JSON (annotations.json or instances_train.json), Pascal VOC "
    "(Annotations/*.xml) or YOLO (labels/*.txt and data.yaml), in train/ and val/ or in one folder"
)
_MAX_ELEMENT = 1 << 26  # characters of one image or object of a JSON file
_CHUNK_BYTES = 1 << 20
_MAX_OBJECTS = 20_000_000
_MAX_XML_BYTES = 1 << 22
_MAX_REASON = 200
_MOST_SHARE = 2.0  # of YOLO's numbers: a box may reach out of the image
_NUM_READERS = 8  # of many small files
_NAME_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names", "_darknet.labels")
_LISTS = "ImageSets/Main"


@dataclass(kw_only=True)
class Annotated:
    """What a file says of an image."""

    size: tuple[int, int] | None = None  # width and height in pixels that boxes refer to; None where it is not said
    relative: bool = False  # boxes are in shares of the image's sides
    objects: list[tuple[str, float, float, float, float, Any, int]] = field(default_factory=list)
    """Name of the object for messages, x1, y1, x2, y2, class (a label, or what the data calls it), 1 if ignored."""
    refused: list[tuple[str, str, bool]] = field(default_factory=list)
    """Name of an object, what is wrong with it, and whether it is kept all the same."""

    def encoded(self, labels: Mapping[Any, int]) -> bytes:
        """What travels with the sample, with labels in place of names; unknown classes are refused."""
        rows, refused = [], list(self.refused)
        for name, *box, kind, ignored in self.objects:
            if kind in labels:
                rows.append([name, *box, labels[kind], ignored])
            else:
                refused.append((name, f"unknown class: {_short(kind)}", False))
        return json.dumps({"size": self.size, "relative": self.relative, "rows": rows, "refused": refused}).encode()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Annotations of a tree, before classes have labels."""

    images: dict[str, tuple[File, str, Annotated]]  # by path; split "train", "val" or "" for either
    classes: ClassNames | None  # None where only the objects name them
    refused: dict[str, str]  # why images can't be used


def boxes_source(tree: Tree, storage: Storage, options: Options) -> Source:
    """List the images of a tree that have annotations, and split them.

    Raises:
        UserError: there are none, or a file of them can't be read.
    """
    files = {file.path: file for file in tree.files("")}
    with translate_errors(tree.name):
        found = _coco(tree, files) or _voc(tree, storage, files) or _yolo(tree, storage, files)
    if found is None:
        raise UserError(f"{tree.name} has no boxes; {WANTED}", code="no-annotations", setting="data")
    names = found.classes or plain_names(
        sorted({str(kind) for *_, annotated in found.images.values() for *_, kind, _ in annotated.objects})
    )
    labels: Mapping[Any, int] = names.labels
    if options.names is not None:  # the data's classes by their names in an order of the user's
        known = options.names.labels
        labels = {key: known[names.names[label]] for key, label in labels.items() if names.names[label] in known}
        names = options.names
    if not names.names:
        raise UserError(f"{tree.name} has annotations, and no object in them; {WANTED}", code="no-objects")
    samples = [
        (split, replace(sample_of(file, 0), annotation=annotated.encoded(labels)))
        for _, (file, split, annotated) in sorted(found.images.items())
    ]
    source = Source(classes=names.names, splits=split_samples(samples, options), storage=storage)
    return with_refused(source, found.refused)


def split_samples(samples: Iterable[tuple[str, Sample]], options: Options) -> dict[str, list[Sample]]:
    """Samples by split, from each one and the split that its path names, "" for none; held out where one is empty."""
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "": []}
    for split, sample in samples:
        splits[split].append(sample)
    free = splits.pop("")
    if not all(splits.values()):
        return hold_out([*splits["train"], *splits["val"], *free], ("images",), options)
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


def _coco(tree: Tree, files: Mapping[str, File]) -> _Found | None:
    """Source: https://cocodataset.org/#format-data."""
    named = [path for path in files if path.lower().endswith(".json")]
    # captions and keypoints lie beside the objects' file in COCO's own archives
    named = [path for path in named if "instances_" in path] or named
    parsed = {path: found for path in sorted(named) if (found := _coco_file(tree, path)) is not None}
    if not parsed:
        return None
    index = _Index(files)
    images: dict[str, tuple[File, str, Annotated]] = {}
    refused: dict[str, str] = {}
    classes: dict[Any, str] = {}
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
        for key, (name, annotated) in content.images.items():
            file = index.find(name, path)
            if key in content.twice.values():
                continue
            if file is None:
                refused[name] = f"{path} names it, and it is not there"
            elif file.path in images:
                refused[f"{path}: {name}"] = "named again, with annotations of its own"
            else:
                images[file.path] = (file, split, annotated)
        for name, key in content.twice.items():
            file = index.find(name, path)
            refused[file.path if file else name] = f"its id is that of another image, too: {_short(key)} in {path}"
        for key, number in content.unlisted.items():
            refused[f"{path}: image {_short(key)}"] = f"annotations of an image that the file does not list: {number:,}"
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


@dataclass(kw_only=True)
class _CocoFile:
    images: dict[Any, tuple[str, Annotated]] = field(default_factory=dict)  # by id
    categories: dict[Any, str] = field(default_factory=dict)
    twice: dict[str, Any] = field(default_factory=dict)  # names of images whose id is that of another, too
    unlisted: Counter[Any] = field(default_factory=Counter)  # objects by the id of an image that is not listed


def _coco_file(tree: Tree, path: str) -> _CocoFile | None:
    """Read a file; None for JSON of another kind. Objects without boxes, as in captions, are refused one by one."""
    where, content = shown(tree.name, path), _CocoFile()
    objects: list[tuple[Any, dict[str, Any]]] = []
    kinds = set()
    with tree.open(path) as file:
        for kind, entry in json_arrays(file, where, ("images", "annotations", "categories")):
            kinds.add(kind)
            if entry is None:  # the array begins
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("id", 0), int | str):
                raise _no_coco(where, f"{kind} holds {_short(entry)}")
            if kind == "images":
                if not isinstance(entry.get("file_name"), str) or "id" not in entry:
                    raise _no_coco(where, f"an image has no id or file_name: {_short(entry)}")
                size = entry.get("width"), entry.get("height")
                known = size if all(isinstance(side, int) and side > 0 for side in size) else None
                if entry["id"] in content.images:
                    content.twice |= dict.fromkeys((content.images[entry["id"]][0], entry["file_name"]), entry["id"])
                content.images[entry["id"]] = entry["file_name"], Annotated(size=known)  # type: ignore[arg-type]
            elif kind == "categories":
                content.categories[entry.get("id")] = str(entry.get("name"))
            else:
                # polygons take most of a file, and no memory here
                kept = {key: entry.get(key) for key in ("id", "category_id", "bbox", "iscrowd")}
                objects.append((entry.get("image_id"), kept))
                if len(objects) > _MAX_OBJECTS:
                    raise UserError(
                        f"{where} has more than {_MAX_OBJECTS:,} annotations; write several files",
                        code="annotations-too-large",
                    )
    if not {"images", "annotations"} <= kinds:
        return None
    seen: dict[Any, tuple[Any, dict[str, Any]]] = {}
    for image_id, entry in objects:
        if not isinstance(image_id, int | str) or image_id not in content.images:
            content.unlisted[image_id if isinstance(image_id, int | str) else None] += 1
            continue
        annotated, name = content.images[image_id][1], f"annotation {_short(entry['id'])}"
        if isinstance(entry["id"], int | str):
            first = seen.setdefault(entry["id"], (image_id, entry))
            if first[1] is not entry:
                is_same = first == (image_id, entry)
                what = "listed twice" if is_same else "its id is that of another annotation; both are kept"
                annotated.refused.append((name, what, not is_same))
                if is_same:
                    continue
        _add_coco_object(annotated, name, entry)
    return content


def _add_coco_object(annotated: Annotated, name: str, entry: Mapping[str, Any]) -> None:
    box, kind = entry["bbox"], entry["category_id"]
    if not (isinstance(box, list) and len(box) == 4 and all(_is_number(value) for value in box)):
        annotated.refused.append((name, "no box of four numbers", False))
        return
    x, y, width, height = map(float, box)
    key = kind if isinstance(kind, int | str) else str(kind)
    annotated.objects.append((name, x, y, x + width, y + height, key, int(bool(entry["iscrowd"]))))


def json_arrays(file: BinaryIO, where: str, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Elements of some arrays of a JSON object, one at a time: a file of any size in little memory.

    Yields:
        Name of an array and None where it begins, then the name and each element.

    Raises:
        UserError: it is empty or no JSON, or an element is too large.
    """
    stream, wanted = _JsonStream(file, where), set(names)
    if (first := stream.peek()) != "{":
        if not first:
            raise UserError(f"{where} is empty; export the annotations again, or remove it", code="damaged-annotations")
        return  # of another kind
    separator = stream.take("{")
    while (separator in "{,") and stream.peek() != "}":
        name = stream.value()
        stream.take(":")
        if stream.peek() == "[" and name in wanted:
            yield name, None
            separator = stream.take("[")
            while separator != "]" and stream.peek() != "]":
                yield name, stream.value()
                separator = stream.take(",]")
            if separator != "]":
                stream.take("]")
        else:
            stream.value()
        separator = stream.take(",}")


class _JsonStream:
    """A JSON text, value by value."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file, self._where = file, where
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder(parse_constant=lambda name: float(name.replace("Infinity", "inf")))

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or not self._fill(_CHUNK_BYTES):
                return self._text[self._at : self._at + 1]

    def take(self, allowed: str) -> str:
        """Move behind the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in allowed:
            raise self._damaged(f"{found!r} where one of {allowed!r} was expected" if found else "it ends too early")
        self._at += 1
        return found

    def value(self) -> Any:
        """Move behind the next value and return it."""
        self.peek()
        more = _CHUNK_BYTES
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._fill(more):  # a number may go on
                    self._at = end
                    return value
                continue
            except RecursionError:
                raise self._damaged("values lie too deep in one another") from None
            except ValueError as error:
                if len(self._text) - self._at > _MAX_ELEMENT:
                    raise self._damaged(f"a value has more than {_MAX_ELEMENT:,} characters") from None
                if not self._fill(more):
                    raise self._damaged(str(error)[:_MAX_REASON]) from None
                more *= 2

    def _fill(self, num_bytes: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(num_bytes)
        self._ended = not data
        try:
            text = self._decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._damaged(f"not UTF-8: {error.reason}") from None
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(data)

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self._where} is no JSON that can be read: {reason}; export the annotations again",
            code="damaged-annotations",
        )


def _no_coco(where: str, reason: str) -> UserError:
    return UserError(f"{where} is not as COCO asks: {reason}; export it again", code="damaged-annotations")


# --- Pascal VOC


def _voc(tree: Tree, storage: Storage, files: Mapping[str, File]) -> _Found | None:
    """Pixels are counted from 1, and a box includes both corners (Everingham et al., VOC development kit, 2012)."""
    xml = [file for path, file in files.items() if path.lower().endswith(".xml")]
    read = {path: text for path, text in _texts(storage, xml, _MAX_XML_BYTES) if "<annotation" in text.value}
    if not read:
        return None
    index = _Index(files)
    listed = {
        split: set(tree.read(path).decode(errors="replace").split()) if path in files else None
        for split in ("train", "val")
        for path in [next((each for each in files if each.endswith(f"{_LISTS}/{split}.txt")), "")]
    }
    images: dict[str, tuple[File, str, Annotated]] = {}
    refused: dict[str, str] = {}
    for path, text in sorted(read.items()):
        stem = PurePosixPath(path).stem
        split = split_of(path)
        if listed["train"] and listed["val"]:
            split = next((name for name, stems in listed.items() if stems and stem in stems), None)
        if split is None:
            continue
        try:
            annotated, name = _voc_image(text.value)
        except (ValueError, ElementTree.ParseError) as error:
            refused[path] = f"no annotations of Pascal VOC: {str(error)[:_MAX_REASON]}"
            continue
        file = index.find(name or f"{stem}.jpg", path) or index.of_stem(stem, path)
        if file is None:
            refused[name or stem] = f"{path} names it, and it is not there"
        elif file.path in images:
            refused[path] = f"a second file of {file.path}"
        else:
            images[file.path] = (file, split, annotated)
    refused |= _unnamed(files, images, refused, "no XML file names it") if listed["train"] is None else {}
    return _Found(images=images, classes=None, refused=refused)


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
    own = {path: found for path, found in own.items() if split_of(path) is not None}
    labelled = {path: next((each for each in paths if each in texts), "") for path, paths in own.items()}
    if not any(labelled.values()):
        return None
    read = dict(_texts(storage, [files[path] for path in labelled.values() if path], MAX_TEXT_BYTES))
    images: dict[str, tuple[File, str, Annotated]] = {}
    refused: dict[str, str] = {}
    for path, label_path in labelled.items():
        annotated = Annotated(relative=True)
        if label_path and read[label_path].problem:
            refused[path] = f"its labels {label_path} can't be read: {read[label_path].problem}"
            continue
        for number, line in enumerate(read[label_path].value.splitlines() if label_path else (), 1):
            if line.strip():
                _add_yolo_object(annotated, f"line {number}", line)
        images[path] = (files[path], split_of(path) or "", annotated)
    used = set(labelled.values())
    folders = {path.rpartition("/")[0] for path in used if path}
    for path in sorted(texts):
        if path not in used and path.rpartition("/")[0] in folders and split_of(path) is not None:
            refused[path] = "labels of an image that is not there"
    if names is None:
        most = max((kind for *_, annotated in images.values() for *_, kind, _ in annotated.objects), default=-1)
        names = tuple(str(label) for label in range(min(int(most) + 1, 10_000)))
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
        annotated.refused.append(
            (name, f"in pixels, and YOLO asks for shares of the image's sides: {_short(line)}", False)
        )
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
    return None


# --- all formats


class _Index:
    """Finds images that annotations name."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self._files = files
        self._by_name: dict[str, list[File]] = {}
        self._by_stem: dict[str, list[File]] = {}
        for path, file in files.items():
            if is_image_name(path):
                name = path.rpartition("/")[2]
                self._by_name.setdefault(name, []).append(file)
                self._by_stem.setdefault(name.rpartition(".")[0], []).append(file)

    def find(self, name: str, named_in: str) -> File | None:
        """The image of this path beside or below the file that names it, or the only one of the name."""
        name = name.replace("\\", "/").lstrip("./")
        return self._best(self._by_name.get(name.rpartition("/")[2], []), name, named_in)

    def of_stem(self, stem: str, named_in: str) -> File | None:
        """The same by the name without its end."""
        return self._best(self._by_stem.get(stem, []), "", named_in)

    @staticmethod
    def _best(found: list[File], name: str, named_in: str) -> File | None:
        """The image whose path ends as it was named; of several of the same split, nearest, in images/."""
        found = [file for file in found if f"/{file.path}".endswith(f"/{name}")] or found
        parts = named_in.split("/")[:-1]

        def nearness(file: File) -> tuple[bool, int, bool]:
            own = file.path.split("/")
            shared = next(
                (at for at, pair in enumerate(zip(own, parts, strict=False)) if pair[0] != pair[1]), len(parts)
            )
            return split_of(file.path) == split_of(named_in), shared, "images" in own[:-1]

        ranked = sorted(found, key=nearness, reverse=True)
        if len(ranked) > 1 and nearness(ranked[0]) == nearness(ranked[1]):
            return None
        return ranked[0] if ranked else None


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
    folders = {path.rpartition("/")[0] for path in images}
    return {
        path: reason
        for path in files
        if is_image_name(path) and path.rpartition("/")[0] in folders and path not in images and path not in refused
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 and math.isfinite(value)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if _is_number(value) else None


def _short(value: Any) -> str:
    return repr(value)[:60]
