"""Trees whose folders are the classes, on a disk, behind a URI or in an archive.

One folder per class, train/ and val/ of them, and ImageNet as Kaggle packs it.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from components.common.contracts.errors import UserError
from components.common.contracts.foreign import MAX_FILE_BYTES
from components.common.data.image_files import open_image
from components.common.data.places import (
    MAX_TEXT_BYTES,
    LocalPlace,
    RemotePlace,
    check_size,
    is_below,
    is_uri,
    nothing_at,
    translate_errors,
)
from components.common.tasks import TASKS
from components.preprocess.sources.samples import (
    SYNSET_MAPS,
    TEST_NAMES,
    TRAIN_NAMES,
    VAL_NAMES,
    ClassNames,
    FileStorage,
    Options,
    Sample,
    Source,
    Storage,
    ZipEntry,
    check_names_differ,
    check_two_classes,
    hold_out,
    parse_class_names,
    plain_names,
    read_sample,
    split_of,
    with_refused,
)

_MAX_PATH_BYTES = 4096  # of an archive's member, as Linux' longest path
_MAX_KEPT_BYTES = 1 << 29  # of the paths and texts of all its members, in memory
_MAX_NAME_CHARACTERS = 1 << 28  # of all folders of a list; each is known by the whole of its path
_WANTED = "DIR/<class>/image.jpg for two classes or more, or DIR/train/<class>/ and DIR/val/<class>/"
_KAGGLE_BASE = "ILSVRC/Data/CLS-LOC"
_SOLUTION = "LOC_val_solution.csv"
_ANNOTATIONS = ("annotations", "labels")  # folders of other tasks, in small letters
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


class File(NamedTuple):
    """A file of a tree."""

    path: str
    size_bytes: int
    offset: int = -1  # as Sample's, like what follows
    zipped: ZipEntry | None = None


@dataclass(kw_only=True)
class Listing:
    """The content of an archive."""

    name: str  # of the archive, in messages
    files: dict[str, File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)  # why an image must not be read, by path
    texts: dict[str, bytes] = field(default_factory=dict)  # content of a tar's .cls files
    kept_bytes: int = 0

    def add(self, member: File, *, is_folder: bool, is_regular: bool) -> str:
        """Take a member. Of members with the same name the last one counts, as when they are extracted.

        Returns:
            Its path in the shortest form; empty for what is no file that may be read.

        Raises:
            UserError: its path is too long, or all together are.
        """
        if (num_bytes := len(member.path.encode(errors="surrogateescape"))) > _MAX_PATH_BYTES:
            raise damaged(self.name, f"has a path of {num_bytes:,} bytes, and at most {_MAX_PATH_BYTES:,} are read")
        self.keep(len(member.path) * (1 if member.path.isascii() else 4))  # as Python has them in memory
        path = safe_path(member.path)
        if not is_visible(member.path):
            return ""
        if path and is_folder:
            self.folders.add(path)
            return ""
        name = path or member.path
        self.files.pop(name, None)
        self.refused.pop(name, None)
        self.texts.pop(name, None)
        if path and is_regular:
            self.files[path] = member._replace(path=path)
            return path
        if path is None and not is_folder:
            self.refused[name] = "a path out of the archive"
        elif path and is_image_name(name):
            self.refused[name] = "no regular file of the archive"
        return ""

    def keep(self, num_bytes: int) -> None:
        """Count what a member takes. Raises UserError."""
        self.kept_bytes += num_bytes
        if self.kept_bytes > _MAX_KEPT_BYTES:
            raise UserError(
                f"{self.name} has paths and labels of more than {_MAX_KEPT_BYTES:,} bytes; pack it as several tars, "
                "or shorten its paths",
                code="too-many-members",
            )


class LocalTree:
    """A folder of this machine. Links are followed as long as they stay inside.

    Paths are relative to the tree, with forward slashes; "" is the tree itself.
    """

    def __init__(self, place: LocalPlace) -> None:
        self.name = place.name
        self.unreadable: dict[str, str] = {}  # links that `files` found and left out, as with_refused takes them
        self._place = place

    def folders(self, path: str) -> list[str]:
        """Names of the sub-folders, sorted.

        Raises:
            UserError: they can't be read, or one is a link to the folder it lies in or to one above.
        """
        names = [entry.name for entry in self._scan(path) if _is_folder(entry)]
        here = self._real(path)
        for name in names:
            real = self._real(joined(path, name))
            if here == real or is_below(here, real):
                raise UserError(
                    f"{shown(self.name, joined(path, name))} is a link to {real}, in which it lies itself, so it is no "
                    "folder of images; remove the link",
                    code="link-loop",
                )
        return checked(names, shown(self.name, path))

    def names(self, path: str) -> list[str]:
        """Names of the files directly in a folder, sorted."""
        return [entry.name for entry in self._scan(path) if not _is_folder(entry)]

    def files(self, path: str) -> Iterator[File]:
        """All files below a folder: its own first, then those of each sub-folder, sorted by name.

        A folder that several links lead to is listed once. Links to what can't be read are left out.
        """
        root = self._place.root
        seen = {root, *(self._real(str(above)) for above in PurePosixPath(path).parents)} if path else set()
        waiting = [path]
        while waiting:
            current = waiting.pop()
            if (real := self._real(current)) in seen:
                continue
            seen.add(real)
            inside = []
            for entry in self._scan(current):
                relative = joined(current, entry.name)
                if _is_folder(entry):
                    if not entry.is_symlink() or is_below(real := self._real(relative), root) or real == root:
                        inside.append(relative)
                    else:
                        self.unreadable[relative] = ""
                elif entry.is_symlink() and not self._place.has_file(relative):
                    self.unreadable[relative] = ""
                else:
                    yield File(relative, self._place.size_bytes(relative))
            waiting += reversed(inside)

    def read(self, path: str) -> bytes:
        """The bytes of a file. Raises OSError or Unreadable."""
        return self._place.read(path, most_bytes=MAX_TEXT_BYTES)

    def open(self, path: str) -> BinaryIO:
        """A file of any size, to read from its beginning. Raises OSError or Unreadable."""
        return self._place.open(path)

    def _real(self, path: str) -> str:
        return os.path.realpath(os.path.join(self._place.root, path))

    def _scan(self, path: str) -> list[os.DirEntry[str]]:
        full = os.path.join(self._place.root, path)
        if path and not is_below(real := os.path.realpath(full), self._place.root) and real != self._place.root:
            raise UserError(
                f"{shown(self.name, path)} is a link out of the data folder, to {real}; put a copy of that folder in "
                "its place (cp -rL), or mount it there",
                code="link-out",
            )
        try:
            with os.scandir(full) as entries:
                return sorted((entry for entry in entries if is_visible(entry.name)), key=lambda entry: entry.name)
        except OSError as error:
            message = f"can't read {shown(self.name, path)}: {error.strerror}; make it readable for you (chmod -R u+rX)"
            raise UserError(message, code="no-permission") from None


class ListedTree:
    """A tree that is known from a list of its files."""

    def __init__(self, name: str, files: Iterable[File], storage: Storage, folders: Iterable[str] = ()) -> None:
        """`folders` need only hold those without files."""
        self.name = name
        self._files: dict[str, list[File]] = {folder: [] for folder in folders}
        self._folders: dict[str, set[str]] = {}
        self._storage = storage
        for file in files:
            self._files.setdefault(file.path.rpartition("/")[0], []).append(file)
        num_characters = 0
        for folder in self._files:
            while folder:
                above, _, last = folder.rpartition("/")
                below = self._folders.setdefault(above, set())
                if last in below:
                    break
                below.add(last)
                num_characters += len(folder)
                folder = above
            if num_characters > _MAX_NAME_CHARACTERS:
                message = f"{name} has too many folders, or too many in one another; take the odd ones away"
                raise UserError(message, code="too-many-folders")

    def folders(self, path: str) -> list[str]:
        """As LocalTree."""
        return checked(sorted(self._folders.get(path, ())), shown(self.name, path))

    def names(self, path: str) -> list[str]:
        """As LocalTree."""
        return sorted(file.path.rpartition("/")[2] for file in self._files.get(path, ()))

    def files(self, path: str) -> Iterator[File]:
        """As LocalTree."""
        waiting = [path]
        while waiting:
            current = waiting.pop()
            yield from sorted(self._files.get(current, ()))
            waiting += [joined(current, name) for name in sorted(self._folders.get(current, ()), reverse=True)]

    def read(self, path: str) -> bytes:
        """As LocalTree."""
        file = self._file(path)
        check_size(file.size_bytes, MAX_TEXT_BYTES)
        return self._storage.read(sample_of(file, 0))

    def open(self, path: str) -> BinaryIO:
        """As LocalTree. Raises UserError: a file within an archive is too large for memory."""
        if isinstance(self._storage, FileStorage):
            return self._storage.place.open(path)
        file = self._file(path)
        if file.size_bytes > MAX_FILE_BYTES:
            raise UserError(
                f"{shown(self.name, path)} has {file.size_bytes:,} bytes, and a file within an archive is read into "
                f"memory, of at most {MAX_FILE_BYTES:,} bytes; unpack the archive, and name its folder",
                code="annotations-too-large",
                setting="data",
            )
        return io.BytesIO(self._storage.read(sample_of(file, 0)))

    def _file(self, path: str) -> File:
        for file in self._files.get(path.rpartition("/")[0], ()):
            if file.path == path:
                return file
        raise FileNotFoundError(path)


Tree = LocalTree | ListedTree


def remote_tree(place: RemotePlace) -> tuple[ListedTree, dict[str, str]]:
    """List a folder behind a URI.

    Returns:
        The tree, and why images that are not in it must not be read, by path.

    Raises:
        UserError: it can't be listed, or there is nothing.
    """
    with translate_errors(place.name):
        driver, root = place.file_system()
        found = driver.find(root, detail=True)
    files, refused = {}, {}
    for full, info in found.items():
        raw = str(full)[len(root.rstrip("/")) :].removeprefix("/")
        path = safe_path(raw)
        if not is_below(str(full), root) or raw.endswith("/") or not is_visible(raw):
            continue
        if path is None or info.get("type") not in ("file", None):
            if is_image_name(raw):
                refused[raw] = "a path out of the data folder" if path is None else "a link, or no regular file"
        else:
            files[path] = File(path, int(info.get("size") or 0))
    if not files and not refused:
        raise nothing_at(place.name)
    return ListedTree(place.name, files.values(), FileStorage(place)), refused


def sample_of(file: File, label: int) -> Sample:
    """A file whose class is known."""
    return Sample(path=file.path, label=label, size_bytes=file.size_bytes, offset=file.offset, zipped=file.zipped)


def safe_path(raw: str) -> str | None:
    """A path of an archive or store in its shortest form; None for one that leads out of it."""
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    return None if raw.startswith("/") or ".." in parts or "\0" in raw or not parts else "/".join(parts)


def is_visible(path: str) -> bool:
    """True if no part of it is hidden or what macOS adds to archives. "." and ".." are not hidden."""
    return not any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in path.split("/"))


def is_image_name(path: str) -> bool:
    """True if a name promises an image that can be read."""
    return path.lower().endswith(_IMAGE_SUFFIXES)


def joined(folder: str, name: str) -> str:
    """`name` in `folder`, which may be ""."""
    return f"{folder}/{name}" if folder else name


def shown(root: str, path: str) -> str:
    """Return the name of `path` in messages."""
    return f"{root.rstrip('/')}/{path}" if path else root


def checked(names: list[str], where: str) -> list[str]:
    """Folder names, which become class names and travel in JSON.

    Raises:
        UserError: one is not UTF-8.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where} has a folder whose name is not UTF-8: {name!r}; rename it", code="not-utf8"
            ) from None
    return names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def folder_source(tree: Tree, storage: Storage, options: Options) -> Source:
    """List the images of a tree and split them.

    Raises:
        UserError: no classes, no images, or too few images of a class to split.
    """
    base = _KAGGLE_BASE if _is_kaggle_imagenet(tree) else ""
    folders = tree.folders(base)
    where = shown(tree.name, base)
    if not folders:
        raise _no_class_folders(where)
    if _has_splits(tree, base, folders):
        return _presplit(tree, base, folders, storage, options)
    classes = _classes(tree, folders, base, options)
    if options.names is None:
        refuse_splits(where, folders, " or, if they are classes, list them in preprocess.class_names_file")
    of_folder = {folder: _samples(tree, folder, classes.labels[folder]) for folder in folders}
    named = {folder for folder, own in of_folder.items() if any(is_image_name(sample.path) for sample in own)}
    others = [folder for folder, own in of_folder.items() if own and folder not in named] if named else []
    if others := [folder for folder in others if not any(_opens(storage, each) for each in of_folder[folder][:4])]:
        raise UserError(
            f"{shown(tree.name, others[0])} holds no file that is named as an image, so it is no class; take it away, "
            "or name the folder that holds the classes",
            code="too-few-images",
        )
    for folder, own in of_folder.items():
        if len(again := sorted(_folders_in(folder, own) & {*folders} - {folder})) > 1:
            raise UserError(
                f"{shown(tree.name, joined(base, folder))} holds {'/, '.join(again[:5])}/, which are classes beside "
                "it, so it is no class; take it away, or name the folder that holds the classes alone",
                code="nested-classes",
                setting="data",
            )
    samples = [sample for own in of_folder.values() for sample in own]
    splits = hold_out(samples, classes.names, options, labels={classes.labels[folder] for folder in folders})
    return Source(classes=classes.names, splits=splits, storage=storage)


def archive_source(data: str, listing: Listing, storage: Storage, options: Options) -> Source:
    """List the images of an archive. Paths of samples begin below its only top folder, if it has one.

    Raises:
        UserError: as folder_source.
    """
    tree = ListedTree(data, listing.files.values(), storage, listing.folders)
    tops = tree.folders("")
    if len(tops) > 1 or _is_kaggle_imagenet(tree) or not (tops and tree.folders(tops[0])):
        return with_refused(options.of_tree(tree, storage, options), listing.refused)
    top = f"{tops[0]}/"
    files = [file._replace(path=file.path[len(top) :]) for file in listing.files.values() if file.path.startswith(top)]
    folders = [folder[len(top) :] for folder in listing.folders if folder.startswith(top)]
    # "../": no path of the tree begins so
    refused = {
        path[len(top) :] if path.startswith(top) else f"../{path}": reason for path, reason in listing.refused.items()
    }
    return with_refused(options.of_tree(ListedTree(data, files, storage, folders), storage, options), refused)


def damaged(name: str, problem: str) -> UserError:
    """The error about an archive that can't be read."""
    return UserError(f"{name} {problem}; make it again, or fetch it again", code="damaged-archive")


def _is_kaggle_imagenet(tree: Tree) -> bool:
    """True if train/ lies three folders deep, as in Kaggle's archive of ImageNet."""
    path = ""
    for name in (*_KAGGLE_BASE.split("/"), "train"):
        if name not in tree.folders(path):
            return False
        path = joined(path, name)
    return True


def _no_class_folders(where: str) -> UserError:
    return UserError(
        f"{where} has no sub-folders, so no classes; arrange the images as {_WANTED}", code="no-class-folders"
    )


def _has_splits(tree: Tree, base: str, folders: Sequence[str]) -> bool:
    """True if there is train/ or val/. One of them without folders of its own, among others, is a class: railways."""
    found = [name for name in _split_names(folders) if name in folders]
    return len(found) == 2 or (bool(found) and (len(folders) == 1 or bool(tree.folders(joined(base, found[0])))))


def _named(folders: Sequence[str], names: Sequence[str]) -> list[str]:
    """Folders with one of these names in any case."""
    return [folder for folder in folders if folder.lower() in names]


def _split_names(folders: Sequence[str]) -> tuple[str, str]:
    """Return the names of the splits. "valid" is one only beside train/: without, it may be a class, like "invalid"."""
    train = _named(folders, TRAIN_NAMES)
    val = _named(folders, VAL_NAMES if train else ("val",))
    return train[0] if train else "train", val[0] if val else "val"


def _presplit(tree: Tree, base: str, folders: Sequence[str], storage: Storage, options: Options) -> Source:
    split_names = _split_names(folders)
    missing = [name for name in split_names if name not in folders]
    where = shown(tree.name, base)
    for called, code in ((TRAIN_NAMES, "two-training-folders"), (VAL_NAMES, "two-validation-folders")):
        if len(both := _named(folders, called)) > 1:
            message = f"{where} has {'/ and '.join(both)}/, which are called the same split; keep one of them there"
            raise UserError(message, code=code)
    if missing:
        raise UserError(
            f"{where} has {'/, '.join(folders[:5])}/ but no {missing[0]}/; it needs both train/ and val/. Add "
            f"{where}/{missing[0]}, or name the folder that holds the classes, and it is split for you",
            code="missing-split",
        )
    train, val = (joined(base, name) for name in split_names)
    of_train, of_val = tree.folders(train), tree.folders(val)
    where_train, where_val = shown(tree.name, train), shown(tree.name, val)
    if not of_train:
        raise _no_class_folders(where_train)
    if extra := sorted(set(of_val) - set(of_train)):
        raise UserError(
            f"{where_val} has classes that train/ has not: {', '.join(extra[:5])}. Add them to train/ or remove "
            "them; folder names must agree to the letter",
            code="unknown-classes",
        )
    classes = _classes(tree, of_train, train, options)
    listed: dict[str, list[Sample]] = {"train": [], "val": []}
    for split, path, names in (("train", train, of_train), ("val", val, of_val)):
        for folder in sorted(names, key=lambda name: classes.labels[name]):
            listed[split] += _samples(tree, joined(path, folder), classes.labels[folder])
    unlabelled: dict[str, str] = {}
    if not of_val and tree.names(val):
        listed["val"], unlabelled = _flat_val(tree, base, val, classes)
    for name, samples in zip(split_names, listed.values(), strict=True):
        if not samples:
            raise UserError(
                f"{where}/{name} holds no files; put images into its folders, one folder per class", code="empty-split"
            )
    return with_refused(Source(classes=classes.names, splits=listed, storage=storage), unlabelled)


def _flat_val(tree: Tree, base: str, val: str, classes: ClassNames) -> tuple[list[Sample], dict[str, str]]:
    """ImageNet's validation images in one folder, with their labels in a table.

    Returns:
        The samples, and why others can't be used.
    """
    homes = [home for home in dict.fromkeys(("", base)) if _SOLUTION in tree.names(home)]
    where = shown(tree.name, val)
    if not homes:
        raise UserError(
            f"{where} holds files but no folder per class; arrange its images as in train/, or put ImageNet's "
            f"{_SOLUTION} into {tree.name}",
            code="no-validation-labels",
        )
    wnids = _solution(tree, joined(homes[0], _SOLUTION))
    samples, unlabelled = [], {}
    for file in tree.files(val):
        image_id = file.path.rpartition("/")[2].rpartition(".")[0]
        wnid = wnids.get(image_id)
        if wnid is None:
            unlabelled[file.path] = f"{_SOLUTION} does not name it"
        elif wnid not in classes.labels:
            message = f"{_SOLUTION} gives {image_id} the class {wnid}, which train/ has not; add it to train/"
            raise UserError(message, code="unknown-classes")
        else:
            samples.append(sample_of(file, classes.labels[wnid]))
    return samples, unlabelled


def _solution(tree: Tree, path: str) -> Mapping[str, str]:
    """The wnid of each ImageId."""
    wnids = {}
    where = shown(tree.name, path)
    rows = csv.DictReader(io.StringIO(read_text(tree, path)))
    if not {"ImageId", "PredictionString"} <= set(rows.fieldnames or ()):
        message = f"{where} needs the columns ImageId,PredictionString; take the file that comes with ImageNet"
        raise UserError(message, code="invalid-solution-table")
    for number, row in enumerate(rows, 2):
        words = (row["PredictionString"] or "").split()
        if not words:
            message = f"{where}, row {number}: PredictionString is empty; take the file that comes with ImageNet"
            raise UserError(message, code="invalid-solution-table")
        wnids[row["ImageId"]] = words[0]
    return wnids


def _refuse_other_tasks(tree: Tree, base: str, folders: Sequence[str]) -> None:
    """Raise UserError where folders are no classes, but hold images with masks, or with boxes in other files."""
    paths = {name.lower(): joined(base, name) for name in folders}
    boxes = [
        path
        for name, path in paths.items()
        if name in _ANNOTATIONS and not any(is_image_name(file.path) for file in tree.files(path))
    ]
    if "images" in paths:
        boxes += [joined(base, name) for name in tree.names(base) if name.lower().endswith(".json")]
    masks = [paths["masks"]] if {"images", "masks"} <= paths.keys() else []
    if boxes or masks:
        found = {"boxes": boxes, "mask": masks}
        fits = " or ".join(f"`enginery run {each.name}`" for each in TASKS.values() if found.get(each.label_member))
        raise UserError(
            f"{shown(tree.name, base)} has no folder per class, but images and {', '.join([*masks, *boxes][:5])}, as "
            f"other tasks have: take {fits}. To classify, arrange the images as {_WANTED}",
            code="other-task",
            setting="data",
        )


def refuse_splits(where: str, folders: Sequence[str], fix: str = "") -> None:
    """Raise UserError where most of these folders are named as splits, or one as that for testing, beside others."""
    splits = {name: split for name in folders if (split := split_of(name)) != ""}
    are_most = len(set(splits.values())) > 1 and 2 * len(splits) >= len(folders)
    if are_most or (len(folders) > 1 and _named(folders, TEST_NAMES)):
        raise UserError(
            f"{where} has {'/, '.join([*splits][:5])}/, which are named as splits where classes are expected; arrange "
            f"the images as DIR/train/<class>/ and DIR/val/<class>/, or name a table of paths and labels{fix}",
            code="splits-as-classes",
            setting="data",
        )


def _classes(tree: Tree, folders: Sequence[str], base: str, options: Options) -> ClassNames:
    where = shown(tree.name, base)
    if options.names is None:
        _refuse_other_tasks(tree, base, folders)
        check_names_differ(folders, where)
    classes = options.names or _from_synset_map(tree, folders) or plain_names(folders)
    unknown = sorted(set(folders) - set(classes.labels))
    if unknown:
        raise UserError(
            f"{where} has folders that {'class_names_file' if options.names else 'the synset map'} does not name: "
            f"{', '.join(unknown[:5])}. Add their names to the file, or take the folders away",
            code="unknown-classes",
            setting="preprocess.class_names_file" if options.names else "",
        )
    fix = "Add a folder of images of another class, or name the folder above if this one is a class"
    if len(classes.names) < 2 and folders and tree.folders(joined(base, folders[0])):
        fix = f"If the folders in {shown(where, folders[0])} are the classes, name that one"
    check_two_classes(classes.names, where, fix)
    return classes


def _from_synset_map(tree: Tree, folders: Sequence[str]) -> ClassNames | None:
    """Return the classes of a synset map in the root that there are folders of; None where they have other names."""
    found = [name for name in SYNSET_MAPS if name in tree.names("")]
    if not found:
        return None
    synsets = parse_class_names(read_text(tree, found[0]), shown(tree.name, found[0]), is_fetched=is_uri(tree.name))
    if not set(folders) & set(synsets.wnids):
        return None
    unknown = set(folders) - set(synsets.wnids)
    return synsets if unknown else synsets.only(folders)


def read_text(tree: Tree, path: str) -> str:
    """The content of a text file in UTF-8. Raises UserError."""
    where = shown(tree.name, path)
    with translate_errors(where):
        data = tree.read(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error}); write it again in that encoding", code="not-utf8") from None


def _folders_in(folder: str, samples: Iterable[Sample]) -> set[str]:
    """Names of the folders directly in a folder of these samples."""
    inside = (sample.path[len(folder) + 1 :].rpartition("/")[0].partition("/")[0] for sample in samples)
    return {name for name in inside if name}


def _opens(storage: Storage, sample: Sample) -> bool:
    try:
        open_image(read_sample(storage, sample))
    except Exception:  # Pillow's parsers let everything through
        return False
    return True


def _samples(tree: Tree, folder: str, label: int) -> list[Sample]:
    samples = [sample_of(file, label) for file in tree.files(folder)]
    refuse_splits(shown(tree.name, folder), sorted(_folders_in(folder, samples)))
    links = tree.unreadable if not samples and isinstance(tree, LocalTree) else ()
    if link := next((link for link in links if is_below(link, folder)), ""):
        raise UserError(
            f"{shown(tree.name, folder)} holds only links to nothing in the data folder, such as {link}; put copies "
            "in their place (cp -rL)",
            code="link-out",
        )
    return samples
