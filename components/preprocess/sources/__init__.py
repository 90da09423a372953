"""Find labelled images, wherever they are, and decide which split each belongs to.

A place (a folder here or behind a URI) or an archive gives a tree of files; what the tree's layout says of classes and
splits, with a storage that reads the files, is a source. Tables and WebDataset tars name their images themselves.

Each kind of source is an entry of KINDS. A new one is a function that lists its samples, and an entry.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from components.common.contracts.errors import UserError
from components.common.contracts.foreign import refuse_lfs_pointer
from components.common.data.places import (
    RemotePlace,
    Unreadable,
    check_uri,
    file_name,
    is_uri,
    is_web,
    local_path,
    locate,
    translate_errors,
)
from components.common.tasks import TASKS, TaskName
from components.preprocess.sources import parallel_text
from components.preprocess.sources.folders import LocalTree, Tree, folder_source, remote_tree
from components.preprocess.sources.samples import (
    FileStorage,
    Options,
    Sample,
    Source,
    Storage,
    read_class_names,
    read_sample,
    with_refused,
)
from components.preprocess.sources.tables import csv_rows, parquet_rows, table_source
from components.preprocess.sources.tars import compressed_tar_source, shard_source, tar_files, tar_source
from components.preprocess.sources.zips import zip_source
from components.preprocess.tasks import labels_of

__all__ = [
    "FOLDER",
    "Kind",
    "Sample",
    "Source",
    "Storage",
    "Unreadable",
    "check_data_folder",
    "find_samples",
    "is_listed_soon",
    "is_uri",
    "kind_of",
    "local_path",
    "read_sample",
]

_BROKEN = re.compile("[\0\n\ud800-\udfff]")  # also halves of letters, which UTF-8 has not


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of source."""

    suffixes: tuple[str, ...]
    """Ends of its files' names."""
    list_samples: Callable[[str, Path, Options], Source]
    """Lists the samples of a path or URI, with an empty folder for what must be fetched or decompressed."""
    is_table: bool = False
    """True if it names images that lie beside it."""
    has_classes: bool = False
    """True if it names one class for each image, and so is for no other task."""
    is_compressed: bool = False
    """True if all of it must be read to list it."""


def _list_folder(data: str, _: Path, options: Options) -> Source:
    place = locate(data)
    tree: Tree
    if isinstance(place, RemotePlace):
        tree, refused = remote_tree(place)
    else:
        tree = LocalTree(place)
        refused = tree.unreadable  # filled as the tree is listed
    if options.of_tree is folder_source and (tars := tar_files(tree)):
        return with_refused(shard_source(place, tars, options), refused)
    return with_refused(options.of_tree(tree, FileStorage(place), options), refused)


FOLDER = Kind(suffixes=(), list_samples=_list_folder)
KINDS = (
    Kind(suffixes=(".tar",), list_samples=tar_source),
    Kind(
        suffixes=(".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"),
        list_samples=compressed_tar_source,
        is_compressed=True,
    ),
    Kind(suffixes=(".zip",), list_samples=zip_source),
    Kind(suffixes=(".csv",), list_samples=partial(table_source, csv_rows), is_table=True, has_classes=True),
    Kind(suffixes=(".parquet",), list_samples=partial(table_source, parquet_rows), is_table=True, has_classes=True),
)


def kind_of(data: str) -> Kind:
    """Return the kind by the end of the name, FOLDER where that says nothing; a folder here may have any name."""
    if not is_uri(data) and local_path(data).is_dir():
        return FOLDER
    name = file_name(data)
    return next((kind for kind in KINDS if name.endswith(kind.suffixes)), FOLDER)


def check_data_folder(data: str, task: TaskName = "classification") -> None:
    """Look whether `data` can be read at all, which takes no time; what it holds is found out by the step.

    Raises:
        UserError: it is not there, may not be read, is of no kind that is read, or is a URI that can't be used here.
    """
    suffixes: tuple[str, ...]
    if TASKS[task].of_text:
        suffixes, wanted, example = parallel_text.SUFFIXES, parallel_text.WANTED, "phrases"
    else:
        suffixes = tuple(suffix for kind in KINDS for suffix in kind.suffixes)
        wanted, example = labels_of(task).wanted, labels_of(task).example
    is_file = file_name(data).endswith(suffixes)
    if is_uri(data):
        check_uri(data, "data")
        if is_web(data) and not is_file:
            raise UserError(
                f"a web server lists no folders, so {data} can't be read as one; name an archive, a table or a file of "
                "text",
                code="unlisted-folder",
                setting="data",
            )
        return
    path = local_path(data)
    if not path.exists():
        message = f"the data folder {path} does not exist; {wanted}. To try: enginery data {example} {example}"
        raise UserError(message, code="no-data", setting="data")
    if not path.is_dir() and (not path.is_file() or not is_file):
        message = f"the data {path} is a file, not a folder, and of no kind that is read; {wanted}"
        raise UserError(message, code="unknown-data-kind", setting="data")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        message = f"no permission to read the data {path}; make it readable for you (chmod -R u+rX)"
        raise UserError(message, code="no-permission", setting="data")
    if path.is_file():
        refuse_lfs_pointer(path)


def is_listed_soon(data: str, *, seconds: float) -> bool:
    """True if the files of a folder behind a URI are listed within `seconds`, and are no tars, which are read to list.

    Raises:
        UserError: it can't be listed.
    """
    place, ends = locate(data), time.monotonic() + seconds
    assert isinstance(place, RemotePlace)
    with translate_errors(place.name):
        driver, root = place.file_system()
        for _, _, files in driver.walk(root):
            if time.monotonic() > ends or any(name.endswith(".tar") for name in files):
                return False
    return True


def find_samples(
    data: str,
    *,
    val_fraction: float,
    seed: int,
    class_names_file: str,
    scratch: Path,
    task: TaskName = "classification",
) -> Source:
    """List the images of `data` and split them.

    Args:
        data: a path or an fsspec URI of a folder, an archive or a table.
        task: what the images are labelled for.
        val_fraction: share of each class held out where the data has no split of its own.
        seed: of that choice.
        class_names_file: class names in the order of their labels; empty for the data's own.
        scratch: an empty folder for what must be fetched or decompressed, needed until all samples are read.

    Raises:
        UserError: it can't be read, or holds no labelled images that can be split.
        EngineryError: `scratch` is too small.
    """
    check_data_folder(data, task)
    names = read_class_names(Path(class_names_file)) if class_names_file else None
    kind = kind_of(data)
    if kind.has_classes and not TASKS[task].classifies:
        message = f"{data} names one class per image; for {task} {labels_of(task).wanted}"
        raise UserError(message, code="no-annotations", setting="data")
    options = Options(names=names, val_fraction=val_fraction, seed=seed, of_tree=labels_of(task).list_samples)
    source = kind.list_samples(data, scratch, options)
    if broken := [str(label) for label, name in enumerate(source.classes) if _BROKEN.search(name)]:
        raise UserError(
            f"{data} has line breaks, zeros or halves of letters in names of classes (in their order, from 0: "
            f"{', '.join(broken[:5])}), which a served list of labels can't hold; rename these classes",
            code="invalid-class-name",
        )
    return source
