"""JSON files of gigabytes, piece by piece."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from components.common.contracts.errors import UserError

_MAX_ELEMENT = 1 << 26  # characters of one element
_CHUNK_BYTES = 1 << 20
_BETWEEN = re.compile(r"\}\s*,\s*\{")  # elements that are objects
_TAIL = 1 << 14  # characters in which the last whole element of a chunk ends, mostly
_MAX_REASON = 200


def json_arrays(file: BinaryIO, where: str, names: Iterable[str]) -> Iterator[tuple[str, list[Any]]]:
    """Elements of some arrays of a JSON object, some at a time: a file of any size in little memory.

    Yields:
        Name of an array and no element where it begins, then the name and its next elements.

    Raises:
        UserError: it is empty or no JSON, or an element is too large.
    """
    stream, wanted, is_of_kind = _JsonStream(file, where), set(names), False
    if (first := stream.peek()) != "{":
        if not first:
            raise UserError(f"{where} is empty; export the annotations again, or remove it", code="damaged-annotations")
        return  # of another kind
    separator = stream.take("{")
    while (separator in "{,") and stream.peek() != "}":
        name = stream.value()
        stream.take(":")
        if stream.peek() == "[" and name in wanted:
            yield name, []
            is_of_kind = True
            separator = stream.take("[")
            while separator != "]" and stream.peek() != "]":
                yield name, stream.values()
                separator = stream.take(",]")
            if separator != "]":
                stream.take("]")
        else:
            stream.value()
        separator = stream.take(",}")
    if separator != "}":
        stream.take("}")
    if is_of_kind and stream.peek():  # of another kind are also files with an object a line
        raise stream.damaged("text follows the closing brace")


class _JsonStream:
    """A JSON text, value by value."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file, self._where = file, where
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._ended = "", 0, False
        self._is_fresh = False  # text was added since `values` looked for whole elements in it
        self._decoder = json.JSONDecoder(parse_constant=lambda name: float(name.replace("Infinity", "inf")))

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or not self._fill(_CHUNK_BYTES):
                return self._text[self._at : self._at + 1]

    def take(self, allowed: str) -> str:
        """Move behind the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in allowed:
            raise self.damaged(f"{found!r} where one of {allowed!r} was expected" if found else "it ends too early")
        self._at += 1
        return found

    def values(self) -> list[Any]:
        """Move behind the next element of an array, and behind those after it that are at hand; return them."""
        start = max(self._at, len(self._text) - _TAIL)
        ends = [match.start() + 1 for match in _BETWEEN.finditer(self._text, start)] if self._is_fresh else []
        self._is_fresh = False
        if ends:
            try:
                found: list[Any] = self._decoder.decode(f"[{self._text[self._at : ends[-1]]}]")
            except (ValueError, RecursionError):  # it ends within an element, or behind the array
                return [self.value()]
            self._at = ends[-1]
            return found
        return [self.value()]

    def value(self) -> Any:
        """Move behind the next value and return it."""
        self.peek()
        more = _CHUNK_BYTES
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._fill(more):  # a number may go on
                    self._at = end
                    return value
                continue
            except RecursionError:
                raise self.damaged("values lie too deep in one another") from None
            except ValueError as error:
                if len(self._text) - self._at > _MAX_ELEMENT:
                    raise self.damaged(f"a value has more than {_MAX_ELEMENT:,} characters") from None
                if not self._fill(more):
                    raise self.damaged(str(error)[:_MAX_REASON]) from None
                more *= 2

    def _fill(self, num_bytes: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(num_bytes)
        self._ended = not data
        try:
            text = self._decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.damaged(f"not UTF-8: {error.reason}") from None
        self._text, self._at, self._is_fresh = self._text[self._at :] + text, 0, True
        return bool(data)

    def damaged(self, reason: str) -> UserError:
        """The error about a text that can't be read."""
        return UserError(
            f"{self._where} is no JSON that can be read: {reason}; export the annotations again",
            code="damaged-annotations",
        )
