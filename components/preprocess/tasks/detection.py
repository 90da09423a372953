"""Detection: boxes with classes, of COCO, Pascal VOC or YOLO."""

import numpy as np

from components.preprocess.sources import Sample, Storage
from components.preprocess.sources.boxes import WANTED, boxes_source
from components.preprocess.tasks import Labels, PackedLabel, annotations_of

_TOLERANCE = 1.0  # px by which boxes may reach out of the image, as where pixels are counted from 1
_MIN_SIDE = 0.5  # px of a box
_NO_OBJECT = (0.0, 0.0, 0.0, 0.0, -1.0, 0.0)


def _pack(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    """Boxes as little-endian float32 [n, 6]: x1, y1, x2, y2 in pixels of the packed image, class, 1 if ignored.

    An image without objects has one row of class -1: no member of a tar is empty.

    Raises:
        Rejected: the annotations are of an image of another size.
    """
    found, rows, _ = annotations_of(sample, size)
    sides = np.array([*size, *size], np.float64)
    boxes = rows[:, :4] * (sides if found["relative"] else 1)
    inside = np.clip(boxes, 0, sides)
    lengths, shown = boxes[:, 2:] - boxes[:, :2], inside[:, 2:] - inside[:, :2]  # [n, 2]
    is_kept: np.ndarray = (lengths.min(axis=1) > 0) & (shown.min(axis=1) >= _MIN_SIDE)
    is_cut = np.abs(boxes - inside).max(axis=1) > _TOLERANCE
    refused = [(name, reason, kept) for name, reason, kept in found["refused"]]
    for place in np.flatnonzero(~is_kept | is_cut).tolist():
        text = _text(boxes[place])
        if is_kept[place]:
            what = f"partly outside of the image, cut at its edge: {text}"
        elif (lengths[place] <= 0).any():
            what = f"of no size: {text}"
        else:
            what = "outside of the image" if (shown[place] <= 0).any() else "of less than half a pixel within it"
            what += f": {text} of {size[0]}x{size[1]}"
        refused.append((found["names"][place], f"a box {what}", bool(is_kept[place])))
    kept = np.column_stack([inside * np.tile(np.array(packed) / size, 2), rows[:, 4:]])[is_kept]
    array = (kept if len(kept) else np.array([_NO_OBJECT])).astype("<f4")
    areas = (array[:, 2] - array[:, 0]) * (array[:, 3] - array[:, 1])
    entry = {
        "label": max(0, int(array[areas.argmax(), 4])),
        "objects": array.astype(np.float64).round(2).tolist() if len(kept) else [],
    }
    return PackedLabel(data=array.tobytes(), entry=entry, refused=refused)


def _text(box: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:g}" for value in box.round(2)) + "]"


LABELS = Labels(wanted=WANTED, example="shapes", list_samples=boxes_source, pack=_pack)
