"""Trees whose folders are the classes: one per class, train/ and val/ of them, and ImageNet as Kaggle packs it."""

import csv
import io
from collections.abc import Mapping, Sequence

from components.common.errors import UserError
from components.preprocess.sources.classnames import (
    SYNSET_MAPS,
    ClassNames,
    check_two_classes,
    parse_class_names,
    plain_names,
)
from components.preprocess.sources.places import told_plainly
from components.preprocess.sources.samples import Sample, Source, Storage, with_refused
from components.preprocess.sources.splits import VAL_NAMES, Options, hold_out
from components.preprocess.sources.trees import Tree, joined, sample_of, shown

_WANTED = "DIR/<class>/image.jpg for two classes or more, or DIR/train/<class>/ and DIR/val/<class>/"
_KAGGLE_BASE = "ILSVRC/Data/CLS-LOC"
_SOLUTION = "LOC_val_solution.csv"


def folder_source(tree: Tree, storage: Storage, options: Options) -> Source:
    """List the images of a tree and split them.

    Raises:
        UserError: no classes, no images, or too few images of a class to split.
    """
    base = _KAGGLE_BASE if is_kaggle_imagenet(tree) else ""
    folders = tree.folders(base)
    where = shown(tree.name, base)
    if not folders:
        raise UserError(f"{where} has no sub-folders, so no classes; arrange the images as {_WANTED}")
    if _has_splits(tree, base, folders):
        return _presplit(tree, base, folders, storage, options)
    classes = _classes(tree, folders, where, options)
    samples: dict[int, list[Sample]] = {}
    for folder in _by_label(folders, classes):
        label = classes.labels[folder]
        samples.setdefault(label, []).extend(_samples(tree, folder, label))
    splits = hold_out(samples, classes.names, options)
    return Source(classes=classes.names, splits=splits, storage=storage)


def is_kaggle_imagenet(tree: Tree) -> bool:
    """Whether train/ lies three folders deep, as in Kaggle's archive of ImageNet."""
    path = ""
    for name in (*_KAGGLE_BASE.split("/"), "train"):
        if name not in tree.folders(path):
            return False
        path = joined(path, name)
    return True


def _has_splits(tree: Tree, base: str, folders: Sequence[str]) -> bool:
    """Whether there is train/ or val/. One of them without folders of its own, among others, is a class: railways."""
    found = [name for name in _split_names(folders) if name in folders]
    return len(found) == 2 or (bool(found) and (len(folders) == 1 or bool(tree.folders(joined(base, found[0])))))


def _split_names(folders: Sequence[str]) -> tuple[str, str]:
    """How the two splits are called. "valid" is one only beside train/: without, it may be a class, like "invalid"."""
    val = next((name for name in VAL_NAMES if name in folders), "val")
    return "train", val if "train" in folders else "val"


def _presplit(tree: Tree, base: str, folders: Sequence[str], storage: Storage, options: Options) -> Source:
    split_names = _split_names(folders)
    missing = [name for name in split_names if name not in folders]
    where = shown(tree.name, base)
    if len(both := [name for name in VAL_NAMES if name in folders]) > 1:
        raise UserError(f"{where} has {'/ and '.join(both)}/, which are called the same split; keep one of them there")
    if missing:
        raise UserError(
            f"{where} has {'/, '.join(folders[:5])}/ but no {missing[0]}/; it needs both train/ and val/. Add "
            f"{where}/{missing[0]}, or name the folder that holds the classes, and it is split for you"
        )
    train, val = (joined(base, name) for name in split_names)
    of_train, of_val = tree.folders(train), tree.folders(val)
    where_train, where_val = shown(tree.name, train), shown(tree.name, val)
    if not of_train:
        raise UserError(f"{where_train} has no sub-folders, so no classes; arrange the images as {_WANTED}")
    if extra := sorted(set(of_val) - set(of_train)):
        raise UserError(
            f"{where_val} has classes that train/ has not: {', '.join(extra[:5])}. Add them to train/ or remove "
            "them; folder names must agree to the letter"
        )
    classes = _classes(tree, of_train, where_train, options)
    listed: dict[str, list[Sample]] = {"train": [], "val": []}
    for split, path, names in (("train", train, of_train), ("val", val, of_val)):
        for folder in _by_label(names, classes):
            listed[split] += _samples(tree, joined(path, folder), classes.labels[folder])
    unlabelled: dict[str, str] = {}
    if not of_val and tree.names(val):
        listed["val"], unlabelled = _flat_val(tree, base, val, classes)
    for name, samples in zip(split_names, listed.values(), strict=True):
        if not samples:
            raise UserError(f"{where}/{name} holds no files; put images into its folders, one folder per class")
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
            f"{_SOLUTION} into {tree.name}"
        )
    wnids = _solution(tree, joined(homes[0], _SOLUTION))
    samples, unlabelled = [], {}
    for file in tree.files(val):
        image_id = file.path.rpartition("/")[2].rpartition(".")[0]
        wnid = wnids.get(image_id)
        if wnid is None:
            unlabelled[file.path] = f"{_SOLUTION} does not name it"
        elif wnid not in classes.labels:
            raise UserError(f"{_SOLUTION} gives {image_id} the class {wnid}, which train/ has not; add it to train/")
        else:
            samples.append(sample_of(file, classes.labels[wnid]))
    return samples, unlabelled


def _solution(tree: Tree, path: str) -> Mapping[str, str]:
    """The wnid of each ImageId."""
    wnids = {}
    where = shown(tree.name, path)
    rows = csv.DictReader(io.StringIO(_text(tree, path)))
    if not {"ImageId", "PredictionString"} <= set(rows.fieldnames or ()):
        raise UserError(f"{where} needs the columns ImageId,PredictionString; take the file that comes with ImageNet")
    for number, row in enumerate(rows, 2):
        words = (row["PredictionString"] or "").split()
        if not words:
            raise UserError(f"{where}, row {number}: PredictionString is empty; take the file that comes with ImageNet")
        wnids[row["ImageId"]] = words[0]
    return wnids


def _classes(tree: Tree, folders: Sequence[str], where: str, options: Options) -> ClassNames:
    classes = options.names or _from_synset_map(tree, folders) or plain_names(folders)
    unknown = sorted(set(folders) - set(classes.labels))
    if unknown:
        raise UserError(
            f"{where} has folders that {'class_names_file' if options.names else 'the synset map'} does not name: "
            f"{', '.join(unknown[:5])}. Add their names to the file, or take the folders away"
        )
    check_two_classes(
        classes.names,
        where,
        "Add a folder of images of another class, or name the folder above if this one is a class",
    )
    return classes


def _from_synset_map(tree: Tree, folders: Sequence[str]) -> ClassNames | None:
    """Of a synset map in the root, the classes that there are folders of; None where they have other names."""
    found = [name for name in SYNSET_MAPS if name in tree.names("")]
    if not found:
        return None
    synsets = parse_class_names(_text(tree, found[0]), shown(tree.name, found[0]))
    if not set(folders) & set(synsets.wnids):
        return None
    unknown = set(folders) - set(synsets.wnids)
    return synsets if unknown else synsets.only(folders)


def _text(tree: Tree, path: str) -> str:
    where = shown(tree.name, path)
    with told_plainly(where):
        data = tree.read(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error}); write it anew in that encoding") from None


def _by_label(folders: Sequence[str], classes: ClassNames) -> list[str]:
    return sorted(folders, key=lambda folder: (classes.labels[folder], folder))


def _samples(tree: Tree, folder: str, label: int) -> list[Sample]:
    return [sample_of(file, label) for file in tree.files(folder)]
