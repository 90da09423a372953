"""WebDataset tars: KEY.jpg beside KEY.cls, which holds an integer or a class name."""

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import MANIFEST, claims_of
from components.preprocess.sources.archive_members import Listing, ShardStorage, list_tar
from components.preprocess.sources.folders import File, Tree, is_image_name, joined, sample_of, shown
from components.preprocess.sources.locations import Place, told_plainly
from components.preprocess.sources.samples import (
    VAL_NAMES,
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    check_two_classes,
    hold_out,
    parse_class_names,
    plain_names,
    with_refused,
)

NAMES_FILE = "classes.txt"
_SPLIT_FOLDERS = {"train", *VAL_NAMES}
_MAX_LABEL = 999_999
_NUM_READERS = 8


@dataclass(frozen=True)
class _Image:
    file: File
    text: str | None  # of its .cls; None where there is none
    split: str


def tar_files(tree: Tree) -> list[str]:
    """The tars of a folder that has nothing but tars, in itself or in train/ and val/; none of any other folder."""
    folders = set(tree.folders(""))
    if folders - _SPLIT_FOLDERS or any(tree.folders(folder) for folder in folders):
        return []
    return [joined(home, name) for home in ("", *sorted(folders)) for name in tree.names(home) if name.endswith(".tar")]


def is_webdataset(listing: Listing) -> bool:
    """Whether an image of the tar has a .cls beside it."""
    return any(path in listing.files for path in (f"{_key(file)}.cls" for file in listing.files if _is_image(file)))


def shard_source(place: Place, tars: Sequence[str], options: Options) -> Source:
    """List the images of several tars.

    Raises:
        UserError: a tar can't be read or holds no labels, or there are too few images of a class to split.
    """
    splits = _splits_of(tars, place.name)
    first = _list(place, tars[0])
    if not is_webdataset(first):
        raise UserError(
            f"{shown(place.name, tars[0])} has no labels (KEY.cls beside KEY.jpg), so it is no WebDataset tar; name a "
            "single archive of class folders, or unpack the tars into class folders"
        )
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        rest = list(readers.map(lambda tar: _list(place, tar), tars[1:]))
    images, refused = [], {}
    for tar, split, listing in zip(tars, splits, (first, *rest), strict=True):
        images += _images(listing, f"{tar}/", split)
        refused.update({f"{tar}/{path}": reason for path, reason in listing.refused.items()})
    return with_refused(_source(place, ShardStorage(place, frozenset(tars)), images, place.name, options), refused)


def single_shard_source(storage: Storage, listing: Listing, beside: Place, name: str, options: Options) -> Source:
    """List the images of one tar, whose members are known; `beside` is where classes.txt may lie.

    Raises:
        UserError: as shard_source.
    """
    images = _images(listing, "", "train")
    return with_refused(_source(beside, storage, images, name, options), listing.refused)


def _list(place: Place, tar: str) -> Listing:
    name = shown(place.name, tar)
    with told_plainly(name), place.open(tar) as stream:
        return list_tar(stream, name)


def _images(listing: Listing, prefix: str, split: str) -> list[_Image]:
    found = []
    for path, file in sorted(listing.files.items()):
        if _is_image(path):
            label = f"{_key(path)}.cls"
            text = listing.texts.get(label, b"").decode(errors="replace").strip() if label in listing.files else None
            found.append(_Image(file._replace(path=prefix + path), text, split))
    return found


def _source(place: Place, storage: Storage, images: Sequence[_Image], name: str, options: Options) -> Source:
    names = options.names or _names_beside(place)
    texts = Counter(image.text for image in images if image.text)
    by_number = 2 * sum(count for text, count in texts.items() if _is_number(text)) >= texts.total()
    if names is None:
        names = _names_of(set(texts), by_number)
    check_two_classes(names.names, name, "Add images of another class, with their .cls files")
    samples: dict[str, list[Sample]] = {"train": [], "val": []}
    reasons: dict[str, str] = {}
    for image in images:
        label = _label(image.text, names, by_number)
        if isinstance(label, int):
            samples[image.split].append(sample_of(image.file, label))
        else:
            reasons[image.file.path] = label
    if samples["val"] and not samples["train"]:
        raise UserError(f"{name} has validation tars but no images for training; add tars whose names begin with train")
    splits = samples if samples["val"] else hold_out(_by_label(samples["train"]), names.names, options)
    return with_refused(Source(classes=names.names, splits=splits, storage=storage), reasons)


def _label(text: str | None, names: ClassNames, by_number: bool) -> int | str:
    """The label that a .cls gives, or why it gives none."""
    if not text:
        return "no .cls file with its label" if text is None else "its .cls file is empty or too long"
    if by_number:
        if not _is_number(text):
            return f"its label {text[:40]!r} is no integer from 0"
        return int(text) if int(text) < len(names.names) else f"its label {text[:40]} is not below {len(names.names)}"
    known = names.labels.get(text)
    return f"its label {text[:40]!r} is no class name" if known is None else known


def _names_beside(place: Place) -> ClassNames | None:
    data = _read_beside(place, NAMES_FILE)
    if data is None:
        return _names_of_manifest(_read_beside(place, MANIFEST) or b"")
    name = shown(place.name, NAMES_FILE)
    try:
        return parse_class_names(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error}); write it anew in that encoding") from None


def _read_beside(place: Place, name: str) -> bytes | None:
    with told_plainly(shown(place.name, name)):
        try:
            return place.read(name)
        except (FileNotFoundError, PermissionError):  # stores that may not be listed say "forbidden" of what is absent
            return None


def _names_of_manifest(data: bytes) -> ClassNames | None:
    """The classes of a data set of our own, or a part of one; None of any other file, which may have this name too."""
    manifest = claims_of(data)
    names = manifest.get("classes") if manifest.get("kind") in ("dataset", "dataset_part") else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return plain_names(names)


def _names_of(texts: set[str], by_number: bool) -> ClassNames:
    if not by_number:
        return plain_names(sorted(texts))
    numbers = [int(text) for text in texts if _is_number(text) and int(text) <= _MAX_LABEL]
    return plain_names(str(number) for number in range(max(numbers, default=-1) + 1))


def _by_label(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    grouped: dict[int, list[Sample]] = {}
    for sample in samples:
        grouped.setdefault(sample.label, []).append(sample)
    return grouped


def _splits_of(tars: Sequence[str], where: str) -> list[str]:
    """Which split each tar is of: train, or val where its folder or a word of its name says so.

    Raises:
        UserError: some are of a third split, which must go into neither of the two.
    """
    splits = [_split_of(tar) for tar in tars]
    if "test" in splits and {"train", "val"} & set(splits):
        raise UserError(
            f"{where} has tars for testing beside others, such as {tars[splits.index('test')]}; take them away, or "
            "give them a name that begins with train or val"
        )
    return ["train" if split == "test" else split for split in splits]


def _split_of(tar: str) -> str:
    folder, _, name = tar.lower().rpartition("/")
    words = set(re.split("[^a-z]+", name))
    if folder in VAL_NAMES or name.startswith("val"):
        return "val"
    if folder == "train" or "train" in words:
        return "train"
    return "val" if words & set(VAL_NAMES) else "test" if "test" in words else "train"


def _key(path: str) -> str:
    """Up to the first dot of the file's name: the members of a WebDataset sample share it."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _is_image(path: str) -> bool:
    return is_image_name(path) and path.rpartition("/")[2].count(".") == 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
