"""Modules of components/serve under the names by which model repositories of version 0.1.0 import them."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "serve")]
