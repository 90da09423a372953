"""Classification: a class per image, which its folder says."""

from components.preprocess.sources import KINDS, Sample, Storage
from components.preprocess.sources.folders import folder_source
from components.preprocess.tasks import Labels, PackedLabel

_LABEL_WIDTH = 6  # digits of a .cls member; DALI needs labels of one length to batch them


def _pack(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    return PackedLabel(data=f"{sample.label:0{_LABEL_WIDTH}d}".encode(), entry={"label": sample.label})


LABELS = Labels(
    wanted="name a folder with one sub-folder of images per class, an archive of it or a table "
    f"({', '.join(suffix for kind in KINDS for suffix in kind.suffixes)})",
    example="digits",
    list_samples=folder_source,
    pack=_pack,
)
