"""Set single values in a YAML file, and leave everything else as a person wrote it: comments, order, spaces."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from components.common.errors import UserError

Path = tuple[str, ...]
Scalar = str | bool


def set_values(text: str, values: Mapping[Path, Scalar], file: str) -> str:
    """The text with values set, each at a path of keys. What is not there yet is added behind its neighbours.

    Raises:
        UserError: the file is no YAML map, or is written so that a value can't be set in place.
    """
    wanted = _unshared(parse(text, file))
    for path, value in values.items():
        text = _set(text, path, value, file)
        _put(wanted, path, value)
    if parse(text, file) != wanted:
        raise UserError(
            f"{file} is written so that {', '.join(map('.'.join, values))} can't be set in place. {_PLAINLY}"
        )
    return text


_PLAINLY = "Write these keys as plain lines, one below the other, as helm/environments/staging/values.yaml has them"


def parse(text: str, file: str) -> dict[str, Any]:
    """The file's content.

    Raises:
        UserError: it is no YAML map.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())}. Mend it") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{file} holds a {type(data).__name__}; Helm's values are a map of keys. Mend it")
    return data


def get_value(data: Mapping[str, Any], path: Path) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return None
        data = data[key]
    return data


def _unshared(data: Any) -> Any:
    """A copy in which what an alias shares is there twice: to set one must not change the other."""
    return {key: _unshared(value) for key, value in data.items()} if isinstance(data, dict) else data


def _put(data: dict[str, Any], path: Path, value: Scalar) -> None:
    *parents, last = path
    for key in parents:
        data = data.setdefault(key, {})
    data[last] = value


def _set(text: str, path: Path, value: Scalar, file: str) -> str:
    node, depth = yaml.compose(text), 0
    while isinstance(node, yaml.MappingNode) and depth < len(path):
        child = next((entry for key, entry in node.value if key.value == path[depth]), None)
        if child is None:
            break
        node, depth = child, depth + 1
    written = json.dumps(value, ensure_ascii=False)  # which is YAML, too
    if node is None:  # nothing but comments
        separator = "" if not text or text.endswith("\n") else "\n"
        return text + separator + _lines(path, written, 0)
    if depth == len(path) and isinstance(node, yaml.ScalarNode):
        start, end = node.start_mark.index, node.end_mark.index
        return text[:start] + (" " if start == end else "") + written + text[end:]
    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        raise UserError(f"{'.'.join(path)} can't be set in {file}, line {node.start_mark.line + 1}. {_PLAINLY}")
    column = node.value[0][0].start_mark.column
    end_of_line = text.find("\n", _end(node))
    at = len(text) if end_of_line < 0 else end_of_line
    return text[:at] + "\n" + _lines(path[depth:], written, column).rstrip("\n") + text[at:]


def _end(node: yaml.Node) -> int:
    """Where the last character of a node is; a block's own end mark lies behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    return int(node.end_mark.index)


def _lines(path: Path, written: str, column: int) -> str:
    *parents, last = path
    lines = [f"{' ' * (column + 2 * depth)}{key}:" for depth, key in enumerate(parents)]
    return "\n".join([*lines, f"{' ' * (column + 2 * len(parents))}{last}: {written}"]) + "\n"
