"""The kind of source that the data is: a folder, a table, a WebDataset, or one archive of these."""

import os
from pathlib import Path

from components.preprocess.sources.archive_members import (
    Listing,
    TarStorage,
    ZipStorage,
    decompress,
    list_tar,
    list_zip,
)
from components.preprocess.sources.folders import (
    ListedTree,
    LocalTree,
    Tree,
    folder_source,
    is_kaggle_imagenet,
    remote_tree,
)
from components.preprocess.sources.locations import (
    FileStorage,
    Kind,
    LocalPlace,
    Place,
    RemotePlace,
    check_data_folder,
    is_uri,
    kind_of,
    local_path,
    locate,
    locate_file,
    told_plainly,
)
from components.preprocess.sources.samples import Options, Source, Storage, read_class_names, with_refused
from components.preprocess.sources.tables import table_source
from components.preprocess.sources.webdataset import is_webdataset, shard_source, single_shard_source, tar_files


def archive_source(data: str, kind: Kind, scratch: Path, options: Options) -> Source:
    """List the images of an archive. Paths of samples begin below its only top folder, if it has one.

    Raises:
        UserError: it can't be read, or what it holds is no labelled images.
    """
    with told_plainly(data):
        place, file = _at_hand(data, kind, scratch)
        if kind == "zip" and isinstance(place, LocalPlace):
            full = place.resolved(file)
            listing = list_zip(full, data)
            return _folders(data, listing, ZipStorage(full), options)
        with place.open(file) as stream:
            listing = list_tar(stream, data)
    storage = TarStorage(place, file)
    if is_webdataset(listing):
        return single_shard_source(storage, listing, locate_file(data)[0], data, options)
    return _folders(data, listing, storage, options)


def _at_hand(data: str, kind: Kind, scratch: Path) -> tuple[Place, str]:
    """Where an uncompressed tar or a zip can be read in place: where it is, or in `scratch`."""
    if not is_uri(data):
        path = Path(os.path.realpath(local_path(data)))
    else:
        place, file = locate_file(data)
        assert isinstance(place, RemotePlace)
        if kind == "tar" and place.has_ranges(file):
            return place, file
        path = scratch / file
        place.download(file, path)
    if kind == "compressed tar":
        unpacked = scratch / "unpacked.tar"
        decompress(path, unpacked, data)
        if path.parent == scratch:
            path.unlink()
        path = unpacked
    return LocalPlace(os.path.realpath(path.parent), str(path.parent)), path.name


def _folders(data: str, listing: Listing, storage: Storage, options: Options) -> Source:
    tree = ListedTree(data, listing.files.values(), storage, listing.folders)
    tops = tree.folders("")
    if len(tops) > 1 or is_kaggle_imagenet(tree) or not (tops and tree.folders(tops[0])):
        return with_refused(folder_source(tree, storage, options), listing.refused)
    top = f"{tops[0]}/"
    files = [file._replace(path=file.path[len(top) :]) for file in listing.files.values() if file.path.startswith(top)]
    folders = [folder[len(top) :] for folder in listing.folders if folder.startswith(top)]
    # "../": no path of the tree begins so
    refused = {
        path[len(top) :] if path.startswith(top) else f"../{path}": reason for path, reason in listing.refused.items()
    }
    return with_refused(folder_source(ListedTree(data, files, storage, folders), storage, options), refused)


def find_samples(data: str, *, val_fraction: float, seed: int, class_names_file: str, scratch: Path) -> Source:
    """List the images of `data` and split them.

    Args:
        data: a path or an fsspec URI of a folder, an archive or a table.
        val_fraction: share of each class held out where the data has no split of its own.
        seed: of that choice.
        class_names_file: class names in the order of their labels; empty for the data's own.
        scratch: an empty folder for what must be fetched or decompressed, needed until all samples are read.

    Raises:
        UserError: it can't be read, or holds no labelled images that can be split.
        EngineryError: `scratch` is too small.
    """
    check_data_folder(data)
    names = read_class_names(Path(class_names_file)) if class_names_file else None
    options = Options(names=names, val_fraction=val_fraction, seed=seed)
    kind = kind_of(data)
    if kind == "folder":
        return _of_folder(locate(data), options)
    if kind in ("csv", "parquet"):
        return table_source(data, scratch, options)
    return archive_source(data, kind, scratch, options)


def _of_folder(place: Place, options: Options) -> Source:
    tree: Tree
    refused: dict[str, str] = {}
    if isinstance(place, RemotePlace):
        tree, refused = remote_tree(place)
    else:
        assert isinstance(place, LocalPlace)
        tree = LocalTree(place)
    if tars := tar_files(tree):
        return with_refused(shard_source(place, tars, options), refused)
    return with_refused(folder_source(tree, FileStorage(place), options), refused)
