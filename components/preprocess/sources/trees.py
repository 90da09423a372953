"""What lies in a folder, wherever it is: sub-folders and files, sorted, without the hidden ones."""

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from components.common.errors import UserError
from components.preprocess.sources.places import FileStorage, LocalPlace, RemotePlace, is_below, told_plainly
from components.preprocess.sources.samples import Sample, Storage, ZipEntry

_MAX_NAME_CHARACTERS = 1 << 28  # of all folders of a list; each is known by the whole of its path
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


class File(NamedTuple):
    """A file of a tree."""

    path: str
    size_bytes: int
    offset: int = -1  # as Sample's, like what follows
    zipped: ZipEntry | None = None


class Tree(Protocol):
    """Paths are relative to the tree, with forward slashes; "" is the tree itself."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def folders(self, path: str) -> list[str]:
        """Names of the sub-folders, sorted. Raises UserError where they can't be read."""

    def names(self, path: str) -> list[str]:
        """Names of the files directly in a folder, sorted."""

    def files(self, path: str) -> Iterator[File]:
        """All files below a folder: its own first, then those of each sub-folder, sorted by name."""

    def read(self, path: str) -> bytes:
        """The bytes of a file. Raises OSError or Unreadable."""


class LocalTree:
    """A folder of this machine. Links are followed as long as they stay inside."""

    def __init__(self, place: LocalPlace) -> None:
        self.name = place.name
        self._place = place

    def folders(self, path: str) -> list[str]:
        """As Tree. One that is a link to the folder it lies in, or to one above, can't be a class or split."""
        names = [entry.name for entry in self._scan(path) if _is_folder(entry)]
        here = self._real(path)
        for name in names:
            real = self._real(joined(path, name))
            if here == real or is_below(here, real):
                raise UserError(
                    f"{shown(self.name, joined(path, name))} is a link to {real}, in which it lies itself, so it is no "
                    "folder of images; remove the link"
                )
        return checked(names, shown(self.name, path))

    def names(self, path: str) -> list[str]:
        """As Tree."""
        return [entry.name for entry in self._scan(path) if not _is_folder(entry)]

    def files(self, path: str) -> Iterator[File]:
        """As Tree. A folder that several links lead to is listed once, and one that leads out as a file."""
        root = self._place.root
        seen = {root, *(self._real(above) for above in _above(path))}
        waiting = [path]
        while waiting:
            current = waiting.pop()
            if (real := self._real(current)) in seen:
                continue
            seen.add(real)
            inside = []
            for entry in self._scan(current):
                relative = joined(current, entry.name)
                if not _is_folder(entry):
                    yield File(relative, self._place.size_bytes(relative))
                elif entry.is_symlink() and not is_below(real := self._real(relative), root) and real != root:
                    yield File(relative, 0)  # read() says that it leads out
                else:
                    inside.append(relative)
            waiting += reversed(inside)

    def read(self, path: str) -> bytes:
        """As Tree."""
        return self._place.read(path)

    def _real(self, path: str) -> str:
        return os.path.realpath(os.path.join(self._place.root, path))

    def _scan(self, path: str) -> list[os.DirEntry[str]]:
        full = os.path.join(self._place.root, path)
        if path and not is_below(real := os.path.realpath(full), self._place.root) and real != self._place.root:
            raise UserError(
                f"{shown(self.name, path)} is a link out of the data folder, to {real}; put a copy of that folder in "
                "its place (cp -rL), or mount it there"
            )
        try:
            with os.scandir(full) as entries:
                return sorted((entry for entry in entries if is_visible(entry.name)), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(
                f"can't read {shown(self.name, path)}: {error.strerror}; make it readable for you (chmod -R u+rX)"
            ) from None


class ListedTree:
    """A tree that is known from a list of its files."""

    def __init__(self, name: str, files: Iterable[File], storage: Storage, folders: Iterable[str] = ()) -> None:
        """`folders` need only hold those without files."""
        self.name = name
        self._files: dict[str, list[File]] = {folder: [] for folder in folders}
        self._folders: dict[str, set[str]] = {}
        self._storage = storage
        for file in files:
            self._files.setdefault(file.path.rpartition("/")[0], []).append(file)
        num_characters = 0
        for folder in self._files:
            while folder:
                above, _, last = folder.rpartition("/")
                below = self._folders.setdefault(above, set())
                if last in below:
                    break
                below.add(last)
                num_characters += len(folder)
                folder = above
            if num_characters > _MAX_NAME_CHARACTERS:
                raise UserError(f"{name} has too many folders, or too many in one another; take the odd ones away")

    def folders(self, path: str) -> list[str]:
        """As Tree."""
        return checked(sorted(self._folders.get(path, ())), shown(self.name, path))

    def names(self, path: str) -> list[str]:
        """As Tree."""
        return sorted(file.path.rpartition("/")[2] for file in self._files.get(path, ()))

    def files(self, path: str) -> Iterator[File]:
        """As Tree."""
        waiting = [path]
        while waiting:
            current = waiting.pop()
            yield from sorted(self._files.get(current, ()))
            waiting += [joined(current, name) for name in sorted(self._folders.get(current, ()), reverse=True)]

    def read(self, path: str) -> bytes:
        """As Tree."""
        file = next((file for file in self._files.get(path.rpartition("/")[0], ()) if file.path == path), None)
        if file is None:
            raise FileNotFoundError(path)
        return self._storage.read(sample_of(file, 0))


def remote_tree(place: RemotePlace) -> tuple[ListedTree, dict[str, str]]:
    """List a folder behind a URI.

    Returns:
        The tree, and why images that are not in it must not be read, by path.

    Raises:
        UserError: it can't be listed, or there is nothing.
    """
    with told_plainly(place.name):
        driver, root = place.file_system()
        found = driver.find(root, detail=True)
    files, refused = {}, {}
    for full, info in found.items():
        raw = str(full)[len(root.rstrip("/")) :].removeprefix("/")
        path = safe_path(raw)
        if not is_below(str(full), root) or raw.endswith("/") or not is_visible(raw):
            continue
        if path is None or info.get("type") not in ("file", None):
            if is_image_name(raw):
                refused[raw] = "a path out of the data folder" if path is None else "a link, or no regular file"
        else:
            files[path] = File(path, int(info.get("size") or 0))
    if not files and not refused:
        raise UserError(f"there is nothing at {place.name}; check the spelling, and that this account sees it")
    return ListedTree(place.name, files.values(), FileStorage(place)), refused


def sample_of(file: File, label: int) -> Sample:
    """A file whose class is known."""
    return Sample(path=file.path, label=label, size_bytes=file.size_bytes, offset=file.offset, zipped=file.zipped)


def safe_path(raw: str) -> str | None:
    """A path of an archive or store in its shortest form; None for one that leads out of it."""
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    return None if raw.startswith("/") or ".." in parts or "\0" in raw or not parts else "/".join(parts)


def is_visible(path: str) -> bool:
    """Whether no part of it is hidden or what macOS adds to archives. "." and ".." are not hidden."""
    return not any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in path.split("/"))


def is_image_name(path: str) -> bool:
    """Whether a name promises an image that can be read."""
    return path.lower().endswith(_IMAGE_SUFFIXES)


def joined(folder: str, name: str) -> str:
    """`name` in `folder`, which may be ""."""
    return f"{folder}/{name}" if folder else name


def shown(root: str, path: str) -> str:
    """How messages call `path`."""
    return f"{root.rstrip('/')}/{path}" if path else root


def checked(names: list[str], where: str) -> list[str]:
    """Folder names, which become class names and travel in JSON.

    Raises:
        UserError: one is not UTF-8.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where} has a folder whose name is not UTF-8: {name!r}; rename it") from None
    return names


def _above(path: str) -> Iterator[str]:
    """The folders that `path` lies in, without the tree itself."""
    while path := path.rpartition("/")[0]:
        yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
