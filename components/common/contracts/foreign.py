"""Foreign files are read within bounds: of themselves, and of what they unpack to."""

import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.common.contracts.errors import UserError

if TYPE_CHECKING:
    import numpy as np

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the text begins that Git LFS has in a file's place
MAX_FILE_BYTES = 1 << 29  # of an image file; more is not read into memory
MAX_PIXELS = 100_000_000  # of an image, which may have few bytes, and takes 8 for each while it is decoded
MAX_ASPECT_RATIO = 100  # of an image: scaled by its shorter side, 60,000 x 1 pixels of 100 bytes would take 15 GB
_MAX_YAML_BYTES = 1 << 16  # which may take PyYAML seconds
_MAX_YAML_LENGTH = 10**6  # characters, written out
_MAX_HEADER_BYTES = 1 << 14  # of an array


def refuse_lfs_pointer(file: Path, source: str = "") -> None:
    """Refuse what stands in a file's place until Git LFS fetches it.

    Raises:
        UserError: the file is a pointer.
        OSError: it can't be read.
    """
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(
                f"{source or file} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its repository",
                code="git-lfs-pointer",
            )


class BoundedLoader(yaml.SafeLoader):
    """Refuses aliases by which a few lines become gigabytes, or that hold themselves."""

    def get_single_node(self) -> yaml.Node | None:
        """The document's node, by which PyYAML builds all values."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _length(node, {}) > _MAX_YAML_LENGTH:
            raise yaml.YAMLError(f"it has more than {_MAX_YAML_LENGTH:,} characters, with what its aliases stand for")
        return node


def _length(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters of a node's values, those behind an alias as often as it is there. `known`: by the nodes' ids."""
    if id(node) not in known:
        known[id(node)] = _MAX_YAML_LENGTH  # for a node that holds itself
        entries = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [child for entry in entries for child in (entry if isinstance(entry, tuple) else (entry,))]
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        known[id(node)] = 1 + own + sum(_length(child, known) for child in nodes)
    return known[id(node)]


def read_yaml(file: Path) -> Any:
    """Return what a foreign file in YAML says.

    Raises:
        ValueError: it is no YAML, or too large, nested too deeply, or `BoundedLoader` refuses it.
        OSError: it can't be read.
    """
    if file.stat().st_size > _MAX_YAML_BYTES or not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"it has more than {_MAX_YAML_BYTES:,} bytes, or is no file")
    try:
        return yaml.load(file.read_bytes(), BoundedLoader)  # noqa: S506  # of a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_arrays(file: Path, max_bytes: Mapping[str, int]) -> "dict[str, np.ndarray] | None":
    """Arrays of a foreign .npz; None where one of them is not in it.

    Args:
        file: the archive.
        max_bytes: of each array, by its name.

    Raises:
        ValueError: it can't be read, is damaged, or an array is too large.
    """
    import numpy as np

    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(file) as archive:  # which reads no more of an entry than its directory says
            entries = {entry.filename: entry for entry in archive.infolist()}
            for name, most in max_bytes.items():
                entry = entries.get(f"{name}.npy")  # np.load takes one without the suffix, too, whose size is its own
                if entry is None:
                    return None
                if entry.file_size > most + _MAX_HEADER_BYTES:
                    raise ValueError(f"{name} has more than {most:,} bytes")
                with archive.open(entry) as opened:
                    arrays[name] = np.lib.format.read_array(opened, allow_pickle=False)
    except Exception as error:  # zipfile, zlib and NumPy have many kinds
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return arrays
