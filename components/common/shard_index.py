"""Where the images of a shard lie, by its DALI index."""

from collections.abc import Iterator
from pathlib import Path


def image_places(index: Path) -> Iterator[tuple[str, int, int]]:
    """Key, offset and size of each image of a shard, from its DALI index: "jpg 512 778 000000000.jpg cls ..."."""
    with index.open(encoding="utf-8") as lines:
        next(lines)  # version and number of samples
        for line in lines:
            parts = line.split()
            for extension, offset, size, name in zip(*[iter(parts)] * 4, strict=True):
                if extension != "cls":
                    yield name.removesuffix(f".{extension}"), int(offset), int(size)
