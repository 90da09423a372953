"""Images with boxes, in the formats that users have: COCO JSON, Pascal VOC XML, YOLO text files."""

import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from xml.etree import ElementTree

import yaml

from components.common.contracts.errors import UserError
from components.common.data.places import MAX_TEXT_BYTES, Unreadable, check_size, translate_errors
from components.preprocess.sources.annotations import (
    MAX_NUMBER,
    Annotated,
    Found,
    Index,
    composed,
    example,
    folder_of,
    quoted,
    same_names,
    unnamed,
)
from components.preprocess.sources.coco import coco
from components.preprocess.sources.folders import File, Tree, is_image_name, joined, sample_of, shown
from components.preprocess.sources.samples import (
    VAL_NAMES,
    ClassNames,
    Options,
    Source,
    Storage,
    parse_class_names,
    plain_names,
    split_of,
)

WANTED = (
    "put the annotations beside the images: COCO JSON (annotations.json or instances_train.json), Pascal VOC "
    "(Annotations/*.xml) or YOLO (labels/*.txt and data.yaml), in train/ and val/ or in one folder; "
    "export other formats as COCO JSON"
)
_MAX_UNNAMED = 10_000  # classes
_MAX_XML_BYTES = 1 << 22
_MAX_REASON = 200
_MOST_SHARE = 2.0  # of YOLO's numbers: a box may reach out of the image
_NUM_READERS = 8  # of many small files
_YAML_FILES = ("data.yaml", "data.yml", "dataset.yaml")
_NAME_FILES = (*_YAML_FILES, "classes.txt", "obj.names", "_darknet.labels")
_NAME_ENDS = (".yaml", ".yml", *_NAME_FILES)
_MAX_OTHER_YAML_BYTES = 1 << 19  # of a file whose name promises no names of classes; takes seconds
_MAX_FOLDERS = 50  # of a path that are looked at
_LISTS = "ImageSets/Main"
_LIST_SPLITS = {"train.txt": "train", **{f"{name}.txt": "val" for name in VAL_NAMES}, "test.txt": "test"}
_FLAG = re.compile(r"\s+-?[01]$")  # of lists: whether a class is in the image
_ABSOLUTE = re.compile(r"/|\\|[A-Za-z]:")
_VOC = re.compile(r"<annotation[\s/>]")


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
            f"{tree.name} has annotations, and no object in them{example(found.refused)}; {WANTED}", code="no-objects"
        )
    return found.source(found.classes, tree.name, storage, options, files)


# --- Pascal VOC


def _voc(tree: Tree, storage: Storage, files: Mapping[str, File]) -> Found | None:
    """Pixels are counted from 1, and a box includes both corners (Everingham et al., VOC development kit, 2012)."""
    xml = [file for path, file in files.items() if path.lower().endswith(".xml")]
    texts = dict(_texts(storage, xml, _MAX_XML_BYTES))
    read = {path: text for path, text in texts.items() if _VOC.search(text.value)}
    if not read:
        return None
    folders = {folder_of(path) for path in read}
    index = Index(files)
    listed = _voc_lists(tree, files, texts)
    is_listed = all(any(listed[split].values()) for split in ("train", "val"))
    images: dict[str, tuple[File, str, Annotated]] = {}
    refused = {
        path: f"no annotations of Pascal VOC: {text.problem or 'empty'}"
        for path, text in texts.items()
        if not text.value and folder_of(path) in folders
    }
    kinds: set[str] = set()
    parsed: dict[str, tuple[Annotated, str, str]] = {}  # with the split and the image's name
    for path, text in sorted(read.items()):
        stem = PurePosixPath(path).stem
        in_list = next((name for name, lists in listed.items() if _is_in(lists, path)), None)
        split = in_list if in_list or is_listed else split_of(folder_of(path))
        if split is None or split == "test":
            continue
        try:
            annotated, name = _voc_image(text.value)
            parsed[path] = _without_copies(annotated), split, name or f"{stem}.jpg"
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
    if not listed["train"]:
        not_used = {PurePosixPath(path).stem for path in texts if path in refused or _is_in(listed["test"], path)}
        others = unnamed(files, images, refused, "no XML file names it")
        refused |= {path: why for path, why in others.items() if PurePosixPath(path).stem not in not_used}
    for split in ("train", "val") if is_listed else ():
        for each, names in listed[split].items():
            missing = names - {end for path in texts if _is_beside(path, each) for end in _ends(path)}
            refused |= dict.fromkeys(missing, f"{each} names it, and it has no XML file")
    return Found(images=images, classes=plain_names(sorted(kinds)), refused=refused)


def _voc_lists(tree: Tree, files: Mapping[str, File], xml: Collection[str]) -> dict[str, dict[str, set[str]]]:
    """What each list of a split names, by split and the list's path; a flag behind a name is no part of it.

    Args:
        tree: with the lists.
        files: of the tree.
        xml: paths of XML files.
    """
    listed: dict[str, dict[str, set[str]]] = {"train": {}, "val": {}, "test": {}}
    lines_of: list[tuple[set[str], list[list[str]]]] = []  # the names of a list, and how each line may be meant
    for path in files:
        folder, _, name = path.rpartition("/")
        if (split := _LIST_SPLITS.get(name.lower())) is not None and f"/{folder}".endswith(f"/{_LISTS}"):
            lines = map(str.strip, tree.read(path).decode("utf-8-sig", errors="replace").splitlines())
            names = listed[split][path] = set[str]()
            meant = [[as_(each) for each in (line, _FLAG.sub("", line)) for as_ in (_bare, _stem)] for line in lines]
            lines_of.append((names, meant))
    wanted = {each for _, meant in lines_of for spellings in meant for each in spellings}
    known = {end for path in xml for end in _ends(path) if end in wanted} if wanted else set()
    for names, meant in lines_of:
        names |= {next((each for each in spellings if each in known), spellings[-1]) for spellings in meant} - {""}
    return listed


def _is_in(lists: Mapping[str, set[str]], path: str) -> bool:
    return any(_is_beside(path, each) and not names.isdisjoint(_ends(path)) for each, names in lists.items())


def _is_beside(path: str, listing: str) -> bool:
    return path.startswith(listing.rpartition(_LISTS)[0])


def _ends(path: str) -> list[str]:
    """Names of a file without its extension: alone, and with each of the folders it is in."""
    return _ends_of(path.rpartition(".")[0])


def _voc_image(text: str) -> tuple[Annotated, str]:
    """Raises ValueError or ParseError."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("it declares entities: remove its DOCTYPE")
    root = ElementTree.fromstring(text)  # noqa: S314  # without entities, and of bounded size
    if root.tag != "annotation":  # of several images, or of a namespace
        raise ValueError(f"its uppermost element is {quoted(root.tag)}, and not annotation")
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


def _yolo(tree: Tree, storage: Storage, files: Mapping[str, File]) -> Found | None:
    """A line per object: class, then centre and size in shares of the image, or a polygon's corners."""
    names, folder, description = _yolo_names(tree, files)
    splits = _yolo_splits(tree, files, folder, description)
    texts = sorted(path for path in files if path.lower().endswith(".txt") and _file_name(path) not in _NAME_FILES)
    paths = {_stem_path(path): path for path in texts}  # of twins x.txt, and not x.TXT
    own = {path: next((paths[e] for e in _label_paths(path) if e in paths), "") for path in splits}
    labelled = {path: own[path] for path, split in splits.items() if split is not None}
    if not any(labelled.values()):
        return None
    read = dict(_texts(storage, [files[path] for path in labelled.values() if path], MAX_TEXT_BYTES))
    images: dict[str, tuple[File, str, Annotated]] = {}
    refused: dict[str, str] = {}
    most = -1  # of all classes
    for path, label_path in labelled.items():
        annotated = Annotated(relative=True)
        if label_path and read[label_path].problem:
            refused[path] = f"its labels {label_path} can't be read: {read[label_path].problem}"
            continue
        for number, line in enumerate(read[label_path].value.splitlines() if label_path else (), 1):
            if line.strip():
                # keypoints come behind the box
                words = line.split()[: 5 if "kpt_shape" in description else None]
                _add_yolo_object(annotated, f"line {number}", words)
        images[path] = (files[path], splits[path] or "", _without_copies(annotated))
        most = max([most, *(kind for *_, kind, _ in annotated.objects)])
    used = set(own.values())
    folders = {folder_of(path) for path in labelled.values() if path}
    for path in paths.values():
        is_label = folder_of(path) in folders or "labels" in path.split("/")[:-1]
        if path not in used and is_label and split_of(folder_of(path)) is not None:
            refused[path] = "labels of an image that is not there"
    if names is None:
        names = tuple(str(label) for label in range(min(most + 1, _MAX_UNNAMED)))
    keys: dict[Any, int] = {label: label for label in range(len(names))}
    return Found(images=images, classes=ClassNames(names, keys), refused=refused)


def _label_paths(image: str) -> list[str]:
    """Return the places where YOLO looks for an image's labels: labels/ in place of images/, or beside it."""
    stem = _stem_path(image)
    parts = stem.split("/")
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    moved = ["/".join([*parts[:place], "labels", *parts[place + 1 :]]) for place in reversed(places)]
    return [*moved, stem]


def _stem_path(path: str) -> str:
    """What the paths of an image and of its labels share, without the suffix."""
    return composed(path.rpartition(".")[0])


def _add_yolo_object(annotated: Annotated, name: str, words: list[str]) -> None:
    values = [_number(word) for word in words]
    if None in values or len(values) < 5 or (len(values) > 5 and len(values) % 2 == 0):
        annotated.refused.append((name, "no class and box of five numbers", False))
        return
    kind, *rest = (float(value or 0) for value in values)
    if kind != int(kind):
        annotated.refused.append((name, f"unknown class: {kind:g}", False))
        return
    if max(rest) > _MOST_SHARE:
        what = f"in pixels, and YOLO asks for shares of the image's sides: {quoted(' '.join(words))}"
        annotated.refused.append((name, what, False))
        return
    if len(rest) == 4:
        x, y, width, height = rest
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    else:
        corners = (min(rest[::2]), min(rest[1::2]), max(rest[::2]), max(rest[1::2]))
    annotated.objects.append((name, *corners, int(kind), 0))


def _yolo_names(tree: Tree, files: Mapping[str, File]) -> tuple[tuple[str, ...] | None, str, Mapping[str, Any]]:
    """The classes' names in order, None where no file tells; folder and content of the YAML file that names them.

    Raises:
        UserError: the file can't be used, or another one beside it names other classes.
    """
    found: dict[str, tuple[str, ...]] = {}
    folder, description = "", dict[str, Any]()
    for depth, is_other, path in sorted(
        (path.count("/"), _file_name(path) not in _NAME_FILES, path)
        for path in files
        if path.lower().endswith(_NAME_ENDS)
    ):
        if found and depth > next(iter(found)).count("/"):
            break
        if is_other and (
            files[path].size_bytes > _MAX_OTHER_YAML_BYTES or any(_file_name(each) in _YAML_FILES for each in found)
        ):
            continue
        name, where, is_sure = _file_name(path), shown(tree.name, path), not is_other
        is_yaml = name.endswith((".yaml", ".yml"))
        text = tree.read(path).decode("utf-8-sig", errors="replace") if is_yaml or is_sure else ""
        content = _yaml(text, where, is_sure=is_sure) if is_yaml else {}
        if content.get("names"):
            found[path] = _names_of_yaml(content["names"], where)
            folder, description = folder_of(path), content
        elif is_sure and not is_yaml:
            found[path] = parse_class_names(text, where).names
    return same_names(found, tree.name) if found else None, folder, description


def _file_name(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _yaml(text: str, where: str, *, is_sure: bool) -> dict[str, Any]:
    """The content of a YAML file; nothing for one of another kind whose name promises nothing. Raises UserError."""
    try:
        content = yaml.load(text, yaml.BaseLoader) or {}  # noqa: S506  # strings alone: a class may be called no
    except (yaml.YAMLError, RecursionError):
        content = None
    if isinstance(content, dict):
        return content
    if is_sure:
        raise UserError(f"{where} is no YAML that can be read; write it again", code="damaged-annotations")
    return {}


def _names_of_yaml(names: Any, where: str) -> tuple[str, ...]:
    """Raises UserError."""
    if isinstance(names, dict) and sorted(names) == sorted(map(str, range(len(names)))):
        names = [names[str(label)] for label in range(len(names))]
    if isinstance(names, list) and all(isinstance(name, str) and len(name.strip().splitlines()) == 1 for name in names):
        return parse_class_names("\n".join(names), where).names
    seen = quoted(names) if isinstance(names, str) else "one is empty or holds others"  # any number of them
    raise UserError(
        f"{where} has names that are neither a list nor numbered from 0 to {len(names) - 1} without a gap; "
        "number the classes as the labels do"
        if isinstance(names, dict)
        else f"{where} has names that are no list of lines: {seen}; list the classes in the labels' order",
        code="damaged-annotations",
    )


def _yolo_splits(
    tree: Tree, files: Mapping[str, File], folder: str, description: Mapping[str, Any]
) -> dict[str, str | None]:
    """The split of each image, as split_of: what the YAML file of a folder says, if it has two, else its folder's.

    It names folders or lists of images, from where the data lay when it was written.
    """
    images = [path for path in files if is_image_name(path)]
    said: dict[str, str | None] = {}
    for split in ("train", "val"):
        entries = description.get(split)
        for entry in entries if isinstance(entries, list) else [entries]:
            ends = [joined(folder, end) for end in _places(entry, description.get("path"))]
            listed = next((end for end in ends if end in files and end.endswith(".txt")), None)
            if listed is not None:
                lines = tree.read(listed).decode("utf-8-sig", errors="replace").splitlines()
                own = [next((e for e in _ends_of(line) if joined(folder, e) in files), "") for line in lines]
                said |= {joined(folder, each): split for each in own if each}
            else:
                own = next(filter(None, ([path for path in images if path.startswith(f"{end}/")] for end in ends)), [])
                said |= dict.fromkeys(own, split)
    if {"train", "val"} <= set(said.values()):
        return {path: said.get(path) for path in images}
    return {path: split_of(folder_of(path)) for path in images}


def _places(entry: Any, root: Any) -> list[str]:
    """Paths that an entry of a YAML file can mean: of a path of another machine only the last folders are known."""
    if not isinstance(entry, str):
        return []
    ends = _ends_of(entry)
    roots = _ends_of(root)[:1] if isinstance(root, str) else []
    return ends if _ABSOLUTE.match(entry) else [*(joined(root, ends[0]) for root in roots if ends), *ends[:1]]


def _ends_of(path: str) -> list[str]:
    """A path with ever fewer of its first folders."""
    parts = [part for part in path.strip().replace("\\", "/").split("/") if part not in ("", ".", "..")]
    parts = parts[-_MAX_FOLDERS:]
    return ["/".join(parts[at:]) for at in range(len(parts))]


# --- both


def _without_copies(annotated: Annotated) -> Annotated:
    """Objects without ids are listed twice where all that is said of them is equal."""
    seen: set[tuple[Any, ...]] = set()
    own, annotated.objects = annotated.objects, []
    for name, *content in own:
        if (key := tuple(content)) in seen:
            annotated.refused.append((name, "listed twice", False))
        else:
            seen.add(key)
            annotated.objects.append((name, *content))
    return annotated


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
        except UnicodeDecodeError as error:
            return _Text("", f"not UTF-8 at byte {error.start}: save it in that encoding")
        except (OSError, Unreadable) as error:
            return _Text("", str(error)[:_MAX_REASON])

    with ThreadPoolExecutor(_NUM_READERS) as readers:
        yield from zip((file.path for file in files), readers.map(read, files), strict=True)


def _stem(path: str) -> str:
    """The name of an image, with or without its folder and extension."""
    return _bare(path).rpartition("/")[2]


def _bare(path: str) -> str:
    """The path of an image without an extension."""
    return path.rpartition(".")[0] if is_image_name(path) else path


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if -MAX_NUMBER < value < MAX_NUMBER else None
