"""The quick dataset: scikit-learn's 1,797 real handwritten digits, as JPEG files.

Source: UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998), its test part
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from components.common.data.image_files import encode_image
from enginery.datasets import DatasetSummary, is_written, write_dataset, write_whole

IMAGE_SIZE = 32  # px, from 8
JPEG_QUALITY = 95


def write_digits(directory: Path) -> DatasetSummary:
    """Write DIRECTORY/<class 0..9>/<index>.jpg: grayscale, 32x32 px. One tree; the chain splits it by a seed.

    Raises:
        UserError: the directory holds something else.
    """
    digits = load_digits()  # images: [1797, 8, 8] float64, 0..16; target: [1797]

    def write() -> None:
        for class_name in digits.target_names:
            (directory / str(class_name)).mkdir(exist_ok=True)
        for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = directory / str(label) / f"{index:04d}.jpg"
            if not is_written(path):
                write_whole(path, _jpeg(image))

    arguments: dict[str, str | int] = {"dataset": "digits", "image_size": IMAGE_SIZE, "jpeg_quality": JPEG_QUALITY}
    sizes = {"num_images": len(digits.images), "num_classes": len(digits.target_names)}
    return write_dataset(directory, arguments, write, **sizes)


def _jpeg(image: np.ndarray) -> bytes:
    """JPEG bytes, 32x32 grayscale, of an [8, 8] image with values 0..16."""
    levels = np.rint(image * (255 / 16)).astype(np.uint8)
    enlarged = Image.fromarray(levels).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    return encode_image(enlarged, "JPEG", quality=JPEG_QUALITY)
