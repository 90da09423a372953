"""Find labelled images, wherever they are, and decide which split each belongs to.

A place (a folder here or behind a URI) or an archive gives a tree of files; what the tree's layout says of classes and
splits, with a storage that reads the files, is a source. Tables and WebDataset tars name their images themselves.
"""

from components.preprocess.sources.finding import find_samples
from components.preprocess.sources.locations import check_data_folder, is_uri, kind_of, local_path
from components.preprocess.sources.samples import Sample, Source, Storage, Unreadable, counts_by_label, read_sample

__all__ = [
    "Sample",
    "Source",
    "Storage",
    "Unreadable",
    "check_data_folder",
    "counts_by_label",
    "find_samples",
    "is_uri",
    "kind_of",
    "local_path",
    "read_sample",
]
