"""Parallel text, in the formats that users have: tab-separated values, Moses' pairs of files, TMX; each also as gzip.

What can't be used is named, line by line; only a file that can't be read at all stops the step. No file is held in
memory, and no line beyond MAX_LINE_BYTES.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from xml.parsers import expat

from components.common.contracts.errors import UserError
from components.common.data.places import (
    LocalPlace,
    RemotePlace,
    fetched,
    file_name,
    is_uri,
    local_path,
    locate,
    translate_errors,
)
from components.preprocess.sources.folders import LocalTree, damaged, remote_tree, shown
from components.preprocess.sources.samples import VAL_NAMES, refuse_utf16, split_of

MAX_LINE_BYTES = 1 << 20
SUFFIXES = (".tsv", ".tsv.gz", ".tmx", ".tmx.gz")  # of a single file
WANTED = (
    "name a file of pairs (.tsv: source, tab, target a line; .tmx; each also with .gz), or a folder with such files or "
    "with Moses' pairs (NAME.en and NAME.de)"
)
_VAL_NAMES = (*VAL_NAMES, "dev", "development")
_CHUNK_BYTES = 1 << 16
_XML_SPACE = re.compile("[ \t\r\n]+")  # what lays a file out; other spaces are the sentence's own
_MAX_XML_TOKEN = 1 << 23  # bytes of a tag; text comes in pieces
_MAX_DEPTH = 100  # of elements within each other, of which the parser keeps the names
# A sentence in quotes with each of its own doubled, as pandas and spreadsheets write it.
_CSV_QUOTED = re.compile(r'"[^"]*(?:""[^"]*)+"')
_MARKUP = ("bpt", "ept", "it", "ph", "ut")  # of TMX: codes of the text's own format, which are no part of the sentence


class Pair(NamedTuple):
    """A line, or what was one pair in its file."""

    line: int
    source: str
    target: str
    problem: str = ""  # code; empty where both sides could be read


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of pairs, or two of the same lines."""

    name: str
    """Within the data."""
    split: str
    """Either "train", "val", or "" where the name says none."""
    read: Callable[[], Iterator[Pair]]
    """Raises UserError where the file itself can't be read."""


def find_texts(data: str, languages: tuple[str, str], scratch: Path) -> tuple[list[TextFile], list[str]]:
    """List the files of pairs of a folder, or the one that is named, and the names of other files there.

    Args:
        data: a path or an fsspec URI.
        languages: of source and target, as Moses' files end and TMX names them.
        scratch: a folder for a file that is fetched, needed until all is read.

    Raises:
        UserError: there is none, or Moses' files have no counterpart.
    """
    if file_name(data).endswith(SUFFIXES) and (is_uri(data) or not local_path(data).is_dir()):
        with translate_errors(data):
            path = fetched(data, scratch)
        return [_text_file(path.name, "", lambda: path.open("rb"), data, languages)], []
    place = locate(data)
    with translate_errors(place.name):
        tree = remote_tree(place)[0] if isinstance(place, RemotePlace) else LocalTree(place)
        names = sorted(file.path for file in tree.files(""))
    if isinstance(place, LocalPlace) and isinstance(tree, LocalTree):
        _refuse_links_out(place, tree.unreadable, languages)
    found, read = [], {"dataset.json"}  # which `enginery data phrases` writes beside its pairs
    for name in names:
        split, where = _split_of(name), shown(tree.name, name)
        if split is None:  # test data
            continue
        opener, other = partial(tree.open, name), _counterpart(name, languages)
        if name.lower().endswith(SUFFIXES):
            found.append(_text_file(name, split, opener, where, languages))
            read.add(name)
        elif other and other not in names:
            raise UserError(
                f"{where} has no {other} beside it; add the file of the other language, or name the languages with "
                "preprocess.source_language and preprocess.target_language",
                code="no-counterpart",
                setting="preprocess.target_language",
            )
        elif name.removesuffix(".gz").endswith(f".{languages[0]}"):
            openers = (opener, partial(tree.open, other))
            wheres = (where, shown(tree.name, other))
            found.append(TextFile(name=name, split=split, read=partial(_moses, openers, wheres)))
            read |= {name, other}
    if not found:
        message = f"{tree.name} has no parallel text of the languages {' and '.join(languages)}; {WANTED}"
        raise UserError(message, code="no-parallel-text", setting="data")
    return found, [name for name in names if name not in read]


def _refuse_links_out(place: LocalPlace, links: Iterable[str], languages: tuple[str, str]) -> None:
    """Raise UserError for a link that is not followed, to a folder or a file of pairs: no text is left out silently."""
    ends = tuple(f".{language}{gz}" for language in languages for gz in ("", ".gz"))
    for name in links:
        is_text = name.lower().endswith(SUFFIXES) or name.endswith(ends) or (Path(place.root) / name).is_dir()
        if is_text and _split_of(name) is not None:
            raise UserError(
                f"{shown(place.name, name)} is a link to nothing in the data folder, so it is not read; put a copy in "
                "its place (cp -rL), or remove the link",
                code="link-out",
                setting="data",
            )


def _split_of(name: str) -> str | None:
    """As split_of, also of names as newsdev2013, newstest2014, tst2010 and devtest (of WMT, IWSLT and FLORES)."""
    plain = re.sub(r"(?<![a-z])(newstest|tst|devtest|heldout)(?![a-z])", "test", name.lower())
    return split_of(plain.replace("newsdev", "dev"), _VAL_NAMES)


def _counterpart(name: str, languages: tuple[str, str]) -> str:
    """The file of the other language that belongs to one of Moses' files; "" for another file."""
    gz = ".gz" if name.endswith(".gz") else ""
    for own, other in (languages, languages[::-1]):
        if (stem := name.removesuffix(gz)).endswith(f".{own}"):
            return f"{stem.removesuffix(own)}{other}{gz}"
    return ""


def _text_file(
    name: str, split: str, opener: Callable[[], BinaryIO], where: str, languages: tuple[str, str]
) -> TextFile:
    is_tmx = name.lower().removesuffix(".gz").endswith(".tmx")
    read = partial(_tmx, opener, where, languages) if is_tmx else partial(_tsv, opener, where, languages)
    return TextFile(name=name, split=split, read=read)


def _swapped(where: str, says: str, languages: tuple[str, str]) -> UserError:
    source, target = languages
    return UserError(
        f"{where} has columns of {target} and {source}, says {says}, and the languages to translate are {source} to "
        f"{target}; swap preprocess.source_language and preprocess.target_language, or the columns with their name",
        code="swapped-languages",
        setting="preprocess.source_language",
    )


def _tsv(opener: Callable[[], BinaryIO], where: str, languages: tuple[str, str]) -> Iterator[Pair]:
    languages = (languages[0].lower(), languages[1].lower())
    for number, (text, problem) in enumerate(_lines(opener, where), 1):
        sides = text.split("\t")
        header = text.lower().replace("_", "-").split("\t") if number == 1 else []
        if _names(header, languages):
            continue
        if _names(header, languages[::-1]):
            raise _swapped(where, "its first line", languages)
        if header and re.search(rf"(?<![a-z])({languages[1]}[-_]{languages[0]})\.tsv", where.lower()):
            raise _swapped(where, "its name", languages)
        if header == ["source", "target"]:
            continue
        if problem or len(sides) != 2:
            yield Pair(number, text, "", problem or ("columns" if text.strip() else "empty"))
        else:
            source, target = sides
            yield Pair(number, source, target, "quoted" if any(map(_CSV_QUOTED.fullmatch, sides)) else "")


def _names(header: list[str], languages: tuple[str, str]) -> bool:
    """True for two columns of these languages, or of variants of them."""
    pairs = zip(header, languages, strict=False)
    return len(header) == 2 and all(f"{each}-".startswith(f"{language}-") for each, language in pairs)


def _moses(openers: tuple[Callable[[], BinaryIO], ...], wheres: tuple[str, ...]) -> Iterator[Pair]:
    sides = [_lines(opener, where) for opener, where in zip(openers, wheres, strict=True)]
    for number, (source, target) in enumerate(zip_longest(*sides), 1):
        if source is None or target is None:
            shorter, longer = wheres if source is None else wheres[::-1]
            raise UserError(
                f"{shorter} ends after {number - 1:,} lines and {longer} does not, so their lines are not "
                "translations of each other; write both again with one sentence a line",
                code="other-number-of-lines",
                setting="data",
            )
        yield Pair(number, source[0], target[0], source[1] or target[1])


def _lines(opener: Callable[[], BinaryIO], where: str) -> Iterator[tuple[str, str]]:
    """Lines without their ends, and the problem of each: "" where it is whole and UTF-8."""
    with _Opened(opener, where) as stream:
        first = True
        while raw := stream.readline(MAX_LINE_BYTES):
            if first:
                refuse_utf16(raw, where)
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                first = False
            is_cut = len(raw) >= MAX_LINE_BYTES and not raw.endswith(b"\n")
            while is_cut and (rest := stream.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
            raw = raw.removesuffix(b"\n").removesuffix(b"\r")
            if is_cut:
                yield raw[:1000].decode(errors="replace"), "too-long"
                continue
            try:
                yield raw.decode(), ""
            except UnicodeDecodeError:
                yield raw.decode(errors="replace"), "encoding"


class _Opened(AbstractContextManager["_Opened"]):
    """A file, decompressed where it is gzip, whose errors name it."""

    def __init__(self, opener: Callable[[], BinaryIO], where: str) -> None:
        self._where = where
        with translate_errors(where):
            self._file = opener()
            is_gzip = self._file.read(2) == b"\x1f\x8b"
            self._file.seek(0)
        self._stream: Any = gzip.GzipFile(fileobj=self._file) if is_gzip else self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def readline(self, most: int) -> bytes:
        """As of a file. Raises UserError."""
        return self._call(self._stream.readline, most)

    def read(self, most: int) -> bytes:
        """As of a file. Raises UserError."""
        return self._call(self._stream.read, most)

    def _call(self, how: Callable[[int], bytes], most: int) -> bytes:
        with translate_errors(self._where):
            try:
                return how(most)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise damaged(self._where, f"is no whole gzip ({error})") from None


def _tmx(opener: Callable[[], BinaryIO], where: str, languages: tuple[str, str]) -> Iterator[Pair]:
    """Source: TMX 1.4b (LISA OSCAR); a document type may be named, is not read, and may declare nothing."""
    with _Opened(opener, where) as stream:
        reader, num_fed = _TmxReader(where, languages), 0
        while True:
            chunk = stream.read(_CHUNK_BYTES)
            num_fed += len(chunk)
            reader.feed(chunk, num_fed)
            yield from reader.pairs
            reader.pairs.clear()
            if not chunk:
                return


class _TmxReader:
    """Translation units of a TMX file, as its pieces come."""

    def __init__(self, where: str, languages: tuple[str, str]) -> None:
        self.pairs: list[Pair] = []
        self._where, self._languages = where, [language.lower() for language in languages]
        self._line, self._language = 0, ""
        self._sides: dict[str, list[str]] = {}  # pieces of the sentences of a unit by language, the first of each
        self._size, self._is_open, self._markup, self._depth = 0, False, 0, 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.EntityDeclHandler = self._refuse_entity
        self._parser.SkippedEntityHandler = lambda *_: self._text("\ufffd")  # which makes the sentence unusable

    def feed(self, chunk: bytes, num_fed: int) -> None:
        """Take the next piece, empty at the end. Raises UserError."""
        try:
            self._parser.Parse(chunk, not chunk)
        except (expat.ExpatError, ValueError, LookupError) as error:
            raise damaged(self._where, f"is no XML that can be read ({error})") from None
        if num_fed - self._parser.CurrentByteIndex > _MAX_XML_TOKEN:
            raise damaged(self._where, f"has a tag of more than {_MAX_XML_TOKEN:,} bytes")

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise damaged(self._where, f"declares entities, such as {name[:40]}, which are not read")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise damaged(self._where, f"has elements within each other more than {_MAX_DEPTH} deep")
        if name == "tu":
            self._line, self._sides, self._size = self._parser.CurrentLineNumber, {}, 0
        elif name == "tuv":
            self._language = self._known(attributes.get("xml:lang") or attributes.get("lang") or "")
        elif name == "seg":
            self._is_open = bool(self._language) and self._language not in self._sides
            if self._is_open:
                self._sides[self._language] = []
        elif name in _MARKUP:
            self._markup += 1

    def _end(self, name: str) -> None:
        self._depth -= 1
        if name == "seg":
            self._is_open = False
        elif name == "tuv":
            self._language = ""
        elif name in _MARKUP:
            self._markup -= 1
        elif name == "tu":
            sides = ("".join(self._sides.get(each, ())) for each in self._languages)
            source, target = (_XML_SPACE.sub(" ", side).strip(" ") for side in sides)
            problem = "" if len(self._sides) == 2 else "missing-language"
            self.pairs.append(Pair(self._line, source, target, "too-long" if self._size > MAX_LINE_BYTES else problem))

    def _text(self, text: str) -> None:
        if self._is_open and not self._markup:
            self._size += len(text)
            if self._size <= MAX_LINE_BYTES:
                self._sides[self._language].append(text)

    def _known(self, language: str) -> str:
        """The language of ours that a unit's is, or a variant of; "" for another."""
        found = language.lower().replace("_", "-")
        fitting = (own for own in self._languages if f"{found}-".startswith(f"{own}-"))
        return max(fitting, key=len, default="")  # zh-TW is no zh where both are ours
