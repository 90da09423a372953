"""One tar or zip archive: class folders, train/val trees, or WebDataset samples in it."""

import os
from pathlib import Path

from components.preprocess.sources.folders import folder_source, is_kaggle_imagenet
from components.preprocess.sources.locations import Kind, is_uri, local_path
from components.preprocess.sources.places import LocalPlace, Place, RemotePlace, locate_file, told_plainly
from components.preprocess.sources.samples import Source, Storage, with_refused
from components.preprocess.sources.splits import Options
from components.preprocess.sources.tars import Listing, TarStorage, decompress, list_tar
from components.preprocess.sources.trees import ListedTree
from components.preprocess.sources.webdataset import is_webdataset, single_shard_source
from components.preprocess.sources.zips import ZipStorage, list_zip


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
