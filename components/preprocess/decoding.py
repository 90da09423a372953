"""Decode every image fully before it is packed, and say why one can't be used."""

import io
import warnings

from PIL import ExifTags, Image, UnidentifiedImageError

from components.common.image_files import open_image
from components.preprocess.exif import check_exif, is_turned_alike
from components.preprocess.structure import Rejected, check_structure

# What Pillow, which checks here, and DALI, which decodes later, read alike: the member name that it gets. The others
# are packed as PNG, and so are files of which _is_read_alike says no.
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "", "TIFF": ""}
# TIFF holds more than pictures, such as 32-bit integers, whose scale nobody tells.
_TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B")
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, max_pixels: int) -> tuple[str, Image.Image]:
    """Decode fully. Returns the member's extension and the image as the loader delivers it: upright, RGB.

    The extension is empty where the file can't be packed as it is: see `as_png`.

    Raises:
        Rejected: it can't be used.
    """
    if not data:
        raise Rejected("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = open_image(data)
            if image.width * image.height > max_pixels:
                raise Rejected(f"{image.width}x{image.height} has more than max_pixels = {max_pixels} pixels")
            if image.format == "TIFF" and image.mode not in _TIFF_MODES:
                raise Rejected(f"TIFF of mode {image.mode} is not supported; convert it to 8 bits per channel")
            kind, is_alike = str(image.format), _is_read_alike(image)
            check_structure(kind, data)
            image.load()
            block = image.info.get("exif", b"")  # of a PNG file it may come behind the picture
            check_exif(block)
            upright = _upright(image)
            is_alike &= is_turned_alike(kind, data, block, upright is not image)
            extension = _EXTENSIONS[kind] if is_alike else ""
            if upright.mode.startswith("I;16"):
                return extension, _from_16_bit(upright)
            return extension, upright if upright.mode == "RGB" else upright.convert("RGB")
    except Rejected:
        raise
    except MemoryError:  # what a damaged file asks for, too
        raise Rejected(f"takes more memory than is left ({len(data):,} bytes to decode)") from None
    except UnidentifiedImageError:
        raise Rejected("not an image, or of a format that is not read; convert it to JPEG or PNG") from None
    except Exception as error:  # damaged data: mostly OSError, but Pillow's parsers let everything through
        raise Rejected(f"damaged: {error}") from None


def _is_read_alike(image: Image.Image) -> bool:
    """Whether DALI makes the same of a JPEG or PNG file as Pillow."""
    if image.mode == "CMYK" and "adobe" not in image.info:  # DALI takes the inks for inverted, as Adobe writes them
        return False
    return not image.info.get("default_image")  # of an animation, shown where only still pictures are; DALI skips it


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, as DALI does; a damaged EXIF block says nothing."""
    for xmp in ("xmp", "XML:com.adobe.xmp"):  # Pillow looks for an orientation there too, and DALI does not
        image.info.pop(xmp, None)
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's EXIF parser raises anything
        return image
    turn = _TRANSPOSITIONS.get(orientation)  # type: ignore[arg-type]  # whatever the file says
    return image if turn is None else image.transpose(turn)


def _from_16_bit(gray: Image.Image) -> Image.Image:
    """Of each value the upper byte, which comes first only in I;16B. Without numpy, which every worker would load."""
    upper = gray.tobytes()[gray.mode != "I;16B" :: 2]
    return Image.frombytes("L", gray.size, upper).convert("RGB")


def as_png(image: Image.Image) -> bytes:
    """What BMP and TIFF files, and the few others that DALI reads in its own way, become."""
    encoded = io.BytesIO()
    image.info.clear()  # colour profiles and the like, which nobody reads later
    image.save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def shrink(image: Image.Image, max_short_side: int, quality: int) -> tuple[bytes, Image.Image]:
    """An image whose shorter side is scaled down to `max_short_side`, as JPEG and as what that decodes to.

    Args:
        image: upright, RGB.
        max_short_side: px; shorter than the image's.
        quality: of the JPEG, 1 to 100.
    """
    scale = max_short_side / min(image.size)
    width, height = (max(max_short_side, round(side * scale)) for side in image.size)
    encoded = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue(), open_image(encoded.getvalue()).convert("RGB")
