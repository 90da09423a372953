"""Check a model in a process of its own, before a run begins: `python -m components.export.checking ARGUMENTS`.

The model may be anybody's file. Whatever reading it does to memory or to a library's code, the run's process lives on,
and it need not import the libraries.
"""

import json
import sys
from pathlib import Path

from components.common.contracts.errors import EngineryError
from components.export.sources import check_model


def main(arguments: str) -> None:
    """Check what `check_model` checks, by its arguments as JSON; the problem goes to standard output."""
    given = json.loads(arguments)
    try:
        check_model(Path(given["model"]), given["architecture"], given["classes"], given["image_size"])
    except EngineryError as error:
        print(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
