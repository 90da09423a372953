"""Check that a base image brings what base.txt names: run inside it, before anything is installed."""

import sys
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement


def problems(requirements: str) -> list[str]:
    """Return what is missing or too old, one line each."""
    found = []
    for line in requirements.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        needed = Requirement(line)
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            found.append(f"{needed.name} is not there, and {needed.name}{needed.specifier} is needed")
            continue
        if not needed.specifier.contains(version, prereleases=True):  # NGC's torch is such as 2.13.0a0+nv26.8
            found.append(f"{needed.name} is {version}, and {needed.specifier} is needed")
    return found


if __name__ == "__main__":
    missing = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if missing:
        sys.exit("this base image can't carry enginery: " + "; ".join(missing) + ". Take another as BASE_IMAGE")
