"""Where model repositories written by version 0.1.0 import their models from: the modules of components/serve."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "serve")]
