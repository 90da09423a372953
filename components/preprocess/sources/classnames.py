"""Class names and their order: from a text file, from ImageNet's synset map, or from what the data says."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.common.errors import UserError

SYNSET_MAPS = ("LOC_synset_mapping.txt", "synset_words.txt")
_SYNSET_LINE = re.compile(r"(n\d{8})\s+(\S.*)")


@dataclass(frozen=True)
class ClassNames:
    """Classes in the order of their labels."""

    names: tuple[str, ...]
    labels: Mapping[str, int]  # by what the data calls a class: its name, or the wnid of a synset map
    wnids: tuple[str, ...] = ()  # of a synset map, in the order of `names`

    def only(self, wnids: Iterable[str]) -> "ClassNames":
        """The classes of a synset map that the data has, in the map's order."""
        wanted = set(wnids)
        kept = [(wnid, name) for wnid, name in zip(self.wnids, self.names, strict=True) if wnid in wanted]
        return _of_synsets([wnid for wnid, _ in kept], [name for _, name in kept])


def plain_names(names: Iterable[str]) -> ClassNames:
    """Classes that the data calls by their names."""
    listed = tuple(names)
    return ClassNames(listed, {name: label for label, name in enumerate(listed)})


def read_class_names(path: Path) -> ClassNames:
    """Read class_names_file: one class per line, or a synset map.

    Raises:
        UserError: it can't be read, is empty, or names a class twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"can't read class_names_file {path}: {error}; name a text file in UTF-8 with one class per line"
        ) from None
    return parse_class_names(text, str(path))


def parse_class_names(text: str, where: str) -> ClassNames:
    """As read_class_names, of the text of a file called `where`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{where} names no class; write one class per line")
    synsets = [_SYNSET_LINE.fullmatch(line) for line in lines]
    keys = [match[1] for match in synsets if match]
    if len(keys) < len(lines):
        _refuse_twice(lines, where)
        return plain_names(lines)
    _refuse_twice(keys, where)
    shown = [match[2].partition(",")[0].strip() for match in synsets if match]
    times = Counter(shown)
    return _of_synsets(
        keys, [f"{name} ({key})" if times[name] > 1 else name for key, name in zip(keys, shown, strict=True)]
    )


def _of_synsets(wnids: list[str], names: list[str]) -> ClassNames:
    labels = {name: label for label, name in enumerate(names)} | {wnid: label for label, wnid in enumerate(wnids)}
    return ClassNames(tuple(names), labels, tuple(wnids))


def _refuse_twice(names: list[str], where: str) -> None:
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UserError(f"{where} names a class twice: {', '.join(twice[:5])}. Each line must name another class")


def check_two_classes(names: tuple[str, ...], where: str, fix: str) -> None:
    """A classifier needs two classes.

    Raises:
        UserError: there are fewer.
    """
    if len(names) < 2:
        has = f"only the class {names[0]!r}" if names else "no class"
        raise UserError(f"{where} has {has}; a classifier needs at least two. {fix}")
