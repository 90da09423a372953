"""Pack images into WebDataset tar shards with a DALI index, decoding each one on the way."""

import hashlib
import io
import stat
import tarfile
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from wds2idx import IndexCreator

from components.preprocess.sources import Sample

# What both Pillow (which checks here) and DALI (which decodes later) read, and the member name it gets.
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "TIFF": "tif"}
# TIFF holds more than pictures. DALI fails on some of the rest (1 bit, 32-bit integers) and scales others its own way.
_TIFF_MODES = ("L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B")
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MEMBER_OVERHEAD_BYTES = 2048  # tar headers and padding of an image and its label
LABEL_WIDTH = 6  # digits of a .cls member; DALI needs labels of one length to batch them


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """What one worker packs."""

    root: Path
    file: Path
    first_index: int
    samples: Sequence[Sample]
    max_pixels: int


@dataclass(kw_only=True)
class ShardResult:
    """What went into a shard, what did not, and sums over its pixels."""

    accepted: list[dict[str, object]] = field(default_factory=list)
    rejected: list[dict[str, str]] = field(default_factory=list)
    pixel_sum: np.ndarray = field(default_factory=lambda: np.zeros(3))  # per RGB channel, of values in 0..1
    pixel_square_sum: np.ndarray = field(default_factory=lambda: np.zeros(3))
    num_pixels: int = 0


class _Rejected(Exception):
    """An image can't be used; the message is the reason."""


def plan_shards(samples: Sequence[Sample], shard_bytes: int) -> list[Sequence[Sample]]:
    """Cut the listing into shards of equal size, as near to `shard_bytes` as that allows.

    Depends on the listing alone, not on what is rejected later.
    """
    ends = list(accumulate(sample.size_bytes + _MEMBER_OVERHEAD_BYTES for sample in samples))
    if not ends:
        return []
    num_shards = max(1, round(ends[-1] / shard_bytes))
    cuts = [bisect_left(ends, ends[-1] * number / num_shards) + 1 for number in range(1, num_shards)]
    edges = [0, *cuts, len(samples)]
    return [samples[start:end] for start, end in pairwise(edges) if start < end]


def write_shard(task: ShardTask) -> ShardResult:
    """Write one tar and its index."""
    result = ShardResult()
    Image.MAX_IMAGE_PIXELS = None  # _decode checks, with a message of its own
    with tarfile.open(task.file, "w", format=tarfile.USTAR_FORMAT) as archive:
        for index, sample in enumerate(task.samples, task.first_index):
            try:
                data = _read(task.root / sample.path)
                extension, pixels = _decode(data, task.max_pixels)
            except _Rejected as reason:
                result.rejected.append({"path": sample.path, "reason": str(reason)})
                continue
            except OSError as error:
                result.rejected.append({"path": sample.path, "reason": f"unreadable: {error.strerror or error}"})
                continue
            key = f"{index:09d}"
            _add(archive, f"{key}.{extension}", data)
            _add(archive, f"{key}.cls", f"{sample.label:0{LABEL_WIDTH}d}".encode())
            _accumulate(result, pixels)
            result.accepted.append(
                {
                    "key": key,
                    "path": sample.path,
                    "label": sample.label,
                    "height": pixels.shape[0],
                    "width": pixels.shape[1],
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            )
    if result.accepted:
        with IndexCreator(str(task.file), str(task.file.with_suffix(".idx")), verbose=False) as index_file:
            index_file.create_index()
    else:
        task.file.unlink()  # every image was rejected; an empty shard would stop DALI
    return result


def _read(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # behind links; a pipe would let the step wait for ever
        raise _Rejected("not a regular file")
    return path.read_bytes()


def _decode(data: bytes, max_pixels: int) -> tuple[str, np.ndarray]:
    """Decode fully. Returns the member's extension and the pixels as the loader delivers them: [H, W, 3] uint8."""
    if not data:
        raise _Rejected("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data))
            if image.format not in _EXTENSIONS:
                raise _Rejected(f"format {image.format} is not supported; convert it to JPEG or PNG")
            if image.width * image.height > max_pixels:
                raise _Rejected(f"{image.width}x{image.height} has more than max_pixels = {max_pixels} pixels")
            if image.format == "TIFF" and image.mode not in _TIFF_MODES:
                raise _Rejected(f"TIFF of mode {image.mode} is not supported; convert it to 8 bits per channel")
            _check_structure(image.format, data)
            extension = _EXTENSIONS[image.format]
            image.load()
            upright = _upright(image)
            if upright.mode.startswith("I;16"):
                return extension, _from_16_bit(np.asarray(upright))
            return extension, np.asarray(upright.convert("RGB"))
    except _Rejected:
        raise
    except UnidentifiedImageError:
        raise _Rejected("not an image") from None
    except Exception as error:  # damaged data: mostly OSError, but Pillow's parsers let everything through
        raise _Rejected(f"damaged: {error}") from None


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, as DALI does; a damaged EXIF block says nothing."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's EXIF parser raises anything
        return image
    turn = _TRANSPOSITIONS.get(orientation)  # type: ignore[arg-type]  # whatever the file says
    return image if turn is None else image.transpose(turn)


def _check_structure(image_format: str, data: bytes) -> None:
    """Refuse damage that Pillow reads past and DALI stops at: one such file would end a training."""
    if image_format == "PNG" and b"IEND" not in data[-64_000:]:
        raise _Rejected("damaged: the end of the PNG is missing")
    if image_format not in ("JPEG", "MPO"):
        return
    position = 2  # after the start-of-image marker
    while data[position : position + 2] != b"\xff\xda":  # start of scan
        if data[position : position + 1] != b"\xff":
            raise _Rejected(f"damaged: no JPEG marker at byte {position}")
        if data[position + 1 : position + 2] == b"\xff":
            position += 1  # a fill byte
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4])


def _from_16_bit(gray: np.ndarray) -> np.ndarray:
    return np.repeat((gray >> 8).astype(np.uint8)[:, :, None], 3, axis=2)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # owner, mode and time stay at fixed values: the same input, the same bytes
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _accumulate(result: ShardResult, pixels: np.ndarray) -> None:
    # Histograms of the 256 values give exact sums faster than converting the image to floats.
    values = np.arange(256) / 255.0
    for channel in range(3):
        counts = np.bincount(pixels[:, :, channel].reshape(-1), minlength=256)
        result.pixel_sum[channel] += counts @ values
        result.pixel_square_sum[channel] += counts @ values**2
    result.num_pixels += pixels.shape[0] * pixels.shape[1]
