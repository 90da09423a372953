"""Names of layers, short enough for a chart."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

_MAX_NAME = 32  # characters


def short_names(names: Sequence[str]) -> list[str]:
    """A short name for each node of a graph, no two of them the same.

    An exported node is named by the modules around it, each with the names of those that hold it:
    `/features/features.7/features.7.0/Conv` is the `features.7.0 Conv`. A name that would be another's too stays as
    it is, and one that is still long loses what lies left of its middle.
    """
    short = [_collapsed(name) for name in names]
    times = Counter(short)
    short = [name if times[brief] > 1 else brief for name, brief in zip(names, short, strict=True)]
    longest = max(map(len, short), default=0)
    for length in range(_MAX_NAME, longest):
        cut = [_cut(name, length) for name in short]
        if len(set(cut)) == len(set(short)):
            return cut
    return short


def _collapsed(name: str) -> str:
    *scopes, node = [part for part in name.split("/") if part] or [name]
    held = pairwise([*scopes, ""])
    kept = [scope for scope, inner in held if inner != scope and not inner.startswith(f"{scope}.")]
    return f"{'.'.join(kept)} {node}" if kept else node


def _cut(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    start = length // 3
    return f"{name[:start]}…{name[start + 1 - length :]}"
