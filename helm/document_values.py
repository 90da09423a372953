"""Write a chart's README from its values.yaml: `python helm/document_values.py helm/enginery`, to standard output.

Every value has a comment that begins with `# --` above it, which may go on in further lines. A map whose own line has
such a comment is one value. Ends with 1 and the names where a comment is missing.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MARK = "# --"


@dataclass(frozen=True)
class Value:
    """One row of the table."""

    name: str
    default: Any
    text: str  # empty where nobody wrote any


def values_of(text: str) -> Iterator[Value]:
    """The values of a file in their order."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _walk(root, yaml.safe_load(text), text.splitlines(), ())


def _walk(node: yaml.MappingNode, data: dict[str, Any], lines: list[str], path: tuple[str, ...]) -> Iterator[Value]:
    for key, child in node.value:
        name, value = (*path, key.value), data[key.value]
        comment = _comment(lines, key.start_mark.line)
        if not comment and isinstance(child, yaml.MappingNode) and value:
            yield from _walk(child, value, lines, name)
        else:
            yield Value(".".join(name), value, comment)


def _comment(lines: list[str], line: int) -> str:
    above = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        above.insert(0, lines[line].strip())
        if above[0].startswith(MARK):
            return " ".join(part.removeprefix(MARK).lstrip("# ") for part in above)
    return ""


def document(chart: Path) -> tuple[str, list[str]]:
    """The README, and the names of values without a comment."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    values = list(values_of((chart / "values.yaml").read_text(encoding="utf-8")))
    rows = []
    for value in values:
        default = json.dumps(value.default, ensure_ascii=False)
        rows.append(f"| `{value.name}` | `{default}` | {value.text.replace('|', chr(92) + '|')} |")
    text = (
        f"# {about['name']}\n\n{about['description']}. How to install it: [docs/cluster.md](../../docs/cluster.md).\n\n"
        f"Version {about['version']}, Kubernetes `{about['kubeVersion']}`. This page is made from `values.yaml` by "
        "`make golden`.\n\n| value | default | what it is |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    return text, [value.name for value in values if not value.text]


def main() -> None:
    """Print the README of the chart that is named."""
    text, missing = document(Path(sys.argv[1]))
    if missing:
        sys.exit(f"values.yaml has no comment that begins with `{MARK}` above: {', '.join(missing)}")
    print(text, end="")


if __name__ == "__main__":
    main()
