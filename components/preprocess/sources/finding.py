"""Which kind of source the data is."""

from pathlib import Path

from components.preprocess.sources.archives import archive_source
from components.preprocess.sources.classnames import read_class_names
from components.preprocess.sources.folders import folder_source
from components.preprocess.sources.locations import check_data_folder, kind_of
from components.preprocess.sources.places import FileStorage, LocalPlace, Place, RemotePlace, locate
from components.preprocess.sources.samples import Source, with_refused
from components.preprocess.sources.splits import Options
from components.preprocess.sources.tables import table_source
from components.preprocess.sources.trees import LocalTree, Tree, remote_tree
from components.preprocess.sources.webdataset import shard_source, tar_files


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
